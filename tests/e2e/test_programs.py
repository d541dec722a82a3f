"""The programs as such: inputs they refuse, signals, help, and what they never say."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.e2e.support import BIN, Process, interrupt, make_cache, readable, relay

PROGRAMS = ["kvcs-keygen", "kvcs-relay", "kvcs-publish", "kvcs-subscribe"]


# --- KV files that are refused -------------------------------------------------------


def truncated(cache, path: Path) -> None:
    path.write_bytes(cache.kv.read_bytes()[:-100])


def cut_in_its_header(cache, path: Path) -> None:
    path.write_bytes(cache.kv.read_bytes()[:50])


def no_safetensors(cache, path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(1000))


def wrong_dtype(cache, path: Path) -> None:
    save_file({**cache.tensors, "layers.3.v": cache.tensors["layers.3.v"].view(np.int16)}, path)


def wrong_shape(cache, path: Path) -> None:
    tensor = cache.tensors["layers.3.v"].reshape(32, 16, 2)
    save_file({**cache.tensors, "layers.3.v": tensor}, path)


def other_length(cache, path: Path) -> None:
    tensor = np.ascontiguousarray(cache.tensors["layers.3.v"][:28])
    save_file({**cache.tensors, "layers.3.v": tensor}, path)


def missing_tensor(cache, path: Path) -> None:
    save_file({n: t for n, t in cache.tensors.items() if n != "layers.3.v"}, path)


def extra_layer(cache, path: Path) -> None:
    save_file({**cache.tensors, "layers.8.k": cache.tensors["layers.7.k"]}, path)


def fewer_tokens(cache, path: Path) -> None:
    save_file({n: np.ascontiguousarray(t[:16]) for n, t in cache.tensors.items()}, path)


REFUSED = {
    truncated: "truncated|layers\\.7\\.v|octets",
    cut_in_its_header: "header|truncated",
    no_safetensors: "safetensors|header",
    wrong_dtype: "'layers.3.v' has elements of 'I16'",
    wrong_shape: r"'layers.3.v' has shape \[32, 16, 2\]",
    other_length: "'layers.3.v' has 28 tokens, not 32|28 tokens",
    missing_tensor: "'layers.3.v' is missing",
    extra_layer: "'layers.8.k' is of no layer",
    fewer_tokens: "16 tokens",
}


def test_kv_files_that_are_not_what_the_descriptor_says_are_refused_before_connecting(
    cache, tmp_path
):
    """A relay is not needed: nobody is asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        processes = {}
        for make in REFUSED:
            path = tmp_path / f"{make.__name__}.safetensors"
            make(cache, path)
            processes[make] = Process(
                tmp_path,
                make.__name__,
                BIN / "kvcs-publish",
                f"moqt://127.0.0.1:{listener.getsockname()[1]}",
                *cache.identity(),
                "--kv",
                path,
            )
        for make, process in processes.items():
            process.finish(2)
            assert re.search(REFUSED[make], readable(process, "kvcs-publish")), process.stderr
        with pytest.raises(BlockingIOError):
            listener.recv(2048)


# --- signals, addresses, help --------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_that_is_told_to_end_lets_a_transfer_finish(number, cache, hub, tmp_path):
    producer = hub.produce(cache)
    consumer = hub.subscribe(cache, tmp_path / "out", "--json", name="consumer")
    hub.reaches(downstream_subscriptions=3)
    producer.say(28)
    hub.process.signal(number)
    producer.say(36)
    result = consumer.finish(0).json()
    assert result["objects_verified"] == cache.objects
    cache.check(tmp_path / "out")
    producer.say("leave")
    hub.process.finish(0)
    assert hub.process.stderr == ""


