"""vi64, MOQT's variable-length integer (MOQT "Variable-Length Integers"): not the QUIC varint.

The leading one-bits of the first octet count the octets that follow it.
"""

from __future__ import annotations

from moqt.values.codes import MAX_VI64
from moqt.values.errors import MisuseError

Buffer = bytes | bytearray | memoryview


class Truncated(Exception):
    """The octets run out inside a field; at least `need` of them, from index 0, are wanted."""

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


def _leading_ones(octet: int) -> int:
    return 8 - (octet ^ 0xFF).bit_length()


_SINGLE = tuple(bytes([value]) for value in range(0x80))
# Indexed by the number of octets. With 8 and 9 of them the first carries no value bits.
_PREFIX = (
    0,
    *(((0xFF << (9 - size)) & 0xFF) << 8 * (size - 1) for size in range(1, 9)),
    0xFF << 64,
)
_MASK = (0, *((1 << 7 * size) - 1 for size in range(1, 9)), MAX_VI64)
_SIZE = tuple(1 + _leading_ones(octet) for octet in range(256))


def encode_vi64(value: int) -> bytes:
    """The shortest form of `value`. Raises MisuseError outside 0..2^64-1."""
    if 0 <= value < 0x80:
        return _SINGLE[value]
    if not 0 <= value <= MAX_VI64:
        raise MisuseError(f"{value} does not fit a vi64")
    bits = value.bit_length()
    size = (bits + 6) // 7 if bits <= 56 else 9
    return (_PREFIX[size] | value).to_bytes(size, "big")


def decode_vi64(buffer: Buffer, position: int) -> tuple[int, int]:
    """The value at `position`, in any legal form, and the position after it.

    Raises Truncated when its octets are not all there.
    """
    try:
        first = buffer[position]
    except IndexError:
        raise Truncated(position + 1) from None
    if first < 0x80:
        return first, position + 1
    size = _SIZE[first]
    end = position + size
    if end > len(buffer):
        raise Truncated(end)
    return int.from_bytes(buffer[position:end], "big") & _MASK[size], end
