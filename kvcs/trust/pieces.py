"""Long octets in pieces: what copies or seals 88 MB at once holds up all threads of a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvsp.blocks.layout import Octets

PIECE: Final = 1 << 20
"""Octets that are copied, or sealed, at once: some tenths of a millisecond."""


def in_one(parts: Sequence[Octets]) -> Octets:
    """Octets that follow each other, in one buffer, for who takes no pieces. One part alone is not
    copied."""
    if len(parts) == 1:
        return parts[0]
    views = [memoryview(part).cast("B") for part in parts]
    octets = sum(map(len, views))
    if octets <= PIECE:
        return b"".join(views)
    made = bytearray(octets)
    at = 0
    with memoryview(made) as whole:
        for view in views:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                whole[at : at + len(piece)] = piece
                at += len(piece)
    return made
