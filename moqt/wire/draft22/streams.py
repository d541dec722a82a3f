"""MOQT "Data Streams" of draft-22."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic, TypeVar

from moqt.values.codes import (
    MAX_VI64,
    EndOfRange,
    FetchFlag,
    GroupOrder,
    ObjectStatus,
    StreamType,
    SubgroupFlag,
)
from moqt.values.errors import MisuseError, protocol_violation
from moqt.values.names import Location
from moqt.wire.draft22.object_fields import (
    check_status,
    priority_octet,
    read_properties,
    read_status,
    read_u8,
    too_large,
)
from moqt.wire.incremental import Incremental
from moqt.wire.objects import (
    DEFAULT_MAX_PROPERTIES,
    FetchHeader,
    GroupOrderOf,
    ObjectHeader,
    Payload,
    RangeMarker,
    StreamKind,
    SubgroupHeader,
    WholeObject,
)
from moqt.wire.primitives import encode_octets
from moqt.wire.vi64 import Buffer, Truncated, decode_vi64, encode_vi64

# Plain ints: operators of IntFlag are too slow for what runs once per Object.
_SUBGROUP_PROPERTIES = int(SubgroupFlag.PROPERTIES)
_FETCH_SUBGROUP_MASK = int(FetchFlag.SUBGROUP_MASK)
_FETCH_SUBGROUP_ZERO = int(FetchFlag.SUBGROUP_ZERO)
_FETCH_SUBGROUP_PRIOR = int(FetchFlag.SUBGROUP_PRIOR)
_FETCH_SUBGROUP_NEXT = int(FetchFlag.SUBGROUP_NEXT)
_FETCH_SUBGROUP_EXPLICIT = int(FetchFlag.SUBGROUP_EXPLICIT)
_FETCH_OBJECT_ID = int(FetchFlag.OBJECT_ID)
_FETCH_GROUP_ID = int(FetchFlag.GROUP_ID)
_FETCH_LOCATION = _FETCH_GROUP_ID | _FETCH_OBJECT_ID
_FETCH_PRIORITY = int(FetchFlag.PRIORITY)
_FETCH_PROPERTIES = int(FetchFlag.PROPERTIES)
_FETCH_DATAGRAM = int(FetchFlag.DATAGRAM)

_SUBGROUP_TYPES = frozenset(
    number
    for number in range(0x80)
    if number & SubgroupFlag.SUBGROUP and number & SubgroupFlag.MODE_MASK != SubgroupFlag.MODE_MASK
)
_STREAM_KINDS: dict[int, StreamKind] = {
    **dict.fromkeys(_SUBGROUP_TYPES, StreamKind.SUBGROUP),
    StreamType.FETCH: StreamKind.FETCH,
    StreamType.CONTROL: StreamKind.CONTROL,
    StreamType.PADDING: StreamKind.PADDING,
}
_MARKERS: dict[int, EndOfRange] = {kind.value: kind for kind in EndOfRange}

PADDING_STREAM_TYPE = encode_vi64(StreamType.PADDING)
"""What a padding stream begins with; zero octets follow."""


def encode_padding_header() -> bytes:
    return PADDING_STREAM_TYPE


def data_stream_type(buffer: bytes) -> tuple[StreamKind, int] | None:
    """What a unidirectional stream is, and the octets of its type (MOQT "Unidirectional Streams").

    None while its type is incomplete. Raises SessionError for an unknown type.
    """
    try:
        number, consumed = decode_vi64(buffer, 0)
    except Truncated:
        return None
    kind = _STREAM_KINDS.get(number)
    if kind is None:
        raise protocol_violation(f"unknown unidirectional stream type {number:#x}")
    return kind, consumed


# Pieces of headers ---------------------------------------------------------------------


H = TypeVar("H")


class _ObjectStreamDecoder(Incremental[H | ObjectHeader], Generic[H]):
    """Objects of one stream: whole ones at once, others in the parts they come in."""

    __slots__ = ("_remaining", "_started", "max_properties")

    def __init__(self, max_properties: int) -> None:
        super().__init__()
        self.max_properties = max_properties
        self._remaining = 0
        self._started = False

    @property
    def mid_object(self) -> bool:
        """Whether a FIN here would cut the stream's header or an Object."""
        return not self._started or self._remaining > 0 or bool(self.pending)

    def feed(self, data: bytes) -> list[H | WholeObject | ObjectHeader | Payload]:
        """What `data`, the next octets of the stream, brings.

        A payload, or part of one, is `data` itself or a view into it: nothing is copied.
        Raises SessionError; the decoder is then of no further use.
        """
        size = len(data)
        if size <= self._remaining:  # the middle of a payload, nearly always
            self._remaining -= size
            return [data] if size else []
        events: list[H | WholeObject | ObjectHeader | Payload] = []
        view = memoryview(data)
        position = self._remaining
        if position:
            self._remaining = 0
            events.append(view[:position])
        while position < size:
            if self.pending:
                event, position = self._take(data, position)
                if event is None:
                    break
            else:
                try:  # as `_take` does, a call less for each Object
                    event, position = self._parse(data, position)
                except Truncated as cut:
                    self._hold(data, position, cut.need)
                    break
            if not isinstance(event, ObjectHeader):
                events.append(event)
                continue
            length = event.length
            end = position + length
            if end <= size:
                events.append(WholeObject(event, view[position:end] if length else b""))
                position = end
            else:
                events.append(event)
                if position < size:
                    events.append(view[position:])
                self._remaining = end - size
                break
        return events


