"""Requests for one track, of one kind: in the order in which they came, counted by session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from moqt.requests import OpenRequest
from moqt.session import Session, session_of

R = TypeVar("R", bound=OpenRequest)


class Readers(Generic[R]):
    """Who reads a track, or is to.

    Which sessions they are of is asked for each request that comes and each source that is looked
    for, so it costs nothing that grows with the readers.
    """

    __slots__ = ("_requests", "sessions")

    def __init__(self) -> None:
        self._requests: dict[R, None] = {}
        self.sessions: Counter[Session] = Counter()
        """How many each session has; those that have none do not stand here."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def add(self, request: R) -> None:
        if request not in self._requests:
            self._requests[request] = None
            self.sessions[session_of(request)] += 1

    def discard(self, request: R) -> None:
        if request not in self._requests:
            return
        del self._requests[request]
        session = session_of(request)
        self.sessions[session] -= 1
        if not self.sessions[session]:
            del self.sessions[session]

    def clear(self) -> None:
        self._requests.clear()
        self.sessions.clear()
