"""Downstream requests that wait: for a track, or for a publisher of it to appear."""

from __future__ import annotations

from dataclasses import dataclass

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
    """At most `limit` requests; whoever is told that it is full refuses the request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.pending: dict[TrackRequest, Pending] = {}
        self.rendezvous: PrefixMap[Pending] = PrefixMap()
        """Those without a track, by namespace (MOQT "RENDEZVOUS_TIMEOUT Parameter")."""

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def full(self) -> bool:
        return len(self.pending) >= self._limit

    def for_track(
        self, request: TrackRequest, downstream: Downstream, deadline: float | None = None
    ) -> None:
        self.pending[request] = Pending(request, downstream, deadline)
        downstream.waiting.add(request)
        request.when_ended(lambda: self.done(request))

    def for_publisher(self, request: TrackRequest, deadline: float) -> None:
        pending = self.pending[request] = Pending(request, None, deadline)
        self.rendezvous.add(request.name.namespace, pending)
        request.when_ended(lambda: self.done(request))

    def done(self, request: TrackRequest) -> None:
        """It is over, or about to be answered."""
        pending = self.pending.pop(request, None)
        if pending is None:
            return
        if pending.downstream is not None:
            pending.downstream.waiting.discard(request)
        else:
            self.rendezvous.remove(request.name.namespace, pending)

    def of(self, name: FullTrackName) -> list[TrackRequest]:
        """Those that wait for a publisher of just this track."""
        return [p.request for p in self.rendezvous.at(name.namespace) if p.request.name == name]

    def under(self, prefix: TrackNamespace) -> list[TrackRequest]:
        """Those that wait for a publisher of a track under `prefix`."""
        return [pending.request for pending in self.rendezvous.under(prefix)]

    def overdue(self, now: float) -> list[TrackRequest]:
        return [
            pending.request
            for pending in self.pending.values()
            if pending.deadline is not None and now > pending.deadline
        ]
