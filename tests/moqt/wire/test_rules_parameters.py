"""Which message may carry which parameter (MOQT "Parameter Scope"), the whole table."""

from __future__ import annotations

import pytest

from moqt.values.codes import MessageType, ParameterType, SessionErrorCode
from moqt.values.errors import MisuseError, SessionError
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    FetchOk,
    LocationFilter,
    Parameters,
    Publish,
    PublishNamespace,
    PublishStateNotify,
    RangeFilter,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from moqt.values.names import Location
from moqt.wire.codec import codec_for
from moqt.wire.vi64 import encode_vi64
from tests.moqt.memory import ALPN

CODEC = codec_for(ALPN)
P = ParameterType

VALUES = {
    P.OBJECT_DELIVERY_TIMEOUT: {"object_delivery_timeout": 5},
    P.AUTHORIZATION_TOKEN: {"authorization_tokens": (AuthorizationToken(3, None, 0, b"x"),)},
    P.RENDEZVOUS_TIMEOUT: {"rendezvous_timeout": 5},
    P.SUBGROUP_DELIVERY_TIMEOUT: {"subgroup_delivery_timeout": 5},
    P.EXPIRES: {"expires": 5},
    P.LARGEST_OBJECT: {"largest_object": Location(1, 2)},
    P.FILL_TIMEOUT: {"fill_timeout": 5},
    P.FORWARD: {"forward": 0},
    P.SUBSCRIBER_PRIORITY: {"subscriber_priority": 200},
    P.LOCATION_FILTER: {"location_filter": LocationFilter.next_object()},
    P.GROUP_ORDER: {"group_order": 2},
    P.FILL_PARAMETERS: {"fill_parameters": Parameters()},
    **{
        type_: {
            "range_filters": (
                RangeFilter(type_, 0, 2 if "PROPERTY" in type_.name else None, ((1, 2),)),
            )
        }
        for type_ in P
        if 0x25 <= type_ <= 0x29
    },
    P.NEW_GROUP_REQUEST: {"new_group_request": 5},
    P.TRACK_NAMESPACE_PREFIX: {"track_namespace_prefix": (b"a",)},
    P.INCLUDE_PROPERTIES: {"include_properties": 0},
    P.RELAY_PATH: {"relay_path": (7, 300)},
}
OF_OBJECTS = {
    P.SUBGROUP_FILTER,
    P.OBJECTID_FILTER,
    P.PRIORITY_FILTER,
    P.OBJECT_PROPERTY_FILTER,
}
OF_SUBSCRIBE = OF_OBJECTS | {
    P.OBJECT_DELIVERY_TIMEOUT,
    P.AUTHORIZATION_TOKEN,
    P.RENDEZVOUS_TIMEOUT,
    P.SUBGROUP_DELIVERY_TIMEOUT,
    P.FORWARD,
    P.SUBSCRIBER_PRIORITY,
    P.LOCATION_FILTER,
    P.GROUP_ORDER,
    P.FILL_PARAMETERS,
    P.NEW_GROUP_REQUEST,
    P.INCLUDE_PROPERTIES,
}
OF_RELAYS = {P.RELAY_PATH}
NAMED = (0, (b"n",), b"t")
CARRIERS = {
    MessageType.SUBSCRIBE: (lambda p: Subscribe(*NAMED, p), OF_SUBSCRIBE | OF_RELAYS),
    MessageType.PUBLISH: (
        lambda p: Publish(*NAMED, 7, p),
        {
            P.OBJECT_DELIVERY_TIMEOUT,
            P.AUTHORIZATION_TOKEN,
            P.SUBGROUP_DELIVERY_TIMEOUT,
            P.EXPIRES,
            P.LARGEST_OBJECT,
            P.FORWARD,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
        },
    ),
    MessageType.FETCH: (
        lambda p: Fetch(*NAMED, p),
        OF_OBJECTS
        | OF_RELAYS
        | {
            P.AUTHORIZATION_TOKEN,
            P.FILL_TIMEOUT,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
            P.INCLUDE_PROPERTIES,
        },
    ),
    MessageType.TRACK_STATUS: (
        lambda p: TrackStatus(*NAMED, p),
        {P.AUTHORIZATION_TOKEN, P.INCLUDE_PROPERTIES, *OF_RELAYS},
    ),
    MessageType.PUBLISH_NAMESPACE: (
        lambda p: PublishNamespace(0, (b"n",), p),
        {P.AUTHORIZATION_TOKEN},
    ),
    MessageType.SUBSCRIBE_NAMESPACE: (
        lambda p: SubscribeNamespace(0, (b"n",), p),
        {P.AUTHORIZATION_TOKEN},
    ),
    # The draft names two sets for it; receivers take the union.
    MessageType.SUBSCRIBE_TRACKS: (
        lambda p: SubscribeTracks(0, (b"n",), p),
        OF_SUBSCRIBE | {P.TRACK_PROPERTY_FILTER},
    ),
    MessageType.SUBSCRIBE_OK: (lambda p: SubscribeOk(7, p), {P.EXPIRES, P.LARGEST_OBJECT}),
    MessageType.FETCH_OK: (lambda p: FetchOk(False, Location(0, 0), p), set()),
    MessageType.PUBLISH_STATE_NOTIFY: (
        PublishStateNotify,
        {P.LARGEST_OBJECT, P.FORWARD, P.LOCATION_FILTER},
    ),
    P.FILL_PARAMETERS: (
        lambda p: Subscribe(*NAMED, Parameters(fill_parameters=p)),
        OF_OBJECTS
        | {P.FILL_TIMEOUT, P.SUBSCRIBER_PRIORITY, P.LOCATION_FILTER, P.GROUP_ORDER},
    ),
}  # fmt: skip


