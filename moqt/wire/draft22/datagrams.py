"""MOQT "Datagrams" of draft-22."""

from __future__ import annotations

from moqt.values.codes import PADDING_DATAGRAM_TYPE, DatagramFlag, ObjectStatus
from moqt.values.errors import MisuseError, protocol_violation
from moqt.wire.draft22.object_fields import (
    check_status,
    priority_octet,
    read_properties,
    read_status,
    read_u8,
)
from moqt.wire.objects import DatagramObject, PaddingDatagram
from moqt.wire.primitives import encode_octets
from moqt.wire.vi64 import Truncated, decode_vi64, encode_vi64

_DATAGRAM_TYPES = frozenset(range(0x10)) | frozenset(
    DatagramFlag.STATUS | number for number in range(0x10) if not number & DatagramFlag.END_OF_GROUP
)


def decode_datagram(data: bytes) -> DatagramObject | PaddingDatagram:
    """Raises SessionError for a datagram of an unknown type or that ends inside its fields."""
    try:
        return _decode_datagram(data)
    except Truncated:
        raise protocol_violation("datagram ends inside its fields") from None


def _decode_datagram(data: bytes) -> DatagramObject | PaddingDatagram:
    flags, position = decode_vi64(data, 0)
    if flags == PADDING_DATAGRAM_TYPE:
        return PaddingDatagram(len(data) - position)
    if flags not in _DATAGRAM_TYPES:
        raise protocol_violation(f"datagram type {flags:#x}")
    track_alias, position = decode_vi64(data, position)
    group, position = decode_vi64(data, position)
    object_id = 0
    if not flags & DatagramFlag.ZERO_OBJECT_ID:
        object_id, position = decode_vi64(data, position)
    priority = None
    if not flags & DatagramFlag.DEFAULT_PRIORITY:
        priority, position = read_u8(data, position)
    properties = b""
    if flags & DatagramFlag.PROPERTIES:
        properties, position = read_properties(data, position, len(data))
        if not properties:
            raise protocol_violation("datagram with Properties Length 0")
    status = ObjectStatus.NORMAL
    if flags & DatagramFlag.STATUS:
        status, position = read_status(data, position, properties)
        if position != len(data):
            raise protocol_violation("octets after the Object Status of a datagram")
    return DatagramObject(
        track_alias,
        group,
        object_id,
        priority,
        properties,
        bool(flags & DatagramFlag.END_OF_GROUP),
        status,
        data[position:],
    )


def encode_datagram(
    datagram: DatagramObject | PaddingDatagram, *, explicit_status: bool = False
) -> bytes:
    """`explicit_status`: write the status of an empty Normal Object too."""
    if isinstance(datagram, PaddingDatagram):
        return encode_vi64(PADDING_DATAGRAM_TYPE) + bytes(datagram.length)
    check_status(datagram.status, len(datagram.payload), datagram.properties)
    with_status = bool(datagram.status) or explicit_status
    if with_status and (datagram.payload or datagram.end_of_group):
        raise MisuseError("a status datagram has neither payload nor END_OF_GROUP")
    flags = (
        DatagramFlag.PROPERTIES * bool(datagram.properties)
        | DatagramFlag.END_OF_GROUP * datagram.end_of_group
        | DatagramFlag.ZERO_OBJECT_ID * (datagram.object == 0)
        | DatagramFlag.DEFAULT_PRIORITY * (datagram.priority is None)
        | DatagramFlag.STATUS * with_status
    )
    return b"".join(
        (
            encode_vi64(flags),
            encode_vi64(datagram.track_alias),
            encode_vi64(datagram.group),
            encode_vi64(datagram.object) if datagram.object else b"",
            b"" if datagram.priority is None else priority_octet(datagram.priority),
            encode_octets(datagram.properties) if datagram.properties else b"",
            encode_vi64(datagram.status) if with_status else datagram.payload,
        )
    )
