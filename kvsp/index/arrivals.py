"""Records whose octets are still arriving: what is withdrawn meanwhile does not come to stay."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from kvsp.names.uris import BlockId
from kvsp.principals import WRITE, Principal

_What = tuple[BlockId, str] | str
"""One replica of a block, or everything of a holder."""


class Arrival:
    """One request with records, from its head to its end."""

    def __init__(self, arrivals: Arrivals, began: int, at: float) -> None:
        self.began = began
        self._arrivals = arrivals
        self._at = at

    def age_ms(self) -> int:
        """How long ago its head came."""
        return int((self._arrivals.clock() - self._at) * 1000)

    def is_late(self, block: BlockId, replica: str, holder: str) -> bool:
        """Whether a DELETE that came after the head withdrew the record: of this replica or of
        all of the holder, by somebody who may do so."""
        return any(
            number > self.began
            and principal.may(block.scope_id, WRITE)
            and principal.is_holder(holder)
            for what in ((block, replica), holder)
            for number, principal in self._arrivals.withdrawn_by(what)
        )


class Arrivals:
    """All requests with records under way, and what was withdrawn since the oldest of them
    began: no more than came in the time that a request may take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._number = 0
        self._open: dict[Arrival, None] = {}
        self._withdrawn: OrderedDict[_What, list[tuple[int, Principal]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._withdrawn)

    @contextlib.contextmanager
    def one(self) -> Iterator[Arrival]:
        """While a request with records lasts."""
        arrival = Arrival(self, self._number, self.clock())
        self._open[arrival] = None
        try:
            yield arrival
        finally:
            del self._open[arrival]
            oldest = next(iter(self._open), None)
            while self._withdrawn and (
                oldest is None or next(iter(self._withdrawn.values()))[-1][0] <= oldest.began
            ):
                self._withdrawn.popitem(last=False)

    def withdrawn(self, principal: Principal, what: _What) -> None:
        """A DELETE has come."""
        if not self._open:
            return  # nothing can be overtaken
        self._number += 1
        others = [each for each in self._withdrawn.get(what, ()) if each[1] != principal]
        self._withdrawn[what] = [*others, (self._number, principal)]
        self._withdrawn.move_to_end(what)

    def withdrawn_by(self, what: _What) -> list[tuple[int, Principal]]:
        """The DELETEs of something, by their numbers."""
        return self._withdrawn.get(what, [])
