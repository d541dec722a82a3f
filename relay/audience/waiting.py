"""Downstream requests that wait: for a track, or for a publisher of it to appear."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from moqt.session import Session, session_of
from moqt.values.names import FullTrackName, TrackNamespace
from relay.audience.downstream import Downstream, TrackRequest
from relay.audience.prefixes import PrefixMap


@dataclass(slots=True, eq=False)
class Pending:
    """One of them."""

    request: TrackRequest
    downstream: Downstream | None
    """Of the track it waits for; None while nobody has the track."""
    deadline: float | None = None
    """When a rendezvous ends; a track's own subscriptions have theirs."""


class Waiting:
    """At most `limit` requests; whoever is told that there is no room refuses the request.

    One session has as many at most as are still free: however many they are that take all they
    can get, there is room for who has none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.pending: dict[TrackRequest, Pending] = {}
        self.rendezvous: PrefixMap[Pending] = PrefixMap()
        """Those without a track, by namespace (MOQT "RENDEZVOUS_TIMEOUT Parameter")."""
        self._named: dict[FullTrackName, dict[TrackRequest, None]] = {}
        """The same by name: others wait in the same namespace."""
        self._of_session: Counter[Session] = Counter()
        self._until: dict[TrackRequest, float] = {}
        """When those that wait for a publisher, now or again, will have waited for long enough."""

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def full(self) -> bool:
        return len(self.pending) >= self._limit

    def room(self, session: Session) -> bool:
        """Whether one more of `session` may wait."""
        return self._of_session[session] < self._limit - len(self.pending)

    def of_session(self, session: Session) -> int:
        """How many of `session` wait."""
        return self._of_session[session]

    def _add(self, pending: Pending) -> None:
        request = pending.request
        if request not in self.pending:
            self._of_session[session_of(request)] += 1
            request.when_ended(lambda: self.done(request))
        self.pending[request] = pending

    def for_track(
        self, request: TrackRequest, downstream: Downstream, deadline: float | None = None
    ) -> None:
        self._add(Pending(request, downstream, deadline))
        downstream.waiting.add(request)

    def rendezvous_ends(self, request: TrackRequest, until: float) -> float:
        """Until when `request` waits: `until`, unless it has waited before, as it has been seen
        anew since who may have the track."""
        if request not in self._until:
            self._until[request] = until
            request.when_ended(partial(self._until.__delitem__, request))
        return self._until[request]

    def for_publisher(self, request: TrackRequest, deadline: float) -> None:
        pending = Pending(request, None, deadline)
        self._add(pending)
        self.rendezvous.add(request.name.namespace, pending)
        self._named.setdefault(request.name, {})[request] = None

    def done(self, request: TrackRequest) -> None:
        """It is over, or about to be answered."""
        pending = self.pending.pop(request, None)
        if pending is None:
            return
        session = session_of(request)
        self._of_session[session] -= 1
        if not self._of_session[session]:
            del self._of_session[session]
        if pending.downstream is not None:
            pending.downstream.waiting.discard(request)
        else:
            self.rendezvous.remove(request.name.namespace, pending)
            named = self._named[request.name]
            del named[request]
            if not named:
                del self._named[request.name]

    def of(self, name: FullTrackName) -> list[TrackRequest]:
        """Those that wait for a publisher of just this track."""
        return list(self._named.get(name, ()))

    def under(self, prefix: TrackNamespace) -> list[TrackRequest]:
        """Those that wait for a publisher of a track under `prefix`."""
        return [pending.request for pending in self.rendezvous.under(prefix)]

    def overdue(self, now: float) -> list[TrackRequest]:
        return [
            pending.request
            for pending in self.pending.values()
            if pending.deadline is not None and now > pending.deadline
        ]
