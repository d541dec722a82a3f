"""MOQT "Control Message Parameters" of draft-22: how each is written, where it may stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from moqt.values.codes import MAX_VI64, LocationFilterType, MessageType, ParameterType
from moqt.values.errors import MisuseError, protocol_violation
from moqt.values.messages import NO_PARAMETERS, LocationFilter, Parameters, RangeFilter
from moqt.wire.primitives import (
    Reader,
    decode_token,
    encode_location,
    encode_namespace,
    encode_octets,
    encode_token,
)
from moqt.wire.vi64 import encode_vi64

_P = ParameterType
_M = MessageType
Allowed = frozenset[ParameterType]

# Where a parameter may stand (MOQT "Parameter Scope") ----------------------------------

_REQUESTS = (
    _M.SUBSCRIBE,
    _M.PUBLISH,
    _M.FETCH,
    _M.TRACK_STATUS,
    _M.PUBLISH_NAMESPACE,
    _M.SUBSCRIBE_NAMESPACE,
    _M.SUBSCRIBE_TRACKS,
)
# First block: in the request itself, in the order of _REQUESTS. Second: inside
# FILL_PARAMETERS. Third: in a REQUEST_UPDATE of that request; nothing updates a
# TRACK_STATUS. SUBSCRIBE_TRACKS takes the union of what the draft says in two places.
_PLACES = {
    _P.OBJECT_DELIVERY_TIMEOUT: "XX....X . XX.....",
    _P.AUTHORIZATION_TOKEN: "XXXXXXX . XXX.XXX",
    _P.RENDEZVOUS_TIMEOUT: "X.....X . .......",
    _P.SUBGROUP_DELIVERY_TIMEOUT: "XX....X . XX.....",
    _P.EXPIRES: ".X..... . .......",
    _P.LARGEST_OBJECT: ".X..... . .......",
    _P.FILL_TIMEOUT: "..X.... X .......",
    _P.FORWARD: "XX....X . XX....X",
    _P.SUBSCRIBER_PRIORITY: "XXX...X X XXX....",
    _P.LOCATION_FILTER: "XXX...X X XX.....",
    _P.GROUP_ORDER: "XXX...X X .......",
    _P.FILL_PARAMETERS: "X.....X . XX.....",
    _P.SUBGROUP_FILTER: "X.X...X X XX.....",
    _P.OBJECTID_FILTER: "X.X...X X XX.....",
    _P.PRIORITY_FILTER: "X.X...X X XX.....",
    _P.OBJECT_PROPERTY_FILTER: "X.X...X X XX.....",
    _P.TRACK_PROPERTY_FILTER: "......X . ......X",
    _P.NEW_GROUP_REQUEST: "X.....X . XX.....",
    _P.TRACK_NAMESPACE_PREFIX: "....... . .....XX",
    _P.INCLUDE_PROPERTIES: "X.XX..X . .......",
    _P.RELAY_PATH: "X.XX... . .......",
}


def _column(index: int) -> Allowed:
    return frozenset(type_ for type_, row in _PLACES.items() if row[index] == "X")


ANYWHERE: Allowed = frozenset(ParameterType)
_IN_FILL = _column(8)
_IN_UPDATE_OF = {
    request: _column(10 + index)
    for index, request in enumerate(_REQUESTS)
    if request is not _M.TRACK_STATUS
}
_IN_OK_OF: dict[MessageType, Allowed] = {
    _M.PUBLISH: frozenset({_P.EXPIRES}),
    _M.REQUEST_UPDATE: frozenset({_P.EXPIRES, _P.LARGEST_OBJECT}),
    _M.TRACK_STATUS: frozenset({_P.LARGEST_OBJECT}),
    _M.PUBLISH_NAMESPACE: frozenset({_P.EXPIRES}),
    _M.SUBSCRIBE_NAMESPACE: frozenset({_P.EXPIRES}),
    _M.SUBSCRIBE_TRACKS: frozenset({_P.EXPIRES}),
}
ALLOWED: dict[MessageType, Allowed] = {
    **{request: _column(index) for index, request in enumerate(_REQUESTS)},
    _M.REQUEST_UPDATE: frozenset().union(*_IN_UPDATE_OF.values()),
    _M.REQUEST_OK: frozenset().union(*_IN_OK_OF.values()),
    _M.SUBSCRIBE_OK: frozenset({_P.EXPIRES, _P.LARGEST_OBJECT}),
    _M.FETCH_OK: frozenset(),
    _M.PUBLISH_STATE_NOTIFY: frozenset({_P.LARGEST_OBJECT, _P.FORWARD, _P.LOCATION_FILTER}),
}
"""What a message may carry when only its own type is known."""


def check_in_update(parameters: Parameters, request: MessageType) -> None:
    """Raises SessionError for a REQUEST_UPDATE that `request` cannot be changed by."""
    if request not in _IN_UPDATE_OF:
        raise protocol_violation(f"REQUEST_UPDATE of a {request.name}")
    _check(parameters, _IN_UPDATE_OF[request], f"REQUEST_UPDATE of a {request.name}")


def check_in_ok(parameters: Parameters, request: MessageType) -> None:
    """Raises SessionError for a REQUEST_OK that cannot answer `request`."""
    if request not in _IN_OK_OF:
        raise protocol_violation(f"REQUEST_OK in answer to {request.name}")
    _check(parameters, _IN_OK_OF[request], f"REQUEST_OK in answer to {request.name}")


def _check(parameters: Parameters, allowed: Allowed, where: str) -> None:
    for type_, _, _ in _present(parameters):
        if type_ not in allowed:
            raise protocol_violation(f"{type_.name} in {where}")


# How a value is written ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """The encoding of one parameter's value and where it lives in `Parameters`."""

    field: str
    read: Callable[[Reader], Any]
    write: Callable[[Any], bytes]
    repeatable: bool = False
    pick: Callable[[Any], bool] = lambda item: True


