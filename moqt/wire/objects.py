"""What data streams and datagrams carry, as values independent of any draft's octets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from moqt.values.codes import EndOfRange, GroupOrder, ObjectStatus
from moqt.values.names import Location

DEFAULT_MAX_PROPERTIES = 65536
"""Octets of Object Properties a stream decoder accepts, and so holds, unless told otherwise."""


class StreamKind(Enum):
    """What a unidirectional stream is (MOQT "Unidirectional Streams")."""

    CONTROL = auto()
    SUBGROUP = auto()
    FETCH = auto()
    PADDING = auto()


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """The head of a subgroup stream (MOQT "Subgroup Streams").

    `subgroup` is None when the stream says "the Object ID of the first
    Object": each ObjectHeader then has it. `priority` is None for the track's
    default.
    """

    track_alias: int
    group: int
    subgroup: int | None = 0
    priority: int | None = None
    end_of_group: bool = False
    first_object: bool = False


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """The head of a fetch stream (MOQT "Fetch Streams")."""

    request_id: int


Payload = bytes | memoryview


class ObjectHeader(NamedTuple):
    """One Object up to its payload of `length` octets, on a subgroup or a fetch stream.

    `subgroup` is None for an Object whose Delivery Mode is Datagram. `priority`
    is None for the track's default. `properties` are the Key-Value-Pairs as
    octets, well-formed, so that a relay passes them on unchanged.
    """

    # A tuple, because one is made for every Object that passes.
    group: int
    object: int
    subgroup: int | None
    priority: int | None
    properties: bytes
    length: int
    status: ObjectStatus = ObjectStatus.NORMAL

    @property
    def location(self) -> Location:
        return Location(self.group, self.object)


class WholeObject(NamedTuple):
    """An Object all of which came at once; `payload` has `header.length` octets."""

    header: ObjectHeader
    payload: Payload


@dataclass(frozen=True, slots=True)
class RangeMarker:
    """On a fetch stream: what is known of every Location from after the last entry to this one."""

    kind: EndOfRange
    location: Location


@dataclass(frozen=True, slots=True)
class DatagramObject:
    """An Object in a datagram (MOQT "Datagrams")."""

    track_alias: int
    group: int
    object: int
    priority: int | None = None
    properties: bytes = b""
    end_of_group: bool = False
    status: ObjectStatus = ObjectStatus.NORMAL
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class PaddingDatagram:
    """Zero octets to be discarded (MOQT "Padding")."""

    length: int


SubgroupEvent = SubgroupHeader | WholeObject | ObjectHeader | Payload
FetchEvent = FetchHeader | WholeObject | ObjectHeader | RangeMarker | Payload
GroupOrderOf = GroupOrder | Callable[[int], GroupOrder]
"""A group order, or how to find it from the Request ID a fetch stream begins with."""
