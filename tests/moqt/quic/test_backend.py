"""What protects packets is chosen, said, and refused at once where it is not there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moqt.quic import backend
from moqt.quic.aio import sending
from moqt.quic.aio.context import QuicContext
from moqt.quic.backend import VARIABLE, Backend, chosen, native
from moqt.quic.config import QuicConfig
from tests.moqt.probe import count_built
from tests.moqt.quic_pair import Pair, Source, quic_config
from tests.moqt.simulator import certificate

MIB = 1 << 20
HERE = [Backend.PYTHON] if native() is None else [Backend.PYTHON, Backend.NATIVE]


@pytest.fixture
def none_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The C extension could not be built here."""
    monkeypatch.setattr(backend, "native", lambda: None)
    backend.tell.cache_clear()
    yield
    backend.tell.cache_clear()


def test_without_the_extension_auto_is_python_and_native_a_sentence_that_helps(
    none_built: None,
) -> None:
    assert chosen(QuicConfig(quic_backend="auto").quic_backend) is Backend.PYTHON
    with pytest.raises(ValueError, match=r"not here: .*compiler.*libssl-dev.*`python` do without"):
        QuicConfig(quic_backend="native")


def test_with_the_extension_auto_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "native", object)
    assert chosen("auto") is Backend.NATIVE
    assert chosen("python") is Backend.PYTHON
    assert QuicConfig(quic_backend="native").quic_backend == "native"


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="auto, python, native, not 'rust'"):
        QuicConfig(quic_backend="rust")


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "python")
    assert QuicConfig().quic_backend == "python"
    assert QuicConfig(quic_backend="auto").quic_backend == "auto"
    monkeypatch.setenv(VARIABLE, "")
    assert QuicConfig().quic_backend == "auto"
    monkeypatch.setenv(VARIABLE, "rust")
    with pytest.raises(ValueError, match=VARIABLE):
        QuicConfig()


def test_the_log_says_once_that_there_is_none(
    none_built: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moqt.quic.backend")
    cert, key = certificate()
    for _ in range(2):
        config = QuicConfig(certfile=cert, keyfile=key, quic_backend="auto")
        context = QuicContext(config, is_client=False)
        assert context.backend is Backend.PYTHON
    (line,) = caplog.messages
    assert "in Python" in line and "libssl-dev" in line


@pytest.mark.parametrize("server", HERE)
@pytest.mark.parametrize("client", HERE)
def test_every_backend_talks_to_every_backend(client: Backend, server: Backend) -> None:
    pair = Pair(quic_config(quic_backend=client), quic_config(quic_backend=server), loss=0.03)
    octets: dict[str, Any] = {}
    for side in (pair.client, pair.server):
        octets[side.name] = bytes(range(256)) * (4 * MIB // 256)
        stream_id = side.live.open_stream(bidirectional=False)
        assert stream_id is not None
        side.live.send(stream_id, octets[side.name], fin=True)
    assert pair.run(lambda: bool(pair.client.record.finished and pair.server.record.finished))
    (received,) = pair.server.record.data.values()
    assert received == octets["client"]
    (received,) = pair.client.record.data.values()
    assert received == octets["server"]


def story(backend: str, seed: int) -> tuple[list[Any], int]:
    """What crosses a path of losses and reordering that carries 2 MiB: when, whence, whither, how
    large and with what fate; and how often the receiver used the packet builder."""
    config = quic_config(quic_backend=backend)
    pair = Pair(config, config, loss=0.03, reorder=0.1, seed=seed)
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    source = Source(pair.client.live, stream_id, bytes(2 * MIB))
    pair.client.record.on_ready = source
    built = count_built(pair.server.probe)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    return pair.simulation.trace, len(built)


@pytest.mark.skipif(native() is None, reason="the C extension is not built here")
@pytest.mark.parametrize("seed", range(3))
def test_every_datagram_of_a_story_is_the_same_with_either_backend(seed: int) -> None:
    assert story("python", seed)[0] == story("native", seed)[0]


@pytest.mark.parametrize("seed", range(3))
def test_an_ack_that_is_made_without_the_packet_builder_is_the_one_that_it_makes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, built = story("python", seed)
    acks = sum(1 for _, source, _, _, _ in quick if source == "server")
    monkeypatch.setattr(sending, "FEW_RANGES", 0)
    slow, all_built = story("python", seed)
    assert quick == slow
    assert built < all_built / 2 and all_built <= acks


@pytest.mark.parametrize(("asked", "code"), [("", 0), ("required", 1)])
def test_an_installation_without_a_compiler_lacks_the_extension_unless_it_is_required(
    asked: str, code: int, tmp_path: Path
) -> None:
    folders = ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    built = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", *folders],
        cwd=Path(backend.__file__).parents[2],
        env={**os.environ, "CC": "false", "KVCS_NATIVE": asked},
        capture_output=True,
        timeout=120,
    )
    assert built.returncode == code, built.stderr
    assert not list(tmp_path.rglob("_packets*.so"))
