"""Rules of filters, fetches, Objects and codes that no other test states by itself."""

from __future__ import annotations

import pytest

from moqt.delivery import PaddingDelivery
from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.session import SessionConfig, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    MAX_VI64,
    AliasType,
    GroupOrder,
    ObjectStatus,
    ParameterType,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.values.errors import SessionError
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    FetchOk,
    KeyValue,
    LocationFilter,
    Parameters,
    RangeFilter,
    RequestUpdate,
)
from moqt.values.names import FullTrackName, Location
from moqt.wire.codec import codec_for
from moqt.wire.objects import DatagramObject, PaddingDatagram
from moqt.wire.vi64 import encode_vi64
from tests.moqt.deliveries import NEXT, Recorder, World, grow, locations
from tests.moqt.inside import fills, listeners, streams_sent
from tests.moqt.memory import ALPN, Pair
from tests.moqt.peers import NAME, track
from tests.moqt.raw import Client, Raw, Server, fetch_stream, octets

CODEC = codec_for(ALPN)
DESCENDING = (KeyValue(PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER, GroupOrder.DESCENDING),)

REGISTRIES = {
    SessionErrorCode: {
        "NO_ERROR": 0x0,
        "INTERNAL_ERROR": 0x1,
        "UNAUTHORIZED": 0x2,
        "PROTOCOL_VIOLATION": 0x3,
        "INVALID_REQUEST_ID": 0x4,
        "DUPLICATE_TRACK_ALIAS": 0x5,
        "KEY_VALUE_FORMATTING_ERROR": 0x6,
        "INVALID_PATH": 0x8,
        "MALFORMED_PATH": 0x9,
        "GOAWAY_TIMEOUT": 0x10,
        "CONTROL_MESSAGE_TIMEOUT": 0x11,
        "DATA_STREAM_TIMEOUT": 0x12,
        "AUTH_TOKEN_CACHE_OVERFLOW": 0x13,
        "DUPLICATE_AUTH_TOKEN_ALIAS": 0x14,
        "MALFORMED_AUTH_TOKEN": 0x16,
        "UNKNOWN_AUTH_TOKEN_ALIAS": 0x17,
        "EXPIRED_AUTH_TOKEN": 0x18,
        "INVALID_AUTHORITY": 0x19,
        "MALFORMED_AUTHORITY": 0x1A,
        "TOO_MANY_REQUEST_UPDATES": 0x1B,
    },
    RequestErrorCode: {
        "INTERNAL_ERROR": 0x0,
        "UNAUTHORIZED": 0x1,
        "TIMEOUT": 0x2,
        "NOT_SUPPORTED": 0x3,
        "MALFORMED_AUTH_TOKEN": 0x4,
        "EXPIRED_AUTH_TOKEN": 0x5,
        "GOING_AWAY": 0x6,
        "EXCESSIVE_LOAD": 0x9,
        "DOES_NOT_EXIST": 0x10,
        "INVALID_RANGE": 0x11,
        "MALFORMED_TRACK": 0x12,
        "UNKNOWN_AUTH_TOKEN_ALIAS": 0x17,  # named for requests, numbered for sessions only
        "UNINTERESTED": 0x20,
        "PREFIX_OVERLAP": 0x30,
        "NAMESPACE_TOO_LARGE": 0x31,
        "UNSUPPORTED_EXTENSION": 0x33,
        "REDIRECT": 0x34,
        "CONFLICTING_FILTERS": 0x35,
        "INVALID_FILTER": 0x36,
    },
    PublishDoneCode: {
        "INTERNAL_ERROR": 0x0,
        "UNAUTHORIZED": 0x1,
        "TRACK_ENDED": 0x2,
        "GOING_AWAY": 0x4,
        "TOO_FAR_BEHIND": 0x5,
        "EXPIRED": 0x6,
        "UPDATE_FAILED": 0x8,
        "EXCESSIVE_LOAD": 0x9,
        "MALFORMED_TRACK": 0x12,
    },
    StreamErrorCode: {
        "INTERNAL_ERROR": 0x0,
        "CANCELLED": 0x1,
        "DELIVERY_TIMEOUT": 0x2,
        "SESSION_CLOSED": 0x3,
        "GOING_AWAY": 0x4,
        "TOO_FAR_BEHIND": 0x5,
        "UNKNOWN_OBJECT_STATUS": 0x6,
        "EXPIRED_AUTH_TOKEN": 0x7,
        "EXCESSIVE_LOAD": 0x9,
        "MALFORMED_TRACK": 0x12,
    },
}


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.__name__)
def test_codes_have_the_numbers_of_their_registry_and_there_are_no_others(registry):
    assert {code.name: code.value for code in registry} == REGISTRIES[registry]


