"""A relay behind a relay: what is asked of, and told to, the one upstream. Sans-IO.

What no publisher here has is asked upstream: SUBSCRIBE, FETCH and TRACK_STATUS by
`Relay.publishers`; namespaces and tracks by one SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS
for each prefix that somebody downstream asks for and that no shorter one covers. How relays
interconnect is out of the draft's scope; only its ordinary requests are used here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from moqt.requests import IncomingPublish, OutgoingPublishNamespace, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError
from moqt.values.names import TrackNamespace, printable_namespace
from relay.audience.prefixes import PrefixMap
from relay.core import Relay

logger = logging.getLogger("relay")

UPSTREAM_PATIENCE = 0.5
"""Seconds that a listing here waits for upstream's answer at most."""

RETRY_SECONDS = 1.0
"""After which a prefix is asked for again that upstream still had another one overlap."""


class Cancellable(Protocol):
    """A request of ours."""

    @property
    def state(self) -> RequestState: ...

    def cancel(self) -> None: ...


Ended = Callable[[MoqtError | None], None]


class Interests:
    """The prefixes wanted downstream, as few requests upstream as cover them.

    Requests of one session must not overlap (PREFIX_OVERLAP), so a prefix under another is
    asked for only when that one is wanted no more.
    """

    def __init__(self, ask: Callable[[Session, TrackNamespace, Ended], Cancellable]) -> None:
        self._ask = ask
        self._session: Session | None = None
        self._wanted: PrefixMap[object] = PrefixMap()
        self._asked: dict[TrackNamespace, Cancellable] = {}
        self._retry: dict[TrackNamespace, float] = {}
        self._waiting: dict[TrackNamespace, dict[Callable[[], None], None]] = {}
        """Who waits for the answer to what was asked."""
        self._now = 0.0

    def attach(self, session: Session | None) -> None:
        """Ask this session from now on, all anew; None when there is none."""
        self._retry.clear()
        for prefix in list(self._asked):
            self._cancel(prefix)
        self._session = session
        for prefix in self._wanted.namespaces_under(()):
            self._start(prefix)

    def add(self, prefix: TrackNamespace, item: object) -> None:
        new = prefix not in self._wanted
        self._wanted.add(prefix, item)
        if new and not self._covered(prefix):
            for narrower in self._wanted.namespaces_under(prefix):
                self._cancel(narrower)
            self._start(prefix)

    def remove(self, prefix: TrackNamespace, item: object) -> None:
        self._wanted.remove(prefix, item)
        if prefix in self._wanted:
            return
        self._retry.pop(prefix, None)
        self._cancel(prefix)
        for narrower in self._wanted.namespaces_under(prefix):
            self._start(narrower)

    def tick(self, now: float) -> None:
        self._now = now
        for prefix in [each for each, at in self._retry.items() if now >= at]:
            del self._retry[prefix]
            self._start(prefix)

    def await_answer(
        self, prefix: TrackNamespace, then: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Call `then` when what covers `prefix` is answered. Returns what calls it before that,
        and waits no more; None when nothing was to be waited for, and it was called at once."""
        for length in range(len(prefix) + 1):
            asked = self._asked.get(prefix[:length])
            if asked is not None and asked.state in (RequestState.QUEUED, RequestState.PENDING):
                waiting = self._waiting.setdefault(prefix[:length], {})
                waiting[then] = None
                return partial(self._enough, waiting, then)
        then()
        return None

    @staticmethod
    def _enough(waiting: dict[Callable[[], None], None], then: Callable[[], None]) -> None:
        waiting.pop(then, None)
        then()

    def answered(self, prefix: TrackNamespace) -> None:
        """What was asked for `prefix` is answered, refused or given up."""
        for then in tuple(self._waiting.pop(prefix, ())):
            then()

    def _cancel(self, prefix: TrackNamespace) -> None:
        request = self._asked.pop(prefix, None)
        if request is not None:
            request.cancel()
        self.answered(prefix)

    def _covered(self, prefix: TrackNamespace) -> bool:
        return any(prefix[:length] in self._wanted for length in range(len(prefix)))

    def _start(self, prefix: TrackNamespace) -> None:
        session = self._session
        if (
            session is None
            or prefix not in self._wanted
            or prefix in self._asked
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
            self._retry[prefix] = self._now + wait


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

    def __init__(self, relay: Relay, *, announce: bool = False) -> None:
        """`announce`: what is published here is announced there (PUBLISH_NAMESPACE)."""
        self.relay = relay
        self._announce = announce
        self._session: Session | None = None
        self._announced: dict[TrackNamespace, OutgoingPublishNamespace] = {}
        self._again: dict[TrackNamespace, float] = {}
        self._namespaces = Interests(self._subscribe_namespace)
        self._tracks = Interests(self._subscribe_tracks)
        relay.namespaces.events.listed.append(self._listed)
        relay.namespaces.events.await_upstream = self._await_upstream
        relay.offers.on_wanted = self._tracks_wanted
        relay.namespaces.events.appeared.append(self._appeared)
        relay.namespaces.events.withdrawn.append(self._withdrawn)

    @property
    def session(self) -> Session | None:
        """The session that is asked now."""
        return self._session

    def attach(self, session: Session) -> None:
        """A session is established. An older one that is still there is moved away from."""
        old, self._session = self._session, session
        self.relay.add_upstream(session)
        self._announced.clear()
        self._again.clear()
        self._namespaces.attach(session)
        self._tracks.attach(session)
        for namespace in self.relay.namespaces.published.namespaces_under(()):
            self._appeared(namespace)
        if old is not None and old.closed is None:
            self.relay.move_upstream(old, session)

    def detach(self, session: Session) -> None:
        """The session has ended."""
        if session is self._session:
            self._session = None
            self._announced.clear()
            self._again.clear()
            self._namespaces.attach(None)
            self._tracks.attach(None)

    def tick(self, now: float) -> None:
        self._namespaces.tick(now)
        self._tracks.tick(now)
        for namespace in [each for each, at in self._again.items() if now >= at]:
            del self._again[namespace]
            self._appeared(namespace)

    # -- asking ----------------------------------------------------------------------------

    def _listed(self, session: Session, prefix: TrackNamespace, item: object, on: bool) -> None:
        if session not in self.relay.upstreams:
            (self._namespaces.add if on else self._namespaces.remove)(prefix, item)

    def _await_upstream(
        self, session: Session, prefix: TrackNamespace, then: Callable[[], None]
    ) -> None:
        if session in self.relay.upstreams:
            then()
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
        names = self.relay.namespaces

        def changed(namespace: TrackNamespace, present: bool) -> None:
            (told.add if present else told.discard)(namespace)
            (names.remote.add if present else names.remote.remove)(namespace, session)
            names.tell(namespace)

        def over(error: MoqtError | None) -> None:
            for namespace in tuple(told):
                changed(namespace, False)
            ended(error)

        request = session.subscribe_namespace(prefix, on_namespace=changed, on_ended=over)
        request.on_answer = lambda error: self._namespaces.answered(prefix)
        return _Listing(request, over)

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
    """A SUBSCRIBE_NAMESPACE whose namespaces are gone when it is given up."""

    def __init__(self, request: Cancellable, over: Callable[[MoqtError | None], None]) -> None:
        self._request = request
        self._over = over

    @property
    def state(self) -> RequestState:
        return self._request.state

    def cancel(self) -> None:
        self._request.cancel()
        self._over(None)
