"""The relay: who publishes what, who asks for it, and the tracks in between (MOQT "Relays").

Sans-IO: one `Relay` is the `SessionHandler` of all sessions; `tick(now)` brings the time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from moqt.codes import PublishDoneCode, RequestErrorCode
from moqt.errors import RequestError, SessionClosed, escaped
from moqt.names import FullTrackName, TrackNamespace, printable_namespace
from moqt.requests import (
    IncomingFetch,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingTrackStatus,
    RequestState,
)
from moqt.session import Session, SessionHandler
from moqt.store import StoredObject, TrackStore
from relay.cache import Cache
from relay.config import Action, AllowAll, Counters, Policy, RelayConfig
from relay.routing import PrefixMap
from relay.upstream import TrackRequest, UpstreamTrack

logger = logging.getLogger("relay")

NO_SUCH_TRACK = "no such track"
"""One reason for every DOES_NOT_EXIST: who asks learns nothing about who publishes."""

MAX_DISPLACED = 64
"""Tracks looked at to find one that can make room for another."""

_PASSED_ON = frozenset(
    {
        RequestErrorCode.INTERNAL_ERROR,
        RequestErrorCode.UNAUTHORIZED,
        RequestErrorCode.TIMEOUT,
        RequestErrorCode.NOT_SUPPORTED,
        RequestErrorCode.EXCESSIVE_LOAD,
        RequestErrorCode.DOES_NOT_EXIST,
        RequestErrorCode.MALFORMED_TRACK,
        RequestErrorCode.UNSUPPORTED_EXTENSION,
    }
)
"""Refusals that mean downstream what they meant to us; others are about our own request."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A downstream request that waits for a track, or for a publisher of it to appear."""

    request: TrackRequest
    track: UpstreamTrack | None
    deadline: float | None = None
    """When a rendezvous ends; a track's own subscriptions have theirs."""


