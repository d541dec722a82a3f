"""Subscriptions of one session to one track that share a Track Alias (MOQT "Track Alias").

Objects do not say whose they are: that is found by running every subscription's filter over
them. A stream carries one subscription's Objects, so its first Object decides for it.
Where several filters pass, an Object comes once for each of them, and the copies go round.
"""

from __future__ import annotations

from collections import OrderedDict

from moqt.receiving.host import Subscriber
from moqt.values.codes import SessionErrorCode
from moqt.values.errors import SessionError
from moqt.wire.objects import ObjectHeader

MAX_DEAD_ALIASES = 1024
"""Track Aliases of ended subscriptions remembered; beyond, the oldest is forgotten."""
MAX_COPIES = 1024
"""First Objects on shared aliases of which it is remembered who got them."""


class TrackAliases:
    """The Track Aliases of the peer: whose they are, and whose they were."""

    def __init__(self) -> None:
        self._subscribers: dict[int, list[Subscriber]] = {}
        self.dead: OrderedDict[int, float] = OrderedDict()
        """When the last subscription of an alias ended."""
        self._copies: OrderedDict[tuple[int, int, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._subscribers)

    def __contains__(self, alias: int) -> bool:
        return alias in self._subscribers

    @property
    def shared_objects(self) -> int:
        """First Objects on shared aliases of which it is remembered who got them."""
        return len(self._copies)

    def add(self, alias: int, subscriber: Subscriber) -> None:
        """Raises SessionError DUPLICATE_TRACK_ALIAS when it names another track."""
        sharing = self._subscribers.setdefault(alias, [])
        if sharing and sharing[0].name != subscriber.name:
            raise SessionError(
                SessionErrorCode.DUPLICATE_TRACK_ALIAS, f"Track Alias {alias} is in use"
            )
        self.dead.pop(alias, None)
        sharing.append(subscriber)

    def remove(self, alias: int, subscriber: Subscriber, now: float) -> None:
        """`subscriber` uses `alias` no more; others that share it may."""
        sharing = self._subscribers.get(alias, [])
        if subscriber not in sharing:
            return
        sharing.remove(subscriber)
        if not sharing:
            del self._subscribers[alias]
            self.dead[alias] = now
            if len(self.dead) > MAX_DEAD_ALIASES:
                self.dead.popitem(last=False)

    def is_shared(self, alias: int) -> bool:
        return len(self._subscribers.get(alias, ())) > 1

    def subscriber(self, alias: int, first: ObjectHeader | None = None) -> Subscriber | None:
        """Whose a stream or datagram of `alias` is that begins with `first`.

        When no filter passes (it was narrowed while the Object was on its way, or there is no
        Object) it is that of the subscription that is oldest.
        """
        sharing = self._subscribers.get(alias)
        if sharing is None:
            return None
        if len(sharing) == 1 or first is None:
            return sharing[0]
        wanting = [each for each in sharing if each.selects(first)]
        if len(wanting) < 2:
            return wanting[0] if wanting else sharing[0]
        key = (alias, first.group, first.object)
        copy = self._copies.get(key, 0)
        self._copies[key] = copy + 1
        if len(self._copies) > MAX_COPIES:
            self._copies.popitem(last=False)
        return wanting[copy % len(wanting)]
