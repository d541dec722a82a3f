"""kvcs-publish and kvcs-subscribe: arguments, input files, exit codes; no relay needed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from kvcs.names.errors import (
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.programs.common import check_not_input, exit_code, explained
from kvcs.programs.publish import app
from kvcs.programs.serving import CountingPublisher
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.cli.common import ExitCode, InputError, check_cafile, check_output, parse_layers
from kvsp.holder.records.index import DEFAULT_TTL_MS
from kvsp.names.errors import FileError
from moqt.backoff import Backoff
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import ConnectError, RequestError, SessionClosed
from tests.kvcs.support import DESCRIPTOR, LAYERS, SCOPE, TOKENS, Link, descriptor, kv, produced

URL = "moqt://127.0.0.1:9"
SECRET = "7c1f" * 16


@pytest.fixture
def files(tmp_path):
    """The input files of both programs, all of them good."""
    scope = tmp_path / "scope.json"
    scope.write_text(json.dumps({"scope_key": SECRET}))
    scope.chmod(0o600)
    (tmp_path / "compat.json").write_bytes(DESCRIPTOR.jcs)
    members = json.loads(DESCRIPTOR.jcs)
    (tmp_path / "misspelt.json").write_text(json.dumps(members | {"adapter": ["sha-256:00"]}))
    members["kv_head"] = members.pop("kv_heads")
    (tmp_path / "kv_head.json").write_text(json.dumps(members))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    write_kv(tmp_path / "kv.safetensors")
    return tmp_path


def write_kv(path, described=DESCRIPTOR, tokens=20):
    with KvFileWriter(path, described, tokens=tokens) as out:
        for layer, (k, v) in enumerate(kv(described, tokens)):
            out.k(layer)[:] = k
            out.v(layer)[:] = v
        out.commit()


def run(program, files, *more, stdin=None, url=URL, **paths):
    names = {"scope_key_file": "scope.json", "compat": "compat.json", "tokens": "tokens.json"}
    names |= {"kv": "kv.safetensors"} if program == "publish" else {"out": "out.safetensors"}
    names |= paths
    arguments = [url]
    for option, name in names.items():
        if name is not None:
            arguments += ["--" + option.replace("_", "-"), name]
    done = subprocess.run(
        [sys.executable, "-m", f"kvcs.programs.{program}", *arguments, *more],
        cwd=files,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    for secret in (SECRET, str(TOKENS[3])):
        assert secret not in done.stdout + done.stderr
    return done


def start(program, files, *more, url=URL, **paths):
    names = {"scope_key_file": "scope.json", "compat": "compat.json", "tokens": "tokens.json"}
    names |= {"kv": "kv.safetensors"} if program == "publish" else {"out": "out.safetensors"}
    options = [
        part
        for name, path in (names | paths).items()
        for part in ("--" + name.replace("_", "-"), path)
    ]
    return subprocess.Popen(
        [sys.executable, "-m", f"kvcs.programs.{program}", url, *options, *more],
        cwd=files,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fails(done, code, *words):
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""
    return done


@pytest.mark.parametrize("program", ["publish", "subscribe"])
def test_help_has_an_example_and_the_exit_codes(program, files):
    done = subprocess.run(
        [sys.executable, "-m", f"kvcs.programs.{program}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    text = " ".join(done.stdout.split())
    assert f"Example: kvcs-{program} moqt://localhost:4443 --cafile ca.pem" in text
    assert "3 not found, 4 not authorized, 5 verification failed" in text


def test_a_codec_that_is_none_is_said_with_its_option_and_those_there_are(files):
    for program in ("publish", "subscribe"):
        done = run(program, files, "--codec", "foo")
        fails(done, 2, "--codec: 'foo' is none of raw, x-zlib, x-q8, x-zstd")


def test_what_does_not_go_together_is_said_before_anything_is_read(files):
    done = run("subscribe", files, "--resume", "--follow", scope_key_file="none.json")
    fails(done, 2, "--resume and --follow do not go together", "leave one of them out")


@pytest.mark.parametrize("program", ["publish", "subscribe"])
@pytest.mark.parametrize(
    ("more", "paths", "words"),
    [
        ((), {"scope_key_file": "none.json"}, ["none.json", "No such file"]),
        ((), {"compat": "none.json"}, ["none.json", "No such file"]),
        ((), {"tokens": "none.json"}, ["none.json", "No such file"]),
        ((), {"tokens": "scope.json"}, ["scope.json", "not a JSON array"]),
        ((), {"compat": "tokens.json"}, ["tokens.json", "not-an-object"]),
        ((), {"scope_key_file": "compat.json"}, ["compat.json", "chmod 600"]),
        ((), {"url": "http://example"}, ["must begin with moqt://"]),
        (("--cafile", "none.pem"), {}, ["none.pem", "No such file"]),
        (("--cafile", "tokens.json"), {}, ["tokens.json", "PEM"]),
        (("--qlog-dir", "tokens.json"), {}, ["tokens.json", "exists"]),
        (("--keylog-file", "none/keys"), {}, ["none/keys", "No such file"]),
        (("--mtu", "100"), {}, ["--mtu"]),
        (("--congestion", "vegas"), {}, ["--congestion", "bbr"]),
        (("--quic-backend", "rust"), {}, ["--quic-backend", "python", "native"]),
        (("--session-window", "100"), {}, ["--session-window"]),
        (("--nonsense",), {}, ["there is no option --nonsense"]),
        (("--toknes", "x"), {}, ["did you mean --tokens?"]),
        ((), {"compat": "misspelt.json"}, ["misspelt.json: 'adapter'", "'adapters' is one"]),
        ((), {"compat": "kv_head.json"}, ["kv_head.json", "no 'kv_heads'; 'kv_head' may be"]),
        ((), {"compat": None}, ["--compat"]),
    ],
)
def test_wrong_arguments_and_bad_files_are_one_sentence_and_exit_code_2(
    program, more, paths, words, files
):
    done = fails(run(program, files, *more, **paths), ExitCode.USAGE, *words)
    assert done.stderr.startswith(f"kvcs-{program}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", ["not a JSON array"]), ('["a"]', ["position 0"]), ("[1, -1]", ["position 1"])],
)
def test_bad_tokens_on_standard_input_are_refused(files, text, words):
    done = run("publish", files, stdin=text, tokens="-")
    fails(done, ExitCode.USAGE, "standard input", *words)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_tokens_than_a_block_are_nothing_to_publish(files, count):
    done = run("publish", files, stdin=json.dumps(TOKENS[:count]), tokens="-")
    fails(done, ExitCode.USAGE, f"{count} tokens fill no block of 4")


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (descriptor(head_dim=16), ["layers.0.k", "shape"]),
        (descriptor(kv_dtype="fp16"), ["layers.0.k", "fp16"]),
        (descriptor(layers=LAYERS + 1), [f"layers.{LAYERS}.k", "missing"]),
        (descriptor(layers=LAYERS - 1), [f"layers.{LAYERS - 1}."]),
    ],
)
def test_a_kv_file_of_another_geometry_is_refused_by_tensor(files, described, words):
    (files / "compat.json").write_bytes(described.jcs)
    fails(run("publish", files), ExitCode.USAGE, "kv.safetensors", *words)


def test_a_truncated_kv_file_is_refused_by_tensor(files):
    path = files / "kv.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    fails(run("publish", files), ExitCode.USAGE, "kv.safetensors", "truncated", "layers.")


def test_a_kv_file_of_other_tokens_is_refused(files):
    write_kv(files / "kv.safetensors", tokens=8)
    fails(run("publish", files), ExitCode.USAGE, "holds 8 tokens", "20 token ids")


@pytest.mark.parametrize(
    ("more", "paths", "words"),
    [
        (("--layers", "3"), {"out": "."}, ["is a directory"]),
        ((), {"out": "none/out"}, ["does not exist"]),
        ((), {"out": "x" * 256}, ["more than 255 octets"]),
        (("--layers", "0-6"), {}, ["0-6", "0-5"]),
        (("--layers", "5-3"), {}, ["5-3"]),
        (("--layers", "a-b"), {}, ["A-B"]),
        (("--blocks", "0"), {}, ["--blocks"]),
        (("--mode", "x"), {}, ["--mode"]),
    ],
)
def test_wrong_arguments_of_subscribe(files, more, paths, words):
    fails(run("subscribe", files, *more, **paths), ExitCode.USAGE, *words)
    assert not (files / "out.safetensors").exists()


@pytest.mark.parametrize("program", ["publish", "subscribe"])
def test_nobody_there_is_exit_code_1_within_the_timeout_and_leaves_no_file(program, files):
    before = sorted(p.name for p in files.iterdir())
    done = fails(run(program, files, "--timeout", "0.5"), ExitCode.FAILED, f"kvcs-{program}: ")
    assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in files.iterdir()) == before


def test_a_failure_is_one_json_object_when_asked_for(files):
    done = run("subscribe", files, "--timeout", "0.3", "--json")
    assert done.returncode == ExitCode.FAILED
    result = json.loads(done.stdout)
    assert result["ok"] is False
    assert result["exit_code"] == 1
    assert result["source"] == URL


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (NotFound("x"), 3),
        (NotAuthorized("x"), 4),
        (RequestError(RequestErrorCode.UNAUTHORIZED), 4),
        (SessionClosed(SessionErrorCode.UNAUTHORIZED, ""), 4),
        (VerificationFailed("x"), 5),
        (PublisherLost("x"), 1),
        (RetrievalTimeout("x"), 1),
        (FileError("x"), 1),
        (ConnectError("x"), 1),
        (RequestError(RequestErrorCode.DOES_NOT_EXIST), 1),
        (SessionClosed(2, "", transport=True), 1),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exit_code(error) == code


def test_a_refusal_says_which_token_was_shown_but_never_the_token(tmp_path):
    token = tmp_path / "token"
    token.write_text("c2VjcmV0")
    refused = RequestError(RequestErrorCode.UNAUTHORIZED, "not yours")
    assert explained(refused, None).endswith("(no token was shown: see --token-file)")
    assert explained(refused, token).endswith(f"(the token shown is that of {token})")
    assert "c2VjcmV0" not in explained(refused, token)
    assert explained(NotFound("none"), None) == "none"
    assert explained(NotFound(), token) == "NotFound"


def test_an_error_behind_a_connect_error_decides():
    error = ConnectError("ended at once")
    error.__cause__ = SessionClosed(SessionErrorCode.UNAUTHORIZED, "no")
    assert exit_code(error) == ExitCode.NOT_AUTHORIZED


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, range(6)), ("2", range(2, 3)), ("0-5", range(6)), ("3-4", range(3, 5))],
)
def test_layers_are_written_inclusively(text, expected):
    assert parse_layers(text, 6) == expected


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "1-2-3", "6", "4-2", "1.5", "٣"])
def test_layers_that_are_none_are_refused(text):
    with pytest.raises(InputError):
        parse_layers(text, 6)


def test_an_output_file_that_is_also_read_is_refused(tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[1]")
    (tmp_path / "link").symlink_to(tokens)
    for out in (tokens, tmp_path / "link"):
        with pytest.raises(InputError, match="one of the files to read"):
            check_not_input(out, None, tmp_path / "other", tokens)
    check_not_input(tmp_path / "out", tokens, tmp_path / "-")
    assert tokens.read_text() == "[1]"


def test_inputs_are_checked_before_anything_is_connected(tmp_path):
    with pytest.raises(InputError):
        check_cafile(tmp_path)
    with pytest.raises(InputError):
        check_output(tmp_path)
    check_cafile(None)
    check_output(tmp_path / "out")


@pytest.mark.parametrize(("cache", "ttl_ms"), [("5", 5000), ("86400", DEFAULT_TTL_MS)])
def test_records_of_the_index_live_no_longer_than_the_objects_at_relays(
    cache, ttl_ms, files, monkeypatch
):
    told = []

    def replicas(*_, ttl_ms, **__):
        told.append(ttl_ms)
        raise InputError("that is all")

    monkeypatch.chdir(files)
    monkeypatch.setattr("kvcs.publishing.replicas.Replicas", replicas)
    options = ["--scope-key-file", "scope.json", "--compat", "compat.json", "--tokens"]
    options += ["tokens.json", "--kv", "kv.safetensors", "--cache", cache]
    options += ["--kvsp", "http://127.0.0.1:9/", "--kvsp-http-loopback"]
    done = CliRunner().invoke(app, [URL, *options])
    assert done.exit_code == ExitCode.USAGE and told == [ttl_ms], done.output


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_delays_grow_until_the_most_and_shrink_only_after_a_healthy_session(jitter):
    backoff = Backoff(jitter=lambda: jitter)
    delays = [backoff.next(0.1) for _ in range(20)]
    assert delays[0] <= 0.5
    assert all(b > a or b > 20 for a, b in itertools.pairwise(delays))
    assert delays[-1] <= 30
    assert backoff.next(9.9) > 20
    assert backoff.next(10.0) == delays[0]
    assert backoff.next(0) == delays[1]


def test_delays_differ_between_processes():
    assert len({Backoff().next() for _ in range(50)}) > 40


async def test_a_counting_publisher_knows_which_requests_are_active():
    handler = CountingPublisher()
    for store in produced(scope=SCOPE).tracks:
        handler.add_track(store)
    async with Link(handler) as link, link.consumer() as consumer:
        assert handler.active == 0
        async for layer in consumer.layers():
            assert np.asarray(layer.k).shape[0] == len(TOKENS)
        await link.settle()
        # two tracks, their beginnings before that, the manifest, and the signed one there is not
        assert handler.requests == 6
        assert handler.active == 0


@pytest.mark.parametrize("program", ["publish", "subscribe"])
def test_help_shows_a_flag_as_it_is_typed(program, files):
    assert "<bool>" not in run(program, files, "--help").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("program", ["publish", "subscribe"])
def test_every_signal_that_asks_it_to_end_ends_it_and_leaves_nothing(program, number, files):
    before = sorted(files.iterdir())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.settimeout(30)
        url = f"moqt://127.0.0.1:{silent.getsockname()[1]}"
        running = start(program, files, "--timeout", "30", url=url)
        silent.recv(2048)  # it is connecting
        running.send_signal(number)
    _, said = running.communicate(timeout=30)
    assert running.returncode == (0 if program == "publish" else 128 + number), said
    assert "Traceback" not in said
    assert sorted(files.iterdir()) == before


def test_a_signal_that_is_ignored_from_the_start_stays_ignored():
    code = "from kvsp.cli.common import stopping_signals; print(*stopping_signals())"
    ran = subprocess.run(
        ["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(int(each)) for each in (signal.SIGINT, signal.SIGTERM)]


def test_a_pipe_that_nobody_writes_can_be_interrupted(files):
    os.mkfifo(files / "pipe")
    running = start("subscribe", files, tokens="pipe")
    writer = os.open(files / "pipe", os.O_WRONLY)  # waits until it reads
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    os.close(writer)
    assert running.returncode == 130
    assert said == "kvcs-subscribe: interrupted\n"


@pytest.mark.parametrize("program", ["publish", "subscribe"])
def test_a_descriptor_that_cannot_be_read_is_named_with_its_file_and_member(program, files):
    unknown = json.loads(DESCRIPTOR.jcs) | {"kv_dtype": "fp17"}
    (files / "unknown.json").write_text(json.dumps(unknown))
    done = run(program, files, compat="unknown.json")
    assert done.returncode == ExitCode.USAGE
    assert "unknown.json: 'kv_dtype': 'fp17'" in done.stderr
