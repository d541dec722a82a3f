"""Several connections for one complete publication: each brings a few layers at a time.

Layers are given out in order, so that those needed first come first whatever the connections are
worth; who is faster asks for more. Each part is a `Retrieval` of its layers on its connection, into
the one assembly: verification, order and recovery are those of any other. What a connection that
is lost, or silent, had to bring is asked for on the others. Sans-IO over `moqt` sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvcs.names.errors import PublisherLost
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Mode
from moqt.session import Session, SessionState

DEPTH: Final = 2
"""Parts that a connection is asked for at a time: the next is on its way when one has come."""

TURNS: Final = 8
"""Parts that each connection has in the mean, where there are layers enough."""

SILENCE: Final = 3.0
"""Seconds after which others are asked for what a connection does not bring ..."""

REST: Final = 10.0
"""... and for how long it is asked for nothing then."""


class _Part(NamedTuple):
    """Some layers of a segment, and the retrieval of them on one connection."""

    segment: int
    layers: range
    retrieval: Retrieval


class _Lane:
    """One connection, and the parts it is asked for."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.parts: list[_Part] = []
        self.brought = 0
        """Layers."""
        self.rests_until = 0.0

    @property
    def heard(self) -> float:
        """When something last came, or was asked for."""
        return max(part.retrieval.quiet for part in self.parts)

    @property
    def lost(self) -> bool:
        return self.session.state is SessionState.CLOSED


class Lanes:
    """Retrieves the layers of `whole`, whose manifest has come and is complete.

    `whole` calls it. It fails when a part does, but for one whose connection is lost.
    """

    def __init__(
        self,
        whole: Retrieval,
        others: Callable[[], Sequence[Session]],
        *,
        connections: int,
        changed: Callable[[], None],
    ) -> None:
        """`others` tells the sessions there are beside that of `whole`, in a lasting order;
        with it there will be up to so many `connections`. `changed` is called when to `poll`."""
        self._connections = connections
        self._changed = changed
        self._whole = whole
        self._others = others
        self._lanes = [_Lane(whole.session)]
        self._waiting: deque[tuple[int, range, bool]] = deque()
        """Layers of a segment that nobody is asked for, and whether somebody was before."""
        self._counted = 0

    @property
    def arrivals(self) -> int:
        """Answers and parts of Objects that have come, on all connections."""
        return self._counted + sum(
            part.retrieval.arrivals for lane in self._lanes for part in lane.parts
        )

    def begin(self, segment: int, layers: Sequence[int], *, again: bool = False) -> None:
        """Ask for `layers` of a segment, which rise without a gap; `again` for what is missing."""
        size = max(1, len(layers) // (TURNS * self._connections))
        for first in layers[::size]:
            part = range(first, min(first + size, layers[-1] + 1))
            self._waiting.append((segment, part, again))

    def ask_again(self, layer: int, segment: int) -> None:
        """Objects of it were to come another way, or were refused: they are missing."""
        for part in [part for lane in self._lanes for part in lane.parts]:
            if layer in part.layers and part.segment == segment:
                part.retrieval.ask_again(layer, segment)
                return
        if not any(layer in layers and of == segment for of, layers, _ in self._waiting):
            self._waiting.appendleft((segment, range(layer, layer + 1), True))

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        known = [lane.session for lane in self._lanes]
        self._lanes += [_Lane(each) for each in self._others() if each not in known]
        times: list[float | None] = []
        failure: Exception | None = None
        for lane in self._lanes:
            for part in list(lane.parts):
                times.append(part.retrieval.poll(now))
                error = part.retrieval.error
                if error is not None and not lane.lost:
                    self._whole.fail(error)
                    return None
                failure = error or failure
                if error is None and self._is_done(part):
                    self._end(lane, part)
                    lane.brought += len(part.layers)
            if lane.lost:
                self._take_back(lane)
            elif lane.parts and (silent := self._silent_at(lane)) is not None:
                if now >= silent:
                    self._take_back(lane)
                    lane.rests_until = now + REST
                else:
                    times.append(silent)
        if self._waiting and all(lane.lost for lane in self._lanes):
            self._whole.fail(failure or PublisherLost("every connection to the relay was lost"))
            return None
        times += self._give_out(now)
        self._whole.stats.layers_by_connection = [lane.brought for lane in self._lanes]
        return min((at for at in times if at is not None), default=None)

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        for lane in self._lanes:
            for part in list(lane.parts):
                self._end(lane, part)
        self._waiting.clear()

    # -- inside --------------------------------------------------------------------------

    def _is_done(self, part: _Part) -> bool:
        return part.retrieval.idle or self._is_filled(part.layers, part.segment)

    def _is_filled(self, layers: range, segment: int) -> bool:
        return all(self._whole.assembly.is_filled(layer, segment) for layer in layers)

    def _silent_at(self, lane: _Lane) -> float | None:
        """When a connection has been silent for too long; None while all others are, too."""
        heard = lane.heard
        others = [each for each in self._lanes if each is not lane and not each.lost]
        if not any(not each.parts or each.heard > heard for each in others):
            return None
        return heard + SILENCE

    def _take_back(self, lane: _Lane) -> None:
        """Others are to bring what this one does not."""
        parts = sorted(lane.parts, key=lambda part: (part.segment, part.layers.start), reverse=True)
        for part in parts:
            self._end(lane, part)
            self._waiting.appendleft((part.segment, part.layers, True))

    def _end(self, lane: _Lane, part: _Part) -> None:
        self._counted += part.retrieval.arrivals
        lane.parts.remove(part)
        part.retrieval.close()

    def _give_out(self, now: float) -> list[float | None]:
        """Ask for what waits, the first layers first, of whoever has least to bring."""
        times: list[float | None] = []
        while self._waiting:
            awake = [
                lane
                for lane in self._lanes
                if not lane.lost and len(lane.parts) < DEPTH and lane.rests_until <= now
            ]
            if not awake:
                break
            segment, layers, again = self._waiting.popleft()
            if self._is_filled(layers, segment):
                continue
            lane = min(awake, key=lambda lane: len(lane.parts))
            retrieval = Retrieval(
                lane.session,
                self._whole.assembly,
                self._whole.stats,
                mode=Mode.FETCH,
                changed=self._changed,
                layers=layers,
            )
            lane.parts.append(_Part(segment, layers, retrieval))
            retrieval.ask_for(segment, again=again)
            times.append(retrieval.poll(now))
        if self._waiting:
            times += [lane.rests_until for lane in self._lanes if lane.rests_until > now]
        return times