def _vi64(field: str) -> _Value:
    return _Value(field, Reader.vi64, encode_vi64)


def _u8(field: str, legal: range) -> _Value:
    def read(reader: Reader) -> int:
        value = reader.u8()
        if value not in legal:
            raise reader.violation(f"{field} {value}")
        return value

    def write(value: int) -> bytes:
        if value not in legal:
            raise MisuseError(f"{field} {value} is not in {legal.start}..{legal.stop - 1}")
        return bytes([value])

    return _Value(field, read, write)


_LOCATION_FILTER_FIELDS = {
    LocationFilterType.NONE: 0,
    LocationFilterType.RELATIVE_START: 1,
    LocationFilterType.ABSOLUTE_START: 2,
    LocationFilterType.ABSOLUTE_START_GROUP_END: 3,
    LocationFilterType.ABSOLUTE_RANGE: 4,
    LocationFilterType.NEXT_OBJECT: 0,
}


def _read_location_filter(reader: Reader) -> LocationFilter:
    number = reader.vi64()
    try:
        type_ = LocationFilterType(number)
    except ValueError:
        raise reader.violation(f"LOCATION_FILTER type {number}") from None
    fields = [reader.vi64() for _ in range(_LOCATION_FILTER_FIELDS[type_])]
    filter_ = LocationFilter(type_, *fields)
    if filter_.start_group + filter_.end_group_delta > MAX_VI64:
        raise reader.violation("LOCATION_FILTER ends above group 2^64-1")
    return filter_


def _write_location_filter(filter_: LocationFilter) -> bytes:
    fields = (
        filter_.start_group,
        filter_.start_object,
        filter_.end_group_delta,
        filter_.end_object,
    )
    used = _LOCATION_FILTER_FIELDS[filter_.type]
    if any(fields[used:]):
        raise MisuseError(f"{filter_} has fields its type does not")
    if filter_.start_group + filter_.end_group_delta > MAX_VI64:
        raise MisuseError(f"{filter_} ends above group 2^64-1")
    return encode_vi64(filter_.type) + b"".join(map(encode_vi64, fields[:used]))


_ON_PROPERTY = frozenset({_P.OBJECT_PROPERTY_FILTER, _P.TRACK_PROPERTY_FILTER})


def _range_filter(type_: ParameterType) -> _Value:
    def read(reader: Reader) -> RangeFilter:
        body = Reader(reader.octets(), f"{reader.what}: {type_.name}")
        if body.at_end:
            return RangeFilter(type_)
        set_id = body.u8()
        property_type = body.vi64() if type_ in _ON_PROPERTY else None
        if body.at_end:
            raise body.violation("no Range")
        # Sums may pass 2^64-1 here. That is a fault of the request, not of the session:
        # `moqt.track.filters.check_range_filters` finds it and the session answers INVALID_FILTER.
        ranges: list[tuple[int, int | None]] = []
        last = 0
        while not body.at_end:
            start = last + body.vi64()
            if body.at_end:
                ranges.append((start, None))
            else:
                last = start + body.vi64()
                ranges.append((start, last))
        return RangeFilter(type_, set_id, property_type, tuple(ranges))

    def write(filter_: RangeFilter) -> bytes:
        if not filter_.ranges:
            return encode_octets(b"")
        if (filter_.property_type is not None) != (type_ in _ON_PROPERTY):
            raise MisuseError(f"{filter_}: a property type belongs to property filters only")
        if not 0 <= filter_.set_id <= 0xFF:
            raise MisuseError(f"{filter_}: SetID is one octet")
        out = [bytes([filter_.set_id])]
        if filter_.property_type is not None:
            out.append(encode_vi64(filter_.property_type))
        last: int | None = 0
        for start, end in filter_.ranges:
            if last is None or start < last or (end is not None and end < start):
                raise MisuseError(f"{filter_}: ranges must ascend and only the last may be open")
            out.append(encode_vi64(start - last))
            if end is not None:
                out.append(encode_vi64(end - start))
            last = end
        return encode_octets(b"".join(out))

    return _Value("range_filters", read, write, True, lambda filter_: filter_.type is type_)


