"""Which prefixes a peer has asked for with one kind of request: none of them overlaps another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from moqt.values.names import TrackNamespace


class Prefixes:
    """Claims on prefixes. A claim costs as many steps as the prefix has fields, however many
    others there are."""

    def __init__(self) -> None:
        self._of: dict[Hashable, TrackNamespace] = {}
        self._at: set[TrackNamespace] = set()
        self._below: Counter[TrackNamespace] = Counter()
        """How many claims lie below a prefix."""

    def __len__(self) -> int:
        return len(self._of)

    def claim(self, owner: Hashable, prefix: TrackNamespace) -> bool:
        """Have `owner` claim `prefix` instead of what it claimed before; False, and nothing has
        changed, when it overlaps what another one claims."""
        before = self._of.get(owner)
        self.release(owner)
        above = (prefix[:length] for length in range(len(prefix) + 1))
        if self._below[prefix] or any(each in self._at for each in above):
            if before is not None:
                self._add(owner, before)
            return False
        self._add(owner, prefix)
        return True

    def _add(self, owner: Hashable, prefix: TrackNamespace) -> None:
        self._of[owner] = prefix
        self._at.add(prefix)
        self._below.update(prefix[:length] for length in range(len(prefix)))

    def release(self, owner: Hashable) -> None:
        prefix = self._of.pop(owner, None)
        if prefix is None:
            return
        self._at.remove(prefix)
        for length in range(len(prefix)):
            above = prefix[:length]
            self._below[above] -= 1
            if not self._below[above]:
                del self._below[above]
