"""The fields that Objects have on streams and in datagrams alike."""

from __future__ import annotations

from moqt.values.codes import ObjectStatus
from moqt.values.errors import MisuseError, SessionError, protocol_violation
from moqt.wire.primitives import check_key_values
from moqt.wire.vi64 import Buffer, Truncated, decode_vi64

_STATUSES: dict[int, ObjectStatus] = {status.value: status for status in ObjectStatus}


def read_u8(buffer: Buffer, position: int) -> tuple[int, int]:
    if position >= len(buffer):
        raise Truncated(position + 1)
    return buffer[position], position + 1


def read_properties(buffer: Buffer, position: int, limit: int) -> tuple[bytes, int]:
    length, position = decode_vi64(buffer, position)
    if not length:
        return b"", position
    if length > limit:
        raise protocol_violation(f"Object Properties of {length} octets, more than {limit}")
    end = position + length
    if end > len(buffer):
        raise Truncated(end)
    octets = bytes(buffer[position:end])
    check_key_values(octets, "Object Properties")
    return octets, end


def read_status(buffer: Buffer, position: int, properties: bytes) -> tuple[ObjectStatus, int]:
    number, position = decode_vi64(buffer, position)
    status = _STATUSES.get(number)
    if status is None:
        raise protocol_violation(f"Object Status {number:#x}")
    if properties and status:
        raise protocol_violation(f"properties on Object Status {status.name}")
    return status, position


def too_large(what: str) -> SessionError:
    return protocol_violation(f"{what} ID outside 0..2^64-1")


def check_status(status: ObjectStatus, length: int, properties: bytes) -> None:
    if status and (length or properties):
        raise MisuseError(f"an Object of status {status.name} has no payload and no properties")


def priority_octet(priority: int) -> bytes:
    if not 0 <= priority <= 0xFF:
        raise MisuseError(f"priority {priority} is not in 0..255")
    return bytes([priority])