# Subgroup streams (MOQT "Subgroup Streams") --------------------------------------------


class SubgroupDecoder(_ObjectStreamDecoder[SubgroupHeader]):
    __slots__ = ("_group", "_previous", "_priority", "_subgroup", "flags")

    def __init__(self, max_properties: int = DEFAULT_MAX_PROPERTIES) -> None:
        super().__init__(max_properties)
        self.flags = 0  # the stream's type, once known
        self._group = 0
        self._previous = -1
        self._priority: int | None = None
        self._subgroup: int | None = None

    def _parse(self, buffer: Buffer, position: int) -> tuple[SubgroupHeader | ObjectHeader, int]:
        if not self._started:
            return self._header(buffer, position)
        delta = buffer[position]
        if delta < 0x80:  # nearly always
            position += 1
        else:
            delta, position = decode_vi64(buffer, position)
        # The first delta is the Object ID itself, as "previous" -1 makes it.
        object_id = self._previous + delta + 1
        if object_id > MAX_VI64:
            raise too_large("Object")
        properties = b""
        if self.flags & _SUBGROUP_PROPERTIES:
            if buffer[position : position + 1] == b"\0":  # none, nearly always
                position += 1
            else:
                properties, position = read_properties(buffer, position, self.max_properties)
        length, position = decode_vi64(buffer, position)
        status = ObjectStatus.NORMAL
        if not length:
            status, position = read_status(buffer, position, properties)
        if self._subgroup is None:
            self._subgroup = object_id
        self._previous = object_id
        header = ObjectHeader(
            self._group, object_id, self._subgroup, self._priority, properties, length, status
        )
        return header, position

    def _header(self, buffer: Buffer, position: int) -> tuple[SubgroupHeader, int]:
        flags, position = decode_vi64(buffer, position)
        if flags not in _SUBGROUP_TYPES:
            raise protocol_violation(f"subgroup stream type {flags:#x}")
        track_alias, position = decode_vi64(buffer, position)
        group, position = decode_vi64(buffer, position)
        mode = flags & SubgroupFlag.MODE_MASK
        subgroup = None if mode == SubgroupFlag.MODE_FIRST_OBJECT_ID else 0
        if mode == SubgroupFlag.MODE_EXPLICIT:
            subgroup, position = decode_vi64(buffer, position)
        priority = None
        if not flags & SubgroupFlag.DEFAULT_PRIORITY:
            priority, position = read_u8(buffer, position)
        self._started = True
        self.flags = flags
        self._group, self._subgroup, self._priority = group, subgroup, priority
        header = SubgroupHeader(
            track_alias,
            group,
            subgroup,
            priority,
            bool(flags & SubgroupFlag.END_OF_GROUP),
            bool(flags & SubgroupFlag.FIRST_OBJECT),
        )
        return header, position


