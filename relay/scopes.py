"""The scopes of a relay: one path, one set of names (MOQT "MOQT URI Scheme").

Tracks with one Full Track Name are the same track only where the sessions' authority and path
are equal. A relay process has one certificate, so whatever authority a client dials (a name,
another one, an address) is the same server; what separates scopes is the path, without its
query. Each scope has a `Relay` of its own; the cache's budget, the policy and the counters
are shared. A session that dials a path of its own invention takes none of them: a scope is made
by the first request that the policy allows. Sans-IO.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
)
from moqt.session import Session, SessionHandler, session_of
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import SessionClosed
from moqt.values.names import TrackNamespace
from moqt.values.tokens import Token
from relay.cache import cache_of
from relay.config import Clock, Counters, RelayConfig
from relay.core import Relay
from relay.counted import Numbers
from relay.disk.tier import DiskTier
from relay.published_here import OnDisk, unmarked
from relay.rights.policy import Action, AllowAll, Policy
from relay.rights.refusals import Refusals

logger = logging.getLogger("relay")


def scope_of(path: str | None) -> str:
    """What of a session's path separates scopes; an empty path is that of the root."""
    return (path or "").partition("?")[0] or "/"


class Threshold(SessionHandler):
    """Sessions that have had no request allowed yet: the first one enters the scope of their path,
    and makes it if need be."""

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._refusals = Refusals(scopes.config, scopes.policy, scopes.counters)
        self.sessions: set[Session] = set()

    def session_closed(self, session: Session, error: SessionClosed) -> None:
        self.sessions.discard(session)
        self._scopes.count(session)

    def check_token(self, session: Session, token: Token) -> RequestErrorCode | None:
        return self._scopes.policy.check(session, token)

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        self._enter(
            request,
            Action.PUBLISH_NAMESPACE,
            request.namespace,
            lambda relay: relay.publish_namespace_received(request),
        )

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        self._enter(
            request,
            Action.SUBSCRIBE_NAMESPACE,
            request.prefix,
            lambda relay: relay.subscribe_namespace_received(request),
        )

    def subscribe_tracks_received(self, request: IncomingSubscribeTracks) -> None:
        self._enter(
            request,
            Action.SUBSCRIBE_TRACKS,
            request.prefix,
            lambda relay: relay.subscribe_tracks_received(request),
        )

    def publish_received(self, request: IncomingPublish) -> None:
        self._enter(
            request,
            Action.PUBLISH,
            request.name.namespace,
            lambda relay: relay.publish_received(request),
        )

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._enter(
            request,
            Action.SUBSCRIBE,
            request.name.namespace,
            lambda relay: relay.subscribe_received(request),
        )

    def fetch_received(self, request: IncomingFetch) -> None:
        self._enter(
            request,
            Action.FETCH,
            request.name.namespace,
            lambda relay: relay.fetch_received(request),
        )

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        namespace = unmarked(request.name).namespace
        self._enter(
            request,
            Action.TRACK_STATUS,
            namespace,
            lambda relay: relay.track_status_received(request),
        )

    def _enter(
        self,
        request: IncomingRequest,
        action: Action,
        namespace: TrackNamespace,
        take: Callable[[Relay], None],
    ) -> None:
        """Have the relay of the session's scope `take` the request; it is refused where there is
        none and none is made for it."""
        scopes, session = self._scopes, session_of(request)
        if not self._refusals.admits(request, action, namespace):
            return
        scope = scope_of(session.path)
        if not scopes.has_room(scope):
            scopes.counters.requests_over_limit += 1
            most = scopes.config.max_scopes
            self._refusals.no_room(
                request, f"{most} paths are in use, and no more may be (max_scopes)"
            )
            return
        self.sessions.discard(session)
        take(scopes.enter(session, scope))


