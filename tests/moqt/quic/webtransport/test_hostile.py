"""HTTP/3 peers that mean harm, and those that only try what the RFCs let them."""

from __future__ import annotations

import pytest

from moqt.quic.webtransport.h3 import (
    MAX_FRAME,
    Capsule,
    FrameType,
    H3Code,
    H3Error,
    Setting,
    StreamType,
    decode_settings,
    encode_frame,
    encode_settings,
    encode_varint,
)
from moqt.quic.webtransport.server import SESSION_TIMEOUT
from moqt.quic.webtransport.session import SETTINGS, State
from moqt.session import Session, SessionHandler
from moqt.values.codes import SessionErrorCode
from tests.moqt.probe import Probe, kept, settings_of
from tests.moqt.quic_pair import Pair
from tests.moqt.webtransport_pair import CONNECT, RawPeer, h3_config, replaced

CONTROL = encode_varint(StreamType.CONTROL)
HUGE = (1 << 62) - 1
GREASE = 0x1F * 7 + 0x21
PRIORITY_UPDATE = 0xF0700


def opened(**options: object) -> tuple[RawPeer, int]:
    peer = RawPeer(**options)
    request = peer.connect()
    peer.run()
    assert peer.session.state is State.OPEN
    return peer, request


# --------------------------------------------------------------------------------- SETTINGS


def test_settings_nobody_knows_are_allowed_and_not_kept() -> None:
    many = [(GREASE + 0x1F * n, n) for n in range(1500)]
    peer = RawPeer(settings=[*SETTINGS, *many])
    peer.connect()
    peer.run()
    assert peer.session.state is State.OPEN
    assert settings_of(peer.session) == dict(SETTINGS)


@pytest.mark.parametrize("name", [Setting.H3_DATAGRAM, Setting.ENABLE_CONNECT_PROTOCOL])
def test_a_setting_that_is_neither_0_nor_1_where_only_these_may_be_is_refused(name: int) -> None:
    with pytest.raises(H3Error) as refused:
        decode_settings(encode_varint(name) + encode_varint(2))
    assert refused.value.code is H3Code.SETTINGS_ERROR


# ----------------------------------------------------------------------------- header fields


def test_header_fields_that_grow_a_hundredfold_are_refused() -> None:
    """An octet and a half names a field of the static table, which decodes into a long one."""
    section = b"\0\0" + bytes([0xFF, 85 - 63]) * 2000
    peer = RawPeer()
    peer.open(encode_frame(FrameType.HEADERS, section), bidirectional=True)
    assert peer.closed_with == H3Code.EXCESSIVE_LOAD
    assert peer.ours.handler is None


@pytest.mark.parametrize("count", [1, 50])
def test_headers_after_those_of_the_session_are_unexpected(count: int) -> None:
    peer, request = opened()
    peer.transport.send(request, peer.codec.encode(request, CONNECT) * count)
    assert peer.closed_with == H3Code.FRAME_UNEXPECTED


@pytest.mark.parametrize(
    "first, code",
    [
        (b"\x80", H3Code.QPACK_DECODER_STREAM_ERROR),  # acknowledges a section
        (b"\x01", H3Code.QPACK_DECODER_STREAM_ERROR),  # counts an insert
        (b"\x40", None),  # cancels a stream, which is allowed
    ],
)
def test_the_qpack_decoder_stream_can_acknowledge_nothing(first: bytes, code: int | None) -> None:
    peer = RawPeer()
    peer.open(encode_varint(StreamType.QPACK_DECODER) + first)
    if code is None:
        peer.run()
        assert not peer.record.closed
    else:
        assert peer.closed_with == code


@pytest.mark.parametrize("instruction", [b"\x5f\xff\xff\xff\x7f", b"\xc0\x7f\xff\xff\x7f", b"\x00"])
def test_nothing_can_be_put_into_a_dynamic_table_of_no_size(instruction: bytes) -> None:
    peer = RawPeer()
    peer.open(encode_varint(StreamType.QPACK_ENCODER) + b"\x20" * 500 + instruction)
    assert peer.closed_with == H3Code.QPACK_ENCODER_STREAM_ERROR


