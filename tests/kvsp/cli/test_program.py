"""The `kvsp` program against an index, a holder and an instance."""

from __future__ import annotations

import base64
import json
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvsp.blocks.container import Container
from kvsp.blocks.kv_files import KvFile
from kvsp.cli.program import app
from kvsp.cli.server import app as server_app
from kvsp.index.app import unix_ms
from kvsp.records.records import InstanceStatus
from tests.kvsp.cli.conftest import SESSION
from tests.kvsp.client.support import DESCRIPTOR, block_of, client_principal, container, record_at

PROMPT = shlex.split("--scope-key-file scope.json --compat compat.json --tokens tokens.json")
ACCESS = ["--token-file", "token", "--http-loopback"]
COMMANDS = get_command(app).commands


def given(done):
    """The JSON object on standard output."""
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def stored(deployment, files, kvsp):
    """All four blocks are at the holder and in the index."""
    done = kvsp("put", deployment.index, "--kv", "kv.safetensors", *PROMPT, *ACCESS,
                "--holder", deployment.holder)  # fmt: skip
    assert done.exit_code == 0, done.output
    deployment.do(deployment.world.records(4))
    yield deployment
    deployment.do(deployment.world.client.delete_blocks(deployment.holder, map(block_of, range(4))))


def test_what_put_stored_get_retrieves_octet_by_octet(stored, files, kvsp):
    done = kvsp("get", stored.index, *PROMPT, *ACCESS, "--out", "out.safetensors", "--json")
    assert done.exit_code == 0, done.output
    result = given(done)
    assert (result["ok"], result["tokens"], result["missing"]) == (True, 16, [])
    with (
        KvFile.open("kv.safetensors", DESCRIPTOR) as sent,
        KvFile.open("out.safetensors", DESCRIPTOR) as came,
    ):
        assert came.tokens == 16
        for layer in range(DESCRIPTOR.layers):
            assert np.array_equal(came.k(layer), sent.k(layer)[:16])
            assert np.array_equal(came.v(layer), sent.v(layer)[:16])


def test_get_can_take_some_layers_and_blocks_in_another_codec(stored, kvsp):
    done = kvsp("get", stored.index, *PROMPT, *ACCESS, "--out", "o.safetensors",
                "--layers", "1-2", "--blocks", "3", "--codec", "x-zlib")  # fmt: skip
    assert done.exit_code == 0 and "12 tokens (3 blocks, layers 1-2)" in done.stdout
    with KvFile.open("o.safetensors", DESCRIPTOR, layers=range(1, 3)) as came:
        assert came.k(1)[:4].tobytes() == bytes(container(0).sections[1][0])


def test_putting_again_stores_nothing_and_is_done(stored, kvsp):
    done = kvsp("put", stored.index, "--kv", "kv.safetensors", *PROMPT, *ACCESS,
                "--holder", stored.holder, "--json")  # fmt: skip
    assert done.exit_code == 0
    assert (given(done)["created"], given(done)["existing"]) == (0, 4)
    assert "keep their codec" not in done.stderr
    done = kvsp("put", stored.index, "--kv", "kv.safetensors", *PROMPT, *ACCESS,
                "--holder", stored.holder, "--codec", "x-zlib")  # fmt: skip
    assert done.exit_code == 0 and "the stored copies keep their codec" in done.stderr


def test_a_shorter_prefix_is_written_when_a_block_is_gone(stored, files, kvsp):
    world = stored.world
    stored.do(world.client.delete(stored.holder, block_of(2)))
    stale = record_at("https://h9.example/kvsp/", container(2), 2)
    stored.do(world.client.publish(stale))  # at a holder that cannot be reached
    done = kvsp("get", stored.index, *PROMPT, *ACCESS, "--out", "out.safetensors", "--json")
    stored.do(world.client.withdraw(stale))
    assert done.exit_code == 0 and "shorter than the index promised" in done.stderr
    assert given(done)["tokens"] == 8
    with KvFile.open("out.safetensors", DESCRIPTOR) as came:
        assert came.tokens == 8


def test_lookup_says_how_much_is_cached_and_where(stored, kvsp):
    done = kvsp("lookup", stored.index, *PROMPT, *ACCESS)
    assert "4 of 4 blocks are cached (16 of 18 tokens)" in done.stdout
    assert f"4 at {stored.holder}" in done.stdout


