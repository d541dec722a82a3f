"""The relay: who publishes what, who asks for it, and the tracks in between (MOQT "Relays").

Sans-IO: one `Relay` is the `SessionHandler` of all sessions; `tick(now)` brings the time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from functools import partial

from moqt.delivery.scheduler import DeliveryLimits
from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
    OpenRequest,
    OutgoingPublish,
    RequestState,
    SubscriberSide,
)
from moqt.session import Session, SessionHandler, session_of
from moqt.track.knowledge import properties_price
from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.errors import RequestError, SessionClosed, escaped
from moqt.values.messages import Goaway, Redirect
from moqt.values.names import FullTrackName, TrackNamespace
from moqt.values.tokens import Token
from relay.askable import Askable
from relay.audience.downstream import TrackRequest
from relay.audience.namespaces import Namespaces
from relay.audience.offers import Offers
from relay.audience.prefixes import PrefixMap
from relay.audience.waiting import Waiting
from relay.cache import Share, cache_of
from relay.config import Clock, Counters, RelayConfig
from relay.counted import Numbers
from relay.published_here import OnDisk, PublishedHere
from relay.rights.policy import Action, AllowAll, Policy
from relay.rights.refusals import Refusals, no_right, passed_on
from relay.sources.hops import claims, is_circle, waiting_relays
from relay.sources.kept import Kept
from relay.sources.subscriptions import NO_ROOM, UpstreamPublish, UpstreamSubscription
from relay.track import UpstreamTrack

logger = logging.getLogger("relay")

NO_SUCH_TRACK = "no such track"
"""One reason for every DOES_NOT_EXIST: who asks learns nothing about who publishes."""

MAX_DISPLACED = 64
"""Tracks looked at to find one that can make room for another."""


class Relay(SessionHandler):
    """Accepts publishers and subscribers, and joins them over the tracks they share."""

    def __init__(
        self,
        config: RelayConfig | None = None,
        policy: Policy | None = None,
        *,
        share: Share | None = None,
        counters: Counters | None = None,
        clock: Clock | None = None,
        on_disk: OnDisk | None = None,
    ) -> None:
        """`counters`, `clock` and the cache, of which this has a `share`, are given when others
        have them too; their owner has Objects expire. `on_disk`: what the disk has of the scope."""
        self.config = config or RelayConfig()
        self.counters = counters or Counters()
        self.refusals = Refusals(self.config, policy or AllowAll(), self.counters)
        self._own_cache = share is None
        self.share = share or cache_of(self.config).share("/")
        self.cache = self.share.cache
        self.clock = clock or Clock()
        self.upstream_subscriptions = 0  # that are established
        self.sessions: set[Session] = set()
        self.parts: tuple[Relay, ...] = (self,)
        """The relays that this one is made of."""
        self._counted = Numbers()
        """Of the sessions that have ended."""
        self.upstreams = self.refusals.trusted
        """Sessions to upstream relays, with their places: asked for what no publisher here has."""
        self.tracks: OrderedDict[FullTrackName, UpstreamTrack] = OrderedDict()
        """Least recently used first."""
        self.active: dict[UpstreamTrack, None] = {}
        """The tracks that have something to do on tick; the others are only cached."""
        self.tracks_by_namespace: PrefixMap[UpstreamTrack] = PrefixMap()
        self.lingering: PrefixMap[UpstreamTrack] = PrefixMap()
        """Of those, the ones that wait for a source; some that wait no more until the next tick."""
        self.namespaces = Namespaces(self.refusals)
        self.namespaces.events.appeared.append(self._publisher_appeared)
        self.namespaces.events.withdrawn.append(self._publishers_changed)
        self.askable = Askable(self.namespaces, self.upstreams)
        self.shelf = None if on_disk is None else on_disk.shelf
        self.published_here = PublishedHere(self.namespaces, self.tracks, on_disk)
        self.offers = Offers(self.refusals, self.tracks_by_namespace.under)
        self.waiting = Waiting(self.config.max_pending)

    # -- sessions ----------------------------------------------------------------------------

    def session_established(self, session: Session) -> None:
        self.counters.sessions += 1
        self.enter(session)

    def enter(self, session: Session) -> None:
        """A session that is established is one of this scope."""
        self.sessions.add(session)
        self.refusals.believe(session)
        config = self.config
        session.scheduler.limits = DeliveryLimits(
            config.pending_subgroups,
            config.pending_datagrams,
            config.pending_fills,
            config.stream_patience,
        )

    def session_closed(self, session: Session, error: SessionClosed) -> None:
        # Its requests have been ended one by one before this is called.
        self.sessions.discard(session)
        self._counted = Numbers.total([self._counted, Numbers.of([session])])
        self.upstreams.pop(session, None)

    def add_upstream(self, session: Session, place: int = 0) -> None:
        """A session to an upstream relay is established, the `place`th of them."""
        self.upstreams[session] = place
        self.refusals.reached()
        for request in self.waiting.under(()):
            self.waiting.done(request)
            self._wanted(request, None)
        for track in self.lingering.under(()):
            if track.lingers:
                track.appeared(session)

    def check_token(self, session: Session, token: Token) -> RequestErrorCode | None:
        return self.refusals.policy.check(session, token)

    def request_goaway_received(self, request: OpenRequest, goaway: Goaway) -> None:
        """One request is to move; it can only move within this session."""
        if isinstance(request, SubscriberSide) and isinstance(
            request.receiver, UpstreamSubscription
        ):
            request.receiver.track.reissue(request.receiver)
        elif isinstance(request, OutgoingPublish):
            track = self.tracks.get(request.name)
            if track is not None:
                self.offers.again(track, request)

    # -- namespaces --------------------------------------------------------------------------

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        self.namespaces.publish(request)

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        self.namespaces.subscribe(request)

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        self.namespaces.prefix_changed(request)

    def check_prefix(
        self,
        request: IncomingSubscribeNamespace | IncomingSubscribeTracks,
        prefix: TrackNamespace,
    ) -> RequestErrorCode | None:
        action = (
            Action.SUBSCRIBE_NAMESPACE
            if isinstance(request, IncomingSubscribeNamespace)
            else Action.SUBSCRIBE_TRACKS
        )
        if self.refusals.may(request, action, prefix):
            return None
        self.refusals.note(request, RequestErrorCode.UNAUTHORIZED, no_right(action))
        return RequestErrorCode.UNAUTHORIZED

    def _publisher_appeared(self, namespace: TrackNamespace) -> None:
        self._publishers_changed(namespace)
        sessions = [session_of(request) for request in self.namespaces.published.at(namespace)]
        for track in self.tracks_by_namespace.under(namespace):
            # An open track is asked for from the new publisher too; a closed one on demand.
            if not (track.subscriptions or track.lingers) or track.track_ended:
                track.origin.unasked = track.track_ended and not track.subscriptions
                continue
            if not track.idle or any(not each.published for each in track.subscriptions):
                track.appeared(sessions[-1])
        for request in self.waiting.under(namespace):
            self.waiting.done(request)
            self._wanted(request, None)

    def _publishers_changed(self, prefix: TrackNamespace) -> None:
        """See which tracks only the cache has."""
        above = self.namespaces.published.above
        for track in self.tracks_by_namespace.under(prefix):
            if track.origin.unasked and next(above(track.name.namespace), None) is None:
                track.origin.unasked = False  # who has appeared has left again
            self.published_here.update(track)

    # -- publications ------------------------------------------------------------------------

    def publish_received(self, request: IncomingPublish) -> None:
        """PUBLISH (MOQT "Publisher Interactions"): it is always of interest to a cache."""
        if self.refusals.admits(request, Action.PUBLISH, request.name.namespace):
            self.take_publication(request)

    def take_publication(self, request: IncomingPublish) -> None:
        """A PUBLISH that is allowed, or that we have asked for."""
        name = request.name
        if self._malformed(request, name):
            return
        track = self._known(name)
        kept = track.store.knowledge.properties if track is not None else 0
        if not self.share.room(properties_price(request.properties) - kept):
            self.refusals.no_room(request, NO_ROOM)
            return
        track = track or self._new_track(name)
        if track is None:
            self.refusals.overloaded(request, "max_tracks", "tracks")
            return
        self.tracks.move_to_end(name)
        self.counters.publications += 1
        for waiting in self.waiting.of(name):
            self.waiting.done(waiting)
            self.waiting.for_track(waiting, track.downstream)
        track.published_by(UpstreamPublish(track, request))
        self.published_here.update(track)

    def subscribe_tracks_received(self, request: IncomingSubscribeTracks) -> None:
        self.offers.subscribe(request)

    def subscribe_tracks_changed(self, request: IncomingSubscribeTracks) -> None:
        self.offers.changed(request)

    # -- requests for tracks -----------------------------------------------------------------

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._wanted(request, Action.SUBSCRIBE)

    def fetch_received(self, request: IncomingFetch) -> None:
        self._wanted(request, Action.FETCH)

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        if not self.published_here.asked_of_disk(request, self.refusals):
            self._wanted(request, Action.TRACK_STATUS)

    def _wanted(self, request: TrackRequest, action: Action | None) -> None:
        """Serve `request`, or find out who can (MOQT "Publisher Interactions").

        No `action`: allowed already.
        """
        name = request.name
        if action is not None and not self.refusals.admits(request, action, name.namespace):
            return
        if claims(request):
            self.refusals.claim_ignored(session_of(request))
        elif is_circle(request):
            self.refusals.refuse(request, RequestErrorCode.DOES_NOT_EXIST, NO_SUCH_TRACK)
            return
        if self._malformed(request, name):
            return
        track = self._known(name)
        if track is None and self._on_disk(name):
            self.refusals.overloaded(request, "max_tracks", "tracks")
            return
        if track is not None and track.only_published:
            # While nobody used it nobody else was asked for it.
            track.open()
        circling = [] if track is None else self.askable.circling(track, request)
        if (
            track is not None
            and track.servable(request)
            and not track.demand.stale
            and not track.origin.probing
            and not circling
        ):
            self._serve(track, request)
            return
        publishers: list[Session] = []
        if track is not None and (
            track.origin.probing or (track.lingers and isinstance(request, IncomingSubscribe))
        ):
            pass  # it waits with the others
        elif track is None or not track.subscriptions or circling:
            if not self.namespaces.publishers(name.namespace) and self._looks(request):
                return
            publishers = self.askable.publishers(name.namespace, request)
            if not publishers:
                self._no_publisher(request)
                return
            left = self.refusals.absent.left(name, publishers, self.clock.now)
            if left is not None and track is not None and track.origin.unasked:
                track.origin.unasked = False  # they have not got it: what is cached holds
                self._wanted(request, None)
                return
            if left is not None and not request.parameters.rendezvous_timeout:
                self.counters.requests_absent += 1
                self._absent(request, int(left * 1000), publishers)
                return
        if not self._may_wait(request):
            return
        if track is None:
            track = self._new_track(name)
            if track is None:
                self.refusals.overloaded(request, "max_tracks", "tracks")
                return
        deadline = None
        if track.rendezvous and not request.parameters.rendezvous_timeout:
            # Upstream may answer later than this subscriber wants to wait.
            deadline = self.clock.now + self.config.upstream_timeout
        self.askable.note(track, request)
        self.waiting.for_track(request, track.downstream, deadline)
        self.track_busy(track)
        if publishers:
            track.open(*circling)
        else:
            track.demand.catch_up(request)
            self.askable.chase(track, request, lambda: self.looked(request, circles=True))

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        return self.askable.publishers(namespace)

    def ranks(self, track: UpstreamTrack) -> list[list[Session]]:
        return self.askable.ranks(track)

    def _malformed(self, request: IncomingRequest, name: FullTrackName) -> bool:
        """Answer MALFORMED_TRACK for a while after a track was found to be so."""
        try:
            self.refusals.malformed.refuse(name, self.clock.now)
        except RequestError as error:
            self.refusals.refuse(
                request,
                RequestErrorCode.MALFORMED_TRACK,
                error.reason,
                retry=error.retry_after_ms,
            )
            return True
        return False

    def _serve(self, track: UpstreamTrack, request: TrackRequest) -> None:
        self.tracks.move_to_end(track.name)
        self.askable.note(track, request)
        if isinstance(request, IncomingFetch) and track.ranges.asks_for_end(
            request, partial(self.track_serve, track, request)
        ):
            self.waiting.for_track(request, track.downstream)
            return
        if isinstance(request, IncomingSubscribe):
            request.updates.gate = track.demand.update_received
        request.accept(track.store)
        if request.state is not RequestState.ESTABLISHED:
            return
        if isinstance(request, IncomingSubscribe):
            self.counters.downstream_subscriptions += 1
        else:
            self.counters.downstream_fetches += 1
        track.requests.add(request)
        track.idle_since = None
        request.when_ended(partial(track.requests.discard, request))
        self.track_busy(track)
        if isinstance(request, IncomingSubscribe):
            track.demand.listened()

    def _looks(self, request: TrackRequest) -> bool:
        """Whether `request` waits, or is refused, until the directory has said who has it."""
        finder = self.askable.looks_for(request)
        if finder is None:
            return False
        if self._may_wait(request):
            self.waiting.for_publisher(request, self.clock.now + self.config.upstream_timeout)
            finder.look_up(request.namespace, lambda: self.looked(request))
        return True

    def looked(self, request: TrackRequest, *, circles: bool = False) -> None:
        """It is known who may have what `request` waits for, or that those wait for it in turn."""
        if request in self.waiting.pending:
            self.waiting.done(request)
            if circles:
                self._absent(request)
            else:
                self._wanted(request, None)

    def source_found(self, namespace: TrackNamespace, session: Session) -> None:
        """Another relay has tracks of `namespace`: readers may wait for such a one."""
        for track in self.lingering.under(namespace):
            if track.lingers:
                track.appeared(session)
            else:
                self.lingering.remove(track.name.namespace, track)

    def _may_wait(self, request: TrackRequest) -> bool:
        session = session_of(request)
        if self.waiting.room(session):
            return True
        own = None if self.waiting.full else self.waiting.of_session(session)
        self.refusals.overloaded(request, "max_pending", "requests that wait for a publisher", own)
        return False

    def _no_publisher(self, request: TrackRequest) -> None:
        """DOES_NOT_EXIST, or wait for a publisher as long as the subscriber allows."""
        timeout = request.parameters.rendezvous_timeout
        if not isinstance(request, IncomingSubscribe) or not timeout:
            self._absent(request)
        elif self._may_wait(request):
            most = self.clock.now + min(timeout / 1000, self.config.max_rendezvous)
            self.waiting.for_publisher(request, self.waiting.rendezvous_ends(request, most))

    def _absent(
        self, request: TrackRequest, retry: int | None = None, denied: Collection[Session] = ()
    ) -> None:
        """Nobody who was asked has the track: it does not exist, if everybody could be asked, or
        if all here who publish just its namespace have `denied` it, for now."""
        if self.askable.lacks(request):
            origins = self.namespaces.published.at(request.namespace)
            if not origins or any(session_of(each) not in denied for each in origins):
                self.counters.requests_unreachable += 1
                self.refusals.unreachable(request)
                return
            retry = retry or self.config.retry_after_ms
        code = RequestErrorCode.DOES_NOT_EXIST
        self.refusals.refuse(request, code, NO_SUCH_TRACK, retry=retry)

    # -- tracks ------------------------------------------------------------------------------

    def _new_track(self, name: FullTrackName) -> UpstreamTrack | None:
        if len(self.tracks) >= self.config.max_tracks and not self._displace():
            return None
        track = self.tracks[name] = UpstreamTrack(self, name)
        if self.shelf is not None:
            track.filling.restore(Kept(self.shelf, track.filling))
        self.tracks_by_namespace.add(name.namespace, track)
        return track

    def _known(self, name: FullTrackName) -> UpstreamTrack | None:
        """The track of that name, if something of it is known, be it on the disk alone."""
        track = self.tracks.get(name)
        if track is None and self._on_disk(name):
            track = self._new_track(name)
            if track is not None:
                # who publishes it by now may say otherwise
                track.origin.unasked = bool(self.namespaces.publishers(name.namespace))
                self.track_busy(track)  # perhaps nobody is served it
        return track

    def _on_disk(self, name: FullTrackName) -> bool:
        return self.shelf is not None and name in self.shelf.entries

    def _displace(self) -> bool:
        """Forget the track that has been out of use for longest."""
        for _, (_, track) in zip(range(MAX_DISPLACED), self.tracks.items(), strict=False):
            if track.idle and not track.subscriptions:
                track.close_upstream()
                self._forget(track)
                return True
        return False

    def _forget(self, track: UpstreamTrack) -> None:
        self.active.pop(track, None)
        self.lingering.remove(track.name.namespace, track)
        if track.filling.kept is not None:
            track.filling.kept.close()
        if self.tracks.get(track.name) is track:
            del self.tracks[track.name]
            self.tracks_by_namespace.remove(track.name.namespace, track)
        self.cache.forget(track.store)
        self.published_here.update(track)

    def track_busy(self, track: UpstreamTrack) -> None:
        self.active[track] = None
        if track.lingers:
            self.lingering.add(track.name.namespace, track)

    def track_available(self, track: UpstreamTrack) -> None:
        self.refusals.absent.forget(track.name)
        self.offers.available(track)

    def track_serve(self, track: UpstreamTrack, request: TrackRequest) -> None:
        self.waiting.done(request)
        self._serve(track, request)

    def track_refused(self, track: UpstreamTrack, error: RequestError) -> None:
        if track.origin.unasked:
            track.origin.unasked = False  # who has appeared has not got it: what is cached holds
            self._serve_again(track)
            return
        code, reason = passed_on(error)
        retry = error.retry_after_ms
        if code is RequestErrorCode.DOES_NOT_EXIST:
            if retry is not None:
                until = self.clock.now + retry / 1000
                self.refusals.absent.add(track.name, track.candidates.denied, until)
            self._denied(track, retry)
            return
        redirect = Redirect(*error.redirect) if error.redirect is not None else None
        for request in tuple(track.waiting):
            self.waiting.done(request)
            self.refusals.refuse(request, code, reason, retry=retry, redirect=redirect)

    def _denied(self, track: UpstreamTrack, retry: int | None) -> None:
        """Those who were asked have not got it, at least not for all who wait."""
        asked_for, again = track.candidates.waiting, []
        for request in tuple(track.waiting):
            self.waiting.done(request)
            if asked_for and not waiting_relays(request):
                again.append(request)  # a relay that waited with it may be who has the track
            elif not self._looks(request):
                self._absent(request, retry, track.candidates.denied)
        for request in again:
            self._wanted(request, None)

    def track_circle(self, track: UpstreamTrack) -> None:
        for request in tuple(track.waiting):
            if self.askable.circling(track, request):
                self.waiting.done(request)
                self._absent(request)

    def track_ended(self, track: UpstreamTrack) -> None:
        self.track_busy(track)  # perhaps there is nothing of it
        if not track.subscriptions:
            self.offers.withdrawn(track)
            self._serve_again(track)
        self.published_here.update(track)

    def _serve_again(self, track: UpstreamTrack) -> None:
        """Those who wait have to be served from elsewhere: the cache, or another publisher."""
        for request in tuple(track.waiting):
            self.waiting.done(request)
            self._wanted(request, None)

    def track_renewed(self, track: UpstreamTrack, reason: str) -> None:
        logger.warning("%s: what was cached of it is dropped: %s", track.name, escaped(reason))
        self.offers.withdrawn(track)
        code, stream_code = PublishDoneCode.INTERNAL_ERROR, StreamErrorCode.INTERNAL_ERROR
        track.downstream.end(code, stream_code, "the publisher has begun the track anew")
        self.published_here.update(track)
        if track.established:
            self.offers.available(track)

    def track_malformed(self, track: UpstreamTrack, reason: str) -> None:
        logger.warning("%s: malformed track: %s", track.name, escaped(reason))
        self.refusals.malformed.add(track.name, reason, self.clock.now)
        self.track_refused(track, RequestError(RequestErrorCode.MALFORMED_TRACK, reason))
        self.offers.withdrawn(track)
        code, stream_code = PublishDoneCode.MALFORMED_TRACK, StreamErrorCode.MALFORMED_TRACK
        track.downstream.end(code, stream_code, reason)
        if track.filling.kept is not None:
            track.filling.kept.drop()
        self._forget(track)

    def purge(self, prefix: TrackNamespace) -> tuple[int, int, int]:
        """Drop what is cached of tracks under `prefix`, in memory and on the disk: how many and how
        many octets, and how many stay because somebody reads them."""
        under = self.tracks_by_namespace.under(prefix)
        return self.published_here.purge(prefix, under, self._forget)

    @property
    def in_use(self) -> bool:
        """Somebody is here, or something of any track, in memory or on the disk."""
        kept = self.shelf is not None and self.shelf.entries
        return bool(self.sessions or self.tracks or kept)

    def forget_all(self) -> None:
        """Give up what is cached; no session is left."""
        for track in tuple(self.tracks.values()):
            track.close_upstream()
            self._forget(track)

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: deadlines, lingering, expiry. Twice a second is enough."""
        self.clock.now = now
        self.refusals.malformed.tick(now)
        self.refusals.absent.tick(now)
        if self._own_cache:
            self.cache.expire(now)
        for request in self.waiting.overdue(now):
            self.waiting.done(request)
            self.refusals.refuse(request, RequestErrorCode.TIMEOUT, "no publisher has appeared")
        for track in tuple(self.active):
            track.tick(now)
            if not track.lingers:
                self.lingering.remove(track.name.namespace, track)
            if not track.subscriptions and not track.published_here:
                self.published_here.update(track)  # its last FETCH may have made it complete
            if track.disposable:
                self._forget(track)
            elif track.settled:
                self.active.pop(track, None)

    # -- numbers -----------------------------------------------------------------------------

    def numbers(self) -> Numbers:
        """What all sessions, ended ones included, have counted."""
        return Numbers.total([self._counted, Numbers.of(self.sessions)])