def encode_subgroup_header(
    header: SubgroupHeader, *, properties: bool, explicit: bool = False
) -> bytes:
    """`properties`: every Object has a Properties Length. `explicit`: write Subgroup ID 0 too."""
    flags = (
        SubgroupFlag.SUBGROUP
        | SubgroupFlag.PROPERTIES * properties
        | SubgroupFlag.END_OF_GROUP * header.end_of_group
        | SubgroupFlag.FIRST_OBJECT * header.first_object
        | SubgroupFlag.DEFAULT_PRIORITY * (header.priority is None)
    )
    subgroup = b""
    if header.subgroup is None:
        flags |= SubgroupFlag.MODE_FIRST_OBJECT_ID
    elif header.subgroup or explicit:
        flags |= SubgroupFlag.MODE_EXPLICIT
        subgroup = encode_vi64(header.subgroup)
    return (
        encode_vi64(flags)
        + encode_vi64(header.track_alias)
        + encode_vi64(header.group)
        + subgroup
        + (b"" if header.priority is None else priority_octet(header.priority))
    )


@lru_cache(1024)
def _plain_object(delta: int, length: int, with_properties: bool) -> bytes:
    """The octets of nearly every Object up to its payload: the same ones again and again."""
    return encode_vi64(delta) + (b"\0" if with_properties else b"") + encode_vi64(length)


def encode_subgroup_object(
    previous_id: int | None,
    object_id: int,
    *,
    properties: bytes = b"",
    with_properties: bool,
    length: int,
    status: ObjectStatus = ObjectStatus.NORMAL,
) -> bytes:
    """An Object's octets up to its payload. `previous_id` is None for the stream's first.

    `with_properties` is what the stream's header was encoded with.
    """
    delta = object_id if previous_id is None else object_id - previous_id - 1
    if delta < 0 or object_id > MAX_VI64:
        raise MisuseError(f"Object {object_id} cannot follow Object {previous_id} in a subgroup")
    if length and not properties and not status:
        return _plain_object(delta, length, with_properties)
    if properties and not with_properties:
        raise MisuseError("properties on a stream whose header says it has none")
    check_status(status, length, properties)
    return b"".join(
        (
            encode_vi64(delta),
            (encode_octets(properties) if properties else b"\0") if with_properties else b"",
            encode_vi64(length),
            b"" if length else encode_vi64(status),
        )
    )


# Fetch streams (MOQT "Fetch Streams") --------------------------------------------------