def test_a_miss_is_exit_code_3_and_explain_says_why(deployment, files, kvsp):
    done = kvsp("lookup", deployment.index, *PROMPT, *ACCESS, "--json")
    assert (done.exit_code, given(done)["matched"]) == (3, 0)
    done = kvsp("get", deployment.index, *PROMPT, *ACCESS, "--out", "out.safetensors")
    assert done.exit_code == 3 and not (files / "out.safetensors").exists()
    done = kvsp("explain", deployment.index, *PROMPT, *ACCESS)
    assert done.exit_code == 3 and "block 0 does not: unknown-key" in done.stderr
    done = kvsp("explain", deployment.index, *PROMPT, *ACCESS, "--json")
    assert (done.exit_code, given(done)["reason"]) == (3, "unknown-key")


def test_a_wrong_token_is_exit_code_4_and_is_not_printed(deployment, files, kvsp):
    (files / "token").write_text("not-a-known-token")
    for command in ("lookup", "explain"):
        done = kvsp(command, deployment.index, *PROMPT, *ACCESS, "--json")
        assert (done.exit_code, given(done)["status"]) == (4, 401)
        assert "not-a-known-token" not in done.output


def test_octets_that_are_not_what_the_record_says_are_exit_code_5(stored, files, kvsp):
    world = stored.world
    for number in range(4):
        stored.do(world.client.delete(stored.holder, block_of(number)))
    stored.do(world.client.put(stored.holder, block_of(0), container(9)))
    (published,) = stored.do(world.records(1))
    # a record that promises other octets than the holder has
    world.service.store.delete_holder(stored.holder, None)
    lie = record_at(stored.holder, container(0), 0)
    principal = world.apps[0].authenticator.by_token["Bearer holder0"]
    world.service.publish(principal, lie.block, lie.replica_id, lie.to_dict(), unix_ms())
    done = kvsp("get", stored.index, *PROMPT, *ACCESS, "--out", "out.safetensors", "--json")
    assert done.exit_code == 5 and "digest-mismatch" in given(done)["error"]
    assert not (files / "out.safetensors").exists()
    assert published[0].holder == stored.holder


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--layers", "9"], "not a range within 0-3"),
        (["--layers", "x"], "write A-B"),
        (["--codec", "gzip"], "known: raw, x-zlib, x-q8"),
        (["--out", "."], "is a directory"),
        (["--out", "-"], "standard output"),
        (["--scope-key-file", "absent.json"], "absent.json"),
        (["--tokens", "compat.json"], "not a JSON array of token ids"),
        (["--compat", "tokens.json"], "tokens.json"),
        (["--cafile", "tokens.json"], "not a file of PEM certificates"),
        (["--client-cert", "x.pem"], "go together"),
        (["--token-file", "tokens.json"], "chmod 600"),
    ],
)
def test_a_wrong_argument_or_input_file_is_exit_code_2_and_one_sentence(
    deployment, files, kvsp, arguments, why
):
    done = kvsp("get", deployment.index, *PROMPT, *ACCESS, "--out", "o.safetensors", *arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvsp: ") and why in line


@pytest.mark.parametrize("uri", ["http://is.example/kvsp/", "https://is.example", "ftp://x/"])
def test_an_index_that_is_no_base_uri_is_exit_code_2(files, kvsp, uri):
    assert kvsp("lookup", uri, *PROMPT, *ACCESS).exit_code == 2


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://127.0.0.1:9/kvsp", ["'http://127.0.0.1:9/kvsp'", "ends in /"]),
        ("127.0.0.1:9/kvsp/", ["'127.0.0.1:9/kvsp/'", "https://", "http://", "--http-loopback"]),
        ("https://me:secret@is.example/kvsp/", ["'https://is.example/kvsp/'", "a user"]),
        ("https://is.example/kvsp/?key=secret", ["'https://is.example/kvsp/?…'", "no query"]),
    ],
)
def test_a_wrong_base_uri_is_repeated_without_credentials(files, kvsp, uri, words):
    for name, arguments in (
        ("INDEX", ["lookup", uri, *PROMPT]),
        ("PLACEMENT", ["sessions", uri]),
        ("--holder", ["lease", "https://is.example/", *PROMPT, "--holder", uri]),
    ):
        done = kvsp(*arguments)
        assert done.exit_code == 2 and done.stderr.startswith(f"kvsp: {name}: "), done.output
        assert all(word in done.stderr for word in words), done.stderr
        assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("member", "value"), [("kv_dtype", "fp17"), ("layout", "kvsp-layout-9"), ("layers", 0)]
)
def test_a_descriptor_that_cannot_be_used_is_named_with_its_member(files, kvsp, member, value):
    text = json.dumps(DESCRIPTOR.to_dict() | {member: value})
    (files / "compat.json").write_text(text)
    done = kvsp("lookup", "https://is.example/kvsp/", *PROMPT)
    assert done.exit_code == 2
    assert "compat.json" in done.stderr and f"'{member}'" in done.stderr


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9/kvsp/", "http://[::1]:9/kvsp/"])
def test_http_to_this_machine_names_the_switch_that_allows_it(files, kvsp, uri):
    for words in (["lookup", uri, *PROMPT], ["sessions", uri]):
        done = kvsp(*words)
        assert done.exit_code == 2 and "with --http-loopback" in done.stderr
    done = kvsp("sessions", uri.replace("127.0.0.1", "192.0.2.1").replace("::1", "::2"))
    assert done.exit_code == 2 and "--http-loopback" not in done.stderr


