"""Subscriptions of one session to one track that share a Track Alias (MOQT "Track Alias").

Objects do not say whose they are: the owner is found by running every subscription's filter
over them. A stream carries one subscription's Objects, so its first Object decides for it.
Where several filters pass, an Object comes once for each of them, and the copies go round.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from moqt.values.codes import SessionErrorCode
from moqt.values.errors import SessionError
from moqt.wire.objects import ObjectHeader

if TYPE_CHECKING:
    from moqt.requests import SubscriberSide

MAX_DEAD_ALIASES = 1024
"""Track Aliases of ended subscriptions remembered; beyond, the oldest is forgotten."""
MAX_COPIES = 1024
"""First Objects on shared aliases of which it is remembered who got them."""


class TrackAliases:
    """The Track Aliases of the peer: whose they are, and whose they were."""

    def __init__(self) -> None:
        self._owners: dict[int, list[SubscriberSide]] = {}
        self.dead: OrderedDict[int, float] = OrderedDict()
        """When the last subscription of an alias ended."""
        self._copies: OrderedDict[tuple[int, int, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, alias: int) -> bool:
        return alias in self._owners

    def add(self, alias: int, owner: SubscriberSide) -> None:
        """Raises SessionError DUPLICATE_TRACK_ALIAS when it names another track."""
        owners = self._owners.setdefault(alias, [])
        if owners and owners[0].name != owner.name:
            raise SessionError(
                SessionErrorCode.DUPLICATE_TRACK_ALIAS, f"Track Alias {alias} is in use"
            )
        self.dead.pop(alias, None)
        owners.append(owner)

    def remove(self, alias: int, owner: SubscriberSide, now: float) -> None:
        """`owner` uses `alias` no more; others that share it may."""
        owners = self._owners.get(alias, [])
        if owner not in owners:
            return
        owners.remove(owner)
        if not owners:
            del self._owners[alias]
            self.dead[alias] = now
            if len(self.dead) > MAX_DEAD_ALIASES:
                self.dead.popitem(last=False)

    def is_shared(self, alias: int) -> bool:
        return len(self._owners.get(alias, ())) > 1

    def owner(self, alias: int, first: ObjectHeader | None = None) -> SubscriberSide | None:
        """Whose a stream or datagram of `alias` is that begins with `first`.

        When no filter passes (it was narrowed while the Object was on its way, or there is no
        Object) it is that of the subscription that is oldest.
        """
        owners = self._owners.get(alias)
        if owners is None:
            return None
        if len(owners) == 1 or first is None:
            return owners[0]
        wanting = [owner for owner in owners if owner.selects(first)]
        if len(wanting) < 2:
            return wanting[0] if wanting else owners[0]
        key = (alias, first.group, first.object)
        copy = self._copies.get(key, 0)
        self._copies[key] = copy + 1
        if len(self._copies) > MAX_COPIES:
            self._copies.popitem(last=False)
        return wanting[copy % len(wanting)]
