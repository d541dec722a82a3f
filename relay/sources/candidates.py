"""Who may bring a track: a list of candidates, and which of them is asked next.

Publishers here stand first, together, then each upstream relay by itself (`Home.ranks`). The first
rank in which somebody has not declined is asked; when all of it have, the next one is. When the
last source of a track is lost, its readers wait for another (`linger`): who declined is asked
anew meanwhile, and who comes is asked at once. They see nothing of it but a gap in time: what was
published meanwhile is fetched (`Ranges.missed`), on streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError
from relay.config import Clock, RelayConfig

ASK_AGAIN_SECONDS = 1.0
"""After which others are asked for a track, when those who were asked have not answered or do not
have it."""


class Candidates:
    """Those of one track."""

    def __init__(
        self, ranks: Callable[[], list[list[Session]]], config: RelayConfig, clock: Clock
    ) -> None:
        """`ranks`: who may be asked by now, the best first; those of one rank together."""
        self._ranks = ranks
        self._config = config
        self._clock = clock
        self._declined: WeakSet[Session] = WeakSet()
        """Who has refused the track, or lost it, in this round of asking."""
        self.denied: WeakSet[Session] = WeakSet()
        """Of those, who has said that it does not exist."""
        self.waiting: frozenset[int] = frozenset()
        """The relays that whoever was asked last was told to wait for the track."""
        self._refusal: RequestError | None = None
        self._again_at = 0.0
        self._lingers_until: float | None = None

    def begin(self, *declined: Session) -> None:
        """A new round of asking: who declined in the last one counts again."""
        self._declined = WeakSet(declined)
        self.denied.clear()
        self._refusal = None

    def decline(self, session: Session) -> None:
        """It has lost the track."""
        self._declined.add(session)

    def refuse(self, session: Session, error: MoqtError) -> None:
        """It has refused the track, or has left before it answered.

        Of several refusals the one that says most is passed on; of those that say that the
        track does not exist, the one that says it for the shortest time.
        """
        self._declined.add(session)
        if not isinstance(error, RequestError):
            error = RequestError(
                RequestErrorCode.INTERNAL_ERROR,
                "the publisher left before it answered",
                retry_after_ms=self._config.retry_after_ms,
            )
        kept, absent = self._refusal, RequestErrorCode.DOES_NOT_EXIST
        if error.code == absent:
            self.denied.add(session)
        if kept is None or (
            kept.code == absent
            and (error.code != absent or (error.retry_after_ms or 0) < (kept.retry_after_ms or 0))
        ):
            self._refusal = error

    def take_refusal(self) -> RequestError:
        """What the readers are told when all have refused."""
        refusal, self._refusal = self._refusal, None
        return refusal or RequestError(RequestErrorCode.INTERNAL_ERROR)

    def appeared(self, session: Session) -> None:
        """It has come, or has published a namespace of the track."""
        self._declined.discard(session)

    def next(self, is_asked: Callable[[Session], bool], *, beyond: bool = False) -> list[Session]:
        """Who of the first rank in which not all have declined is to be asked still; `beyond`:
        of the first rank that was not asked."""
        self._again_at = self._clock.now + ASK_AGAIN_SECONDS
        for rank in self._ranks():
            fit = [each for each in rank if each not in self._declined]
            new = [each for each in fit if not is_asked(each)]
            if new or (fit and not beyond):
                return new
        return []

    def ordered(self, established: set[Session]) -> list[Session]:
        """All of them in their order, ranks of which nobody is among the `established` behind the
        others, and those that have declined last."""
        ranks = sorted(self._ranks(), key=established.isdisjoint)
        sessions = dict.fromkeys(each for rank in ranks for each in rank)
        return sorted(sessions, key=lambda each: each in self._declined)

    @property
    def due(self) -> bool:
        """Whether it is time to ask others."""
        return self._clock.now >= self._again_at

    # -- without a source ------------------------------------------------------------------

    @property
    def lingers(self) -> bool:
        """The last source is lost, and the readers wait for another."""
        return self._lingers_until is not None

    def linger(self, seconds: float) -> None:
        self._lingers_until = self._clock.now + seconds

    def settle(self) -> bool:
        """There is another source, or it is over: whether it was waited for."""
        lingered, self._lingers_until = self.lingers, None
        return lingered

    def tick(self) -> None:
        """Time has passed."""
        if self._lingers_until is not None and self._clock.now >= self._lingers_until:
            self._lingers_until = None
