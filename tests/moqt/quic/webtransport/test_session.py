"""WebTransport over HTTP/3 between two connections in memory (MOQT "Session establishment")."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moqt.quic.webtransport.codes import from_http_code, to_http_code
from moqt.quic.webtransport.h3 import (
    WEBTRANSPORT_SETTINGS,
    Capsule,
    FrameType,
    H3Code,
    H3Error,
    HeaderCodec,
    Setting,
    StreamType,
    TypeLengthReader,
    decode_settings,
    encode_frame,
    encode_settings,
    encode_varint,
    format_strings,
    parse_strings,
    read_varint,
)
from moqt.quic.webtransport.held import MAX_HELD, MAX_HELD_STREAMS
from moqt.quic.webtransport.session import State
from moqt.values.codes import MessageType, SessionErrorCode, SetupOptionType
from moqt.values.messages import Setup
from moqt.wire.codec import codec_for
from tests.moqt.probe import held
from tests.moqt.quic_pair import Pair, Source
from tests.moqt.webtransport_pair import (
    AUTHORITY,
    CONNECT,
    PATH,
    RawPeer,
    SessionPeer,
    WebTransportPair,
    h3_config,
    replaced,
)

MIB = 1 << 20


# ------------------------------------------------------------------------------ wire pieces


@pytest.mark.parametrize(
    "encoded, value",
    [
        ("25", 37),
        ("4025", 37),
        ("7bbd", 15293),
        ("9d7f3e7d", 494878333),
        ("c2197c5eff14e88c", 151288809941952652),
    ],
)
def test_variable_length_integers_of_rfc_9000_are_read(encoded: str, value: int) -> None:
    octets = bytes.fromhex(encoded)
    assert read_varint(octets) == (value, len(octets))
    assert read_varint(octets[:-1]) is None
    assert read_varint(encode_varint(value)) == (value, len(encode_varint(value)))


@pytest.mark.parametrize(
    "code, http",
    [
        (0, 0x52E4A40FA8DB),
        (0x1D, 0x52E4A40FA8F8),
        (0x1E, 0x52E4A40FA8FA),  # the code between them is reserved for greasing
        (0xFFFFFFFF, 0x52E5AC983162),
    ],
)
def test_application_error_codes_are_mapped_into_http3s(code: int, http: int) -> None:
    assert to_http_code(code) == http
    assert from_http_code(http) == code


@pytest.mark.parametrize("http", [0, 0x10C, 0x52E4A40FA8DA, 0x52E4A40FA8F9, 0x52E5AC983163])
def test_a_code_that_maps_to_none_is_an_internal_error(http: int) -> None:
    assert from_http_code(http) == 0


@pytest.mark.parametrize(
    "value, strings",
    [
        ('"moqt-22"', ["moqt-22"]),
        ('"moqt-22", "moqt-21"', ["moqt-22", "moqt-21"]),
        (' "a";q=1;v="x,y" ,\t"b"', ["a", "b"]),
        ("moqt-22, moqt-21", ["moqt-22", "moqt-21"]),
        (r'"a\"b\\c"', ['a"b\\c']),
        ("", []),
        ('"open', []),
        ('"a",', []),
        ('"a" "b"', []),
        ("22", []),
        ('("a" "b")', []),
        ('"a\x01"', []),
    ],
)
def test_lists_of_strings_are_structured_fields(value: str, strings: list[str]) -> None:
    assert parse_strings(value) == strings
    if strings:
        assert parse_strings(format_strings(strings)) == strings


def test_frames_are_read_octet_by_octet_and_unknown_ones_are_skipped() -> None:
    reader = TypeLengthReader({FrameType.HEADERS}, {FrameType.DATA})
    octets = encode_frame(0x21, b"grease") + encode_frame(1, b"fields") + encode_frame(0, b"abc")
    found = [pair for octet in octets for pair in reader.feed(bytes([octet]))]
    assert found == [(1, b"fields"), (0, b"a"), (0, b"b"), (0, b"c")]
    assert not reader.inside


def test_a_frame_longer_than_the_limit_is_refused_before_it_is_held() -> None:
    reader = TypeLengthReader({FrameType.HEADERS}, limit=100)
    with pytest.raises(H3Error):
        reader.feed(encode_varint(1) + encode_varint(101))


def test_header_fields_need_no_dynamic_table() -> None:
    codec = HeaderCodec()
    (_, section) = TypeLengthReader({1}).feed(codec.encode(0, CONNECT))[0]
    assert HeaderCodec().decode(0, section) == CONNECT
    with pytest.raises(H3Error) as refused:
        HeaderCodec().decode(0, b"\x05\x00\x80")  # refers to the dynamic table
    assert refused.value.code is H3Code.QPACK_DECOMPRESSION_FAILED


@pytest.mark.parametrize("pairs", [[(2, 0)], [(0x33, 1), (0x33, 1)]])
def test_reserved_and_repeated_settings_are_refused(pairs: list[tuple[int, int]]) -> None:
    (_, body) = TypeLengthReader({4}).feed(encode_settings(pairs))[0]
    with pytest.raises(H3Error) as refused:
        decode_settings(body)
    assert refused.value.code is H3Code.SETTINGS_ERROR


# --------------------------------------------------------------------------------- sessions


def test_a_session_reports_the_chosen_protocol_authority_and_path_to_both_sides() -> None:
    pair = WebTransportPair()
    assert pair.client.record.alpn == pair.server.record.alpn == "moqt-22"
    assert (pair.s.authority, pair.s.path) == (AUTHORITY, PATH)
    assert pair.c.is_client and not pair.s.is_client


def test_the_server_chooses_among_what_is_offered_by_its_own_preference() -> None:
    pair = WebTransportPair(offered=("moqt-21", "moqt-22"), known=("moqt-23", "moqt-22", "moqt-21"))
    assert pair.client.record.alpn == pair.server.record.alpn == "moqt-22"


def test_streams_of_both_kinds_and_datagrams_cross_in_both_directions() -> None:
    pair = WebTransportPair(loss=0.03, reorder=0.2, seed=5)
    payload = os.urandom(200_000)
    for here, there in ((pair.client, pair.server), (pair.server, pair.client)):
        ours = pair.sessions[here.name]
        uni = ours.open_stream(bidirectional=False)
        bidi = ours.open_stream(bidirectional=True)
        assert uni is not None and bidi is not None
        ours.send(uni, payload, True)
        ours.send(bidi, payload[:5000], True)
        peer = pair.sessions[there.name]
        there.record.on_data = lambda s, data, fin, peer=peer: (  # type: ignore[misc]
            peer.send(s, data, fin) if not s & 2 else None
        )
        assert pair.run(lambda u=uni, t=there: u in t.record.finished)  # type: ignore[misc]
        assert pair.run(lambda b=bidi, h=here: b in h.record.finished)  # type: ignore[misc]
        assert bytes(there.record.data[uni]) == payload
        assert bytes(here.record.data[bidi]) == payload[:5000]
        there.record.on_data = None


def test_datagrams_carry_the_quarter_stream_id_and_nothing_else() -> None:
    pair = WebTransportPair()
    assert pair.c.send_datagram(b"to the server") and pair.s.send_datagram(b"")
    assert pair.run(lambda: bool(pair.server.record.datagrams and pair.client.record.datagrams))
    assert pair.server.record.datagrams == [b"to the server"]
    assert pair.client.record.datagrams == [b""]
    assert not pair.c.send_datagram(bytes(1 << 14))


@pytest.mark.parametrize("code", [0, 5, 0x1E, 0xFFFF])
def test_resets_and_stop_sending_carry_the_applications_code(code: int) -> None:
    pair = WebTransportPair()
    stream_id = pair.c.open_stream(bidirectional=True)
    assert stream_id is not None
    pair.c.send(stream_id, b"hello")
    assert pair.run(lambda: stream_id in pair.server.record.data)
    pair.s.stop_receiving(stream_id, code)
    pair.s.reset(stream_id, code)
    assert pair.run(lambda: bool(pair.client.record.resets and pair.client.record.stops))
    assert pair.client.record.stops == {stream_id: code}
    assert pair.client.record.resets == {stream_id: code}


def test_closing_a_session_tells_its_code_and_reason_and_ends_the_connection() -> None:
    pair = WebTransportPair()
    pair.c.close(0x1B, "too many")
    assert pair.run(lambda: bool(pair.server.record.closed and pair.client.record.closed), 5)
    assert pair.server.record.closed == [(0x1B, "too many", True)]
    assert pair.client.record.closed == [(0x1B, "too many", True)]
    assert pair.run(lambda: pair.client.live.terminated and pair.server.live.terminated, 10)


def test_close_webtransport_session_is_a_capsule_in_a_data_frame_before_the_fin() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    peer.session.close(3, "no")
    peer.run()
    assert peer.frames(request)[1:] == [(0, bytes.fromhex("68430600000003") + b"no")]
    assert request in peer.record.finished


def test_a_peer_that_never_answers_the_close_is_left_after_a_moment() -> None:
    peer = RawPeer()
    peer.connect()
    peer.run()
    peer.session.close(0, "")
    assert peer.pair.run(lambda: bool(peer.record.closed), 3)
    assert peer.record.closed[0][0] == H3Code.NO_ERROR


def test_a_session_is_over_when_the_connect_stream_ends() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    peer.transport.send(request, b"", True)
    peer.run()
    assert peer.ours.record.closed == [(0, "", True)]


def test_a_session_is_over_when_the_connect_stream_is_reset() -> None:
    peer = RawPeer()
    request = peer.connect()
    peer.run()
    peer.transport.reset(request, H3Code.REQUEST_CANCELLED)
    peer.run()
    ((code, reason, application),) = peer.ours.record.closed
    assert code == H3Code.REQUEST_CANCELLED and "reset the session" in reason and not application


def test_the_close_of_the_connection_ends_the_session_with_its_http3_reason() -> None:
    peer = RawPeer()
    peer.connect()
    peer.run()
    peer.transport.close(H3Code.EXCESSIVE_LOAD, "enough")
    peer.run()
    ((code, reason, application),) = peer.ours.record.closed
    assert (code, application) == (H3Code.EXCESSIVE_LOAD, False)
    assert "enough" in reason and "EXCESSIVE_LOAD" in reason


def test_a_drain_capsule_and_unknown_capsules_leave_the_session_open() -> None:
    peer = RawPeer()
    request = peer.connect()
    capsules = encode_frame(0x1234, bytes(5000)) + encode_frame(Capsule.DRAIN_SESSION, b"")
    peer.transport.send(request, encode_frame(FrameType.DATA, capsules))
    peer.run()
    assert peer.session.draining and peer.session.state is State.OPEN


def test_a_second_session_on_a_connection_is_rejected_and_the_first_goes_on() -> None:
    peer = RawPeer()
    first = peer.connect()
    second = peer.connect()
    peer.run()
    assert peer.record.resets == {second: H3Code.REQUEST_REJECTED}
    assert peer.ours.live.counters.webtransport_sessions_refused == 1
    stream_id = peer.open(encode_varint(0x54) + encode_varint(first) + b"still", fin=True)
    peer.run()
    assert bytes(peer.ours.record.data[stream_id]) == b"still"


# ------------------------------------------------------------------------------ negotiation


@pytest.mark.parametrize("announced", sorted(WEBTRANSPORT_SETTINGS))
def test_a_server_that_announces_webtransport_by_any_drafts_setting_is_asked(
    announced: int,
) -> None:
    peer = RawPeer("server", settings=[(Setting.ENABLE_CONNECT_PROTOCOL, 1), (announced, 1)])
    peer.run()
    request = peer.answer(0)
    assert request[b":method"] == b"CONNECT"
    assert request[b":path"] == PATH.encode() and request[b":authority"] == AUTHORITY.encode()
    assert request[b"wt-available-protocols"] == b'"moqt-22"'
    late = announced == Setting.WT_ENABLED
    assert request[b":protocol"] == (b"webtransport-h3" if late else b"webtransport")


def test_a_server_that_announces_no_webtransport_is_not_asked() -> None:
    peer = RawPeer("server", settings=[(Setting.ENABLE_CONNECT_PROTOCOL, 1)])
    peer.run()
    assert 0 not in peer.record.data
    assert "no WebTransport" in peer.ours.record.closed[0][1]


@pytest.mark.parametrize(
    "offered, answer, chosen",
    [
        (("moqt-22",), None, "moqt-22"),  # it does not say so, but there was one offer
        (("moqt-22",), b'"moqt-22"', "moqt-22"),
        (("moqt-22",), b"moqt-22", "moqt-22"),
        (("moqt-22",), b"?garbage?", "moqt-22"),
        (("moqt-22", "moqt-21"), b'"moqt-21"', "moqt-21"),
        (("moqt-22", "moqt-21"), None, None),
        (("moqt-22",), b'"moqt-19"', None),
        (("moqt-22",), b'"moqt-22", "moqt-21"', None),
    ],
)
def test_a_client_takes_what_the_server_chose_or_its_only_offer(
    offered: tuple[str, ...], answer: bytes | None, chosen: str | None
) -> None:
    peer = RawPeer("server", offered=offered)
    peer.run()
    headers = [(b":status", b"200")] + ([(b"wt-protocol", answer)] if answer else [])
    peer.transport.send(0, peer.codec.encode(0, [(b":status", b"103")]))
    peer.transport.send(0, peer.codec.encode(0, headers))
    peer.run()
    assert peer.ours.record.alpn == chosen
    if chosen is None:
        ((_, reason, application),) = peer.ours.record.closed
        assert "offered were moqt-22" in reason and not application


def test_a_refused_session_names_the_status() -> None:
    peer = RawPeer("server")
    peer.run()
    peer.transport.send(0, peer.codec.encode(0, [(b":status", b"404")]), True)
    peer.run()
    assert "status 404" in peer.ours.record.closed[0][1]
    assert peer.closed_with == H3Code.NO_ERROR


@pytest.mark.parametrize(
    "changes, status",
    [
        ({"wt_available_protocols": None}, b"400"),
        ({"wt_available_protocols": b'"moqt-19"'}, b"400"),
        ({"wt_available_protocols": b'"moqt-22'}, b"400"),
        ({"protocol": b"websocket"}, b"501"),
        ({"method": b"GET", "protocol": None}, b"404"),
    ],
)
def test_requests_that_cannot_become_a_session_are_answered(
    changes: dict[str, bytes | None], status: bytes
) -> None:
    peer = RawPeer()
    request = peer.connect(replaced(CONNECT, **changes))
    peer.run()
    assert peer.answer(request)[b":status"] == status
    assert request in peer.record.finished
    if status == b"400":
        assert b"known here: moqt-22" in peer.frames(request)[1][1]
    retried = peer.connect()  # a refusal leaves the connection usable
    peer.run()
    assert peer.answer(retried)[b":status"] == b"200"


def test_the_upgrade_token_of_later_drafts_and_draft_2s_header_are_understood() -> None:
    peer = RawPeer()
    headers = replaced(CONNECT, protocol=b"webtransport-h3", sec_webtransport_http3_draft02=b"1")
    request = peer.connect(headers)
    peer.run()
    answer = peer.answer(request)
    assert answer[b":status"] == b"200" and answer[b"wt-protocol"] == b'"moqt-22"'
    assert answer[b"sec-webtransport-http3-draft"] == b"draft02"


@pytest.mark.parametrize("missing", ["scheme", "authority", "path"])
def test_a_connect_without_a_pseudo_header_is_malformed(missing: str) -> None:
    peer = RawPeer()
    request = peer.connect(replaced(CONNECT, **{missing: None}))
    peer.run()
    assert peer.record.resets == {request: H3Code.MESSAGE_ERROR}


def test_a_client_that_asks_for_no_session_is_not_kept() -> None:
    peer = RawPeer()
    assert peer.pair.run(lambda: bool(peer.record.closed), 15)
    assert "no WebTransport session" in peer.record.closed[0][1]


# ---------------------------------------------------------------- what comes before its time


def test_streams_that_overtake_the_connect_request_are_held_for_it() -> None:
    peer = RawPeer()
    request = peer.transport.open_stream(bidirectional=True)
    assert request == 0
    early = peer.open(encode_varint(0x54) + encode_varint(request) + b"early", fin=True)
    other = peer.open(encode_varint(0x54) + encode_varint(400) + b"nobody's", fin=True)
    peer.run()
    assert peer.ours.handler is None
    peer.transport.send(request, peer.codec.encode(0, CONNECT))
    peer.run()
    assert bytes(peer.ours.record.data[early]) == b"early"
    assert other not in peer.ours.record.data
    assert peer.ours.live.counters.webtransport_streams_refused == 1


def test_what_is_held_before_a_session_is_bounded() -> None:
    peer = RawPeer()
    for _ in range(MAX_HELD_STREAMS + 5):
        peer.open(encode_varint(0x54) + encode_varint(0) + bytes(1000))
    large = peer.open(encode_varint(0x54) + encode_varint(0) + bytes(MAX_HELD))
    peer.run(1)
    assert len(held(peer.session)) == MAX_HELD_STREAMS
    assert peer.record.stops[large] == H3Code.WT_BUFFERED_STREAM_REJECTED
    assert peer.ours.live.counters.webtransport_streams_refused == 6
    assert held(peer.session).octets <= MAX_HELD


def test_one_held_stream_that_outgrows_the_bound_is_refused() -> None:
    peer = RawPeer()
    stream_id = peer.open(encode_varint(0x54) + encode_varint(0) + bytes(2 * MAX_HELD))
    peer.run(1)
    assert peer.record.stops == {stream_id: H3Code.WT_BUFFERED_STREAM_REJECTED}
    assert held(peer.session).octets == 0 and not held(peer.session)


# ------------------------------------------------------------------------------ broken peers

UNI_CONTROL = encode_varint(StreamType.CONTROL)


@pytest.mark.parametrize(
    "streams, code",
    [
        ([UNI_CONTROL + encode_frame(7, b"\0")], H3Code.MISSING_SETTINGS),
        ([UNI_CONTROL + encode_settings([]), UNI_CONTROL], H3Code.STREAM_CREATION_ERROR),
        ([UNI_CONTROL + encode_settings([]) + encode_settings([])], H3Code.FRAME_UNEXPECTED),
        ([UNI_CONTROL + encode_settings([]) + encode_frame(6, b"")], H3Code.FRAME_UNEXPECTED),
        ([UNI_CONTROL + encode_settings([(4, 1)])], H3Code.SETTINGS_ERROR),
        ([UNI_CONTROL + encode_frame(4, b"\x40")], H3Code.FRAME_ERROR),
        ([UNI_CONTROL + encode_varint(4) + encode_varint(1 << 20)], H3Code.EXCESSIVE_LOAD),
        ([encode_varint(StreamType.PUSH)], H3Code.STREAM_CREATION_ERROR),
        ([encode_varint(2) + b"\x40" + bytes(4)], H3Code.QPACK_ENCODER_STREAM_ERROR),
        ([encode_varint(0x54) + encode_varint(3)], H3Code.ID_ERROR),
    ],
)
def test_a_broken_rule_of_http3_closes_the_connection_with_its_code(
    streams: list[bytes], code: H3Code
) -> None:
    peer = RawPeer(settings=None)
    for data in streams:
        peer.open(data)
    assert peer.closed_with == code


@pytest.mark.parametrize("fin", [True, False])
def test_the_control_stream_must_stay_open(fin: bool) -> None:
    peer = RawPeer(settings=None)
    control = peer.open(UNI_CONTROL + encode_settings([]), fin=fin)
    if not fin:
        peer.run()
        peer.transport.reset(control, H3Code.NO_ERROR)
    assert peer.closed_with == H3Code.CLOSED_CRITICAL_STREAM


@pytest.mark.parametrize(
    "octets, code",
    [
        (encode_frame(FrameType.DATA, b"x"), H3Code.FRAME_UNEXPECTED),
        (encode_settings([]), H3Code.FRAME_UNEXPECTED),
        (encode_frame(FrameType.HEADERS, b"\xff\xff\xff"), H3Code.QPACK_DECOMPRESSION_FAILED),
        (encode_varint(1) + encode_varint(1 << 24), H3Code.EXCESSIVE_LOAD),
    ],
)
def test_a_broken_request_closes_the_connection(octets: bytes, code: H3Code) -> None:
    peer = RawPeer()
    peer.open(octets, bidirectional=True)
    assert peer.closed_with == code


def test_a_close_capsule_longer_than_it_may_be_is_refused() -> None:
    peer = RawPeer()
    request = peer.connect()
    capsule = encode_frame(Capsule.CLOSE_SESSION, bytes(4 + 1025))
    peer.transport.send(request, encode_frame(FrameType.DATA, capsule))
    assert peer.closed_with == H3Code.EXCESSIVE_LOAD


def test_streams_of_unknown_types_are_not_read() -> None:
    peer = RawPeer()
    stream_id = peer.open(encode_varint(0x21) + bytes(100))
    peer.connect()
    peer.run()
    assert peer.record.stops == {stream_id: H3Code.STREAM_CREATION_ERROR}
    assert peer.session.state is State.OPEN


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=60), st.booleans()), max_size=6))
@pytest.mark.parametrize("raw", ["client", "server"])
def test_whatever_a_peer_writes_the_other_side_neither_fails_nor_hangs(
    raw: str, streams: list[tuple[bool, bytes, bool]]
) -> None:
    peer = RawPeer(raw)
    for bidirectional, data, fin in streams:
        peer.open(data, bidirectional=bidirectional, fin=fin)
    peer.run(0.1)
    for code, reason, _ in peer.record.closed:
        assert code != H3Code.INTERNAL_ERROR and code != 1 and reason


# ----------------------------------------------------------------------------- flow control


def _transfer(pair: Pair, ours: WebTransportPair, size: int, limit: float = 120.0) -> None:
    payload = os.urandom(size)
    stream_id = ours.c.open_stream(bidirectional=False)
    assert stream_id is not None
    pair.client.record.on_ready = Source(ours.c, stream_id, payload)
    assert pair.run(lambda: stream_id in pair.server.record.finished, limit)
    assert bytes(pair.server.record.data[stream_id]) == payload


@pytest.mark.parametrize("seed", range(3))
def test_a_transfer_completes_with_5_percent_loss_of_everything(seed: int) -> None:
    """Small windows, so that MAX_DATA and MAX_STREAM_DATA are many, and some of them lost."""
    config = h3_config(stream_window=64 << 10, session_window=128 << 10)
    pair = WebTransportPair(config, config, loss=0.05, reorder=0.1, seed=seed)
    _transfer(pair, pair, MIB)


def test_a_paused_consumer_leaves_both_ends_idle_and_the_sender_at_its_window() -> None:
    window = 256 << 10
    config = h3_config(stream_window=window, session_window=MIB)
    pair = WebTransportPair(config, config)
    payload = os.urandom(2 * MIB)
    stream_id = pair.c.open_stream(bidirectional=False)
    assert stream_id is not None
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.s.pause_receiving(stream)
    pair.client.record.on_ready = Source(pair.c, stream_id, payload)
    pair.run(limit=5.0)
    assert 0 < server.received <= window
    assert pair.c.unsent <= Source.BUDGET + 16384
    assert pair.c.send_room(stream_id) == 0
    before = sum(pair.sent.values())
    pair.run(limit=10.0)
    assert sum(pair.sent.values()) - before < 40  # keep-alive, nothing else
    server.on_data = None
    pair.s.resume_receiving(stream_id)
    assert pair.run(lambda: stream_id in server.finished)
    assert bytes(server.data[stream_id]) == payload


def test_many_paused_streams_are_bounded_by_the_session_window() -> None:
    config = h3_config(stream_window=64 << 10, session_window=256 << 10)
    pair = WebTransportPair(config, config)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.s.pause_receiving(stream)
    for _ in range(60):
        stream_id = pair.c.open_stream(bidirectional=False)
        assert stream_id is not None
        pair.c.send(stream_id, bytes(30_000), True)
    pair.run(limit=5.0)
    assert server.received <= 256 << 10
    server.on_data = None
    for stream_id in list(server.data):
        pair.s.resume_receiving(stream_id)
    assert pair.run(lambda: len(server.finished) == 60)


def test_payloads_pass_by_reference() -> None:
    pair = WebTransportPair()
    stream_id = pair.c.open_stream(bidirectional=False)
    assert stream_id is not None
    payload = bytes(50_000)
    pair.c.send(stream_id, payload)
    assert pair.client.probe.chunks(stream_id)[1].obj is payload


# -------------------------------------------------------------------------- the MOQT session


@pytest.mark.parametrize(
    "setup, code",
    [
        ("af00000301012f", SessionErrorCode.INVALID_PATH),
        ("af000003050168", SessionErrorCode.INVALID_AUTHORITY),
    ],
)
def test_path_and_authority_in_setup_are_refused_over_webtransport(
    setup: str, code: SessionErrorCode
) -> None:
    peer = SessionPeer("client")
    request = peer.connect()
    peer.open(encode_varint(0x54) + encode_varint(request) + bytes.fromhex(setup))
    peer.run()
    ((kind, capsule),) = peer.frames(request)[1:]
    assert kind == FrameType.DATA
    assert capsule.startswith(bytes.fromhex("6843"))
    assert int.from_bytes(capsule[3:7], "big") == code
    assert peer.moqt.closed is not None and peer.moqt.closed.code == code


def test_a_client_names_path_and_authority_in_connect_and_not_in_setup() -> None:
    peer = SessionPeer("server")
    peer.run()
    assert peer.answer(0)[b":path"] == PATH.encode()
    peer.transport.send(0, peer.codec.encode(0, [(b":status", b"200")]))
    peer.run()
    (control,) = [bytes(d) for d in peer.record.data.values() if d.startswith(b"\x40\x54\x00")]
    (setup,) = (
        codec_for("moqt-22").message_decoder(frozenset({MessageType.SETUP})).feed(control[3:])
    )
    assert isinstance(setup, Setup)
    named = {SetupOptionType.PATH, SetupOptionType.AUTHORITY}
    assert setup.options and not named & {pair.type for pair in setup.options}
