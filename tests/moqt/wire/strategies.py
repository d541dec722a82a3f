"""Strategies for every control message."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moqt.values.codes import (
    MAX_VI64,
    AliasType,
    LocationFilterType,
    MessageType,
    ParameterType,
    RequestErrorCode,
)
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    FetchOk,
    Goaway,
    KeyValue,
    LocationFilter,
    Namespace,
    NamespaceDone,
    Parameters,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from moqt.values.names import Location
from moqt.wire.draft22.parameters import ALLOWED

P = ParameterType
vi64 = st.one_of(st.integers(0, 300), st.integers(0, MAX_VI64))
u8 = st.integers(0, 255)
names = st.binary(max_size=8)
namespaces = st.lists(st.binary(min_size=1, max_size=6), max_size=4).map(tuple)
reasons = st.text(max_size=40)
uris = st.text(alphabet="abc:/.", max_size=20)
locations = st.builds(Location, vi64, vi64)
tokens = st.one_of(
    st.builds(
        AuthorizationToken, st.sampled_from([AliasType.DELETE, AliasType.USE_ALIAS]), alias=vi64
    ),
    st.builds(AuthorizationToken, st.just(AliasType.REGISTER), vi64, vi64, names),
    st.builds(
        AuthorizationToken, st.just(AliasType.USE_VALUE), st.none(), token_type=vi64, value=names
    ),
)
unknown_pairs = st.lists(
    st.one_of(
        st.builds(KeyValue, st.integers(0x40, MAX_VI64 // 2).map(lambda n: 2 * n), vi64),
        st.builds(KeyValue, st.integers(0x40, MAX_VI64 // 2).map(lambda n: 2 * n + 1), names),
    ),
    max_size=4,
)


def ascending(pairs: list[KeyValue]) -> tuple[KeyValue, ...]:
    return tuple(sorted(pairs, key=lambda pair: pair.type))


key_values = unknown_pairs.map(ascending)


@st.composite
def location_filters(draw: st.DrawFn) -> LocationFilter:
    type_ = draw(st.sampled_from(LocationFilterType))
    start, end = sorted(draw(st.tuples(vi64, vi64)))
    used = (0, 1, 2, 3, 4, 0)[type_]
    return LocationFilter(type_, *(start, draw(vi64), end - start, draw(vi64))[:used])


@st.composite
def range_filters(draw: st.DrawFn, type_: ParameterType) -> RangeFilter:
    bounds = sorted(draw(st.lists(vi64, max_size=8)))
    if not bounds:
        return RangeFilter(type_)
    ranges: list[tuple[int, int | None]] = list(zip(bounds[::2], bounds[1::2], strict=False))
    if len(bounds) % 2:
        ranges.append((bounds[-1], None))
    on_property = type_ in (P.OBJECT_PROPERTY_FILTER, P.TRACK_PROPERTY_FILTER)
    return RangeFilter(type_, draw(u8), draw(vi64) if on_property else None, tuple(ranges))


SCALARS: dict[ParameterType, tuple[str, st.SearchStrategy[Any]]] = {
    P.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", vi64),
    P.AUTHORIZATION_TOKEN: ("authorization_tokens", st.lists(tokens, max_size=3).map(tuple)),
    P.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", vi64),
    P.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", vi64),
    P.EXPIRES: ("expires", vi64),
    P.LARGEST_OBJECT: ("largest_object", locations),
    P.FILL_TIMEOUT: ("fill_timeout", vi64),
    P.FORWARD: ("forward", st.integers(0, 1)),
    P.SUBSCRIBER_PRIORITY: ("subscriber_priority", u8),
    P.LOCATION_FILTER: ("location_filter", location_filters()),
    P.GROUP_ORDER: ("group_order", st.integers(1, 2)),
    P.NEW_GROUP_REQUEST: ("new_group_request", vi64),
    P.TRACK_NAMESPACE_PREFIX: ("track_namespace_prefix", namespaces),
    P.INCLUDE_PROPERTIES: ("include_properties", st.integers(0, 1)),
    P.RELAY_PATH: ("relay_path", st.lists(vi64, min_size=1, max_size=4).map(tuple)),
}
RANGE_FILTERS = [type_ for type_ in P if 0x25 <= type_ <= 0x29]
IN_FILL = frozenset({P.FILL_TIMEOUT, P.SUBSCRIBER_PRIORITY, P.LOCATION_FILTER, P.GROUP_ORDER})


@st.composite
def parameters_of(draw: st.DrawFn, allowed: frozenset[ParameterType]) -> Parameters:
    fields: dict[str, Any] = {}
    for type_, (name, values) in SCALARS.items():
        if type_ in allowed and draw(st.booleans()):
            fields[name] = draw(values)
    if P.FILL_PARAMETERS in allowed and draw(st.booleans()):
        fields["fill_parameters"] = draw(parameters_of(IN_FILL))
    filters: list[RangeFilter] = []
    for type_ in RANGE_FILTERS:
        if type_ in allowed:
            filters += draw(st.lists(range_filters(type_), max_size=2))
    return Parameters(**fields, range_filters=tuple(filters))


def in_message(type_: MessageType) -> st.SearchStrategy[Parameters]:
    return parameters_of(ALLOWED[type_])


M = MessageType
MESSAGES = st.one_of(
    st.builds(Setup, key_values),
    st.builds(Goaway, uris, vi64),
    st.builds(Subscribe, vi64, namespaces, names, in_message(M.SUBSCRIBE)),
    st.builds(SubscribeOk, vi64, in_message(M.SUBSCRIBE_OK), key_values),
    st.builds(RequestUpdate, vi64, in_message(M.REQUEST_UPDATE)),
    st.builds(RequestOk, in_message(M.REQUEST_OK), key_values),
    st.builds(
        RequestErrorMessage,
        vi64.filter(lambda code: code != RequestErrorCode.REDIRECT),
        vi64,
        reasons,
    ),
    st.builds(
        RequestErrorMessage,
        st.just(int(RequestErrorCode.REDIRECT)),
        vi64,
        reasons,
        st.builds(Redirect, uris, namespaces, names),
    ),
    st.builds(Publish, vi64, namespaces, names, vi64, in_message(M.PUBLISH), key_values),
    st.builds(PublishDone, vi64, vi64, reasons),
    st.builds(PublishStateNotify, in_message(M.PUBLISH_STATE_NOTIFY)),
    st.builds(Fetch, vi64, namespaces, names, in_message(M.FETCH)),
    st.builds(FetchOk, st.booleans(), locations, in_message(M.FETCH_OK), key_values),
    st.builds(TrackStatus, vi64, namespaces, names, in_message(M.TRACK_STATUS)),
    st.builds(PublishNamespace, vi64, namespaces, in_message(M.PUBLISH_NAMESPACE)),
    st.builds(SubscribeNamespace, vi64, namespaces, in_message(M.SUBSCRIBE_NAMESPACE)),
    st.builds(Namespace, namespaces),
    st.builds(NamespaceDone, namespaces),
    st.builds(SubscribeTracks, vi64, namespaces, in_message(M.SUBSCRIBE_TRACKS)),
    st.builds(PublishSkipped, namespaces, names),
)
