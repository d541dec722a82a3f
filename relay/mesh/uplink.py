"""A relay behind a relay: what is asked of, and told to, one upstream relay. Sans-IO.

What no publisher here has is asked upstream: SUBSCRIBE, FETCH and TRACK_STATUS by
`Relay.publishers`; namespaces and tracks by one SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS
for each prefix that somebody downstream asks for and that no shorter one covers. How relays
interconnect is out of the draft's scope; only its ordinary requests are used here.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from moqt.requests import IncomingPublish, OutgoingPublishNamespace, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import TrackNamespace, printable_namespace
from relay.audience.prefixes import PrefixMap
from relay.core import Relay
from relay.sources.hops import relay_of

logger = logging.getLogger("relay")

UPSTREAM_PATIENCE = 0.5
"""Seconds that a listing here waits for upstream's answer at most."""

RETRY_SECONDS = 1.0
"""After which a prefix is asked for again that upstream still had another one overlap."""

MOST_RETRY_SECONDS = 60.0
"""Between two requests for a prefix that is refused again and again."""

UNWANTED_SECONDS = 10.0
"""For which a prefix that covers others is asked for when it is wanted no more."""

FADING_SECONDS = 2.0
"""For which the namespaces of a listing given up for another one are held: that tells them anew."""


class Cancellable(Protocol):
    """A request of ours."""

    @property
    def state(self) -> RequestState: ...

    def cancel(self) -> None: ...


Ended = Callable[[MoqtError | None], None]

Answered = Callable[[bool], None]
"""Told whether upstream has told of a prefix, or will not; False: it cannot be asked."""

_CANNOT_TELL = frozenset({RequestErrorCode.INTERNAL_ERROR, RequestErrorCode.TIMEOUT})
"""Refusals of a listing that may be repeated: upstream lacks somebody, too."""


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
        for length in range(len(prefix) + 1):
            asked = self._asked.get(prefix[:length])
            if prefix[:length] in self._overlapping or (
                asked is not None and asked.state in (RequestState.QUEUED, RequestState.PENDING)
            ):
                waiting = self._waiting.setdefault(prefix[:length], {})
                waiting[then] = None
                return partial(self._enough, waiting, then)
        then(self._session is not None and not self._is_untold(prefix))
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
        logger.info("upstream refuses to tell of %s: %s", printable_namespace(prefix), error)
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


