"""Inputs that are no files: `<(…)` of a shell, and standard input; and names of any length."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from kvcs.trust.producers import ProducerKey, with_producer
from tests.e2e.support import BIN, Process, readable, relay


def piped(file: str | Path) -> str:
    return f"<(cat '{file}')"


def in_shell(directory: Path, name: str, program: str, *words: str | Path) -> Process:
    line = " ".join([f"exec '{BIN / program}'", *map(str, words)])
    return Process(directory, name, "bash", "-c", line)


def options(inputs: dict[str, Path], *pipes: str) -> str:
    """The options, `pipes` of them with a pipe."""
    shown = {o: piped(file) if o in pipes else f"'{file}'" for o, file in inputs.items()}
    return " ".join(f"{option} {file}" for option, file in shown.items())


@pytest.fixture
def inputs(cache, tmp_path):
    """What a signed publication is made of, and what its consumer needs, by option."""
    key = ProducerKey.generate()
    key.save(tmp_path / "producer.json")
    (tmp_path / "producers.json").write_bytes(with_producer(tmp_path / "producers.json", key))
    (tmp_path / "token").write_text(secrets.token_urlsafe(32))
    for name in ("token", "producers.json"):
        (tmp_path / name).chmod(0o600)
    both = {
        "--scope-key-file": cache.scope,
        "--compat": cache.compat,
        "--tokens": cache.tokens_file,
        "--token-file": tmp_path / "token",
    }
    publishing = {**both, "--kv": cache.kv, "--sign-key": tmp_path / "producer.json"}
    return publishing, {**both, "--producers": tmp_path / "producers.json"}


def test_every_input_that_is_read_once_may_be_a_pipe(cache, inputs, hub, tmp_path):
    publishing, consuming = inputs
    cafile = f"{hub.url} --cafile {hub.cafile}"
    publisher = in_shell(
        tmp_path, "publish", "kvcs-publish", cafile, options(publishing, *publishing)
    )
    publisher.wait_for("publishing")
    out = tmp_path / "all"
    piping = options(consuming, *consuming)
    in_shell(tmp_path, "consumer", "kvcs-subscribe", cafile, piping, f"--out '{out}'").finish(0)
    cache.check(out)
    doctor = in_shell(tmp_path, "doctor", "kvcs-doctor", cafile, piping).finish(0)
    assert f"{len(cache.tokens)} tokens" in doctor.stdout
    shown = in_shell(tmp_path, "inspect", "kvcs-inspect", piped(out)).finish(0)
    assert "kv layers: [0, 7]" in shown.stdout
    with cache.tokens_file.open() as tokens:
        again = Process(
            tmp_path,
            "standard input",
            BIN / "kvcs-subscribe",
            *cafile.split(),
            *("--scope-key-file", cache.scope, "--compat", cache.compat, "--tokens", "-"),
            *("--out", tmp_path / "again"),
            stdin=tokens,
        )
        again.finish(0)
    cache.check(tmp_path / "again")


def test_an_input_that_is_read_again_and_is_a_pipe_is_refused_in_a_sentence(
    cache, inputs, hub, tmp_path
):
    publishing, consuming = inputs
    pipe = piped(hub.cafile)
    refused = {
        "kvcs-publish": f"{hub.url} --cafile {pipe} {options(publishing)}",
        "kvcs-subscribe": f"{hub.url} --cafile {pipe} {options(consuming)} --out '{tmp_path}/x'",
        "kvcs-doctor": f"{hub.url} --cafile {pipe}",
    }
    running = {p: in_shell(tmp_path, p, p, words) for p, words in refused.items()}
    for program, process in running.items():
        process.finish(2)
        assert "a pipe, but it is read more than once: name a file" in readable(process, program)
    listen, files = "--listen 127.0.0.1:0", tmp_path / "tls"
    signed = f"{listen} --self-signed '{files}'"
    above = f"{signed} --upstream {hub.url}"
    relays = {
        "cert": f"{listen} --cert {piped(files / 'cert.pem')} --key '{files}/key.pem'",
        "key": f"{listen} --cert '{files}/cert.pem' --key {piped(files / 'key.pem')}",
        "auth": f"{signed} --auth {piped(tmp_path / 'token')}",
        "reset": f"{signed} --reset-key {piped(tmp_path / 'token')}",
        "upstream": f"{above} --upstream-cafile {pipe}",
        "token": f"{above} --upstream-token-file {piped(tmp_path / 'token')}",
    }
    running = {n: in_shell(tmp_path, n, "kvcs-relay", words) for n, words in relays.items()}
    for process in running.values():
        process.finish(2)
        assert "pipe" in process.stderr or "not a regular file" in process.stderr
        readable(process, "kvcs-relay")


def test_a_relay_takes_its_settings_from_a_pipe(tmp_path):
    with relay(tmp_path):
        pass  # it has made its certificate
    settings = f"<(echo 'self_signed = \"{tmp_path}/tls\"')"
    words = f"--listen 127.0.0.1:0 --config {settings}"
    in_shell(tmp_path, "piped", "kvcs-relay", words).wait_for("ready")


def test_a_cache_is_written_to_a_name_as_long_as_the_file_system_takes_and_resumed_beside_it(
    cache, hub, tmp_path
):
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    hub.publish(cache).wait_for("publishing")
    out = tmp_path / ("x" * longest)
    hub.subscribe(cache, out).finish(0)
    cache.check(out)
    out.unlink()
    hub.subscribe(cache, out, "--resume", name="resumed").finish(0)
    cache.check(out)
    assert [each.name for each in tmp_path.iterdir() if len(each.name) > 100] == [out.name]
    too_long = hub.subscribe(cache, tmp_path / ("x" * (longest + 1)), name="too-long").finish(2)
    assert f"the name has more than {longest} octets" in too_long.stderr
