"""The prefixes of which another relay, upstream or of the mesh, is asked to tell. Sans-IO."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from moqt.requests import RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import TrackNamespace, printable_namespace
from relay.audience.prefixes import PrefixMap

logger = logging.getLogger("relay")

UPSTREAM_PATIENCE = 0.5
"""Seconds that a listing here waits for the answer of other relays at most."""

RETRY_SECONDS = 1.0
"""After which a prefix is asked for again that upstream still had another one overlap."""

MOST_RETRY_SECONDS = 60.0
"""Between two requests for a prefix that is refused again and again."""

UNWANTED_SECONDS = 10.0
"""For which a prefix that covers others is asked for when it is wanted no more."""


class Cancellable(Protocol):
    """A request of ours."""

    @property
    def state(self) -> RequestState: ...

    def cancel(self) -> None: ...


Ended = Callable[[MoqtError | None], None]

Answered = Callable[[bool], None]
"""Told whether upstream has told of a prefix, or will not; False: it cannot be asked."""

_CANNOT_TELL = frozenset(
    {
        RequestErrorCode.INTERNAL_ERROR,
        RequestErrorCode.TIMEOUT,
        RequestErrorCode.EXCESSIVE_LOAD,
    }
)
"""Refusals of a listing that may be repeated: upstream lacks somebody, too, or room."""


class Interests:
    """The prefixes wanted downstream, as few requests upstream as cover them.

    Requests of one session must not overlap (PREFIX_OVERLAP), so a prefix under another is asked
    for only when that one is wanted no more, or is of no use to those under it: upstream refuses
    it, or has more to tell than is kept.
    """

    def __init__(self, ask: Callable[[Session, TrackNamespace, Ended], Cancellable]) -> None:
        self._ask = ask
        self._session: Session | None = None
        self._wanted: PrefixMap[object] = PrefixMap()
        self._asked: dict[TrackNamespace, Cancellable] = {}
        self._useless: set[TrackNamespace] = set()
        """Prefixes that upstream does not tell all of: they cover no other."""
        self._unwanted: dict[TrackNamespace, float] = {}
        """Those that are asked for a while still, so that who asks for one again and again does
        not have all that it covers asked for in turn."""
        self._retry: dict[TrackNamespace, float] = {}
        self._tries: dict[TrackNamespace, int] = {}
        self._waiting: dict[TrackNamespace, dict[Answered, None]] = {}
        """Who waits for the answer to what was asked."""
        self._overlapping: set[TrackNamespace] = set()
        """Prefixes that are asked for again soon: upstream still had others that overlap, which
        were given up for them. Who waits does not hear of that, and waits on."""
        self._untold: set[TrackNamespace] = set()
        """Prefixes of which upstream cannot tell for now, and that are asked for again."""
        self._now = 0.0

    @property
    def session(self) -> Session | None:
        """The one that is asked now."""
        return self._session

    def attach(self, session: Session | None) -> None:
        """Ask this session from now on, all anew; None when there is none."""
        self._session = None
        for table in (self._retry, self._useless, self._unwanted, self._tries, self._untold):
            table.clear()
        self._overlapping.clear()
        for prefix in list(self._asked):
            self._cancel(prefix)
        for prefix in list(self._waiting):
            self._answered(prefix)
        self._session = session
        for prefix in self._wanted.namespaces_under(()):
            self._start(prefix)

    def add(self, prefix: TrackNamespace, item: object) -> None:
        new = prefix not in self._wanted and self._unwanted.pop(prefix, None) is None
        self._wanted.add(prefix, item)
        if not new:
            return
        for length in range(len(prefix)):
            if prefix[:length] in self._useless:
                self._cancel(prefix[:length])  # it tells of a part alone
        if not self._covered(prefix):
            self._start_instead(prefix)

    def remove(self, prefix: TrackNamespace, item: object) -> None:
        self._wanted.remove(prefix, item)
        if prefix in self._wanted:
            return
        self._retry.pop(prefix, None)
        self._untold.discard(prefix)
        self._overlapping.discard(prefix)
        if prefix in self._asked and self._wanted.any_under(prefix):
            self._unwanted[prefix] = self._now + UNWANTED_SECONDS
        else:
            self._drop(prefix)

    def _drop(self, prefix: TrackNamespace) -> None:
        """It is asked for no more; those that it covered are."""
        self._useless.discard(prefix)
        self._tries.pop(prefix, None)
        self._cancel(prefix)
        self._start_under(prefix)

    def full(self, prefix: TrackNamespace) -> None:
        """Upstream has more to tell of `prefix` than is kept."""
        self._useless.add(prefix)
        if any(each != prefix for each in self._wanted.namespaces_under(prefix)):
            self._cancel(prefix)
            self._start_under(prefix)

    def tick(self, now: float) -> None:
        self._now = now
        for prefix in [each for each, at in self._unwanted.items() if now >= at]:
            del self._unwanted[prefix]
            self._drop(prefix)
        for prefix in [each for each, at in self._retry.items() if now >= at]:
            del self._retry[prefix]
            self._useless.discard(prefix)
            self._overlapping.discard(prefix)
            if not self._covered(prefix):
                self._start_instead(prefix)

    def await_answer(self, prefix: TrackNamespace, then: Answered) -> Callable[[], None] | None:
        """Call `then` when what covers `prefix` is answered. Returns what calls it before that,
        and waits no more; None when nothing was to be waited for, and it was called at once."""
        unanswered = self._unanswered(prefix)
        if unanswered is not None:
            waiting = self._waiting.setdefault(unanswered, {})
            waiting[then] = None
            return partial(self._enough, waiting, then)
        then(self.tells(prefix))
        return None

    def tells(self, prefix: TrackNamespace) -> bool:
        """Whether upstream has told of `prefix`, or will not."""
        if self._session is None or self._unanswered(prefix) is not None:
            return False
        return not self._is_untold(prefix)

    def _unanswered(self, prefix: TrackNamespace) -> TrackNamespace | None:
        """What covers `prefix` and is not answered."""
        for length in range(len(prefix) + 1):
            asked = self._asked.get(prefix[:length])
            if prefix[:length] in self._overlapping or (
                asked is not None and asked.state in (RequestState.QUEUED, RequestState.PENDING)
            ):
                return prefix[:length]
        return None

    def _is_untold(self, prefix: TrackNamespace) -> bool:
        """Whether upstream cannot tell of `prefix`, and nothing covers it that it has answered."""
        covering = [prefix[:length] for length in range(len(prefix) + 1)]
        return not self._untold.isdisjoint(covering) and not any(
            each in self._asked for each in covering
        )

    @staticmethod
    def _enough(waiting: dict[Answered, None], then: Answered) -> None:
        waiting.pop(then, None)
        then(True)  # it is slow: what it tells is told on

    def accepted(self, prefix: TrackNamespace) -> None:
        """What was asked for `prefix` is answered: upstream tells of it."""
        self._tries.pop(prefix, None)
        self._untold.discard(prefix)
        self._answered(prefix)

    def _answered(self, prefix: TrackNamespace, *, lost: bool = False) -> None:
        """What was asked for `prefix` is accepted, refused or given up; `lost`: upstream is."""
        known = not lost and self._session is not None and not self._is_untold(prefix)
        for then in tuple(self._waiting.pop(prefix, ())):
            then(known)

    def _cancel(self, prefix: TrackNamespace) -> None:
        request = self._asked.pop(prefix, None)
        if request is not None:
            request.cancel()
        self._answered(prefix)

    def _covered(self, prefix: TrackNamespace) -> bool:
        return any(
            (shorter in self._wanted or shorter in self._unwanted) and shorter not in self._useless
            for shorter in (prefix[:length] for length in range(len(prefix)))
        )

    def _start_instead(self, prefix: TrackNamespace) -> None:
        """Ask for it instead of all that it covers; who waits for those waits for it."""
        waiting: dict[Answered, None] = {}
        for narrower in self._wanted.namespaces_under(prefix):
            waiting.update(self._waiting.pop(narrower, {}))
            self._cancel(narrower)
        if waiting:
            self._waiting[prefix] = waiting
        self._start(prefix)

    def _start_under(self, prefix: TrackNamespace) -> None:
        for narrower in self._wanted.namespaces_under(prefix):
            if narrower != prefix:
                self._start(narrower)

    def _start(self, prefix: TrackNamespace) -> None:
        session = self._session
        if (
            session is None
            or prefix not in self._wanted
            or prefix in self._asked
            or prefix in self._retry
            or self._covered(prefix)
        ):
            return

        def ended(error: MoqtError | None) -> None:
            if self._session is session and self._asked.pop(prefix, None) is not None:
                self._refused(prefix, error)

        try:
            self._asked[prefix] = self._ask(session, prefix, ended)
        except MoqtError as error:
            self._refused(prefix, error)

    def _refused(self, prefix: TrackNamespace, error: MoqtError | None) -> None:
        """Ask again where that may help: a prefix given up just before may still overlap."""
        logger.info("another relay refuses to tell of %s: %s", printable_namespace(prefix), error)
        wait = retry_after(error)
        if wait is not None:
            tries = self._tries[prefix] = self._tries.get(prefix, 0) + 1
            longest = max(MOST_RETRY_SECONDS, wait)
            self._retry[prefix] = self._now + min(wait * 2.0 ** (min(tries, 16) - 1), longest)
            if isinstance(error, RequestError) and error.code in _CANNOT_TELL:
                self._untold.add(prefix)
        overlaps = isinstance(error, RequestError) and error.code == RequestErrorCode.PREFIX_OVERLAP
        useless = not overlaps and (error is None or isinstance(error, RequestError))
        if useless:
            self._useless.add(prefix)
        elif overlaps:
            self._overlapping.add(prefix)
            return
        # who is told now may want it no more, and then nothing of it stays
        self._answered(prefix, lost=isinstance(error, SessionClosed))
        if useless:
            # not those under it for what it is refused
            self._start_under(prefix)


def retry_after(error: MoqtError | None) -> float | None:
    """Seconds after which the request may be made again; None: not as it was."""
    if error is None:
        return RETRY_SECONDS
    if not isinstance(error, RequestError):
        return None  # the session has ended, the next one is asked anew
    if error.retry_after_ms is not None:
        return max(error.retry_after_ms / 1000, RETRY_SECONDS)
    return RETRY_SECONDS if error.code == RequestErrorCode.PREFIX_OVERLAP else None