def value_octets(type_: ParameterType) -> bytes:
    """The octets of one parameter by itself: its type, then its value."""
    carrier = next(make for make, allowed in CARRIERS.values() if type_ in allowed)
    empty, full = (CODEC.encode_message(carrier(Parameters(**each)))
                   for each in ({}, VALUES[type_]))  # fmt: skip
    first = next(i for i in range(3, len(empty)) if empty[i] != full[i])
    return full[first + 1 : len(full) - (len(empty) - first - 1)]


@pytest.mark.parametrize("place", CARRIERS, ids=lambda place: place.name)
@pytest.mark.parametrize("type_", VALUES, ids=lambda type_: type_.name)
def test_a_message_carries_exactly_the_parameters_of_the_scope_table(place, type_):
    make, allowed = CARRIERS[place]
    parameters = Parameters(**VALUES[type_])
    if type_ in allowed:
        message = make(parameters)
        assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]
        return
    with pytest.raises(MisuseError):
        CODEC.encode_message(make(parameters))
    if type_ is P.TRACK_NAMESPACE_PREFIX:
        octets = b"\x34\x01\x01a"
    else:
        octets = value_octets(type_)
    empty = CODEC.encode_message(make(Parameters()))
    body = empty[3:]
    if place is P.FILL_PARAMETERS:  # ... 01 23 <length> <count>
        body = body[:-2] + encode_vi64(1 + len(octets)) + b"\x01" + octets
    else:  # ... <count> at the very end, as there are no properties
        body = body[:-1] + b"\x01" + octets
    with pytest.raises(SessionError) as closed:
        CODEC.message_decoder().feed(empty[:1] + len(body).to_bytes(2, "big") + body)
    assert closed.value.code == SessionErrorCode.PROTOCOL_VIOLATION
    assert "not allowed" in closed.value.reason


def test_only_tokens_and_range_filters_may_be_repeated():
    for type_ in VALUES:
        if type_ in (P.EXPIRES, P.LARGEST_OBJECT):
            make, allowed = CARRIERS[MessageType.PUBLISH]
        elif type_ is P.TRACK_NAMESPACE_PREFIX:
            make, allowed = (lambda p: RequestUpdate(0, p)), {type_}
        elif type_ in (P.FILL_TIMEOUT, P.RELAY_PATH):
            make, allowed = CARRIERS[MessageType.FETCH]
        else:
            make, allowed = CARRIERS[MessageType.SUBSCRIBE_TRACKS]
        assert type_ in allowed
        one = b"\x34\x01\x01a" if type_ is P.TRACK_NAMESPACE_PREFIX else value_octets(type_)
        empty = CODEC.encode_message(make(Parameters()))
        body = empty[3:-1] + b"\x02" + one + b"\x00" + one[len(encode_vi64(type_)) :]
        octets = empty[:1] + len(body).to_bytes(2, "big") + body
        if type_ is P.AUTHORIZATION_TOKEN or 0x25 <= type_ <= 0x29:
            assert len(CODEC.message_decoder().feed(octets)) == 1
        else:
            with pytest.raises(SessionError, match="repeated"):
                CODEC.message_decoder().feed(octets)


def test_a_priority_is_one_raw_octet_and_never_a_vi64():
    parameters = Parameters(subscriber_priority=200)
    assert CODEC.encode_message(Subscribe(0, (), b"", parameters))[-2:] == b"\x20\xc8"


def test_a_delta_that_goes_beyond_64_bits_names_no_parameter():
    empty = CODEC.encode_message(Subscribe(0, (), b"", Parameters()))
    around = encode_vi64(2**64 - P.FORWARD + P.OBJECT_DELIVERY_TIMEOUT)
    body = empty[3:-1] + b"\x02" + bytes((P.FORWARD, 1)) + around + b"\x05"
    with pytest.raises(SessionError, match="above"):
        CODEC.message_decoder().feed(empty[:1] + len(body).to_bytes(2, "big") + body)


def test_a_relay_path_names_one_relay_after_the_other_at_most_256():
    message = TrackStatus(0, (b"n",), b"t", Parameters(relay_path=(7, 300)))
    octets = CODEC.encode_message(message)
    # Type 0x4B5705, Length 3, then the relays 7 and 300
    assert octets.endswith(bytes.fromhex("e04b570503 07 812c"))
    for count in (0, 257):
        path = tuple(range(count))
        with pytest.raises(MisuseError):
            CODEC.encode_message(TrackStatus(0, (b"n",), b"t", Parameters(relay_path=path)))


@pytest.mark.parametrize("value", [b"\x00", encode_vi64(257) + bytes(257), b"\x01\xff"])
def test_a_relay_path_of_no_relay_or_too_many_or_half_a_one_is_a_violation(value):
    octets = CODEC.encode_message(TrackStatus(0, (b"n",), b"t", Parameters(relay_path=(7,))))
    kind, body = octets[:1], octets[3:-2] + value
    with pytest.raises(SessionError) as refused:
        CODEC.message_decoder().feed(kind + len(body).to_bytes(2, "big") + body)
    assert refused.value.code == SessionErrorCode.PROTOCOL_VIOLATION
