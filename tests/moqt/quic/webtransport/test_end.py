"""How a WebTransport session ends (WebTransport "Session Termination"), in every packet order."""

from __future__ import annotations

import itertools

import pytest

from moqt.quic.webtransport.codes import to_http_code
from moqt.quic.webtransport.h3 import Capsule, FrameType, H3Code, encode_frame, encode_varint
from moqt.quic.webtransport.session import GONE_TIMEOUT, State
from moqt.values.codes import SessionErrorCode
from tests.moqt.probe import is_empty
from tests.moqt.webtransport_pair import CONNECT, RawPeer, SessionPeer, WebTransportPair

REASON = b"malformed token"
CODE = int(SessionErrorCode.MALFORMED_AUTH_TOKEN)


def close_capsule(code: int = CODE, reason: bytes = REASON) -> bytes:
    return encode_frame(
        FrameType.DATA, encode_frame(Capsule.CLOSE_SESSION, code.to_bytes(4, "big") + reason)
    )


class Leaver(SessionPeer):
    """A server that ends a MOQT session in the steps a test names, a packet for each."""

    def __init__(self) -> None:
        super().__init__("server")
        self.run()
        self.transport.send(0, self.codec.encode(0, [(b":status", b"200")]))
        self.run()
        (self.control,) = (s for s, d in self.record.data.items() if d.startswith(b"\x40\x54\x00"))
        self.own = self.open(encode_varint(0x54) + encode_varint(0))
        self.run()

    def step(self, name: str) -> None:
        if name == "stop":
            self.transport.stop_receiving(self.control, H3Code.WT_SESSION_GONE)
        elif name == "reset":
            self.transport.reset(self.own, H3Code.WT_SESSION_GONE)
        else:
            self.transport.send(0, close_capsule(), True)
        self.run(0.05)


@pytest.mark.parametrize("order", list(itertools.permutations(["stop", "reset", "capsule"])))
def test_the_code_of_the_capsule_is_the_sessions_in_every_order(order: tuple[str, ...]) -> None:
    peer = Leaver()
    for name in order:
        peer.step(name)
    closed = peer.moqt.closed
    assert closed is not None and not closed.transport
    assert (closed.code, closed.reason) == (CODE, REASON.decode())
    assert peer.closed_with == H3Code.NO_ERROR


def test_resets_in_the_same_packet_before_the_capsule_do_not_hide_it() -> None:
    peer = Leaver()
    peer.transport.stop_receiving(peer.control, H3Code.WT_SESSION_GONE)
    peer.transport.reset(peer.own, H3Code.WT_SESSION_GONE)
    peer.step("capsule")
    assert peer.moqt.closed is not None and peer.moqt.closed.code == CODE


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_the_end_of_the_connect_stream_says_it_as_well(end: str) -> None:
    peer = Leaver()
    peer.step("stop")
    assert peer.moqt.closed is None and peer.session.state is State.GONE
    if end == "fin":
        peer.transport.send(0, b"", True)
    else:
        peer.transport.reset(0, H3Code.REQUEST_CANCELLED)
    peer.run(0.05)
    closed = peer.moqt.closed
    assert closed is not None
    assert closed.code == (0 if end == "fin" else H3Code.REQUEST_CANCELLED)


def test_a_peer_that_never_says_why_is_waited_for_a_moment() -> None:
    peer = Leaver()
    peer.step("reset")
    before = peer.pair.now
    assert peer.pair.run(lambda: peer.moqt.closed is not None, 5)
    assert 0 < peer.pair.now - before <= GONE_TIMEOUT
    closed = peer.moqt.closed
    assert closed is not None and closed.transport
    assert "without saying why" in closed.reason and "WT_SESSION_GONE" in closed.reason
    assert closed.code == H3Code.WT_SESSION_GONE


def test_nothing_is_opened_or_sent_to_a_peer_that_has_gone() -> None:
    peer = Leaver()
    session = peer.session
    stream_id = session.open_stream(bidirectional=False)
    assert stream_id is not None
    peer.run(0.05)
    peer.step("stop")
    assert session.open_stream(bidirectional=True) is None
    assert not session.send_datagram(b"late") and session.send_room(stream_id) == 0
    session.send(stream_id, b"late")
    peer.run(0.05)
    assert b"late" not in peer.record.data[stream_id] and not peer.record.datagrams


def test_what_was_sent_before_the_end_is_still_delivered() -> None:
    peer = RawPeer()
    request = peer.connect()
    head = encode_varint(0x54) + encode_varint(request)
    cut, whole = peer.open(head + b"cut"), peer.open(head + b"who")
    peer.run()
    peer.transport.reset(cut, H3Code.WT_SESSION_GONE)
    peer.run(0.05)
    assert peer.session.state is State.GONE
    peer.transport.send(whole, b"le", True)
    late = peer.open(head + b"late", fin=True)
    peer.run(0.05)
    peer.transport.send(request, close_capsule(), True)
    peer.run(0.05)
    record = peer.ours.record
    assert bytes(record.data[whole]) == b"whole" and bytes(record.data[late]) == b"late"
    assert record.closed == [(CODE, REASON.decode(), True)] and not record.resets