def test_a_publisher_leaves_a_relay_that_goes_away_and_comes_back_to_the_next_one(cache, tmp_path):
    """The relay need not wait for its drain timeout, which is longer than a test may take."""
    with relay(tmp_path, "--drain-timeout", "600") as hub:
        publisher = hub.publish(cache)
        publisher.wait_for("publishing")
        hub.process.signal(signal.SIGTERM)
        hub.process.finish(0)
    address = hub.url.removeprefix("moqt://")
    with relay(tmp_path, "--listen", address) as again:
        again.reaches(namespaces=1)
        again.subscribe(cache, tmp_path / "out").finish(0)
    assert "the relay is going away; trying again in" in publisher.stderr
    assert publisher.stderr.splitlines()[-1] == "kvcs-publish: announced again"


def test_an_idle_relay_ends_without_its_drain_timeout(tmp_path):
    with relay(tmp_path, "--drain-timeout", "600") as hub:
        hub.process.signal(signal.SIGTERM)
        hub.process.finish(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_publisher_that_is_told_to_end_ends_well(number, cache, hub):
    publisher = hub.publish(cache)
    publisher.wait_for("publishing")
    publisher.signal(number)
    publisher.finish(0)
    assert publisher.stderr == ""
    hub.reaches(sessions=0, namespaces=0)


def test_a_relay_whose_address_is_taken_says_so(tmp_path, hub):
    port = re.search(r":(\d+)", hub.url).group(1)
    taken_metrics = re.search(r"//(\S+)/metrics", hub.metrics_url).group(1)
    listen = ["--listen", f"127.0.0.1:{port}"]
    metrics = ["--listen", "127.0.0.1:0", "--metrics", taken_metrics]
    for number, options in enumerate((listen, metrics)):
        process = Process(
            tmp_path,
            f"relay-{number}",
            BIN / "kvcs-relay",
            *options,
            "--self-signed",
            tmp_path / "tls",
        )
        process.finish(1)
        assert "cannot listen on" in readable(process, "kvcs-relay")
        assert process.stdout == ""


def test_nobody_there_is_a_failure_and_not_a_crash(cache, hub, tmp_path):
    hub.process.signal(signal.SIGTERM)
    hub.process.finish(0)
    consumer = hub.subscribe(cache, tmp_path / "out")
    publisher = hub.publish(cache)
    consumer.finish(1)
    readable(consumer)
    publisher.finish(1)
    readable(publisher, "kvcs-publish")


def test_a_relay_that_nobody_vouches_for_is_not_trusted(cache, hub, tmp_path):
    with relay(other := tmp_path / "other"):
        pass
    consumer = Process(
        tmp_path,
        "consumer",
        BIN / "kvcs-subscribe",
        hub.url,
        *("--cafile", other / "tls" / "cert.pem", "--out", tmp_path / "out"),
        *cache.identity(),
    )
    consumer.finish(1)
    assert "certificate" in readable(consumer)


def test_help_has_an_example_whose_options_exist_and_unknown_options_are_refused(tmp_path):
    helps = {p: Process(tmp_path, p, BIN / p, "--help") for p in PROGRAMS}
    wrong = {p: Process(tmp_path, f"{p}-wrong", BIN / p, "--no-such-option") for p in PROGRAMS}
    for program in PROGRAMS:
        text = helps[program].finish(0).stdout
        example = re.search(rf"Example:\s+({program}.*?)\n\s*\n", text, re.DOTALL)
        assert example, text
        for option in re.findall(r"--[a-z-]+", example.group(1)):
            assert re.search(rf"^\W*{option}\b", text, re.MULTILINE), option
        wrong[program].finish(2)
        assert "no-such-option" in wrong[program].stderr
        assert wrong[program].stdout == ""


def test_the_examples_of_the_help_run(cache, hub, tmp_path):
    """As they are written, but for the address."""
    port = hub.url.rpartition(":")[2]
    for name, source in (
        ("ca.pem", hub.cafile),
        ("compat.json", cache.compat),
        ("tokens.json", cache.tokens_file),
        ("cache.safetensors", cache.kv),
    ):
        (tmp_path / name).write_bytes(source.read_bytes())

    def run(program: str) -> Process:
        text = Process(tmp_path, f"{program}-help", BIN / program, "--help").finish(0).stdout
        example = re.search(rf"Example:\s+({program}.*?)\n\s*\n", text, re.DOTALL).group(1)
        example = re.sub(r"[\w.]+:4443", f"127.0.0.1:{port}", example)
        return Process(tmp_path, program, BIN / program, *example.split()[1:], cwd=tmp_path)

    run("kvcs-keygen").finish(0)
    run("kvcs-publish").wait_for("publishing")
    run("kvcs-subscribe").finish(0)
    cache.check(tmp_path / "received.safetensors")
    hub.process.signal(signal.SIGTERM)
    hub.process.finish(0)
    run("kvcs-relay").wait_for("ready")


# --- secrets -------------------------------------------------------------------------


def test_neither_scope_key_nor_tokens_are_ever_said(cache, tmp_path):
    key = bytes.fromhex(json.loads(cache.scope.read_text())["scope_key"])
    assert len(key) >= 32
    said: dict[str, str] = {}

    def note(process: Process) -> Process:
        command = Path(f"/proc/{process.popen.pid}/cmdline")
        if command.exists():
            said[f"{process.name} command"] = command.read_bytes().decode()
        return process

    stranger = make_cache(tmp_path / "stranger", tokens=4)
    with relay(tmp_path, "--log-level", "debug") as hub:
        note(hub.process)
        processes = [hub.process]
        for name, publisher in (
            ("publish", hub.publish(cache, "--live-delay", "100")),
            ("publish-json", hub.publish(cache, "--json", name="publish-json")),
        ):
            note(publisher).wait_for("publishing|announced")
            said[f"{name} command"] = said.pop(f"{publisher.name} command")
            processes.append(publisher)
        consumers = [
            (0, hub.subscribe(cache, tmp_path / "one", name="subscribe")),
            (0, hub.subscribe(cache, tmp_path / "two", "--json", name="subscribe-json")),
            (
                3,
                hub.subscribe(
                    cache.variant("other", scope=stranger.scope), tmp_path / "x", name="not-found"
                ),
            ),
        ]
        (tmp_path / "bad.json").write_text(json.dumps([*cache.tokens, "x"]))
        (tmp_path / "bad-scope.json").write_text(cache.scope.read_text()[:-5])
        (tmp_path / "bad-scope.json").chmod(0o600)
        for name in ("bad.json", "bad-scope.json"):
            options = ["--tokens" if name == "bad.json" else "--scope-key-file", tmp_path / name]
            consumers.append((2, hub.subscribe(cache, tmp_path / "x", *options, name=name)))
        for code, consumer in consumers:
            note(consumer)
            processes.append(consumer.finish(code))
        said["metrics"] = hub.metrics()
        for process in processes:
            interrupt(process) if process.popen.poll() is None else None
            process.wait()
    for process in processes:
        said[f"{process.name} stdout"], said[f"{process.name} stderr"] = (
            process.stdout,
            process.stderr,
        )
    assert "session" in said["relay stderr"]  # debug logging was on
    first, second, third = cache.tokens[:3]
    secrets = {
        "raw key": re.escape(key.decode("latin-1")),
        "hexadecimal key": key.hex(),
        "base64 key": re.escape(base64.b64encode(key).decode().rstrip("=")),
        "base64url key": re.escape(base64.urlsafe_b64encode(key).decode().rstrip("=")),
        "tokens": rf"\b{first}\W+{second}\W+{third}\b",
        "any token": rf"\b{max(cache.tokens)}\b(?!\.\d)",
    }
    for where, text in said.items():
        for what, pattern in secrets.items():
            assert not re.search(pattern, text, re.IGNORECASE), f"{what} in {where}: {text}"
