"""Requests of ours that wait until the peer grants a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError

if TYPE_CHECKING:
    from moqt.requests import OutgoingRequest, RequestOwner
    from moqt.session.session import Session


class RequestQueue:
    """Sends requests in the order they were made, each as soon as there is a stream for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[OutgoingRequest, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[OutgoingRequest]:
        return iter(self._waiting)

    def submit(self, owner: OutgoingRequest) -> None:
        """Send it now or when its turn has come.

        Raises RequestError EXCESSIVE_LOAD when `max_queued_requests` wait already.
        """
        session = self._session
        if not self._waiting and session.open_request(owner):
            return
        if len(self._waiting) >= session.config.max_queued_requests:
            raise RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                f"the peer grants no request stream, and {len(self)} requests wait already",
                retry_after_ms=100,
            )
        session.counters.requests_queued += 1
        self._waiting[owner] = None

    def take_back(self, owner: RequestOwner) -> None:
        """It is cancelled before it was sent."""
        self._waiting.pop(owner, None)  # type: ignore[call-overload]

    def open(self) -> None:
        """Send what the peer grants streams for now."""
        while self._waiting and self._session.closed is None:
            owner = next(iter(self._waiting))
            if not self._session.open_request(owner):
                return
            self._waiting.pop(owner, None)

    def clear(self) -> None:
        self._waiting.clear()
