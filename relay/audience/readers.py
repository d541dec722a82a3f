"""Requests for one track, of one kind: in the order in which they came, counted by session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from moqt.requests import OpenRequest
from moqt.session import Session, session_of
from relay.sources.hops import waiting_relays

R = TypeVar("R", bound=OpenRequest)
K = TypeVar("K")


class Readers(Generic[R]):
    """Who reads a track, or is to.

    Which sessions they are of, and which relays wait for them, is asked for each request that comes
    and each source that is looked for, so it costs nothing that grows with the readers.
    """

    __slots__ = ("_requests", "relays", "sessions")

    def __init__(self) -> None:
        self._requests: dict[R, frozenset[int]] = {}
        """With the relays that wait for each."""
        self.sessions: Counter[Session] = Counter()
        """How many each session has; those that have none do not stand here."""
        self.relays: Counter[int] = Counter()
        """For how many each relay waits, likewise."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def add(self, request: R) -> None:
        if request not in self._requests:
            relays = self._requests[request] = waiting_relays(request)
            self.sessions[session_of(request)] += 1
            self.relays.update(relays)

    def discard(self, request: R) -> None:
        relays = self._requests.pop(request, None)
        if relays is None:
            return
        _less(self.sessions, session_of(request))
        for each in relays:
            _less(self.relays, each)

    def clear(self) -> None:
        self._requests.clear()
        self.sessions.clear()
        self.relays.clear()


def _less(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
