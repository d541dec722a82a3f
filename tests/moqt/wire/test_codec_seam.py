"""A draft is a table chosen by ALPN for each session; which one is in use is never global."""

from __future__ import annotations

import pytest

from moqt.client import connect
from moqt.publisher import Publisher
from moqt.server import serve
from moqt.track.store import TrackStore
from moqt.values.codes import LocationFilterType, MessageType, SessionErrorCode
from moqt.values.errors import ConnectError, MisuseError, SessionError
from moqt.values.messages import LocationFilter
from moqt.wire import codec
from moqt.wire.draft22 import Draft22Codec
from tests.moqt.memory import ALPN, Pair
from tests.moqt.peers import NAME, Collector
from tests.moqt.quic_pair import quic_config

OTHER = "moqt-other"
MASK = 0x55
SUBSCRIBE = bytes.fromhex("03001502020464656d6f046c69766505766964656f01")


def masked(data):
    return bytes(octet ^ MASK for octet in data)


class MaskedDecoder:
    def __init__(self, inner):
        self.inner = inner

    @property
    def buffered(self):
        return self.inner.buffered

    def feed(self, data):
        return self.inner.feed(masked(data))


class OtherCodec(Draft22Codec):
    """Control messages and stream types of a draft that writes every octet differently."""

    @property
    def alpn(self):
        return OTHER

    def encode_message(self, message):
        return masked(super().encode_message(message))

    def message_decoder(self, *arguments):
        return MaskedDecoder(super().message_decoder(*arguments))

    def data_stream_type(self, buffer):
        return super().data_stream_type(masked(buffer))


def subscribed(alpn):
    """A SUBSCRIBE over two sessions that ALPN gave `alpn`; the octets that carried it, too."""
    publisher = Publisher()
    publisher.add_track(TrackStore(NAME))
    pair = Pair(server=publisher, start=False)
    sent = []
    send = pair.client_transport.send
    pair.client_transport.send = lambda stream, data, fin=False: (
        sent.append(bytes(data)),
        send(stream, data, fin),
    )
    for session in (pair.client, pair.server):
        session.connection_established(alpn)
    pair.run()
    collector = Collector()
    pair.client.subscribe(NAME, collector)
    pair.run()
    return collector, sent[-1]


@pytest.fixture
def other_draft():
    other = OtherCodec()
    codec.register_codec(other)
    yield other
    if OTHER in codec.codecs():
        codec.unregister_codec(OTHER)


def test_another_drafts_table_serves_its_sessions_beside_those_of_this_one(other_draft):
    collector, octets = subscribed(OTHER)
    assert collector.accepted is not None
    same, plain = subscribed(ALPN)
    assert same.accepted is not None
    assert octets == masked(plain) != plain
    assert plain[0] == MessageType.SUBSCRIBE


def test_codecs_are_found_by_alpn_while_they_are_registered(other_draft):
    assert list(codec.codecs()) == [ALPN, OTHER]
    assert codec.codec_for(OTHER) is other_draft
    codec.unregister_codec(OTHER)
    assert list(codec.codecs()) == [ALPN]
    with pytest.raises(MisuseError, match=f"no MOQT draft '{OTHER}' here; known: {ALPN}"):
        codec.codec_for(OTHER)
    with pytest.raises(MisuseError):
        codec.unregister_codec(OTHER)


def test_a_session_keeps_the_codec_it_began_with(other_draft):
    pair = Pair(start=False)
    for session in (pair.client, pair.server):
        session.connection_established(OTHER)
    codec.unregister_codec(OTHER)
    pair.run()
    assert pair.client.codec is pair.server.codec is other_draft
    assert pair.client.closed is None


def test_a_second_codec_of_the_same_name_is_refused_and_the_same_one_is_not(other_draft):
    codec.register_codec(other_draft)
    with pytest.raises(MisuseError, match="already"):
        codec.register_codec(OtherCodec())
    with pytest.raises(TypeError):
        codec.codecs()[OTHER] = OtherCodec()


@pytest.mark.parametrize("side", ["client", "server"])
async def test_offering_a_draft_that_is_not_spoken_here_is_a_mistake(side):
    quic = quic_config(alpn=(ALPN, OTHER))
    with pytest.raises(MisuseError, match=OTHER):
        if side == "client":
            await connect("moqt://localhost:1/", quic=quic)
        else:
            await serve("127.0.0.1", 0, quic=quic, handler=Publisher())


async def test_the_drafts_a_config_offers_are_what_two_endpoints_choose_from(other_draft):
    both, newest = quic_config(alpn=(ALPN, OTHER)), quic_config(alpn=(OTHER,))
    async with await serve("127.0.0.1", 0, quic=both, handler=Publisher()) as server:
        for scheme in ("moqt", "https"):
            url = f"{scheme}://127.0.0.1:{server.port}/"
            for quic, chosen in ((newest, OTHER), (quic_config(), ALPN)):
                async with connect(url, quic=quic) as session:
                    assert session.session.codec.alpn == chosen


async def test_a_webtransport_server_of_other_drafts_only_is_a_connect_error(other_draft):
    quic = quic_config(alpn=(OTHER,))
    async with await serve("127.0.0.1", 0, quic=quic, handler=Publisher()) as server:
        with pytest.raises(ConnectError, match="status 400"):
            await connect(f"https://127.0.0.1:{server.port}/", quic=quic_config(), timeout=5)


def test_21_05_is_next_object_in_this_draft():
    (message,) = codec.codec_for(ALPN).message_decoder().feed(SUBSCRIBE + b"\x21\x05")
    assert message.parameters.location_filter == LocationFilter(LocationFilterType.NEXT_OBJECT)


@pytest.mark.parametrize("kind", [0x06, 0x10, 0x7F])
def test_an_unknown_filter_type_is_a_protocol_violation_and_never_the_whole_track(kind):
    decoder = codec.codec_for(ALPN).message_decoder()
    with pytest.raises(SessionError) as refused:
        decoder.feed(SUBSCRIBE + bytes([0x21, kind]))
    assert refused.value.code == SessionErrorCode.PROTOCOL_VIOLATION