class Relay(SessionHandler):
    """Accepts publishers and subscribers, and joins them. See the module."""

    def __init__(self, config: RelayConfig | None = None, policy: Policy | None = None) -> None:
        self.config = config or RelayConfig()
        self.policy: Policy = policy or AllowAll()
        self.cache = Cache(self.config.cache_octets)
        self.cache.on_gone = self._object_gone
        self.counters = Counters()
        self.now = 0.0
        self.sessions: set[Session] = set()
        self.tracks: OrderedDict[FullTrackName, UpstreamTrack] = OrderedDict()
        """Least recently used first."""
        self.active: dict[UpstreamTrack, None] = {}
        """The tracks that have something to do on tick; the others are only cached."""
        self.published: PrefixMap[IncomingPublishNamespace] = PrefixMap()
        self.publications = 0
        self.pending: dict[TrackRequest, _Pending] = {}
        self._published_by: dict[Session, int] = {}
        self._listings: PrefixMap[IncomingSubscribeNamespace] = PrefixMap()
        self._listing_prefix: dict[IncomingSubscribeNamespace, TrackNamespace] = {}
        self._tracks_by_namespace: PrefixMap[UpstreamTrack] = PrefixMap()
        self._held: PrefixMap[UpstreamTrack] = PrefixMap()
        """Complete cached tracks without a publisher, by namespace."""
        self._rendezvous: PrefixMap[_Pending] = PrefixMap()

    # -- sessions ----------------------------------------------------------------------------

    def session_established(self, session: Session) -> None:
        self.sessions.add(session)
        self.counters.sessions += 1

    def session_closed(self, session: Session, error: SessionClosed) -> None:
        # Its requests have been ended one by one before this is called.
        self.sessions.discard(session)

    # -- namespaces --------------------------------------------------------------------------

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        """PUBLISH_NAMESPACE (MOQT "Publisher Interactions")."""
        session, namespace = request.session, request.namespace
        if not self._allowed(request, Action.PUBLISH_NAMESPACE, namespace):
            return
        count = self._published_by.get(session, 0)
        if (
            count >= self.config.max_namespaces_per_session
            or self.publications >= self.config.max_namespaces
        ):
            self._overloaded(request, "too many namespaces are published")
            return
        self._published_by[session] = count + 1
        self.publications += 1
        self.published.add(namespace, request)
        request.on_ended = lambda: self._withdrawn(request)
        request.accept()
        logger.info("%s is published", printable_namespace(namespace))
        self._reconsider(namespace)
        for track in self._tracks_by_namespace.under(namespace):
            # An open track is asked for from the new publisher too; a closed one on demand.
            if (
                track.legs
                and not track.track_ended
                and session in self.publishers(track.name.namespace)
            ):
                track.open([session])
        for waiting in self._rendezvous.under(namespace):
            self._end_rendezvous(waiting)
            self._wanted(waiting.request, None)

    def _withdrawn(self, request: IncomingPublishNamespace) -> None:
        """Cancelled, or the session was lost."""
        session, namespace = request.session, request.namespace
        self.published.remove(namespace, request)
        self.publications -= 1
        self._published_by[session] -= 1
        if not self._published_by[session]:
            del self._published_by[session]
        logger.info("%s is published no more", printable_namespace(namespace))
        self._reconsider(namespace)

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        """SUBSCRIBE_NAMESPACE (MOQT "Subscribing to Namespaces")."""
        if not self._allowed(request, Action.SUBSCRIBE_NAMESPACE, request.prefix):
            return
        if len(self._listing_prefix) >= self.config.max_namespaces:
            self._overloaded(request, "too many namespace subscriptions")
            return
        request.on_ended = lambda: self._unlist(request)
        request.accept()
        self._list(request)

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        self._unlist(request)
        if self.policy.allow(
            request.session, Action.SUBSCRIBE_NAMESPACE, request.prefix, request.tokens
        ):
            self._list(request)
        else:
            self.counters.requests_refused += 1
            request.revoke()

    def _list(self, request: IncomingSubscribeNamespace) -> None:
        self._listings.add(request.prefix, request)
        self._listing_prefix[request] = request.prefix
        for known in (self.published, self._held):
            for namespace in known.namespaces_under(request.prefix):
                request.add(namespace)

    def _unlist(self, request: IncomingSubscribeNamespace) -> None:
        prefix = self._listing_prefix.pop(request, None)
        if prefix is not None:
            self._listings.remove(prefix, request)

    def _tell(self, namespace: TrackNamespace) -> None:
        """NAMESPACE or NAMESPACE_DONE to every session whose prefix matches."""
        present = namespace in self.published or namespace in self._held
        for listing in self._listings.above(namespace):
            if present:
                listing.add(namespace)
            else:
                listing.remove(namespace)

    def _reconsider(self, prefix: TrackNamespace) -> None:
        """Publishers of `prefix` came or went: see which tracks only the cache has."""
        for track in self._tracks_by_namespace.under(prefix):
            self._update_held(track)
        self._tell(prefix)

    def _update_held(self, track: UpstreamTrack) -> None:
        """A complete track without a publisher makes the relay its publisher."""
        namespace = track.name.namespace
        held = (
            not track.over
            and not track.legs
            and track.name in self.tracks
            and next(self.published.above(namespace), None) is None
            and track.store.is_complete()
        )
        if held != track.held:
            track.held = held
            if held and not track.track_ended:
                track.store.finish(PublishDoneCode.TRACK_ENDED)
            (self._held.add if held else self._held.remove)(namespace, track)
            self._tell(namespace)

    # -- requests for tracks -----------------------------------------------------------------

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._wanted(request, Action.SUBSCRIBE)

    def fetch_received(self, request: IncomingFetch) -> None:
        self._wanted(request, Action.FETCH)

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        self._wanted(request, Action.TRACK_STATUS)

    def _wanted(self, request: TrackRequest, action: Action | None) -> None:
        """Serve `request`, or find out who can (MOQT "Publisher Interactions").

        No `action`: allowed already.
        """
        name = request.name
        if action is not None and not self._allowed(request, action, name.namespace):
            return
        track = self.tracks.get(name)
        if track is not None and track.servable(request):
            self._serve(track, request)
            return
        if track is not None and track.opening:
            self._wait(request, track)
            return
        publishers = self.publishers(name.namespace)
        if not publishers:
            self._no_publisher(request)
            return
        if not self._may_wait(request):
            return
        if track is None:
            track = self._new_track(name)
            if track is None:
                self._overloaded(request, "too many tracks are in use")
                return
        self._wait(request, track)
        self._activate(track)
        track.open(publishers)

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions to ask for a track of `namespace` (MOQT "Publisher Interactions").

        Those that published exactly it, if any, else those that published a prefix; those
        that said GOAWAY only when there is nobody else.
        """
        requests = self.published.at(namespace) or list(self.published.above(namespace))
        sessions = list(dict.fromkeys(request.session for request in requests))
        return [session for session in sessions if session.goaway is None] or sessions

    def _serve(self, track: UpstreamTrack, request: TrackRequest) -> None:
        self.tracks.move_to_end(track.name)
        request.on_ended = None
        request.accept(track.store)
        if request.state is not RequestState.ESTABLISHED:
            return
        if isinstance(request, IncomingSubscribe):
            self.counters.downstream_subscriptions += 1
        else:
            self.counters.downstream_fetches += 1
        track.requests[request] = None
        track.idle_since = None
        request.on_ended = lambda: self._released(track, request)
        self._activate(track)

    def _released(self, track: UpstreamTrack, request: TrackRequest) -> None:
        track.requests.pop(request, None)

    def _may_wait(self, request: TrackRequest) -> bool:
        if len(self.pending) < self.config.max_pending:
            return True
        self._overloaded(request, "too many requests are waiting")
        return False

    def _wait(self, request: TrackRequest, track: UpstreamTrack) -> None:
        if self._may_wait(request):
            self.pending[request] = _Pending(request, track)
            track.waiting[request] = None
            request.on_ended = lambda: self._unwait(request)

    def _unwait(self, request: TrackRequest) -> None:
        pending = self.pending.pop(request, None)
        if pending is not None and pending.track is not None:
            pending.track.waiting.pop(request, None)
        request.on_ended = None

    def _no_publisher(self, request: TrackRequest) -> None:
        """DOES_NOT_EXIST, or wait for a publisher as long as the subscriber allows."""
        timeout = request.parameters.rendezvous_timeout
        if not isinstance(request, IncomingSubscribe) or not timeout:
            self._refuse(request, RequestErrorCode.DOES_NOT_EXIST, NO_SUCH_TRACK)
        elif self._may_wait(request):
            waits = min(timeout / 1000, self.config.max_rendezvous)
            pending = _Pending(request, None, self.now + waits)
            self.pending[request] = pending
            self._rendezvous.add(request.name.namespace, pending)
            request.on_ended = lambda: self._end_rendezvous(pending)

    def _end_rendezvous(self, pending: _Pending) -> None:
        self._rendezvous.remove(pending.request.name.namespace, pending)
        self._unwait(pending.request)

    # -- answers -----------------------------------------------------------------------------

    def _allowed(self, request: IncomingRequest, action: Action, namespace: TrackNamespace) -> bool:
        if self.policy.allow(request.session, action, namespace, request.tokens):
            return True
        self._refuse(request, RequestErrorCode.UNAUTHORIZED, f"no right to {action.value} here")
        return False

    def _overloaded(self, request: IncomingRequest, reason: str) -> None:
        self._refuse(request, RequestErrorCode.EXCESSIVE_LOAD, reason, self.config.retry_after_ms)

    def _refuse(
        self,
        request: IncomingRequest,
        code: RequestErrorCode,
        reason: str,
        retry_after_ms: int | None = None,
    ) -> None:
        self.counters.requests_refused += 1
        request.reject(code, reason, retry_after_ms=retry_after_ms)

    # -- tracks ------------------------------------------------------------------------------

    def _new_track(self, name: FullTrackName) -> UpstreamTrack | None:
        if len(self.tracks) >= self.config.max_tracks and not self._displace():
            return None
        track = self.tracks[name] = UpstreamTrack(self, name)
        self._tracks_by_namespace.add(name.namespace, track)
        return track

    def _displace(self) -> bool:
        """Forget the track that has been out of use for longest."""
        for _, (_, track) in zip(range(MAX_DISPLACED), self.tracks.items(), strict=False):
            if track.idle and not track.legs:
                track.close_upstream()
                self._forget(track)
                return True
        return False

    def _forget(self, track: UpstreamTrack) -> None:
        self.active.pop(track, None)
        if self.tracks.get(track.name) is track:
            del self.tracks[track.name]
            self._tracks_by_namespace.remove(track.name.namespace, track)
        self.cache.forget(track.store)
        self._update_held(track)

    def _activate(self, track: UpstreamTrack) -> None:
        self.active[track] = None

    def track_ready(self, track: UpstreamTrack) -> None:
        for request in tuple(track.waiting):
            self._unwait(request)
            self._serve(track, request)

    def track_refused(self, track: UpstreamTrack, error: RequestError) -> None:
        try:
            code = RequestErrorCode(error.code)
        except ValueError:
            code = RequestErrorCode.INTERNAL_ERROR
        reason, retry = error.reason, error.retry_after_ms
        if code not in _PASSED_ON:
            code, reason = RequestErrorCode.INTERNAL_ERROR, f"the publisher said {code.name}"
        if code is RequestErrorCode.DOES_NOT_EXIST:
            reason, retry = NO_SUCH_TRACK, None
        for request in tuple(track.waiting):
            self._unwait(request)
            self._refuse(request, code, reason, retry)

    def track_ended(self, track: UpstreamTrack) -> None:
        self._update_held(track)

    def track_malformed(self, track: UpstreamTrack, reason: str) -> None:
        logger.warning("%s: malformed track: %s", track.name, escaped(reason))
        self.track_refused(track, RequestError(RequestErrorCode.MALFORMED_TRACK, reason))
        track.end_malformed(reason)
        self._forget(track)

    def _object_gone(self, store: TrackStore, stored: StoredObject) -> None:
        track = self.tracks.get(store.name)
        if track is not None and track.store is store:
            track.evicted(stored)
            if not store.octets:
                self._activate(track)  # perhaps there is nothing left of it

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, lingering, expiry. Twice a second is enough."""
        self.now = now
        self.cache.expire(now)
        for pending in tuple(self.pending.values()):
            if pending.deadline is not None and now > pending.deadline:
                self._end_rendezvous(pending)
                self._refuse(pending.request, RequestErrorCode.TIMEOUT, "no publisher has appeared")
        for track in tuple(self.active):
            track.tick(now)
            if track.disposable:
                self._forget(track)
            elif track.idle and not track.legs and not track.fetches and not track.queue:
                self.active.pop(track, None)

    # -- numbers -----------------------------------------------------------------------------

    @property
    def downstream_subscriptions(self) -> int:
        return self._requests(IncomingSubscribe)

    @property
    def downstream_fetches(self) -> int:
        return self._requests(IncomingFetch)

    @property
    def upstream_subscriptions(self) -> int:
        return sum(leg.established for track in self.active for leg in track.legs.values())

    @property
    def upstream_fetches(self) -> int:
        return sum(len(track.fetches) for track in self.active)

    def namespaces(self, prefix: TrackNamespace = ()) -> set[TrackNamespace]:
        """The namespaces a SUBSCRIBE_NAMESPACE for `prefix` is told of."""
        return {
            namespace
            for known in (self.published, self._held)
            for namespace in known.namespaces_under(prefix)
        }

    def _requests(self, kind: type[TrackRequest]) -> int:
        return sum(
            isinstance(request, kind) and request.state is RequestState.ESTABLISHED
            for track in self.active
            for request in track.requests
        )