class Scopes(SessionHandler):
    """Hands each session to the `Relay` of its scope, as soon as there is one."""

    def __init__(
        self,
        config: RelayConfig | None = None,
        policy: Policy | None = None,
        *,
        clock: Clock | None = None,
        disk: DiskTier | None = None,
        make: type[Relay] = Relay,
    ) -> None:
        """`disk` is the second tier of the cache, and has the same `clock`. Scopes are of the kind
        `make`."""
        self._make = make
        self.config = config or RelayConfig()
        self.policy = policy or AllowAll()
        self.counters = Counters()
        self.cache = cache_of(self.config)
        self.clock = clock or Clock()
        self.disk = disk
        self.relays: dict[str, Relay] = {}
        self.threshold = Threshold(self)
        self.made: list[Callable[[str, Relay], None]] = []
        """Told of every scope that is made."""
        self.gone: list[Callable[[str], None]] = []
        """Told of every scope that is forgotten."""
        self._kept: set[str] = set()
        self._on_disk: dict[str, OnDisk] = {}
        """Of the scopes that the disk has something of, also while nobody is in them."""
        self._counted = Numbers()
        """Of the scopes that are gone."""

    def keep(self, path: str) -> Relay:
        """The scope of `path`, which stays also while nobody uses it."""
        scope = scope_of(path)
        self._kept.add(scope)
        return self._relay(scope)

    def restore(self) -> None:
        """Make the scopes of which the disk has something, as many as may be: it is published."""
        for scope in [] if self.disk is None else list(self.disk.shelves):
            if len(self.relays) < self.config.max_scopes:
                self._relay(scope)

    def _relay(self, scope: str) -> Relay:
        relay = self.relays.get(scope)
        if relay is None:
            relay = self.relays[scope] = self._make(
                self.config,
                self.policy,
                share=self.cache.share(scope),
                counters=self.counters,
                clock=self.clock,
                on_disk=self._shelf(scope),
            )
            for made in self.made:
                made(scope, relay)
        return relay

    def _shelf(self, scope: str) -> OnDisk | None:
        if self.disk is None:
            return None
        shelf, known = self.disk.shelf(scope), self._on_disk.get(scope)
        if known is None or known.shelf is not shelf:
            known = self._on_disk[scope] = OnDisk(shelf)
        return known

    # -- sessions ----------------------------------------------------------------------------

    def check_scope(
        self, session: Session, authority: str | None, path: str | None
    ) -> SessionErrorCode | None:
        """INVALID_PATH for one scope too many; one that only the cache knows makes room."""
        if self.has_room(scope_of(path)):
            return None
        return SessionErrorCode.INVALID_PATH

    def has_room(self, scope: str) -> bool:
        """Whether it is there, or can be made."""
        if scope in self.relays or len(self.relays) < self.config.max_scopes:
            return True
        if self._unused() is not None:
            return True  # only the cache knows it: `enter` displaces it
        self.counters.scopes_refused += 1
        if self.counters.scopes_refused == 1:
            logger.warning(
                "the relay is at its limit of %d scopes (max_scopes): sessions for more are closed",
                self.config.max_scopes,
            )
        return False

    def enter(self, session: Session, scope: str) -> Relay:
        """`session` is one of `scope` from now on, which is made if need be."""
        if scope not in self.relays and len(self.relays) >= self.config.max_scopes:
            unused = self._unused()
            assert unused is not None, "has_room is asked first"
            self._forget(unused)
        relay = self._relay(scope)
        session.handler = relay
        relay.enter(session)
        return relay

    def sessions(self) -> list[Session]:
        """Those that are established."""
        inside = [session for relay in self.relays.values() for session in relay.sessions]
        return [*inside, *self.threshold.sessions]

    def count(self, session: Session) -> None:
        """`session` has ended at the threshold."""
        self._counted = Numbers.total([self._counted, Numbers.of([session])])

    def check_token(self, session: Session, token: Token) -> RequestErrorCode | None:
        return self.policy.check(session, token)

    def session_established(self, session: Session) -> None:
        self.counters.sessions += 1
        # who may nothing there would keep a scope that all others have left
        session.handler = self.threshold
        self.threshold.sessions.add(session)

    def _unused(self) -> str | None:
        """A scope that nobody is in, which makes room for another."""
        for scope, relay in self.relays.items():
            if not relay.sessions and scope not in self._kept:
                return scope
        return None

    def _forget(self, scope: str) -> None:
        relay = self.relays.pop(scope)
        relay.forget_all()
        self.cache.shares.pop(scope, None)
        if self.disk is not None:
            on_disk = self._on_disk[scope]
            on_disk.told, on_disk.emptied = None, partial(self._emptied, scope, self.disk)
            self._leave(scope, self.disk)
        self._counted = Numbers.total([self._counted, relay.numbers()])
        for gone in self.gone:
            gone(scope)

    def _emptied(self, scope: str, disk: DiskTier) -> None:
        if not disk.reading:  # else more of it may be found, at this very moment
            self._leave(scope, disk)

    def _leave(self, scope: str, disk: DiskTier) -> None:
        disk.leave(scope)
        if scope in disk.shelves:
            self._on_disk[scope].listen()
        else:
            del self._on_disk[scope]

    # -- time and numbers --------------------------------------------------------------------

    def tick(self, now: float, most: int | None = None) -> None:
        """Time has passed. Twice a second is enough. With `most` no more Objects expire at once,
        and the others by `expire_more` of the cache."""
        self.clock.now = now
        self.cache.expire(now, most)
        if self.disk is not None:
            self.disk.tick(now)
        for scope, relay in tuple(self.relays.items()):
            relay.tick(now)
            if not relay.in_use and scope not in self._kept:
                self._forget(scope)

    def numbers(self) -> Numbers:
        """What all sessions, ended ones included, have counted."""
        inside = (relay.numbers() for relay in self.relays.values())
        return Numbers.total([self._counted, Numbers.of(self.threshold.sessions), *inside])