# ------------------------------------------------------------------------- frames and streams


@pytest.mark.parametrize("kind", [GREASE, PRIORITY_UPDATE, PRIORITY_UPDATE + 1, 0x3, 0xD])
def test_unknown_frames_are_ignored_on_the_control_stream_and_on_requests(kind: int) -> None:
    peer = RawPeer(settings=None)
    frame = encode_frame(kind, b"\0" + bytes(50))
    peer.open(CONTROL + encode_settings(SETTINGS) + frame)
    request = peer.open(frame + peer.codec.encode(0, CONNECT) + frame, bidirectional=True)
    peer.run()
    assert peer.session.state is State.OPEN
    assert peer.answer(request)[b":status"] == b"200"


@pytest.mark.parametrize(
    "kind, code",
    [
        (FrameType.SETTINGS, H3Code.FRAME_UNEXPECTED),
        (FrameType.GOAWAY, H3Code.FRAME_UNEXPECTED),
        (FrameType.PUSH_PROMISE, H3Code.FRAME_UNEXPECTED),
        (0x09, H3Code.FRAME_UNEXPECTED),
        (FrameType.WT_STREAM, H3Code.FRAME_ERROR),
    ],
)
def test_frames_that_belong_elsewhere_are_unexpected_on_a_request(kind: int, code: int) -> None:
    peer, request = opened()
    peer.transport.send(request, encode_frame(kind, b"\0"))
    assert peer.closed_with == code


@pytest.mark.parametrize("kind", [GREASE, FrameType.DATA])
def test_a_frame_that_never_ends_is_skipped_and_not_held(kind: int) -> None:
    peer, request = opened()
    before = kept(peer.session)
    inner = encode_varint(GREASE) + encode_varint(HUGE) if kind == FrameType.DATA else b""
    peer.transport.send(request, encode_varint(kind) + encode_varint(HUGE) + inner)
    for _ in range(20):
        peer.transport.send(request, bytes(50_000))
        peer.run(0.1)
    assert kept(peer.session) == before and peer.session.state is State.OPEN


@pytest.mark.parametrize("kind", [FrameType.HEADERS, FrameType.GOAWAY, FrameType.SETTINGS])
def test_a_frame_that_would_be_held_may_not_be_endless(kind: int) -> None:
    peer = RawPeer()
    peer.open(encode_varint(kind) + encode_varint(HUGE), bidirectional=True)
    assert peer.closed_with == H3Code.EXCESSIVE_LOAD


def test_requests_that_never_end_hold_a_frame_for_each_stream_at_most() -> None:
    peer = RawPeer()
    head = encode_varint(FrameType.HEADERS) + encode_varint(MAX_FRAME)
    for _ in range(128):
        peer.open(head + bytes(MAX_FRAME - 1), bidirectional=True)
    peer.run(2)
    assert kept(peer.session) <= 128 * (MAX_FRAME + 10)
    assert peer.pair.run(lambda: bool(peer.record.closed), SESSION_TIMEOUT + 1)
    assert "no WebTransport session" in peer.record.closed[0][1]


@pytest.mark.parametrize(
    "frames, code",
    [
        ([b"\0", b"\4"], H3Code.ID_ERROR),
        ([b""], H3Code.FRAME_ERROR),
        ([b"\0\0"], H3Code.FRAME_ERROR),
        ([b"\x40"], H3Code.FRAME_ERROR),
        ([b"\x08", b"\x04", b"\x04"], None),
    ],
)
def test_goaway_carries_one_id_that_never_grows(frames: list[bytes], code: int | None) -> None:
    peer = RawPeer(settings=None)
    control = peer.open(CONTROL + encode_settings(SETTINGS))
    peer.connect()
    for payload in frames:
        peer.transport.send(control, encode_frame(FrameType.GOAWAY, payload))
    peer.run()
    if code is None:
        assert peer.session.draining and peer.session.state is State.OPEN
    else:
        assert peer.closed_with == code


