"""Receive windows: the octets a peer may send beyond what the application has consumed.

A window begins small and follows what a round trip brings, so that flow control binds no sender
that the path does not bind; what all connections of a process may be sent at once has a bound,
which they share out by the addresses of their peers.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

FIRST_WINDOW = 256 << 10
"""Octets over all streams that a connection has of itself, from its first packet on."""
INITIAL_SESSION_WINDOW = 16 << 20
"""Octets over all streams that it asks for once its handshake is complete."""
INITIAL_STREAM_WINDOW = 8 << 20
"""Octets of each stream: a layer of a cache comes without a word in between."""
FRESH = 8
"""Streams that may be paused before anything of them was consumed, until they fill the window of
the session as it may become."""
SPARE = 8
"""An eighth of a session's window is lent to no stream ..."""
LEAST = 128
"""... but that each has a part of it in any case: with no window it would never ask for more."""
ROUND_TRIPS = 4
"""Round trips of what comes that a window holds: what is under way, as much again while something
lost is sent anew, and both doubled, as a sender that begins doubles its rate each round trip."""
SHORTEST_TRIP = 0.005
"""Seconds: on shorter paths event loops are what takes time."""

Mark = tuple[float, int, float]
"""When a round trip began, what had been consumed by then, and when a quarter was used up last."""
NO_MARK: Mark = (0.0, 0, 0.0)


def grown(
    window: int, limit: int, mark: Mark, consumed: int, trip: float, now: float
) -> tuple[int, Mark]:
    """What a window should be when a quarter of it has been used up, and the mark for next time.

    `limit` is what was granted, `consumed` what was used of it, both since the connection or stream
    began; `trip` is the round trip.
    """
    since, before, last = mark
    if now - since > max(trip, SHORTEST_TRIP):
        since, before = last, limit - window  # the quarter before
    if now - since > max(trip, SHORTEST_TRIP):
        # What is beyond the quarter came now, and at once: something lost had been waited for.
        since, before = now, limit - window * 3 // 4
    return max(window, ROUND_TRIPS * (consumed - before)), (since, before, now)


class Arrivals:
    """What a round trip brings over all streams, whether or not it can be consumed yet."""

    def __init__(self) -> None:
        self.ends = 0.0
        """When the round trip that is counted is over."""
        self._before = 0
        self._last = 0

    def next_trip(self, arrived: int, trip: float, now: float) -> None:
        """A round trip is over, or more; `arrived` octets came since the connection began."""
        late = now - self.ends
        self.ends = now + max(trip, SHORTEST_TRIP)
        self._last = arrived - self._before if late < self.ends - now else 0
        self._before = arrived

    def of_a_trip(self, arrived: int) -> int:
        """Octets that came in the round trip before this one or, if that is more, in this one."""
        return max(arrived - self._before, self._last)