class FetchDecoder(_ObjectStreamDecoder[FetchHeader | RangeMarker]):
    """`group_order` may be set until the second entry; what it is, is not on the stream."""

    __slots__ = ("_location", "_priority", "_subgroup", "group_order")

    def __init__(
        self, group_order: GroupOrderOf, max_properties: int = DEFAULT_MAX_PROPERTIES
    ) -> None:
        super().__init__(max_properties)
        self.group_order = group_order
        self._location: Location | None = None  # of the prior entry, Object or marker
        self._priority: int | None = None  # of the prior Object
        self._subgroup: int | None = None  # of the last Object that had one

    def _parse(
        self, buffer: Buffer, position: int
    ) -> tuple[FetchHeader | RangeMarker | ObjectHeader, int]:
        if not self._started:
            return self._header(buffer, position)
        flags, position = decode_vi64(buffer, position)
        if flags >= 0x80:
            return self._marker(flags, buffer, position)
        prior = self._location
        if not flags and prior is not None and self._priority is not None:
            # Nearly every Object: the next one, like the one before, in Subgroup 0.
            group, object_id = prior
            object_id += 1
            if object_id > MAX_VI64:
                raise too_large("Object")
            length, position = decode_vi64(buffer, position)
            self._location = Location(group, object_id)
            self._subgroup = 0
            return ObjectHeader(group, object_id, 0, self._priority, b"", length), position
        if prior is None and flags & _FETCH_LOCATION != _FETCH_LOCATION:
            raise protocol_violation("first Object of a fetch stream without Group and Object ID")

        group, prior_object = prior or (0, -1)
        if flags & _FETCH_GROUP_ID:
            group, position = self._group(prior, buffer, position)

        if flags & _FETCH_DATAGRAM:
            subgroup = None
        else:
            subgroup, position = self._subgroup_id(flags & _FETCH_SUBGROUP_MASK, buffer, position)

        object_id = prior_object + 1
        if flags & _FETCH_OBJECT_ID:
            object_id, position = decode_vi64(buffer, position)
            if not flags & _FETCH_GROUP_ID:
                object_id += prior_object
        if object_id > MAX_VI64:
            raise too_large("Object")

        priority = self._priority
        if flags & _FETCH_PRIORITY:
            priority, position = read_u8(buffer, position)
        elif priority is None:
            raise protocol_violation("fetch Object refers to a prior priority: there is none")

        properties = b""
        if flags & _FETCH_PROPERTIES:
            properties, position = read_properties(buffer, position, self.max_properties)
        length, position = decode_vi64(buffer, position)

        self._location = Location(group, object_id)
        self._priority = priority
        if subgroup is not None:
            self._subgroup = subgroup
        return ObjectHeader(group, object_id, subgroup, priority, properties, length), position

    def _header(self, buffer: Buffer, position: int) -> tuple[FetchHeader, int]:
        number, position = decode_vi64(buffer, position)
        if number != StreamType.FETCH:
            raise protocol_violation(f"fetch stream of type {number:#x}")
        request_id, position = decode_vi64(buffer, position)
        if not isinstance(self.group_order, GroupOrder):
            self.group_order = self.group_order(request_id)
        self._started = True
        return FetchHeader(request_id), position

    def _marker(self, flags: int, buffer: Buffer, position: int) -> tuple[RangeMarker, int]:
        kind = _MARKERS.get(flags)
        if kind is None:
            raise protocol_violation(f"fetch Serialization Flags {flags:#x}")
        group, position = decode_vi64(buffer, position)
        object_id, position = decode_vi64(buffer, position)
        self._location = Location(group, object_id)
        return RangeMarker(kind, self._location), position

    def _group(self, prior: Location | None, buffer: Buffer, position: int) -> tuple[int, int]:
        delta, position = decode_vi64(buffer, position)
        if prior is None:
            return delta, position
        step = delta + 1
        group = prior.group + (step if self.group_order == GroupOrder.ASCENDING else -step)
        if not 0 <= group <= MAX_VI64:
            raise too_large("Group")
        return group, position

    def _subgroup_id(self, mode: int, buffer: Buffer, position: int) -> tuple[int, int]:
        if not mode:
            return 0, position
        if mode == _FETCH_SUBGROUP_EXPLICIT:
            return decode_vi64(buffer, position)
        if self._subgroup is None:
            raise protocol_violation("fetch Object refers to a prior Subgroup ID: there is none")
        subgroup = self._subgroup + (mode == _FETCH_SUBGROUP_NEXT)
        if subgroup > MAX_VI64:
            raise too_large("Subgroup")
        return subgroup, position


