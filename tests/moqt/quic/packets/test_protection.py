"""Packets made and opened in batches: RFC 9001's own, and the same octets by every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aioquic._crypto import HeaderProtection
from aioquic.quic.crypto import next_key_phase
from aioquic.tls import CipherSuite
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.quic.backend import Backend, native
from moqt.quic.packets.layout import varint
from moqt.quic.packets.protection import Keys, KeysOfDirection, header_masks
from tools.fuzz_native import SUITES, compare, context_of, keys_of

HERE = [Backend.PYTHON] if native() is None else [Backend.PYTHON, Backend.NATIVE]
CID = b"12345678"
SECRET = bytes(range(32))

each_backend = pytest.mark.parametrize("backend", HERE)
each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


def extension(backend: Backend) -> Any:
    return native() if backend is Backend.NATIVE else None


def pair(backend: Backend, suite: CipherSuite = SUITES[0]) -> tuple[Keys, Keys]:
    """Keys that seal, and those that open it."""
    context = context_of(suite, SECRET)
    module = extension(backend)
    return keys_of(context, module, sealing=True), keys_of(context, module, sealing=False)


def frame(start: int, data: bytes, fin: bool = False, stream: int = 2) -> Any:
    return varint(stream), 4, start, len(data), fin, [memoryview(data)]


# ---- RFC 9001


def test_the_header_protection_of_aes_is_that_of_the_rfc() -> None:
    """(RFC 9001 appendix A.2)"""
    hp = HeaderProtection(b"aes-128-ecb", bytes.fromhex("9f50449e04a0e810283a1e9933adedd2"))
    sample = bytes.fromhex("d1b1c98dd7689fb8ec11d242b123dc9b")
    assert header_masks(hp, [sample, sample])[16:21] == bytes.fromhex("437b9aec36")


@each_backend
def test_the_short_header_packet_of_the_rfc_is_opened(backend: Backend) -> None:
    """(RFC 9001 appendix A.5: no connection ID, a number of three octets, and a PING)"""
    secret = bytes.fromhex("9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b")
    packet = bytes.fromhex("4cfe4189655e5cd55c41f69080575d7999c25a5bfb")
    context = context_of(CipherSuite.CHACHA20_POLY1305_SHA256, secret)
    keys = keys_of(context, extension(backend), sealing=False)
    number = 654360564
    run = (number, number + 1, 0x42, 0, [(b"\x01", False)])
    assert keys.open([packet], 0, b"", 0, number, number - 1) == (1, [run])


@each_backend
@each_suite
def test_what_is_sealed_in_a_batch_is_what_aioquic_seals_one_by_one(
    backend: Backend, suite: CipherSuite
) -> None:
    context = context_of(suite, SECRET)
    keys = keys_of(context, extension(backend), sealing=True)
    data = os.urandom(3000)
    sealed = keys.seal(b"\x41" + CID, 0xFFFE, [(3, [frame(0x4000, data, True, 70_000)])])
    for index, packet in enumerate(sealed):
        last = index == 2
        header = b"\x41" + CID + (0xFFFE + index & 0xFFFF).to_bytes(2, "big")
        clear = bytes([0x0E | last]) + varint(70_000)
        clear += (0x80000000 | 0x4000 + 1000 * index).to_bytes(4, "big")
        clear += (0x4000 | 1000).to_bytes(2, "big") + data[1000 * index : 1000 * index + 1000]
        assert packet == context.encrypt_packet(header, clear, 0xFFFE + index)


# ---- what is opened


@each_backend
@each_suite
def test_stream_frames_of_successive_packets_come_as_one(
    backend: Backend, suite: CipherSuite
) -> None:
    seal, open_ = pair(backend, suite)
    data = os.urandom(50_000)
    other = frame(7, b"other", stream=6)
    groups = [(40, [frame(0, data[:48_000])]), (1, [frame(48_000, data[48_000:], True), other])]
    sealed = seal.seal(b"\x41" + CID, 10, groups)
    assert len(sealed) == 41 and len({len(packet) for packet in sealed[:40]}) == 1
    (index, [run]) = open_.open(sealed, 0, CID, 0, 10, 9)
    assert index == 41
    assert run == (10, 51, 0x41, 41, [(2, 0, data, True), (6, 7, b"other", False)])


@each_backend
def test_nothing_is_joined_over_a_packet_that_is_missing_or_late(backend: Backend) -> None:
    seal, open_ = pair(backend)
    a, b, c, d = seal.seal(b"\x41" + CID, 0, [(4, [frame(0, bytes(400))])])
    _, runs = open_.open([a, c, d, b], 0, CID, 0, 0, -1)
    assert [run[:2] for run in runs] == [(0, 1), (2, 4), (1, 2)]
    assert [len(run[4]) for run in runs] == [1, 1, 1]


@each_backend
def test_a_packet_that_comes_again_is_a_run_of_its_own(backend: Backend) -> None:
    seal, open_ = pair(backend)
    a, b, c = seal.seal(b"\x41" + CID, 0, [(3, [frame(0, bytes(300))])])
    _, runs = open_.open([a, b, b, c, a], 0, CID, 0, 0, -1)
    assert [run[:2] for run in runs] == [(0, 2), (1, 2), (2, 3), (0, 1)]


@each_backend
def test_what_cannot_be_opened_is_passed_over_and_what_is_no_such_packet_ends_the_run(
    backend: Backend,
) -> None:
    seal, open_ = pair(backend)
    a, b = seal.seal(b"\x41" + CID, 0, [(2, [frame(0, bytes(200))])])
    forged = a[:-1] + bytes([a[-1] ^ 1])
    for end in (b"\xc0" + bytes(60), b"\x41" + b"87654321" + bytes(60), b"\x41" + CID + bytes(19)):
        index, runs = open_.open([forged, a, forged, b, end, a], 0, CID, 0, 0, -1)
        assert index == 4
        assert [run[:2] for run in runs] == [(0, 2)]


@each_backend
@pytest.mark.parametrize("suite", [SUITES[0], SUITES[2]], ids=lambda suite: suite.name)
def test_after_a_key_update_the_header_protection_is_the_old_one(
    backend: Backend, suite: CipherSuite
) -> None:
    """(RFC 9001 section 6.1; a packet of the next phase ends a run)"""
    context = context_of(suite, SECRET)
    directions = [KeysOfDirection(extension(backend), sealing=way) for way in (True, False)]
    for direction in directions:
        direction.begin(context)
    before, _ = (direction.of(context) for direction in directions)
    old = before.seal(b"\x41" + CID, 0, [(1, [frame(0, bytes(100))])])
    index, runs = directions[1].of(context).open(old, 0, CID, 1, 0, -1)
    assert (index, runs) == (0, [])
    following = next_key_phase(context)
    context.aead, context.secret = following.aead, following.secret
    context.key_phase = following.key_phase
    seal, open_ = (direction.of(context) for direction in directions)
    packet = context.encrypt_packet(b"\x45" + CID + b"\0\x01", b"\x01\x01\x01", 1)
    new = seal.seal(b"\x45" + CID, 2, [(1, [frame(100, bytes(100))])])
    index, runs = open_.open([packet, *new], 0, CID, 1, 1, 0)
    assert index == 2
    assert [run[:2] for run in runs] == [(1, 3)]


@each_backend
def test_reserved_bits_end_the_reading_with_nothing_read(backend: Backend) -> None:
    context = context_of(SUITES[0], SECRET)
    _, open_ = pair(backend)
    good = context.encrypt_packet(b"\x41" + CID + b"\0\0", b"\x01\x01\x01", 0)
    bad = context.encrypt_packet(b"\x51" + CID + b"\0\x01", b"\x01\x01\x01", 1)
    index, runs = open_.open([good, bad, good], 0, CID, 0, 0, -1)
    assert index == 2
    assert runs[1] == (1, 2, 0x51, 0, [])


# ---- both beside each other


@pytest.mark.skipif(native() is None, reason="the C extension is not built here")
@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=150, deadline=None)
def test_both_backends_say_the_same_of_whatever_they_are_given(seed: int) -> None:
    assert compare(seed, native()) >= 0


@pytest.mark.skipif(native() is None, reason="the C extension is not built here")
@pytest.mark.parametrize(
    "groups",
    [
        [(0, [frame(0, b"x")])],
        [(1, [])],
        [(2, [frame(0, b"xx"), frame(2, b"xx")])],
        [(2, [frame(0, b"xxx")])],
        [(1, [(b"\x02", 4, 0, 5, False, [memoryview(b"four")])])],
        [(1, [(b"\x02", 4, 0, 3, False, [memoryview(b"four")])])],
        [(1, [(b"\x02", 4, 1 << 30, 1, False, [memoryview(b"x")])])],
        [(1, [(b"\x02", 3, 0, 1, False, [memoryview(b"x")])])],
        [(1, [(b"", 4, 0, 1, False, [memoryview(b"x")])])],
        [(1, [(b"\x02", 4, 0, 0x4000, False, [memoryview(bytes(0x4000))])])],
        [(1 << 20, [frame(0, bytes(1 << 20))])],
        [(1, b"\x01")],
        [(2, b"\x01\x01\x01")],
        [(1, ["frame"])],
        ["group"],
    ],
)
def test_the_extension_refuses_what_cannot_be_a_packet_and_goes_on(groups: Any) -> None:
    seal, open_ = pair(Backend.NATIVE)
    with pytest.raises((ValueError, TypeError, IndexError)):
        seal.seal(b"\x41" + CID, 0, groups)
    sealed = seal.seal(b"\x41" + CID, 0, [(1, [frame(0, b"well")])])
    with pytest.raises(TypeError):
        open_.open(["packet"], 0, CID, 0, 0, -1)  # type: ignore[list-item]
    assert open_.open(sealed, 0, CID, 0, 0, -1)[1][0][4] == [(2, 0, b"well", False)]
    with pytest.raises(RuntimeError, match="the other direction"):
        seal.open(sealed, 0, CID, 0, 0, -1)


@pytest.mark.skipif(native() is None, reason="the C extension is not built here")
def test_the_extension_refuses_keys_of_a_wrong_length() -> None:
    with pytest.raises(ValueError, match="wrong length"):
        native().Keys(0, bytes(32), bytes(12), bytes(16), True)
    with pytest.raises(ValueError, match="no such cipher suite"):
        native().Keys(3, bytes(32), bytes(12), bytes(32), True)


def test_where_openssl_is_without_a_cipher_python_does_it_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Without:
        def Keys(self, *given: Any) -> Keys:
            raise RuntimeError("OpenSSL does not take the keys")

    context = context_of(SUITES[2], SECRET)
    keys = keys_of(context, Without(), sealing=True)
    groups: list[Any] = [(1, [frame(0, b"octets")])]
    python = keys_of(context, None, sealing=True)
    assert keys.seal(b"\x41" + CID, 0, groups) == python.seal(b"\x41" + CID, 0, groups)
    keys_of(context_of(SUITES[2], SECRET), Without(), sealing=True)  # another connection
    (record,) = caplog.records
    assert "CHACHA20_POLY1305" in record.message and "Python" in record.message


@pytest.mark.skipif(native() is None, reason="the C extension is not built here")
def test_what_openssl_refuses_leaves_no_error_for_the_next_tls_connection(tmp_path: Path) -> None:
    config = tmp_path / "openssl.cnf"
    config.write_text(
        "openssl_conf = init\n[init]\nalg_section = algorithms\n"
        "[algorithms]\ndefault_properties = there=yes\n"
    )
    script = """if True:
        import ctypes
        from moqt.quic import _packets
        try:
            _packets.Keys(0, bytes(16), bytes(12), bytes(16), True)
        except RuntimeError as error:
            library = ctypes.CDLL(_packets.__file__)
            library.ERR_peek_error.restype = ctypes.c_ulong
            print(error, library.ERR_peek_error())
    """
    environment = {**os.environ, "OPENSSL_CONF": str(config)}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout == "OpenSSL does not take the keys 0\n"