class WindowMemory:
    """The octets that the connections of a process have granted their peers, by address.

    An address gets no more than what is left then, so that n busy ones have an n+1st part each and
    one more always finds something; a connection a quarter of what its address may have.
    """

    def __init__(self) -> None:
        self.octets = 0
        """Granted now, `FIRST_WINDOW` of each connection not counted."""
        self.denied = 0
        """Times that a window could not grow as its sender could have used it."""
        self._granted: dict[str, int] = {}
        self._told: set[str] = set()

    def take(self, origin: str, octets: int, most: int) -> int:
        """How many of so many octets more a connection from `origin` gets, of `most` in all."""
        given = min(octets, self.left(origin, most))
        if given < octets:
            self.deny("window_memory", most)
        if given:
            self._granted[origin] = self._granted.get(origin, 0) + given
            self.octets += given
        return given

    def left(self, origin: str, most: int) -> int:
        """How many octets a connection from `origin` would get now, of `most` in all."""
        return max(0, (most - self.octets - self._granted.get(origin, 0)) // 4)

    def give_back(self, origin: str, octets: int) -> None:
        self.octets -= octets
        left = self._granted.get(origin, 0) - octets
        if left:
            self._granted[origin] = left
        else:
            self._granted.pop(origin, None)

    def deny(self, setting: str, octets: int) -> None:
        """A window that a sender has filled does not grow for the sake of `setting`."""
        self.denied += 1
        if setting not in self._told:
            self._told.add(setting)
            log.warning(
                "a peer could send faster than its receive window lets it, which does not grow "
                "beyond what %s=%d leaves: raise that where memory allows",
                setting,
                octets,
            )


class SessionWindow:
    """The window over all streams of one connection, and its share of the memory.

    `most` is `session_window`, `memory_most` is `window_memory`. What a paused stream has brought
    stays in it, and what that may still bring has its place there: so that the other streams always
    find room, each stream gets but a part of what is left (`lend`).
    """

    def __init__(self, memory: WindowMemory, origin: str, most: int, memory_most: int) -> None:
        self.octets = min(FIRST_WINDOW, most)
        self._memory = memory
        self._origin = origin
        self._most = most
        self._memory_most = memory_most
        self._taken = 0
        self._mark = NO_MARK
        self._over = False
        self._lent = 0
        """What streams may hold of it: those that have used a part, and paused ones ..."""
        self._borrowers = 0
        """... and how many these are."""

    def begin(self) -> None:
        """The peer has shown that it is there. Half of the memory is for those that use it: many
        peers only ask, and never send more than they may from the first packet on."""
        if 2 * self._memory.octets <= self._memory_most:
            self._raise(min(INITIAL_SESSION_WINDOW, self._most))

    def used(self, limit: int, consumed: int, trip: float, now: float) -> None:
        """A quarter has been used up: see whether it should be larger (see `grown`)."""
        wanted, self._mark = grown(self.octets, limit, self._mark, consumed, trip, now)
        self._raise(self._bound("session_window", wanted, self._most))

    def expect(self, wanted: int) -> None:
        """So much may come before anything more is consumed."""
        self._raise(self._bound("session_window", wanted, self._most))

    def close(self) -> None:
        """Nothing comes any more."""
        self._over = True
        self._memory.give_back(self._origin, self._taken)
        self._taken = 0

    def of_fresh_stream(self, most: int) -> int:
        """The window that each stream begins with, and may have `most` of: the peer is told with
        the handshake, before it is known how many there are."""
        grown = self.octets + self._memory.left(self._origin, self._memory_most)
        return min(INITIAL_STREAM_WINDOW, most, min(grown, self._most) // FRESH)

    def lend(self, had: int, wanted: int, most: int) -> int:
        """The window of a stream that `had` some, should have `wanted` octets and may have `most`.

        A part of what the others leave, the smaller the more they are: of n streams that take what
        they can get, one after the other, each leaves something to the next.
        """
        wanted = self._bound("stream_window", wanted, most)
        others, parts = self._lent - had, 2 + self._borrowers - (had > 0)
        if wanted > INITIAL_STREAM_WINDOW:
            octets = (others + parts * wanted) * SPARE // (SPARE - 1)
            self._raise(min(octets, self._most))
        spare = self.octets // SPARE
        return self.keep(
            had, min(wanted, max((self.octets - spare - others) // parts, spare // LEAST))
        )

    def keep(self, had: int, kept: int) -> int:
        """A stream that was lent `had` octets may hold `kept` from now on; returns these."""
        self._borrowers += (kept > 0) - (had > 0)
        self._lent += kept - had
        return kept

    def pause(self, had: int, held: int) -> int:
        """A stream that was lent `had` octets stands still, and may come to hold `held`, which it
        returns: the others have as much beside that as a session has at first, up to half of what
        it may have, as what is not read is kept by the application."""
        self._raise(min(self._lent + held - had + INITIAL_SESSION_WINDOW, self._most // 2))
        return self.keep(had, held)

    def _bound(self, setting: str, wanted: int, most: int) -> int:
        if wanted > 2 * most:  # what is lost is waited for, or more: the sender will have to
            self._memory.deny(setting, most)
        return min(wanted, most)

    def _raise(self, wanted: int) -> None:
        if wanted > self.octets and not self._over:
            given = self._memory.take(self._origin, wanted - self.octets, self._memory_most)
            self._taken += given
            self.octets += given