def test_a_goaway_of_a_server_names_a_request() -> None:
    peer = RawPeer("server", settings=None)
    peer.open(CONTROL + encode_settings(SETTINGS) + encode_frame(FrameType.GOAWAY, b"\x01"))
    assert peer.closed_with == H3Code.ID_ERROR


def test_streams_of_grease_cost_nothing_and_do_not_stop_the_others() -> None:
    peer, request = opened()
    before = kept(peer.session)
    for n in range(400):
        peer.open(encode_varint(GREASE + 0x1F * n) + bytes(100), fin=True)
        peer.run(0.03)
    stream_id = peer.open(encode_varint(0x54) + encode_varint(request) + b"mine", fin=True)
    peer.run()
    assert bytes(peer.ours.record.data[stream_id]) == b"mine"
    assert kept(peer.session) == before


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_streams_that_end_before_they_say_what_they_are_are_forgotten(end: str) -> None:
    peer, _ = opened()
    before = kept(peer.session)
    for bidirectional in (True, False):
        for _ in range(20):
            stream_id = peer.open(b"\x40", bidirectional=bidirectional)
            peer.run(0.03)
            if end == "fin":
                peer.transport.send(stream_id, b"", True)
            else:
                peer.transport.reset(stream_id, H3Code.NO_ERROR)
    peer.run()
    assert kept(peer.session) == before and peer.session.state is State.OPEN


# --------------------------------------------------------------------------------- sessions


def test_a_thousand_connects_are_rejected_and_forgotten_and_the_session_goes_on() -> None:
    peer, request = opened()
    before = kept(peer.session)
    streams = len(peer.ours.probe.streams)
    for _ in range(20):
        for _ in range(50):
            assert peer.transport.open_stream(bidirectional=True) is not None
            # All of a request at once, and its end: as cheap as it gets for the attacker.
            last = Probe(peer.transport).next_request_stream - 4
            peer.transport.send(last, peer.codec.encode(last, CONNECT), True)
        peer.run(0.2)
    assert peer.ours.live.counters.webtransport_sessions_refused == 1000
    assert kept(peer.session) == before
    assert len(peer.ours.probe.streams) <= streams + 1
    stream_id = peer.open(encode_varint(0x54) + encode_varint(request) + b"still", fin=True)
    peer.run()
    assert bytes(peer.ours.record.data[stream_id]) == b"still"


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": b"webtransport-h4"},
        {"protocol": b""},
        {"protocol": None},
        {"method": b"connect"},
        {"method": b"POST"},
        {"scheme": b"http"},
        {"path": b""},
        {"path": b"no-slash"},
        {"path": b"?query"},
        {"path": b"*"},
        {"path": b"/two words"},
        {"path": b"/%zz"},
        {"path": b"/x#fragment"},
        {"path": b"/\\..\n"},
        {"path": b"/\xc3\xa9"},
        {"path": b"/<script>"},
        {"authority": b""},
        {"authority": b"two words"},
        {"authority": b"host:port"},
        {"authority": b"\xff"},
    ],
)
def test_a_request_with_one_thing_wrong_makes_no_session(changes: dict[str, bytes | None]) -> None:
    peer = RawPeer()
    peer.connect(replaced(CONNECT, **changes))
    peer.run()
    assert peer.ours.handler is None and peer.session.state is State.CONNECTING
    assert not peer.record.closed


def test_a_repeated_pseudo_header_is_malformed() -> None:
    peer = RawPeer()
    request = peer.connect([*CONNECT, (b":path", b"/other")])
    peer.run()
    assert peer.record.resets == {request: H3Code.MESSAGE_ERROR}


