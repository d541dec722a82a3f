"""Peers that misbehave cost themselves a session, and nobody else anything."""

from __future__ import annotations

import asyncio
import random
import re
import socket

import pytest

import moqt
from moqt.quic.config import QuicConfig
from moqt.quic.transport import TransportHandler
from moqt.quic.udp import endpoint
from tests.e2e.support import eventually


class Vandal(TransportHandler):
    """Speaks QUIC and no MOQT; remembers how it was closed."""

    def __init__(self) -> None:
        self.closed: tuple[int, str, bool] | None = None
        self.received = 0

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.received += len(data)

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        self.closed = (code, reason, application)

    def ready_to_send(self) -> None: ...
    def connection_established(self, alpn: str) -> None: ...
    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def stop_sending(self, stream_id: int, code: int) -> None: ...
    def datagram(self, data: bytes) -> None: ...


def garbage(seed: int, octets: int = 3000) -> bytes:
    return random.Random(seed).randbytes(octets)


def control_stream(payload: bytes):
    """A second control stream, or a first one that is wrong."""

    def send(transport) -> None:
        transport.send(transport.open_stream(bidirectional=False), payload)

    return send


def request_stream(payload: bytes):
    def send(transport) -> None:
        transport.send(transport.open_stream(bidirectional=True), payload, True)

    return send


def many_request_streams(transport) -> None:
    for seed in range(60):
        stream = transport.open_stream(bidirectional=True)
        if stream is not None:
            transport.send(stream, garbage(seed, 200), seed % 2 == 0)


def cut_streams(transport) -> None:
    for seed in range(60):
        stream = transport.open_stream(bidirectional=seed % 3 == 0)
        if stream is not None:
            transport.send(stream, garbage(seed, 5))
            transport.reset(stream, seed)


def datagrams(transport) -> None:
    for seed in range(50):
        transport.send_datagram(garbage(seed, seed + 1))
    transport.send(transport.open_stream(bidirectional=False), garbage(1))


BEFORE_SETUP = {
    "garbage": control_stream(garbage(1)),
    "zeros": control_stream(bytes(5000)),
    "another draft's type": control_stream(b"\x2f\x00\xff\xff"),
    "datagrams": datagrams,
}
AFTER_SETUP = {
    "a second control stream": control_stream(b"\xaf\x00\x00\x00"),
    "garbage as data": control_stream(b"\x10" + garbage(3)),
    "garbage as request": request_stream(garbage(2)),
    "a request of zeros": request_stream(bytes(500)),
    "a request that is cut": request_stream(b"\x03\x00"),
    "many requests of garbage": many_request_streams,
    "streams that are cut": cut_streams,
}


async def attack(port: int, cafile, send) -> tuple[int, str]:
    """The code and reason with which the relay ended the connection."""
    vandal = Vandal()
    config = QuicConfig(cafile=cafile, idle_timeout=5)
    made = []

    def make(transport):
        made.append(transport)
        return vandal

    await endpoint.connect("127.0.0.1", port, config, make)
    (transport,) = made
    send(transport)
    transport.wake()
    async with asyncio.timeout(20):
        while vandal.closed is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    code, reason, application = vandal.closed
    assert application, reason
    return code, reason


async def attack_after_setup(url: str, cafile, send, patience) -> moqt.SessionClosed | None:
    """How the relay ended the session, if it did within `patience` seconds."""
    config = QuicConfig(cafile=cafile, idle_timeout=5)
    session = await moqt.connect(url, quic=config)
    transport = session.session.transport
    send(transport)
    transport.wake()
    try:
        async with asyncio.timeout(patience):
            return await session.wait_closed()
    except TimeoutError:
        session.close()
        await session.wait_closed()
        return None


async def test_malformed_peers_lose_their_session_and_disturb_no_transfer(cache, hub, tmp_path):
    producer = hub.produce(cache)
    consumer = hub.subscribe(cache, tmp_path / "out", "--json", name="consumer")
    await asyncio.to_thread(hub.reaches, downstream_subscriptions=3)
    port = int(hub.url.rpartition(":")[2])
    for name, send in BEFORE_SETUP.items():
        producer.say(5)
        code, reason = await attack(port, hub.cafile, send)
        assert code == moqt.SessionErrorCode.PROTOCOL_VIOLATION, (name, reason)
    for name, send in AFTER_SETUP.items():
        producer.say(5)
        # A peer may give up any stream; an unknown alias may become known.
        lasts = name in ("streams that are cut", "garbage as data")
        closed = await attack_after_setup(hub.url, hub.cafile, send, 1 if lasts else 30)
        if lasts:
            continue
        assert closed is not None, name
        assert not closed.transport, name
        assert closed.code != moqt.SessionErrorCode.NO_ERROR, name
    producer.say(64)
    result = await asyncio.to_thread(consumer.finish)
    assert result.json()["objects_verified"] == cache.objects
    assert result.json()["duplicates"] == result.json()["recoveries"] == 0
    cache.check(tmp_path / "out")
    assert "Traceback" not in hub.process.stderr
    await asyncio.to_thread(hub.reaches, sessions=1)
    assert hub.process.popen.poll() is None


def test_sessions_that_are_killed_again_and_again_leave_nothing_behind(hub):
    for number in range(4):
        peer = hub.peer("linger", "--idle", "2", name=f"linger-{number}")
        peer.wait_for("lingering")
        if number == 0:
            hub.reaches(sessions=3, namespaces=3, downstream_subscriptions=3)
        peer.kill()
    hub.reaches(sessions_total=12)
    hub.reaches(
        sessions=0,
        namespaces=0,
        downstream_subscriptions=0,
        downstream_fetches=0,
        upstream_subscriptions=0,
        upstream_fetches=0,
        pending_requests=0,
    )
    # they are cached still, but no longer anybody's
    assert hub.metric("tracks") <= 3


@pytest.mark.parametrize("noise", [b"", b"\x00" * 1200, b"\xc0" + b"\xff" * 1199, b"x" * 9000])
def test_datagrams_that_are_no_quic_are_ignored(noise, hub):
    port = int(re.search(r":(\d+)$", hub.url).group(1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(50):
            sender.sendto(noise, ("127.0.0.1", port))
    eventually(lambda: hub.metric("sessions") == 0, "the relay answers")
    assert hub.process.popen.poll() is None
    assert hub.process.stderr == ""