def _read_fill(reader: Reader) -> Parameters:
    # Length and an inner count: what both deployed implementations send and require.
    body = Reader(reader.octets(), f"{reader.what}: FILL_PARAMETERS")
    parameters = read_parameters(body, _IN_FILL)
    body.finish()
    return parameters


def _write_fill(parameters: Parameters) -> bytes:
    return encode_octets(write_parameters(parameters, _IN_FILL, "FILL_PARAMETERS"))


MAX_RELAY_PATH = 256
"""Relays that a RELAY_PATH may name."""


def _read_relay_path(reader: Reader) -> tuple[int, ...]:
    body = Reader(reader.octets(), f"{reader.what}: RELAY_PATH")
    path = []
    while not body.at_end:
        path.append(body.vi64())
    if not 0 < len(path) <= MAX_RELAY_PATH:
        raise body.violation(f"{len(path)} relays")
    return tuple(path)


def _write_relay_path(path: tuple[int, ...]) -> bytes:
    if not 0 < len(path) <= MAX_RELAY_PATH:
        raise MisuseError(f"a RELAY_PATH of {len(path)} relays")
    return encode_octets(b"".join(map(encode_vi64, path)))


# In ascending order, which is the order on the wire.
_VALUES: dict[ParameterType, _Value] = {
    _P.OBJECT_DELIVERY_TIMEOUT: _vi64("object_delivery_timeout"),
    _P.AUTHORIZATION_TOKEN: _Value(
        "authorization_tokens",
        lambda reader: decode_token(reader.octets()),
        lambda token: encode_octets(encode_token(token)),
        repeatable=True,
    ),
    _P.RENDEZVOUS_TIMEOUT: _vi64("rendezvous_timeout"),
    _P.SUBGROUP_DELIVERY_TIMEOUT: _vi64("subgroup_delivery_timeout"),
    _P.EXPIRES: _vi64("expires"),
    _P.LARGEST_OBJECT: _Value("largest_object", Reader.location, encode_location),
    _P.FILL_TIMEOUT: _vi64("fill_timeout"),
    _P.FORWARD: _u8("forward", range(2)),
    _P.SUBSCRIBER_PRIORITY: _u8("subscriber_priority", range(256)),
    _P.LOCATION_FILTER: _Value("location_filter", _read_location_filter, _write_location_filter),
    _P.GROUP_ORDER: _u8("group_order", range(1, 3)),
    _P.FILL_PARAMETERS: _Value("fill_parameters", _read_fill, _write_fill),
    **{type_: _range_filter(type_) for type_ in ParameterType if 0x25 <= type_ <= 0x29},
    _P.NEW_GROUP_REQUEST: _vi64("new_group_request"),
    _P.TRACK_NAMESPACE_PREFIX: _Value("track_namespace_prefix", Reader.namespace, encode_namespace),
    _P.INCLUDE_PROPERTIES: _u8("include_properties", range(2)),
    _P.RELAY_PATH: _Value("relay_path", _read_relay_path, _write_relay_path),
}
# A parameter that is in one table only would silently not be sent.
assert _VALUES.keys() == _PLACES.keys() == frozenset(ParameterType)
assert {value.field for value in _VALUES.values()} == {field.name for field in fields(Parameters)}


def _present(parameters: Parameters) -> Iterator[tuple[ParameterType, _Value, Any]]:
    if parameters is NO_PARAMETERS:
        return
    for type_, value in _VALUES.items():
        item = getattr(parameters, value.field)
        items: Iterable[Any] = (
            filter(value.pick, item) if value.repeatable else () if item is None else (item,)
        )
        for each in items:
            yield type_, value, each


def read_parameters(reader: Reader, allowed: Allowed) -> Parameters:
    """Number of Parameters (v), then each as Type Delta (v) and value."""
    count = reader.vi64()
    if not count:
        return NO_PARAMETERS
    fields: dict[str, Any] = {}
    number, previous = 0, -1
    for _ in range(count):
        number += reader.vi64()
        if number > MAX_VI64:
            raise reader.violation("parameter type above 2^64-1")
        value = _VALUES.get(number)  # type: ignore[call-overload]
        if value is None:
            raise reader.violation(f"unknown parameter {number:#x}")
        if number not in allowed:
            raise reader.violation(f"{ParameterType(number).name} is not allowed here")
        if value.repeatable:
            fields[value.field] = (*fields.get(value.field, ()), value.read(reader))
        elif number == previous:
            raise reader.violation(f"{ParameterType(number).name} repeated")
        else:
            fields[value.field] = value.read(reader)
        previous = number
    return Parameters(**fields)


def write_parameters(parameters: Parameters, allowed: Allowed, where: str) -> bytes:
    """Raises MisuseError for a parameter that may not stand in `where`."""
    out: list[bytes] = []
    previous = count = 0
    for type_, value, item in _present(parameters):
        if type_ not in allowed:
            raise MisuseError(f"{type_.name} is not allowed in {where}")
        out += encode_vi64(type_ - previous), value.write(item)
        previous = type_
        count += 1
    return encode_vi64(count) + b"".join(out)