def test_an_unknown_capsule_may_come_octet_by_octet() -> None:
    peer, request = opened()
    capsules = encode_frame(GREASE, b"whatever") + encode_frame(Capsule.DRAIN_SESSION, b"")
    for octet in capsules:
        peer.transport.send(request, encode_frame(FrameType.DATA, bytes([octet])))
        peer.run(0.03)
    assert peer.session.draining and peer.session.state is State.OPEN


def test_a_close_capsule_of_2_to_the_62_octets_is_refused_at_its_length() -> None:
    peer, request = opened()
    head = encode_varint(Capsule.CLOSE_SESSION) + encode_varint(HUGE)
    peer.transport.send(request, encode_frame(FrameType.DATA, head))
    assert peer.closed_with == H3Code.EXCESSIVE_LOAD


@pytest.mark.parametrize(
    "data, code",
    [
        (b"", H3Code.DATAGRAM_ERROR),
        (b"\xc0\0\0", H3Code.DATAGRAM_ERROR),
        (encode_varint(1 << 60), H3Code.DATAGRAM_ERROR),
        (encode_varint((1 << 60) - 1) + b"x", None),
        (encode_varint(1) + b"x", None),
    ],
)
def test_datagrams_of_no_session_are_dropped_and_broken_ones_are_an_error(
    data: bytes, code: int | None
) -> None:
    peer, _ = opened()
    assert peer.transport.send_datagram(data)
    peer.run()
    if code is None:
        assert not peer.ours.record.datagrams and not peer.record.closed
    else:
        assert peer.closed_with == code


def test_datagrams_before_the_session_are_dropped() -> None:
    peer = RawPeer()
    for _ in range(100):
        peer.transport.send_datagram(encode_varint(0) + bytes(1000))
    peer.run()
    peer.connect()
    peer.run()
    assert not peer.ours.record.datagrams and peer.session.state is State.OPEN


# ------------------------------------------------------------------- the wrong protocol spoken


def test_moqt_octets_after_alpn_h3_are_not_a_session() -> None:
    peer = RawPeer(settings=None)
    peer.open(bytes.fromhex("af0000020100"))  # what a native SETUP looks like
    for _ in range(5):
        peer.open(bytes.fromhex("03001502020464656d6f"), bidirectional=True)
    peer.run()
    assert peer.ours.handler is None
    assert peer.pair.run(lambda: bool(peer.record.closed), SESSION_TIMEOUT + 1)
    assert "no WebTransport session" in peer.record.closed[0][1]


class MoqtPair(Pair):
    """A raw client and a server that speaks MOQT."""

    def handler(self, side, transport):  # type: ignore[no-untyped-def]
        if side is self.client:
            return super().handler(side, transport)
        self.session = Session(transport, SessionHandler())
        return self.session


def test_http3_octets_after_alpn_moqt_end_the_session() -> None:
    pair = MoqtPair(connect=False)
    assert pair.run(lambda: pair.client.connected, 5)
    for data in (CONTROL + encode_settings(SETTINGS), b"\2", b"\3"):
        stream_id = pair.client.live.open_stream(bidirectional=False)
        assert stream_id is not None
        pair.client.live.send(stream_id, data)
    assert pair.run(lambda: bool(pair.client.record.closed), 15)
    assert pair.client.record.closed[0][0] == SessionErrorCode.PROTOCOL_VIOLATION


# --------------------------------------------------------------------------- only one suffers


def test_what_one_connection_does_the_others_do_not_feel() -> None:
    """The state of HTTP/3 is each connection's own: one broken one, one that works."""
    bad, _ = opened()
    good, request = opened(client=h3_config(), server=h3_config())
    bad.open(CONTROL)
    assert bad.closed_with == H3Code.STREAM_CREATION_ERROR
    stream_id = good.open(encode_varint(0x54) + encode_varint(request) + b"fine", fin=True)
    good.run()
    assert bytes(good.ours.record.data[stream_id]) == b"fine"
    assert bad.pair.run(lambda: bad.ours.live.terminated, 10)
    assert bad.ours.live.unsent == bad.ours.live.held == bad.ours.probe.datagrams_pending == 0
