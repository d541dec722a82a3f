"""What is shared out: the octets of a tier, and what each client may do at once. No I/O."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType

from kvsp.names.codes import Tier
from kvsp.names.errors import KvspError

logger = logging.getLogger("kvsp.holder")


class NoRoomError(KvspError):
    """Nothing that may be evicted makes enough room in a tier."""

    def __init__(self, tier: Tier, octets: int) -> None:
        super().__init__(f"no room for {octets} octets in {tier}")
        self.tier = tier
        self.octets = octets


class Room:
    """One tier's octets. `budget` None is without bound (storage of somebody else).

    `ceiling` is what the medium has shown to hold, None while that is the budget at least.
    """

    def __init__(self, tier: Tier, budget: int | None) -> None:
        self.tier = tier
        self.budget = budget
        self.ceiling: int | None = None
        self.used = 0
        self.reserved = 0
        self.leaving = 0

    @property
    def limit(self) -> int | None:
        """What it may hold now."""
        if self.budget is None or self.ceiling is None:
            return self.budget if self.ceiling is None else self.ceiling
        return min(self.budget, self.ceiling)

    def lacks(self, octets: int) -> bool:
        """Whether so many more do not fit, once what is leaving has left."""
        limit = self.limit
        return limit is not None and limit - self.used - self.reserved + self.leaving < octets

    def promise(self, octets: int) -> Reservation:
        """Have so many octets kept free; whether they are is the caller's matter."""
        return Reservation(self, octets)

    def shrink(self, octets: int) -> None:
        """The medium did not take so many of the octets that are promised."""
        held = self.used + self.reserved
        self.ceiling = max(0, min(held, held if self.limit is None else self.limit) - octets)

    def grow(self, free: int, most: int) -> bool:
        """The medium says it has `free` octets more: hold up to `most` more than now.

        True when the budget is whole again.
        """
        if self.ceiling is None:
            return False
        self.ceiling = max(self.ceiling, min(self.used + free, self.ceiling + most))
        if self.budget is not None and self.ceiling < self.budget:
            return False
        self.ceiling = None
        return True


class Reservation:
    """Octets promised in a tier until they are stored there, or given back: once, whoever
    does it first. As a context manager it gives back what was not used."""

    __slots__ = ("_open", "_room", "octets")

    def __init__(self, room: Room, octets: int) -> None:
        self._room = room
        self._open = True
        self.octets = octets
        room.reserved += octets

    @property
    def tier(self) -> Tier:
        return self._room.tier

    def use(self, octets: int) -> None:
        """They are stored now."""
        assert self._open and octets == self.octets, "octets were stored without a reservation"
        self.release()
        self._room.used += octets

    def absorb(self, other: Reservation) -> None:
        """Have what another one in the same tier promised, too."""
        assert self._open and other._open and self._room is other._room
        other._open = False
        self.octets += other.octets

    def release(self) -> None:
        """Give them back; harmless when they are used or were given back."""
        if self._open:
            self._open = False
            self._room.reserved -= self.octets

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ClientBusyError(KvspError):
    """As much of this is going on for one client as may; it is worth asking again."""


class Shares:
    """How many of something each client may have at once, so that no one has them all."""

    def __init__(self, what: str, share: int, on_refused: Callable[[], None]) -> None:
        """`what` is said in errors and in the log: "blocks being stored"."""
        self._what = what
        self._share = share
        self._on_refused = on_refused
        self._has: Counter[str] = Counter()
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def of(self, client: str | None) -> Iterator[None]:
        """One of a client; None is this process itself. Raises ClientBusyError."""
        if client is None:
            yield
            return
        if self._has[client] >= self._share:
            self._on_refused()
            if client not in self._warned:
                self._warned.add(client)
                logger.warning(
                    "%s has %d %s at once, which is its share", client, self._share, self._what
                )
            raise ClientBusyError(f"you have {self._share} {self._what} already; wait for one")
        self._has[client] += 1
        try:
            yield
        finally:
            self._has[client] -= 1
            if not self._has[client]:
                del self._has[client]
                self._warned.discard(client)
