"""Requests that are made later: in some seconds, or when there is a stream for them."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.names.refusals import NO_STREAM_DELAY
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError


class Later:
    """Requests that wait for their time. True while there are any."""

    def __init__(self) -> None:
        self._new: list[tuple[float, Callable[[], None]]] = []
        """Seconds to wait from the next look on, and what makes the request."""
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._new or self._waiting)

    def add(self, delay: float, make: Callable[[], None]) -> None:
        """Make a request in `delay` seconds."""
        self._new.append((delay, make))

    def make_due(self, now: float) -> None:
        """Make those whose time has come; one for which there is no stream waits for it. Raises
        SessionClosed, and moqt RequestError for whatever else makes one impossible."""
        new, self._new = self._new, []
        self._waiting += [(now + delay, make) for delay, make in new]
        due = [make for at, make in self._waiting if at <= now]
        self._waiting = [item for item in self._waiting if item[0] > now]
        for make in due:
            try:
                make()
            except RequestError as error:
                if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                    raise
                self._waiting.append((now + NO_STREAM_DELAY, make))

    @property
    def times(self) -> list[float]:
        """When to come back."""
        return [at for at, _ in self._waiting]

    def clear(self) -> None:
        """None of them is made."""
        self._new.clear()
        self._waiting.clear()