# -- filters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "largest", "start"),
    [
        (0, Location(7, 2), Location(8, 0)),
        (1, Location(7, 2), Location(7, 0)),
        (3, Location(7, 2), Location(5, 0)),
        (9, Location(7, 2), Location(0, 0)),
        (0, None, Location(0, 0)),
        (5, None, Location(0, 0)),
    ],
)
def test_a_relative_start_counts_groups_back_from_the_next_one_and_stops_at_0(
    groups, largest, start
):
    assert LocationFilter.relative_start(groups).resolve(largest)[0] == start


def test_next_object_is_0_0_as_long_as_nothing_is_published():
    assert LocationFilter.next_object().resolve(None)[0] == Location(0, 0)
    assert LocationFilter.next_object().resolve(Location(3, 9))[0] == Location(3, 10)


def test_what_stands_inside_fill_parameters_overrides_the_subscription_for_the_fill_only():
    only_0 = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0),))
    only_1 = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, 1),))
    store = TrackStore(NAME)
    for group in range(2):
        for object_id in range(3):
            store.append(group, object_id, b"x")
    world = World(store, None)
    world.request = world.pair.client.subscribe(
        NAME,
        world.got,
        Parameters(
            range_filters=(only_0,),
            subscriber_priority=20,
            fill_parameters=Parameters(
                range_filters=(only_1,), group_order=GroupOrder.DESCENDING, subscriber_priority=3
            ),
        ),
    )
    world.pair.client_transport.deliver()
    (request,) = world.pair.server.requests.incoming.values()
    (fill,) = fills(request.delivery)
    assert (request.delivery.flow.subscriber_priority, fill.flow.subscriber_priority) == (20, 3)
    world.run()
    world.put((2, 0), (2, 1))
    assert world.got.filled() == locations((1, 1), (0, 1))
    assert world.got.live() == [(2, 0)]
    world.end()


def test_a_fill_that_fails_is_reset_after_its_header_and_the_subscription_goes_on():
    store = TrackStore(NAME)
    growing = grow(store, (0, 0))
    world = World(
        store,
        Parameters(
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
        ),
    )
    store.abort(growing)
    world.run()
    assert world.got.ends == [(Via.FILL, None, StreamErrorCode.INTERNAL_ERROR)]
    world.put((0, 1))
    assert world.got.live() == [(0, 1)]
    world.end()


# -- FETCH -------------------------------------------------------------------------------


def test_a_fetch_without_a_group_order_is_ascending_whatever_the_track_says():
    store = TrackStore(NAME, DESCENDING)
    for group in range(3):
        store.append(group, 0, b"x")
    assert World(store, None).fetch().locations == locations((0, 0), (1, 0), (2, 0))


def test_a_subscription_and_its_fill_take_the_tracks_group_order_unless_they_name_one():
    for properties, asked, expected in (
        (DESCENDING, None, [1, 0]),
        (DESCENDING, GroupOrder.ASCENDING, [0, 1]),
        ((), None, [0, 1]),
        ((), GroupOrder.DESCENDING, [1, 0]),
    ):
        publisher, store, got = Publisher(), TrackStore(NAME, properties), Recorder()
        publisher.add_track(store)
        for group in range(2):
            store.append(group, 0, b"x")
        pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
        fill = Parameters(location_filter=LocationFilter.absolute_start(0))
        pair.client.subscribe(NAME, got, Parameters(group_order=asked, fill_parameters=fill))
        pair.run()
        for group in range(2, 4):
            store.append(group, 0, b"x")
        pair.run()
        assert [at.group for at in got.filled()] == expected
        assert [at.group for at in got.live()] == [group + 2 for group in expected]