class Uplink:
    """One upstream relay, over the sessions to it that come and go."""

    def __init__(self, relay: Relay, *, announce: bool = False, place: int = 0) -> None:
        """`announce`: what is published here is announced there (PUBLISH_NAMESPACE). Of several
        upstream relays those of a lower `place` are asked first."""
        self.relay = relay
        self._announce = announce
        self._place = place
        self._session: Session | None = None
        self._announced: dict[TrackNamespace, OutgoingPublishNamespace] = {}
        self._again: dict[TrackNamespace, float] = {}
        self._told: Counter[tuple[Session, TrackNamespace]] = Counter()
        """How many listings at a session, those that fade included, tell of a namespace."""
        self._fading: deque[tuple[float, Session, TrackNamespace]] = deque()
        self._namespaces = Interests(self._subscribe_namespace)
        self._tracks = Interests(self._subscribe_tracks)
        relay.askable.unreachable.add(self)
        relay.namespaces.events.listed.append(self._listed)
        relay.namespaces.events.awaited.append(self._await_upstream)
        relay.offers.on_wanted.append(self._tracks_wanted)
        relay.namespaces.events.appeared.append(self._appeared)
        relay.namespaces.events.withdrawn.append(self._withdrawn)

    @property
    def session(self) -> Session | None:
        """The session that is asked now."""
        return self._session

    def attach(self, session: Session) -> None:
        """A session is established. An older one that is still there is moved away from."""
        old, self._session = self._session, session
        self.relay.askable.unreachable.discard(self)
        self.relay.add_upstream(session, self._place)
        self._announced.clear()
        self._again.clear()
        # what the session before has told of holds until this one has told
        soon = self.relay.clock.now + FADING_SECONDS
        self._fading = deque((max(at, soon), who, told) for at, who, told in self._fading)
        self._namespaces.attach(session)
        self._tracks.attach(session)
        for namespace in self.relay.namespaces.published.namespaces_under(()):
            self._appeared(namespace)
        if old is not None and old.closed is None:
            self.relay.upstreams.pop(old, None)
            self._move(old, session)

    def leave(self, session: Session) -> None:
        """The upstream relay is going away (GOAWAY), and no other session to it is there yet: what
        comes from it is asked of the next one, where there is one."""
        others = [each for each in self.relay.askable.above() if each.goaway is None]
        if session is self._session and others:
            self._move(session, others[0])

    def _move(self, old: Session, new: Session) -> None:
        """Ask `new` for what comes on `old`."""
        for track in tuple(self.relay.tracks.values()):
            if track.publishes(old):
                track.move(old, new)

    def detach(self, session: Session) -> None:
        """The session has ended."""
        if session is self._session:
            self._session = None
            self.relay.askable.unreachable.add(self)
            self._announced.clear()
            self._again.clear()
            self._namespaces.attach(None)
            self._tracks.attach(None)

    def tick(self, now: float) -> None:
        self.relay.namespaces.tick(now)
        self._namespaces.tick(now)
        self._tracks.tick(now)
        while self._fading and now >= self._fading[0][0]:
            _, session, namespace = self._fading.popleft()
            self._changed(session, namespace, False)
        for namespace in [each for each, at in self._again.items() if now >= at]:
            del self._again[namespace]
            self._appeared(namespace)

    # -- asking ----------------------------------------------------------------------------

    def _listed(self, session: Session, prefix: TrackNamespace, item: object, on: bool) -> None:
        if session not in self.relay.upstreams:
            (self._namespaces.add if on else self._namespaces.remove)(prefix, item)

    def _await_upstream(self, session: Session, prefix: TrackNamespace, then: Answered) -> None:
        above, asking = self._session, relay_of(session)
        if not self.relay.askable.goes_up(session) or (
            above is not None and asking is not None and relay_of(above) == asking
        ):
            then(True)  # who asks would wait for itself
            return
        enough = self._namespaces.await_answer(prefix, then)
        if enough is not None:
            # what is known here is not kept back for an upstream that is slow
            session.clock.after(UPSTREAM_PATIENCE, enough)

    def _tracks_wanted(
        self, session: Session, prefix: TrackNamespace, item: object, on: bool
    ) -> None:
        if session not in self.relay.upstreams:
            (self._tracks.add if on else self._tracks.remove)(prefix, item)

    def _subscribe_namespace(
        self, session: Session, prefix: TrackNamespace, ended: Ended
    ) -> Cancellable:
        told: set[TrackNamespace] = set()

        def changed(namespace: TrackNamespace, present: bool) -> None:
            (told.add if present else told.discard)(namespace)
            self._changed(session, namespace, present)

        def fade(seconds: float) -> None:
            gone = tuple(told)
            told.clear()
            if seconds:
                until = self.relay.clock.now + seconds
                self._fading.extend((until, session, namespace) for namespace in gone)
                return
            for namespace in gone:
                self._changed(session, namespace, False)

        def over(error: MoqtError | None) -> None:
            # of who is lost nobody knows what it has: it is to come back
            lost = isinstance(error, SessionClosed)
            fade(self.relay.config.publisher_linger if lost else 0.0)
            ended(error)

        def given_up() -> None:
            fade(FADING_SECONDS)
            ended(None)

        request = session.subscribe_namespace(
            prefix,
            on_namespace=changed,
            on_ended=over,
            on_full=lambda: self._namespaces.full(prefix),
        )

        def answered(error: MoqtError | None) -> None:
            if error is None:
                self._namespaces.accepted(prefix)

        request.on_answer = answered
        return _Listing(request, given_up)

    def _changed(self, session: Session, namespace: TrackNamespace, present: bool) -> None:
        """One more, or one less, of the listings at `session` tells of `namespace`."""
        key = session, namespace
        before = self._told[key]
        self._told[key] = before + (1 if present else -1)
        if not self._told[key]:
            del self._told[key]
        if not (before and key in self._told):
            names = self.relay.namespaces
            (names.remote.add if present else names.remote.remove)(namespace, session)
            again = self._session is not None and (self._session, namespace) in self._told
            names.tell(namespace, lost=not present and not again)

    def _subscribe_tracks(
        self, session: Session, prefix: TrackNamespace, ended: Ended
    ) -> Cancellable:
        return session.subscribe_tracks(
            prefix, on_publish=self._offered, on_ended=ended, on_skipped=lambda name: None
        )

    def _offered(self, publication: IncomingPublish) -> None:
        self.relay.take_publication(publication)

    # -- telling ---------------------------------------------------------------------------

    def _appeared(self, namespace: TrackNamespace) -> None:
        session = self._session
        if (
            not self._announce
            or session is None
            or namespace in self._announced
            or namespace not in self.relay.namespaces.published
        ):
            return

        def ended(error: MoqtError) -> None:
            if self._session is not session or self._announced.pop(namespace, None) is None:
                return
            logger.warning("upstream refuses %s: %s", printable_namespace(namespace), error)
            wait = retry_after(error)
            if wait is not None:
                self._again[namespace] = self.relay.clock.now + wait

        try:
            self._announced[namespace] = session.publish_namespace(namespace, on_ended=ended)
        except MoqtError as error:
            logger.warning(
                "%s is not announced upstream: %s", printable_namespace(namespace), error
            )

    def _withdrawn(self, namespace: TrackNamespace) -> None:
        if namespace not in self.relay.namespaces.published:
            self._again.pop(namespace, None)
            announced = self._announced.pop(namespace, None)
            if announced is not None:
                announced.cancel()


class _Listing:
    """A SUBSCRIBE_NAMESPACE whose namespaces are held for a moment when it is given up."""

    def __init__(self, request: Cancellable, given_up: Callable[[], None]) -> None:
        self._request = request
        self._given_up = given_up

    @property
    def state(self) -> RequestState:
        return self._request.state

    def cancel(self) -> None:
        self._request.cancel()
        self._given_up()
