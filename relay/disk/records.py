"""The octets of a file of the disk tier: Objects, an index over them, and what the track is.

    magic | record, record, ... | index | summary | trailer

A record is a head, the Object's properties and its payload; the CRC-32 at its beginning is of all
that follows. The index has a row for each record, by Location; the summary says which track it is
and where it ends. A file without a trailer is none: it was not finished.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from moqt.track.stored import Buffer, StoredObject
from moqt.values.codes import ObjectStatus
from moqt.values.errors import MoqtError
from moqt.values.messages import Properties
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader
from moqt.wire.primitives import decode_key_values, encode_key_values

MAGIC: Final = b"moqtdsk1"
END: Final = b"moqtend1"

_CRC: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BBQQQQIQ")
"""Flags, priority, group, object, subgroup, arrival (ms of the epoch), octets of properties and of
payload."""
ROW: Final = struct.Struct("<QQQQ")
"""Group, object, offset of the record and its octets."""
TRAILER: Final = struct.Struct("<QQIII8s")
"""Offset of the index, its octets and CRC, then the summary's octets and CRC, and `END`."""
OVERHEAD: Final = _CRC.size + _HEAD.size + ROW.size
"""Octets of a file that an Object takes beyond its properties and its payload."""
MAX_SUMMARY: Final = 1 << 20

_HAS_SUBGROUP: Final = 1


class Damaged(Exception):
    """A file is not what was written; the message says what is wrong with it."""


class Kept(NamedTuple):
    """An Object as it was read back; `arrived` is when it came, in seconds of the epoch."""

    header: ObjectHeader
    payload: bytes
    arrived: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of which track a file holds something, and what was known of that when it was written."""

    scope: str
    name: FullTrackName
    properties: Properties
    largest: Location | None
    end: Location
    objects: int
    octets: int
    """Of the payloads."""
    arrived: float
    """When the first of its Objects came, in seconds of the epoch."""
    known: tuple[tuple[Location, Location], ...]
    """What exists of these ranges is in this file, or in those of the track before it."""


def record_octets(stored: StoredObject) -> int:
    """What an Object takes of a file."""
    return OVERHEAD + len(stored.properties) + stored.length


def head_of(
    header: ObjectHeader, priority: int, arrived: float, payload: Iterable[Buffer]
) -> bytes:
    """What stands before the payload in the record of an Object."""
    head = (
        _HEAD.pack(
            _HAS_SUBGROUP if header.subgroup is not None else 0,
            priority,
            header.group,
            header.object,
            header.subgroup or 0,
            max(0, int(arrived * 1000)),
            len(header.properties),
            header.length,
        )
        + header.properties
    )
    crc = zlib.crc32(head)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return _CRC.pack(crc) + head


def read_record(record: bytes, at: Location) -> Kept:
    """The Object that should be `at`. Raises Damaged."""
    begin = _CRC.size + _HEAD.size
    if (
        len(record) < begin
        or zlib.crc32(memoryview(record)[_CRC.size :]) != _CRC.unpack_from(record)[0]
    ):
        raise Damaged(f"the record of Object {at.group}/{at.object} does not have its checksum")
    flags, priority, group, number, subgroup, arrived, properties, length = _HEAD.unpack_from(
        record, _CRC.size
    )
    if (group, number) != at or len(record) != begin + properties + length:
        raise Damaged(f"the index does not name the record of Object {at.group}/{at.object}")
    header = ObjectHeader(
        group=group,
        object=number,
        subgroup=subgroup if flags & _HAS_SUBGROUP else None,
        priority=priority,
        properties=record[begin : begin + properties],
        length=length,
        status=ObjectStatus.NORMAL,
    )
    return Kept(header, record[begin + properties :], arrived / 1000)


def encode_summary(summary: Summary) -> bytes:
    return json.dumps(
        {
            "scope": summary.scope,
            "namespace": [field.hex() for field in summary.name.namespace],
            "name": summary.name.name.hex(),
            "properties": encode_key_values(summary.properties).hex(),
            "largest": summary.largest,
            "end": summary.end,
            "objects": summary.objects,
            "octets": summary.octets,
            "arrived": summary.arrived,
            "known": summary.known,
        }
    ).encode()


def decode_summary(text: bytes) -> Summary:
    """Raises Damaged."""
    try:
        found = json.loads(text)
        largest = found["largest"]
        return Summary(
            scope=found["scope"],
            name=FullTrackName(
                tuple(bytes.fromhex(field) for field in found["namespace"]),
                bytes.fromhex(found["name"]),
            ),
            properties=decode_key_values(bytes.fromhex(found["properties"])),
            largest=None if largest is None else Location(*largest),
            end=Location(*found["end"]),
            objects=int(found["objects"]),
            octets=int(found["octets"]),
            arrived=float(found["arrived"]),
            known=tuple((Location(*low), Location(*high)) for low, high in found["known"]),
        )
    except (ValueError, KeyError, TypeError, MoqtError) as error:
        raise Damaged(f"the summary cannot be read: {error}") from None
