"""Which blocks an instance has, in the engine's memory or its own store (sans-IO).

What asks for them, as a selector for compute-aware traffic steering does, visits those it gets.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kvsp.names.uris import BlockId


class Inventory:
    """Blocks by how many places they are in, their keys in order."""

    def __init__(self) -> None:
        self._places: dict[BlockId, int] = {}
        self._keys: dict[tuple[bytes, bytes], list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def change(self, block: BlockId, by: int) -> None:
        """A block has come to a place, 1, or left one, -1."""
        before = self._places.get(block, 0)
        kind = (block.compat_id, block.scope_id)
        if before + by:
            self._places[block] = before + by
        else:
            del self._places[block]
        if not before:
            bisect.insort(self._keys.setdefault(kind, []), block.block_key)
        elif not before + by:
            keys = self._keys[kind]
            del keys[bisect.bisect_left(keys, block.block_key)]
            if not keys:
                del self._keys[kind]

    def keys(
        self, compat_id: bytes, scope_id: bytes, after: bytes, limit: int
    ) -> tuple[Sequence[bytes], bool]:
        """At most `limit` Block Keys above `after`, in order, and whether there are more."""
        keys = self._keys.get((compat_id, scope_id), [])
        first = bisect.bisect_right(keys, after)
        return keys[first : first + limit], first + limit < len(keys)
