"""What one relay tells of publications: by a listing, or prefix by prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcs.finding import listing as listings
from kvcs.finding import probing
from kvcs.finding.listing import Found, Listing, listing, release
from kvcs.finding.probing import Probing
from kvcs.finding.relays import Sessions
from kvcs.finding.telling import UNTOLD_SECONDS, Telling
from kvcs.names.errors import PublisherLost, RetrievalError
from moqt.session import Session
from moqt.values.errors import MoqtError


class Search:
    """The search at one relay; `poll` as `Candidates.poll`.

    `error` is set when the relay tells of nothing (any more).
    """

    def __init__(
        self,
        sessions: Sessions,
        url: str | None,
        scope_id: bytes,
        compat_id: bytes,
        keys: Sequence[bytes],
        *,
        changed: Callable[[], None],
        lists: bool,
        min_blocks: int,
        grace: float | None,
        probes: int,
    ) -> None:
        """`url` is None for the consumer's own relay; with `lists` it is asked for a listing
        first. The others are those of `Candidates`."""
        self.url = url
        self.error: RetrievalError | None = None
        self.began: float | None = None
        self._sessions = sessions
        self._scope_id = scope_id
        self._compat_id = compat_id
        self._keys = keys
        self._changed = changed
        self._lists = lists
        self._min_blocks = min_blocks
        self._grace = grace
        self._probes = probes
        self._session: Session | None = None
        self._listing: Listing | None = None
        self._probing: Probing | None = None
        self._telling: Telling | None = None
        self._told = False
        """The relay has told of what there is."""
        self._patient_until: float | None = None
        """When a relay that cannot tell has been asked for long enough."""

    def poll(self, now: float) -> float | None:
        """Go on with the search. Returns when to come back at the latest."""
        if self.began is None:
            self.began = now
        if self.error is not None or (self._session is None and not self._dialled()):
            return None
        due = None
        if self._listing is not None:
            due = self._listing.poll(now, _or(self._grace, listings.DEFAULT_GRACE))
            if self._listing.error is not None:
                self._give_up(self._listing.error)
            elif self._listing.refused is not None:
                self._let_go()
            elif self._listing.untold is not None:
                due = _first(due, self._patience(now))
                if now >= self._patience(now):
                    self._let_go()
        if self._listing is None and self.error is None:
            due = self._probe(now)
        if self.error is None and not self._told and self._asked_all:
            due = _first(due, self._tell(now))
        return due

    @property
    def untold(self) -> str | None:
        """Why the relay cannot tell for now; None when nothing says so."""
        told = [each.untold for each in (self._listing, self._probing) if each is not None]
        told.append(self._telling.why if self._telling is not None else None)
        return next(filter(None, told), None)

    @property
    def open(self) -> int:
        """Publications of so many of our blocks, and of fewer, may yet be found."""
        if self.error is not None or self._told:
            return 0
        if self._probing is not None and self._probing.open:
            return self._probing.open
        return len(self._keys)

    @property
    def state(self) -> object:
        """Something that differs when `found` may; None when only `found` tells."""
        if self._probing is not None:
            return None
        changes = self._listing.changes if self._listing is not None else -1
        return self.error is not None, changes

    def found(self) -> Iterator[Found]:
        """What the relay has told of, longest first."""
        if self._listing is not None:
            return self._listing.find(self._keys, self._min_blocks)
        return iter(()) if self._probing is None else self._probing.find()

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        self._let_go()
        for asking in (self._probing, self._telling):
            if asking is not None:
                asking.close()

    # -- inside --------------------------------------------------------------------------

    @property
    def _asked_all(self) -> bool:
        """Whether the relay has answered what it was asked for."""
        if self._probing is not None:
            return not self._probing.open
        return self._listing is not None and self._listing.settled

    def _patience(self, now: float) -> float:
        if self._patient_until is None:
            self._patient_until = now + UNTOLD_SECONDS
        return self._patient_until

    def _tell(self, now: float) -> float | None:
        """Who has told of nothing is asked whether it can tell. Returns when to come back."""
        if self._telling is None:
            if next(self.found(), None) is not None:
                self._told = True
                return None
            assert self._session is not None
            self._telling = Telling(
                self._session,
                self._scope_id,
                self._compat_id,
                until=self._patience(now),
                changed=self._changed,
            )
        due = self._telling.poll(now)
        self._told = self._telling.over
        if self._telling.error is not None:
            self._give_up(self._telling.error)
        return due

    def _dialled(self) -> bool:
        """Whether there is a session to the relay; a listing is begun on it."""
        task = self._sessions.dial(self.url)
        if not task.done():
            return False
        try:
            session = task.result()
        except MoqtError as error:
            lost = PublisherLost(str(error))
            lost.__cause__ = error
            self._give_up(lost)
            return False
        self._session = session.session
        if self._lists:
            self._listing = listing(self._session, self._scope_id, self._compat_id)
            self._listing.watchers.add(self._changed)
        return True

    def _probe(self, now: float) -> float | None:
        if self._probing is None:
            assert self._session is not None
            self._probing = Probing(
                self._session,
                self._scope_id,
                self._compat_id,
                self._keys,
                min_blocks=self._min_blocks,
                grace=_or(self._grace, probing.DEFAULT_GRACE),
                probes=self._probes,
                changed=self._changed,
                until=self._patient_until,
            )
        due = self._probing.poll(now)
        if self._probing.error is not None:
            self._give_up(self._probing.error)
        return due

    def _give_up(self, error: RetrievalError) -> None:
        self.error = error
        self._let_go()

    def _let_go(self) -> None:
        held, self._listing = self._listing, None
        if held is not None:
            assert self._session is not None
            held.watchers.discard(self._changed)
            release(self._session, held)


def _first(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