def test_stop_sending_on_the_stream_of_a_fetch_resets_that_and_the_request_stream():
    world = World(track(2, ended=False, size=100_000), None, stream_window=1000)
    got = Recorder()
    got.stream_opened = lambda stream: world.pair.client_transport.pause_receiving(stream.stream_id)
    request = world.pair.client.fetch(NAME, got)
    world.run()
    (stream_id,) = streams_sent(world.pair.server)
    world.pair.client_transport.stop_receiving(stream_id, StreamErrorCode.CANCELLED)
    world.pair.client_transport.deliver()
    out = world.pair.server_transport.out
    assert out[stream_id].reset == StreamErrorCode.CANCELLED
    assert out[request.stream.stream_id].reset == StreamErrorCode.CANCELLED
    assert not world.pair.server.requests.incoming and not listeners(world.store)


def test_an_update_of_a_fetch_that_fails_resets_its_data_stream():
    raw = Server()
    store = TrackStore(NAME)
    store.append(0, 0, bytes(3 << 20))
    request = raw.ask(Fetch(0, NAME.namespace, NAME.name))
    raw.requests[0].accept(store)
    raw.session.ready_to_send()
    (data,) = (s for s in raw.transport.out if s & 2 and s != raw.own_control)
    assert raw.transport.out[data].queue and not raw.transport.out[data].fin
    unknown = AuthorizationToken(AliasType.USE_ALIAS, 5)
    raw.session.stream_data(
        request, octets(RequestUpdate(2, Parameters(authorization_tokens=(unknown,)))), False
    )
    assert raw.transport.out[data].reset == StreamErrorCode.CANCELLED
    assert not listeners(store)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (LocationFilter.range(Location(0, 1), Location(1, 9)), Location(1, 9)),
        (LocationFilter.groups(0, 1), Location(1, 3)),
        (LocationFilter.groups(0, 9), Location(2, 3)),
        (LocationFilter.absolute_start(1), Location(2, 3)),
        (None, Location(2, 3)),
    ],
)
def test_end_location_is_the_end_asked_for_lowered_to_what_there_is(asked, shown):
    world = World(track(3, ended=False), None)
    assert world.fetch(location_filter=asked).accepted.end_location == shown


def test_end_location_of_a_group_whose_end_nobody_knows_has_the_largest_object_id():
    store = TrackStore(NAME, authoritative=False)
    store.append(0, 0, b"x")
    store.append(1, 0, b"x")
    got = World(store, None).fetch(location_filter=LocationFilter.groups(0, 0))
    assert got.accepted.end_location == Location(0, MAX_VI64)


def test_an_unknown_mandatory_property_in_fetch_ok_cancels_the_fetch():
    client = Client()
    collector = client.fetch()
    client.say(collector.request, FetchOk(False, Location(0, 5), properties=(KeyValue(0x4000, 1),)))
    assert collector.failed.code == RequestErrorCode.UNSUPPORTED_EXTENSION
    assert client.transport.out[0].reset == StreamErrorCode.CANCELLED
    assert client.session.state is SessionState.ESTABLISHED


def test_a_fetch_of_a_track_that_is_not_there_is_answered_does_not_exist():
    pair, got = Pair(server=Publisher()), Recorder()
    pair.client.fetch(NAME, got)
    pair.run()
    assert got.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_the_objects_of_a_fetch_may_come_before_fetch_ok():
    client = Client()
    collector = client.fetch()
    client.send_uni(fetch_stream(0, (0, 0), (0, 1)), fin=True)
    assert collector.locations == locations((0, 0), (0, 1)) and collector.accepted is None
    client.say(collector.request, FetchOk(False, Location(0, 1)))
    assert collector.accepted.end_location == Location(0, 1)
    assert not client.session.requests.outgoing and not client.session.data_streams.expected


# -- Objects and datagrams ---------------------------------------------------------------


def test_an_object_that_arrives_after_it_was_recorded_not_to_exist_is_no_error():
    store = TrackStore(NAME, authoritative=False)
    store.mark_nonexistent(Location(0, 0), Location(0, 9))
    stored = grow(store, (0, 3), 1)
    assert stored is not None


