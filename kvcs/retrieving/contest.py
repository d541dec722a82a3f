"""Which of several publications to retrieve: their manifests tell.

The best candidate's manifest is asked for first; others are asked for beside it as soon as it
is slow to answer, or turns out to be still in production when there are others of the same
length. The Anchor Key of a publication is that of its first segment: only its manifest tells how
many blocks it has. So when the best of those read does not have all that is wanted, others are
read, too, also those with fewer blocks by their Anchor Keys, `SEATS` at the most. So neither a
publication that is dead or merely announced, nor one that is slow, stands in the way of a shorter
or a whole one. Sans-IO over `moqt` sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvcs.finding.candidates import Candidate, Candidates
from kvcs.names.errors import PublisherLost, RetrievalError
from kvcs.retrieving.retrieval import Retrieval
from moqt.aio import MoqtSession
from moqt.values.errors import MoqtError

SEATS: Final = 4
"""Publications whose manifests are asked for at a time, as long as something comes of them."""

MOST_SEATS: Final = 64
"""The same when nothing comes: twice as many each time, so that hundreds that are only announced
cost seconds and not minutes."""

HEDGE: Final = 0.25
"""Seconds after which others are asked beside one that has not answered, and how long a whole
one of the same length is waited for."""

DRIPS: Final = 5
"""Times its patience that a manifest, or an Object, is waited for which comes drop by drop."""


class Entrant:
    """A publication whose manifest is asked for."""

    def __init__(self, candidate: Candidate, dialled: asyncio.Task[MoqtSession], now: float):
        self.candidate = candidate
        self.dialled = dialled
        self.retrieval: Retrieval | None = None
        self.began = now
        self.heard = now
        """When something last came of it."""
        self.ready_at: float | None = None
        """When its manifest had come."""
        self._arrivals = 0

    @property
    def blocks(self) -> int:
        """How many of our blocks it has: as its manifest shows, or as it is said to."""
        if self.retrieval is not None and self.retrieval.assembly.manifest is not None:
            return self.retrieval.assembly.blocks
        return self.candidate.blocks

    @property
    def whole(self) -> bool:
        """Whether its manifest says that it is complete."""
        return self.retrieval is not None and self.retrieval.assembly.complete

    def look(self, now: float) -> None:
        """Take note of what has come."""
        retrieval = self.retrieval
        if retrieval is None:
            return
        if retrieval.manifest_arrivals != self._arrivals:
            self._arrivals, self.heard = retrieval.manifest_arrivals, now
        if self.ready_at is None and retrieval.assembly.manifest is not None:
            self.ready_at = now

    def silent_at(self, patience: float) -> float:
        """When it counts as silent: nothing came of its manifest for so long, or not all of it
        in several times as long."""
        return min(self.heard + patience, self.began + DRIPS * patience)

    def close(self) -> None:
        if self.retrieval is not None:
            self.retrieval.close()


class Contest:
    """Asks for manifests until one publication is to be retrieved.

    `poll` at once, whenever something has changed, and when the time it returned has come,
    until `winner` is set, or `error`: why there is none, or what is wrong here.
    """

    def __init__(
        self,
        candidates: Candidates,
        make: Callable[[Candidate, MoqtSession], Retrieval],
        *,
        wanted: int,
        patience: float,
        settle_by: float,
        early: bool,
    ) -> None:
        """`make` makes the retrieval of a candidate, held before its data. `wanted` is how many
        blocks are of use. A manifest of which nothing has come for `patience` seconds, or that
        is not whole after `DRIPS` times as long, is waited for no longer when there are others.
        What is known at `settle_by` is tried then, although the search for better ones may go
        on. `early`: of the first that is looked at, the beginning of a layer is asked for with its
        manifest.
        """
        self.winner: Entrant | None = None
        self.error: Exception | None = None
        self._candidates = candidates
        self._make = make
        self._wanted = wanted
        self._patience = patience
        self._settle_by = settle_by
        self._early = early
        self._entrants: list[Entrant] = []
        self._seats = SEATS
        self._entered = 0

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        times = [self._candidates.poll(now)]
        for entrant in list(self._entrants):
            times.append(self._look_at(entrant, now))
            if self.error is not None:
                return None
        self._enter(now)
        self.winner = self._decide(now)
        if self.winner is not None or self.error is not None:
            return None
        if now < self._settle_by:
            times.append(self._settle_by)
        for entrant in self._entrants:
            ready = entrant.ready_at
            waits = (
                (entrant.began + HEDGE, entrant.silent_at(self._patience))
                if ready is None
                else (ready + HEDGE,)
            )
            times += [at for at in waits if at > now]
        return min((at for at in times if at is not None), default=None)

    @property
    def asked(self) -> int:
        """Publications whose manifests are asked for, and have not come."""
        return sum(each.ready_at is None for each in self._entrants)

    def is_silent(self, now: float) -> bool:
        """Whether nothing comes of any publication that is asked for."""
        return all(self._is_silent(each, now) for each in self._entrants)

    def close(self) -> None:
        """Give up all but the winner: they may be tried again; harmless when repeated."""
        for entrant in self._entrants:
            if entrant is not self.winner:
                entrant.close()
                self._candidates.allow_again(entrant.candidate)
        self._entrants.clear()

    # -- inside --------------------------------------------------------------------------

    def _look_at(self, entrant: Entrant, now: float) -> float | None:
        if entrant.retrieval is None:
            if not entrant.dialled.done():
                return None
            try:
                session = entrant.dialled.result()
            except MoqtError as error:
                lost = PublisherLost(str(error))
                lost.__cause__ = error
                self._drop(entrant, lost)
                return None
            entrant.heard = now
            entrant.retrieval = self._make(entrant.candidate, session)
            entrant.retrieval.start(early=self._early and entrant is self._entrants[0])
        due = entrant.retrieval.poll(now)
        entrant.look(now)
        failure = entrant.retrieval.error
        if isinstance(failure, RetrievalError):
            self._drop(entrant, failure)
        elif failure is not None:
            self.error = failure
        return due

    def _drop(self, entrant: Entrant, error: RetrievalError) -> None:
        self._entrants.remove(entrant)
        entrant.close()
        self._candidates.failed(error, entrant.candidate)

    def _enter(self, now: float) -> None:
        """Ask for further manifests, when it is time to."""
        while len(self._entrants) < self._seats:
            candidate = self._candidates.best()
            if candidate is None:
                if self._candidates.searching or not self.is_silent(now):
                    return
                if self._candidates.widen():
                    return
                if not self._candidates.retry_stalled():
                    if not self._entrants:
                        self.error = self._candidates.why()
                    return
                continue
            if not self._may_enter(candidate, now):
                return
            dialled = self._candidates.take(candidate)
            self._entered += 1
            entrant = Entrant(candidate, dialled, now)
            self._entrants.append(entrant)
            self._look_at(entrant, now)
        self._evict(now)

    def _may_enter(self, candidate: Candidate, now: float) -> bool:
        if not self._entrants:
            open_ = min(self._candidates.open, self._wanted)
            return candidate.blocks >= open_ or now >= self._settle_by
        ready = [each for each in self._entrants if each.ready_at is not None]
        if ready:
            # one is there: only what may be better is worth a look
            if self._candidates.doubted(candidate):
                return False
            best = max(ready, key=lambda each: (each.blocks, each.whole))
            most = min(candidate.blocks, self._wanted)
            if most > best.blocks or (most == best.blocks and not best.whole):
                return True
            return self._may_have_more(candidate, best) and self._entered < SEATS
        return now >= min(each.began for each in self._entrants) + HEDGE

    def _may_have_more(self, candidate: Candidate, best: Entrant) -> bool:
        """Whether further segments may make it better than the best so far; those that the
        application gave are in its order of preference, and nothing is said of their length."""
        return 0 < candidate.blocks <= best.blocks < self._wanted

    def _evict(self, now: float) -> None:
        """Every seat is taken: when others wait, there are more seats for them, or those that
        are silent give way."""
        asked = [each for each in self._entrants if each.ready_at is None]
        if len(asked) < self._seats:
            return
        silent = [each for each in self._entrants if self._is_silent(each, now)]
        if not silent or not (self._candidates.best() or self._candidates.retry_stalled()):
            return
        if self._seats < MOST_SEATS:
            self._seats *= 2
        else:
            for each in silent:
                self._entrants.remove(each)
                each.close()
                self._candidates.stalled(each.candidate, self._silence(each))
        self._enter(now)

    def _is_silent(self, entrant: Entrant, now: float) -> bool:
        return entrant.ready_at is None and now >= entrant.silent_at(self._patience)

    def _silence(self, entrant: Entrant) -> PublisherLost:
        publication = entrant.candidate.namespace.publication_id.hex()
        return PublisherLost(
            f"publication {publication}: its manifest did not come within {self._patience:g} s"
        )

    def _decide(self, now: float) -> Entrant | None:
        ready = [each for each in self._entrants if each.ready_at is not None]
        if not ready:
            return None
        best = max(ready, key=lambda each: (each.blocks, each.whole))
        assert best.ready_at is not None
        for rival in self._entrants:
            if rival.ready_at is not None:
                continue
            most = min(rival.blocks, self._wanted)
            longer = most > best.blocks and not self._is_silent(rival, now)
            same = most == best.blocks and not best.whole
            more = same or self._may_have_more(rival.candidate, best)
            if longer or (more and now < best.ready_at + HEDGE):
                return None
        for rival in self._entrants:
            if rival.ready_at is None and min(rival.blocks, self._wanted) > best.blocks:
                # silent for too long: it is not to be asked at once again
                rival.close()
                self._entrants.remove(rival)
                self._candidates.stalled(rival.candidate, self._silence(rival))
                return self._decide(now)
        return best