def test_blocks_that_only_a_relay_has_are_said_to_be_there(deployment, files, kvsp):
    relay = "moqt://relay.example:4443/kv"
    block = block_of(0)
    fields = (b"kvcs-1", block.scope_id, block.compat_id, block.block_key, bytes(16))
    octets = b"".join(bytes([len(field)]) + field for field in fields)
    namespace = base64.urlsafe_b64encode(octets).rstrip(b"=").decode()
    record = record_at(relay, container(0), moqt_namespace=namespace)
    principal = client_principal(publishes_for=frozenset({relay}))
    service = deployment.world.service
    service.publish(principal, record.block, record.replica_id, record.to_dict(), unix_ms())
    try:
        done = kvsp("get", deployment.index, *PROMPT, *ACCESS, "--out", "out.safetensors")
        assert done.exit_code == 3, done.output
        assert f"only at {relay}; kvcs-subscribe gets it" in done.stderr
        done = kvsp("doctor", deployment.index, *PROMPT, *ACCESS, "--json")
        levels = {check["what"]: check["level"] for check in given(done)["checks"]}
        assert levels[f"holder {relay}"] == "skipped"
    finally:
        service.store.delete_holder(relay, None)


def test_a_prompt_shorter_than_a_block_has_no_key(deployment, files, kvsp):
    (files / "tokens.json").write_text("[1, 2, 3]")
    done = kvsp("lookup", deployment.index, *PROMPT, *ACCESS)
    assert done.exit_code == 2 and "fill no block of 4" in done.stderr


def test_an_index_that_is_away_is_exit_code_1(files, kvsp):
    done = kvsp("lookup", "http://127.0.0.1:9/kvsp/", *PROMPT, *ACCESS)
    assert done.exit_code == 1
    assert "connection refused: nobody listens on 127.0.0.1:9\n" in done.stderr


# --- instances and doctor ------------------------------------------------------------


def test_prefetch_sends_the_sources_of_every_block_and_waits_for_the_end(stored, kvsp):
    stored.requests.clear()
    done = kvsp("prefetch", stored.index, stored.control, *PROMPT, *ACCESS, "--json")
    assert done.exit_code == 0 and given(done)["state"] == "complete"
    assert [request.method for request in stored.requests] == ["POST", "GET"]


def test_sessions_are_shown_and_ended(deployment, files, kvsp):
    assert given(kvsp("sessions", deployment.control, *ACCESS)) == {"instances": []}
    assert given(kvsp("sessions", deployment.control, SESSION, *ACCESS)) == {"epoch": 1}
    done = kvsp("sessions", deployment.control, SESSION.upper(), "--end", *ACCESS, "--json")
    assert given(done)["ended"] is True
    other = SESSION.replace("6", "7")
    assert kvsp("sessions", deployment.control, other, *ACCESS).exit_code == 3
    assert kvsp("sessions", deployment.control, "no-uuid", *ACCESS).exit_code == 2


def test_doctor_finds_nothing_wrong_where_nothing_is(stored, kvsp):
    done = kvsp("doctor", stored.index, *PROMPT, *ACCESS, "--json")
    assert done.exit_code == 0, done.output
    assert {check["level"] for check in given(done)["checks"]} == {"ok"}


def test_doctor_says_what_keeps_caches_from_being_found(deployment, files, kvsp):
    done = kvsp("doctor", deployment.index, *PROMPT, *ACCESS)
    assert done.exit_code == 0 and "warning  explain: block 0: unknown-key" in done.stdout
    (files / "token").write_text("nobody")
    done = kvsp("doctor", deployment.index, *PROMPT, *ACCESS, "--json")
    assert done.exit_code == 4 and given(done)["exit_code"] == 4