def test_a_datagram_of_an_unknown_type_closes_the_session_and_padding_does_not():
    client = Client()
    client.session.datagram(CODEC.encode_datagram(PaddingDatagram(100)))
    client.session.datagram(CODEC.encode_datagram(DatagramObject(99, 0, 0, 1, payload=b"x")))
    assert client.session.state is SessionState.ESTABLISHED, "an unknown alias is no error"
    client.session.datagram(b"\x40\x01\x02\x03\x04")
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_the_datagram_types_are_exactly_those_of_the_draft():
    taken = set()
    for flags in range(0x200):
        body = b"\x01\x02"
        body += b"" if flags & 0x04 else b"\x03"
        body += b"" if flags & 0x08 else b"\x80"
        body += b"\x02\x10\x09" if flags & 0x01 else b""
        body += b"\x00" if flags & 0x20 else b"payload"
        try:
            CODEC.decode_datagram(encode_vi64(flags) + body)
        except SessionError as error:
            assert error.code == SessionErrorCode.PROTOCOL_VIOLATION
        else:
            taken.add(flags)
    assert taken == {*range(0x10), 0x20, 0x21, 0x24, 0x25, 0x28, 0x29, 0x2C, 0x2D}


def test_padding_is_nothing_but_zeros():
    world = World()
    padding = PaddingDelivery(world.pair.server, 5000)
    padding.begin()
    sent = bytearray()
    send = world.pair.server_transport.send
    world.pair.server_transport.send = lambda stream_id, data, fin=False: (
        sent.extend(data),
        send(stream_id, data, fin),
    )
    world.run()
    header = CODEC.encode_padding_header()
    assert sent.startswith(header) and not any(sent[len(header) :]) and len(sent) >= 5000


def test_without_another_one_every_priority_is_128():
    for properties, expected in (
        ((), 128),
        ((KeyValue(PropertyType.DEFAULT_PUBLISHER_PRIORITY, 100),), 100),
    ):
        store = TrackStore(NAME, properties)
        world = World(store, Parameters())
        (request,) = world.pair.server.requests.incoming.values()
        assert request.delivery.flow.subscriber_priority == 128
        world.put((0, 0))
        came = store.begin(Location(1, 0), subgroup=0, priority=None, properties=b"", length=0)
        assert came is not None and came.priority == expected
        assert [stream.subgroup.priority for stream in world.got.opened] == [expected]


def test_two_subscriptions_of_one_session_get_an_object_each_by_their_own_filters():
    world = World(None, NEXT)
    other = Recorder()
    world.pair.client.subscribe(
        NAME, other, Parameters(location_filter=LocationFilter.groups(1, 1))
    )
    world.run()
    world.put((0, 0), (1, 0), (2, 0))
    assert sorted(world.got.live()) == locations((0, 0), (1, 0), (2, 0))
    assert other.live() == [(1, 0)]


# -- a whole session ---------------------------------------------------------------------


def test_a_subscription_that_joins_the_current_group_is_the_drafts_example_on_the_wire():
    """SUBSCRIBE with Next Object and a fill of the current group; Largest is {24, 2}."""
    name = FullTrackName((b"demo", b"live"), b"video")
    store = TrackStore(name, (KeyValue(PropertyType.DEFAULT_PUBLISHER_PRIORITY, 100),))
    for object_id in range(3):
        store.append(24, object_id, b"past")
    handler = Publisher()
    handler.add_track(store)
    raw = Raw(client=False, handler=handler)
    request = raw.send_bidi(
        bytes.fromhex("03001b06020464656d6f046c69766505766964656f022105020401210101")
    )
    raw.session.ready_to_send()
    store.append(24, 3, b"new")
    store.finish_subgroup(24, 0)
    store.append(25, 0, b"new")
    store.finish_subgroup(25, 0)
    store.mark_end(Location(26, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(26, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)
    raw.session.ready_to_send()
    ok, done = raw.answers(request)
    assert ok.parameters.largest_object == Location(24, 2)
    assert (done.code, done.stream_count) == (PublishDoneCode.TRACK_ENDED, 4)
    assert raw.transport.out[request].fin
    fill, rest, group_25, end = (
        b"".join(stream.queue)
        for stream_id, stream in raw.transport.out.items()
        if stream_id & 2 and stream_id != raw.own_control
    )
    assert fill == bytes.fromhex("0506 1c18006404") + b"past" + (b"\x00\x04past") * 2
    for data, (group, object_id), first in (
        (rest, (24, 3), False),
        (group_25, (25, 0), True),
        (end, (26, 0), True),
    ):
        header, whole, *_ = CODEC.subgroup_decoder().feed(data)
        assert (header.group, header.priority, header.first_object) == (group, 100, first)
        assert whole.header.object == object_id
    assert whole.header.status is ObjectStatus.END_OF_TRACK