class FetchEncoder:
    """Writes one fetch stream, each entry as short as what came before it allows."""

    __slots__ = ("_group_order", "_location", "_priority", "_request_id", "_subgroup")

    def __init__(self, request_id: int, group_order: GroupOrder) -> None:
        self._request_id = request_id
        self._group_order = group_order
        self._location: Location | None = None
        self._priority: int | None = None
        self._subgroup: int | None = None

    def header(self) -> bytes:
        return encode_vi64(StreamType.FETCH) + encode_vi64(self._request_id)

    def object(self, header: ObjectHeader) -> bytes:
        """The Object's octets up to its payload.

        Raises MisuseError for an Object out of order, without a priority (a
        fetch stream has no default) or with a status (a fetch has none).
        """
        prior = self._location
        if (
            prior is not None
            and header.object == prior.object + 1
            and header.group == prior.group
            and header.subgroup == 0
            and header.priority == self._priority is not None
            and not header.properties
            and not header.status
        ):  # nearly every Object: the next one, like the one before, in Subgroup 0
            self._location = Location(header.group, header.object)
            self._subgroup = 0
            return b"\0" + encode_vi64(header.length)
        if header.priority is None:
            raise MisuseError("an Object on a fetch stream states its priority")
        if header.status:
            raise MisuseError(f"status {header.status.name} on a fetch stream: use a RangeMarker")
        flags, fields = self._place(header)
        mode = self._subgroup_mode(header.subgroup)
        if mode == _FETCH_SUBGROUP_EXPLICIT and header.subgroup is not None:
            # Between Group and Object ID.
            fields.insert(bool(flags & _FETCH_GROUP_ID), encode_vi64(header.subgroup))
        flags |= mode
        if header.priority != self._priority:
            flags |= _FETCH_PRIORITY
            fields.append(priority_octet(header.priority))
        if header.properties:
            flags |= _FETCH_PROPERTIES
            fields.append(encode_octets(header.properties))
        octets = encode_vi64(flags) + b"".join(fields) + encode_vi64(header.length)
        self._location = header.location
        self._priority = header.priority
        if header.subgroup is not None:
            self._subgroup = header.subgroup
        return octets

    def marker(self, marker: RangeMarker) -> bytes:
        octets = (
            encode_vi64(marker.kind)
            + encode_vi64(marker.location.group)
            + encode_vi64(marker.location.object)
        )
        self._location = marker.location
        return octets

    def _place(self, header: ObjectHeader) -> tuple[int, list[bytes]]:
        """Flags and fields that say the Group and the Object ID."""
        prior = self._location
        if prior is None:
            return _FETCH_LOCATION, [encode_vi64(header.group), encode_vi64(header.object)]
        flags, fields = 0, []
        if header.group != prior.group:
            ascending = self._group_order == GroupOrder.ASCENDING
            delta = (header.group - prior.group) * (1 if ascending else -1) - 1
            if delta < 0:
                raise MisuseError(f"group {header.group} cannot follow group {prior.group}")
            flags = _FETCH_GROUP_ID
            fields.append(encode_vi64(delta))
        if header.object != prior.object + 1:
            flags |= _FETCH_OBJECT_ID
            number = header.object
            if not flags & _FETCH_GROUP_ID:
                number -= prior.object
                if number <= 0:
                    raise MisuseError(f"{header.location} cannot follow {prior} on a fetch stream")
            fields.append(encode_vi64(number))
        return flags, fields

    def _subgroup_mode(self, subgroup: int | None) -> int:
        if subgroup is None:
            return _FETCH_DATAGRAM
        if subgroup == 0:
            return _FETCH_SUBGROUP_ZERO
        if subgroup == self._subgroup:
            return _FETCH_SUBGROUP_PRIOR
        if self._subgroup is not None and subgroup == self._subgroup + 1:
            return _FETCH_SUBGROUP_NEXT
        return _FETCH_SUBGROUP_EXPLICIT


# Datagrams (MOQT "Datagrams", "Padding") -----------------------------------------------