@pytest.mark.parametrize("what", ["reset", "stop"])
def test_an_end_that_overtakes_the_answer_to_connect_is_not_a_streams_code(what: str) -> None:
    """The session's stream and its end come while the response is still on its way."""
    peer = RawPeer("server")
    peer.run()
    early = peer.open(b"\x40\x41" + encode_varint(0) + b"x", bidirectional=True)
    peer.run(0.05)
    if what == "reset":
        peer.transport.reset(early, H3Code.WT_SESSION_GONE)
    else:
        peer.transport.stop_receiving(early, H3Code.WT_SESSION_GONE)
    peer.run(0.05)
    peer.transport.send(0, peer.codec.encode(0, [(b":status", b"200")]) + close_capsule(), True)
    peer.run(0.05)
    record = peer.ours.record
    assert record.closed == [(CODE, REASON.decode(), True)]
    assert not record.resets and not record.stops


def test_a_stop_sending_that_overtakes_the_answer_to_connect_is_told_afterwards() -> None:
    peer = RawPeer("server")
    peer.run()
    early = peer.open(b"\x40\x41" + encode_varint(0) + b"x", bidirectional=True)
    peer.run(0.05)
    peer.transport.stop_receiving(early, to_http_code(5))
    peer.run(0.05)
    assert not peer.ours.record.stops
    peer.transport.send(0, peer.codec.encode(0, [(b":status", b"200")]))
    peer.run(0.05)
    assert peer.ours.record.stops == {early: 5}


# ------------------------------------------------------------------------------ our own end


def test_our_capsule_arrives_before_our_resets_even_when_its_first_packet_is_lost() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    session = peer.session
    streams = [session.open_stream(bidirectional=False) for _ in range(3)]
    for stream_id in streams:
        assert stream_id is not None
        session.send(stream_id, b"part of an Object")
    peer.run()
    seen: list[str] = []
    peer.record.on_data = lambda s, data, fin: seen.append("capsule") if s == request else None
    reset = peer.record.stream_reset
    peer.record.stream_reset = (  # type: ignore[method-assign]
        lambda s, code: (seen.append("reset"), reset(s, code))[1]
    )
    lost = iter([True])
    peer.pair.drop = lambda side, data: side is peer.pair.server and next(lost, False)
    session.close(CODE, REASON.decode())
    peer.run(0.9)
    assert seen == ["capsule", "reset", "reset", "reset"]
    assert peer.record.resets == dict.fromkeys(streams, H3Code.WT_SESSION_GONE)
    assert peer.frames(request)[1:] == [(0, close_capsule()[2:])]


def test_streams_of_the_peer_are_stopped_once_it_has_the_capsule() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    stream_id = peer.open(encode_varint(0x54) + encode_varint(request) + b"half")
    peer.run()
    peer.session.close(CODE, "")
    peer.run()
    assert peer.record.stops == {stream_id: H3Code.WT_SESSION_GONE}
    late = peer.open(encode_varint(0x54) + encode_varint(request) + b"late")
    peer.run()
    assert peer.record.stops[late] == H3Code.WT_SESSION_GONE


def test_two_sessions_that_close_at_once_each_keep_their_own_code() -> None:
    pair = WebTransportPair()
    pair.c.close(1, "mine")
    pair.s.close(2, "yours")
    assert pair.run(lambda: bool(pair.client.record.closed and pair.server.record.closed), 5)
    assert pair.client.record.closed == [(1, "mine", True)]
    assert pair.server.record.closed == [(2, "yours", True)]
    assert pair.run(lambda: pair.client.live.terminated and pair.server.live.terminated, 10)


def test_a_second_close_capsule_changes_nothing() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    peer.transport.send(request, close_capsule() + close_capsule(9, b"again"), True)
    peer.run()
    assert peer.ours.record.closed == [(CODE, REASON.decode(), True)]


def test_a_capsule_cut_off_by_the_end_of_its_stream_is_malformed() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    part = encode_varint(Capsule.CLOSE_SESSION) + encode_varint(8) + b"\0\0"
    peer.transport.send(request, encode_frame(FrameType.DATA, part), True)
    assert peer.closed_with == H3Code.MESSAGE_ERROR


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_a_server_that_ends_the_request_without_an_answer_is_reported_at_once(end: str) -> None:
    peer = RawPeer("server")
    peer.run()
    if end == "fin":
        peer.transport.send(0, b"", True)
    else:
        peer.transport.reset(0, H3Code.REQUEST_REJECTED)
    peer.run()
    ((_, reason, application),) = peer.ours.record.closed
    assert not application
    assert ("without an answer" if end == "fin" else "REQUEST_REJECTED") in reason


def test_streams_after_the_end_are_refused_and_nothing_is_kept() -> None:
    peer = RawPeer()
    request = peer.connect(CONNECT)
    peer.run()
    peer.session.close(0, "")
    for _ in range(30):
        peer.open(encode_varint(0x54) + encode_varint(request) + bytes(500))
    peer.run(0.5)
    assert len(peer.record.stops) == 30
    assert is_empty(peer.session)