def test_doctor_flags_instances_that_publish_nothing(deployment, files, kvsp):
    board = deployment.world.service.board
    silent = "https://ii9.example/kvsp/"
    status = InstanceStatus(silent, 1, "active", 0, 0, 8, 0.0, 1.0, 1.0, 60_000)
    board.put(status, unix_ms())
    (index_app,) = deployment.world.index.services
    index_app.sweep()
    try:
        done = kvsp("doctor", deployment.index, *ACCESS)
        assert "1 reporting instances have no replica" in done.stdout
    finally:
        board.put(InstanceStatus(silent, 2, "active", 0, 0, 8, 0.0, 1.0, 1.0, 1), 0)
        index_app.sweep()


def test_doctor_judges_the_path_that_was_asked(deployment, files, kvsp):
    done = kvsp("doctor", deployment.index.replace("/kvsp/", "/foo/"), *ACCESS)
    assert done.exit_code == 3, done.output
    assert "warning" in done.stdout and f"its host says it is {deployment.index}" in done.stdout
    assert "no service here answers to this path" in done.stdout and "ready" not in done.stdout
    assert done.stderr == "kvsp: 1 check failed\n"


def test_doctor_without_a_credential_says_that_the_path_answers(deployment, kvsp):
    done = kvsp("doctor", deployment.index, "--http-loopback")
    assert (done.exit_code, done.stdout) == (0, f"ok       index {deployment.index}: ready\n")


def test_doctor_says_what_it_did_not_read_and_reads_it_when_asked(stored, files, kvsp):
    done = kvsp("doctor", stored.index, *PROMPT, *ACCESS)
    assert "layer 0 came" in done.stdout
    assert "not read: 3 other layers and 3 other replicas (see --every-layer)" in done.stdout
    done = kvsp("doctor", stored.index, *PROMPT, *ACCESS, "--every-layer")
    assert done.exit_code == 0 and "every layer of 4 of 4 replicas came" in done.stdout
    # the last layer of block 2 becomes another
    sections = [*container(2).sections[:-1], container(9).sections[-1]]
    damaged = Container.build(DESCRIPTOR, sections)
    stored.do(stored.world.client.delete(stored.holder, block_of(2)))
    stored.do(stored.world.client.put(stored.holder, block_of(2), damaged))
    stored.do(stored.world.records(4))
    lie = record_at(stored.holder, container(2), 2)
    principal = stored.world.apps[0].authenticator.by_token["Bearer holder0"]
    service = stored.world.service
    service.store.delete_holder(stored.holder, None)
    for number in range(4):
        record = lie if number == 2 else record_at(stored.holder, container(number), number)
        service.publish(principal, record.block, record.replica_id, record.to_dict(), unix_ms())
    assert kvsp("doctor", stored.index, *PROMPT, *ACCESS).exit_code == 0
    done = kvsp("doctor", stored.index, *PROMPT, *ACCESS, "--every-layer")
    assert done.exit_code == 5 and "every layer of 3 of 4 replicas came" in done.stdout
    assert f"failed   block 2 at {stored.holder}" in done.stdout
    assert done.stderr == "kvsp: 1 check failed\n"


def test_doctor_needs_a_prompt_to_read_every_layer(deployment, kvsp):
    done = kvsp("doctor", deployment.index, *ACCESS[2:], "--every-layer")
    assert done.exit_code == 2 and "--every-layer: needs" in done.stderr


# --- the program as a process --------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_shows_flags_without_a_value(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0 and "--help" in done.stdout
    assert not re.search("bool", done.stdout, re.IGNORECASE)
    done = CliRunner().invoke(server_app, ["--help"])
    assert "--dev" in done.stdout and not re.search("bool", done.stdout, re.IGNORECASE)


def test_the_examples_of_the_help_work_as_typed(stored, kvsp):
    for name, command in COMMANDS.items():
        text = command.epilog.removeprefix("Example:  kvsp ").replace("--hold 60", "--hold 0")
        for made_up, real in (
            ("https://is.example/kvsp/", stored.index),
            ("https://ii7.example/kvsp/", stored.control),
            ("https://pc.example/kvsp/", stored.control),
        ):
            text = text.replace(made_up, real)
        words = [*shlex.split(text), "--http-loopback"]
        if name in ("put", "lease"):
            words += ["--holder", stored.holder]
        done = kvsp(*words)
        assert done.exit_code == 0, f"{text}: {done.output}"


def test_a_lease_is_released_on_ctrl_c(stored, files):
    words = ["lease", stored.index, *PROMPT, *ACCESS, "--holder", stored.holder]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsp.cli.program", *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "4 blocks leased" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors == "kvsp: interrupted\n"
    assert stored.do(stored.world.client.delete(stored.holder, block_of(3)))


def test_the_program_does_not_import_what_streams(files):
    code = (
        "import sys, kvsp.cli.program as p; "
        "assert not {'kvcs', 'moqt', 'aioquic', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
