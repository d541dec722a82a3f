"""One track of a relay: where its Objects come from, and who waits for them.

`UpstreamTrack` owns the TrackStore that downstream requests are served from. It fills it
with a subscription to every matching publisher (`relay.sources.subscriptions`) and, for what
was published before or has been evicted, with FETCHes (`relay.sources.missing`). Sans-IO.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from moqt.requests import IncomingFetch, OutgoingPublish
from moqt.session import Session
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError
from moqt.values.names import FullTrackName, Location, TrackNamespace, location_after
from relay.audience.downstream import Downstream, TrackRequest, live
from relay.cache import Share
from relay.config import Clock, Counters, RelayConfig
from relay.demand import Demand
from relay.sources.candidates import Candidates
from relay.sources.filling import Filling
from relay.sources.missing import Ranges
from relay.sources.origin import Origin
from relay.sources.subscriptions import UpstreamPublish, UpstreamSubscribe, UpstreamSubscription
from relay.sources.wanted import EVERYTHING

_ASKED_ANEW = frozenset({PublishDoneCode.UPDATE_FAILED, PublishDoneCode.TOO_FAR_BEHIND})
"""Ends of a subscription of ours that say nothing of the track."""

_NOT_AWAITED = frozenset({PublishDoneCode.UNAUTHORIZED})
"""Ends that no publisher takes back by coming again."""


class Home(Protocol):
    """What a track needs of its relay."""

    config: RelayConfig
    share: Share
    counters: Counters
    clock: Clock
    tracks: OrderedDict[FullTrackName, UpstreamTrack]
    upstreams: dict[Session, int]
    """Sessions to upstream relays."""
    upstream_subscriptions: int
    """Established subscriptions to publishers."""

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions that may be asked for a track of `namespace`, the best first."""

    def ranks(self, track: UpstreamTrack) -> list[list[Session]]:
        """The same for `track`, by rank: those of one are asked together, those of the next
        when none of them has it."""

    def track_serve(self, track: UpstreamTrack, request: TrackRequest) -> None:
        """Upstream is established and up to date: serve `request`, which waited for that."""

    def track_available(self, track: UpstreamTrack) -> None:
        """A publisher has it: offer it to who asked for such tracks."""

    def track_refused(self, track: UpstreamTrack, error: RequestError) -> None:
        """No publisher gave the track: tell who waits."""

    def track_circle(self, track: UpstreamTrack) -> None:
        """It may come from upstream relays alone: they cannot have it from here."""

    def track_ended(self, track: UpstreamTrack) -> None:
        """No upstream subscription is left, or the store lost an Object."""

    def track_malformed(self, track: UpstreamTrack, reason: str) -> None:
        """The track is unusable: end all its requests and forget it."""

    def track_renewed(self, track: UpstreamTrack, reason: str) -> None:
        """Another content is in the place of what it was: end who was served that."""

    def track_busy(self, track: UpstreamTrack) -> None:
        """The track has something to do on tick."""


class UpstreamTrack:
    """A store, the upstream requests that fill it, and the downstream ones it serves."""

    def __init__(self, home: Home, name: FullTrackName) -> None:
        self.home = home
        self.config = home.config
        self.cache = home.share.cache
        self.counters = home.counters
        self.clock = home.clock
        self.name = name
        self.filling = Filling(name, self.config, home.share, self.counters, self.clock)
        self.store = self.filling.store
        self.ranges = Ranges(self)
        self.origin = Origin(self)
        self.filling.contradicted = self.origin.contradicted
        self.subscriptions: dict[UpstreamSubscription, None] = {}
        self.downstream = Downstream()
        self.waiting = self.downstream.waiting
        self.requests = self.downstream.requests
        self.offers = self.downstream.offers
        self.demand = Demand(self)
        self._connect(self.store)
        self.idle_since: float | None = None
        self.published_here = False
        """Complete and without a publisher: the relay is the publisher now."""
        self.read_above = False
        """Another relay has asked for it, or was offered it."""
        self.over = False
        self.candidates = Candidates(lambda: home.ranks(self), self.config, self.clock)
        self._lost: tuple[int, str] | None = None
        """How the last subscription ended, while another, or what was missed, may come."""
        self._end_unseen = False
        """It ended while its publication was paused, or narrowed: there may be Objects that nobody
        told of."""

    def _connect(self, store: TrackStore) -> None:
        store.on_used = self.ranges.used
        store.on_evicted = self._evicted
        store.on_new_group = self.demand.ask_new_group
        store.source = self.ranges

    # -- state ---------------------------------------------------------------------------

    @property
    def established(self) -> bool:
        return any(each.established for each in self.subscriptions)

    @property
    def rendezvous(self) -> bool:
        """An upstream relay was asked to wait for a publisher, too."""
        return any(
            isinstance(each, UpstreamSubscribe) and each.rendezvous for each in self.subscriptions
        )

    @property
    def track_ended(self) -> bool:
        return self.store.ended and self.store.end_code == PublishDoneCode.TRACK_ENDED

    @property
    def idle(self) -> bool:
        """Nobody downstream needs it."""
        return self.downstream.idle

    @property
    def lingers(self) -> bool:
        """Its last source is lost, and those who listen wait for another."""
        return self.candidates.lingers

    @property
    def only_published(self) -> bool:
        """Out of use, and only PUBLISHes bring it."""
        return self.idle and self.established and all(s.published for s in self.subscriptions)

    def publishes(self, session: Session) -> bool:
        """Whether `session` is a publisher of the track."""
        return any(each.session is session for each in self.subscriptions)

    def servable(self, request: TrackRequest) -> bool:
        """Whether `request` can be answered without waiting for a publisher."""
        if self.established:
            return True
        ended = self.track_ended and not self._end_unseen and not self.origin.unasked
        if ended and (self.filling.holds or self.filling.whole):
            return True
        if self.home.publishers(self.name.namespace):
            return ended
        # Without any publisher the cache is all there is; what it misses resets the stream.
        return isinstance(request, IncomingFetch) and self.filling.holds

    def sources(self) -> list[Session]:
        """Who can be asked for a range, in order."""
        established = {each.session for each in self.subscriptions if each.established}
        return [s for s in self.candidates.ordered(established) if s.closed is None]

    # -- upstream subscriptions ------------------------------------------------------------

    def open(self, *declined: Session) -> None:
        """Ask for it: a new round, in which all but the `declined` are asked, refused or not."""
        self.candidates.begin(*declined)
        self._ask()
        if not self.subscriptions:
            self.home.track_refused(self, RequestError(RequestErrorCode.DOES_NOT_EXIST))

    def appeared(self, session: Session) -> None:
        """`session` may have it, too: it has come, or published a namespace of it."""
        self.candidates.appeared(session)
        self._ask()

    def _ask(self, *, beyond: bool = False) -> None:
        """SUBSCRIBE to those whose turn it is (MOQT "Publisher Interactions")."""
        sessions = self.candidates.next(self.publishes, beyond=beyond)
        self._subscribe([UpstreamSubscribe(self, each) for each in sessions])

    def _subscribe(self, new: list[UpstreamSubscribe]) -> None:
        self.subscriptions.update(dict.fromkeys(new))
        for subscription in new:
            self._open(subscription)

    def _open(self, subscription: UpstreamSubscribe) -> None:
        patience = 0
        if subscription.session in self.home.upstreams:
            patience = min(self.downstream.rendezvous_ms, round(self.config.max_rendezvous * 1000))
        wanted = self.demand.wanted
        subscription.unasked = wanted is None
        self.candidates.waiting = self.downstream.relays if self.read_above else frozenset()
        error = subscription.open(
            wanted or EVERYTHING,
            waiting=self.candidates.waiting,
            forward=self.demand.forward,
            new_group=self.demand.new_group(),
            rendezvous_ms=patience,
        )
        if error is not None:
            self.upstream_failed(subscription, error)

    def published_by(self, subscription: UpstreamPublish) -> None:
        """A PUBLISH was accepted; a SUBSCRIBE to the same publisher that it crosses is moot."""
        if self.over:
            return
        crossed = [
            other
            for other in self.subscriptions
            if isinstance(other, UpstreamSubscribe)
            and other.session is subscription.session
            and not other.established
        ]
        for other in crossed:
            self._give_up(other)
        self.subscriptions[subscription] = None
        subscription.accept()
        for other in crossed:
            if other.replaces is not None:
                self._give_up(other.replaces)

    def reissue(self, subscription: UpstreamSubscription) -> None:
        """The publisher wants this request to move (GOAWAY on it): SUBSCRIBE anew, and give
        it up when that is established."""
        if subscription in self.subscriptions and not any(
            isinstance(other, UpstreamSubscribe) and other.replaces is subscription
            for other in self.subscriptions
        ):
            self._subscribe([UpstreamSubscribe(self, subscription.session, replaces=subscription)])

    def move(self, old: Session, new: Session) -> None:
        """The upstream session goes away: SUBSCRIBE on the new one, then leave the old one. A
        track that nobody uses is left at once, and asked for again when somebody does."""
        subscriptions = [each for each in self.subscriptions if each.session is old]
        if not self.idle:
            self._subscribe([UpstreamSubscribe(self, new, replaces=each) for each in subscriptions])
            return
        for subscription in subscriptions:
            self._give_up(subscription)
        if not self.subscriptions:
            self._finish(PublishDoneCode.GOING_AWAY, "the publisher has moved")

    def _give_up(self, subscription: UpstreamSubscription) -> None:
        if subscription in self.subscriptions:
            self._drop(subscription)
            subscription.cancel()

    def upstream_accepted(self, subscription: UpstreamSubscription) -> None:
        request = subscription.request
        assert request is not None
        alone = not self.established
        subscription.accepted()
        self._end_unseen = False
        self.home.upstream_subscriptions += 1
        self._lost = None
        self.counters.publishers_returned += self.candidates.settle()
        self.origin.accepted(subscription, request.largest, alone=alone)
        store = self.store
        if store.ended and not (self.track_ended and store.end_of_track is not None):
            # A subscription that is still draining would have a hole it does not know of.
            for old in self.downstream.subscriptions():
                old.end(store.end_code or PublishDoneCode.INTERNAL_ERROR, "the publisher was lost")
            store.reopen()
        self.filling.take_properties(request.properties)
        if not self._learn(subscription):
            return
        if subscription.replaces is not None:
            self._give_up(subscription.replaces)
        self.ranges.forgive()
        self.home.track_busy(self)
        self.home.track_available(self)
        self.demand.widen(subscription)
        self._recover(subscription)
        self._ready(subscription)
        if self.waiting:
            self.demand.catch_up()

    def upstream_told(self, subscription: UpstreamSubscription) -> None:
        """An update was answered, with the Largest Object at that moment."""
        if subscription in self.subscriptions and self._learn(subscription):
            self._ready(subscription)

    def _learn(self, subscription: UpstreamSubscription) -> bool:
        """Take over what the publisher says the Largest Object is; False: it cannot be."""
        request, store = subscription.request, self.store
        assert request is not None
        largest, before = request.largest, store.largest
        if largest is None or (before is not None and largest <= before):
            return True
        if store.end_of_track is not None and largest >= store.end_of_track:
            reason = "the Largest Object lies beyond the end of the track"
            if not self.origin.contradicted(reason):
                self.malformed(reason)
            return not self.over
        store.largest = largest
        slept, subscription.slept = subscription.slept, subscription.paused
        if subscription.narrowed and not slept:
            return True  # what is wanted of that has come, or comes
        if self.downstream.listens:
            self.ranges.missed(
                location_after(before) if before is not None else Location(0, 0), largest
            )
            self._recover(subscription)
        return True

    def _recover(self, subscription: UpstreamSubscription) -> None:
        """FETCH what was missed, now that `subscription` is there, unless another brings it."""
        going = subscription, subscription.replaces
        if (
            self.ranges.missing
            and self.downstream.listens
            and not any(other.current for other in self.subscriptions if other not in going)
        ):
            # It was published while nothing came (MOQT "Relays"), or is given up.
            self.ranges.recover()

    def _ready(self, subscription: UpstreamSubscription) -> None:
        """Who waited can go on; who wants Objects, only when they come."""
        if self.origin.probing:
            return  # `confirmed` follows
        flows = subscription.flows
        if flows:
            self.demand.patience = None
        for request in tuple(self.waiting):
            if flows or not live(request):
                self.home.track_serve(self, request)
        if flows:
            self.downstream.let_go()

    def upstream_failed(self, subscription: UpstreamSubscription, error: MoqtError) -> None:
        """Refused, cancelled by the publisher, or its session ended."""
        if subscription not in self.subscriptions:
            return
        if not self._drop(subscription):
            self.candidates.refuse(subscription.session, error)
            if not self.subscriptions:
                self._ask()
            elif self.read_above:
                self._ask()
                self.home.track_circle(self)
            if not self.subscriptions and not self.lingers:
                refusal = self.candidates.take_refusal()
                if self._lost is not None:
                    self._finish(*self._lost)
                self.home.track_refused(self, refusal)
            return
        if isinstance(error, RequestError) and error.code == RequestErrorCode.MALFORMED_TRACK:
            self.malformed(error.reason)
        else:
            self._lost_upstream(
                subscription, PublishDoneCode.INTERNAL_ERROR, "the publisher was lost"
            )

    def upstream_done(self, subscription: UpstreamSubscription, code: int, reason: str) -> None:
        """PUBLISH_DONE, and the streams it counts have ended (MOQT "PUBLISH_DONE")."""
        if not self._drop(subscription):
            return
        store = self.store
        self._end_unseen = subscription.narrowed or (
            subscription.paused and store.end_of_track is None
        )
        if code == PublishDoneCode.TRACK_ENDED and subscription.brought_all:
            if store.end_of_track is None:
                store.set_end_of_track(
                    location_after(store.largest) if store.largest else Location(0, 0)
                )
            self.ranges.vouched(subscription.start)
        if code == PublishDoneCode.MALFORMED_TRACK:
            self.malformed(reason)
        elif code == PublishDoneCode.TRACK_ENDED and subscription.lost:
            self._lost_upstream(
                subscription,
                PublishDoneCode.INTERNAL_ERROR,
                "a stream was lost on its way from the publisher",
            )
        else:
            if code in _ASKED_ANEW and not self.idle:
                again = UpstreamSubscribe(self, subscription.session)
                again.unfiltered = code == PublishDoneCode.UPDATE_FAILED
                self._subscribe([again])
            self._lost_upstream(subscription, code, reason)

    def _drop(self, subscription: UpstreamSubscription) -> bool:
        """Take out what ended, or is to end; whether it was an established one of this track."""
        was = subscription in self.subscriptions and subscription.established
        self.subscriptions.pop(subscription, None)
        self.home.upstream_subscriptions -= subscription.established
        subscription.established = False
        return was

    def _lost_upstream(self, subscription: UpstreamSubscription, code: int, reason: str) -> None:
        over = code == PublishDoneCode.TRACK_ENDED and self.filling.whole
        if self.downstream.listens and code != PublishDoneCode.TRACK_ENDED:
            others = [each.start for each in self.subscriptions if each.established]
            self.ranges.cut(subscription.cuts.values(), others)
        if self.established and not over:
            if self.downstream.listens:
                self.ranges.recover()
            self.adjust()
        else:
            self._finish_or_wait(subscription.session, code, reason)

    def _finish_or_wait(self, session: Session, code: int, reason: str) -> None:
        """The last source, `session`, is gone; others have not answered or not been asked yet."""
        if code == PublishDoneCode.TRACK_ENDED:
            # That is final: what another publisher has of the track can be fetched.
            for subscription in tuple(self.subscriptions):
                self._give_up(subscription)
        elif not self.idle:
            if self.subscriptions:
                self.candidates.decline(session)
            else:
                self.candidates.begin(session)
                self._ask()
            if self.config.publisher_linger and code not in _NOT_AWAITED:
                self.candidates.linger(self.config.publisher_linger)
                self.counters.publishers_lost += 1
                self.home.track_busy(self)
        if self.subscriptions or self.lingers:
            self._lost = (code, reason)
        else:
            self._finish(code, reason)

    def _await_source(self) -> None:
        """Time has passed: those who listen may wait for a source, or for its answer."""
        self.candidates.tick()
        if self.established or not self.candidates.due:
            return
        if self.subscriptions and (self.waiting or self.lingers):
            self._ask(beyond=True)  # who was asked is slow
        elif self.lingers:
            self.candidates.begin()
            self._ask()

    def end_complete(self) -> None:
        """All of it is here, and no publisher is."""
        if not self.track_ended:
            self.store.finish(PublishDoneCode.TRACK_ENDED)

    def _finish(self, code: int, reason: str) -> None:
        """No upstream subscription is left: downstream ones end with the same meaning."""
        self._lost = None
        self.candidates.settle()
        if self.filling.whole:
            code, reason = PublishDoneCode.TRACK_ENDED, ""
        elif (
            code == PublishDoneCode.TRACK_ENDED and self.ranges.missing and self.downstream.listens
        ):
            if self.ranges.recover():
                self._lost = code, reason
                return
            code, reason = PublishDoneCode.INTERNAL_ERROR, "what was missed cannot be had"
        self.ranges.forget_missed()
        self.downstream.let_go()
        self.store.finish(code, reason)
        self.home.track_ended(self)

    def recovered(self) -> None:
        """What was missed has come, or cannot be had."""
        if self._lost is not None and not self.subscriptions and not self.lingers:
            self._finish(*self._lost)

    def rejected(self, location: Location) -> None:
        self.ranges.rejected(location)

    def renew(self, reason: str) -> None:
        """What is cached is dropped, and who was served it ends; what comes now is the track."""
        self.ranges.stop()
        for subscription in self.subscriptions:
            subscription.begin_anew()
        self.store = self.filling.begin_anew()
        self._connect(self.store)
        self.home.track_renewed(self, reason)
        for subscription in tuple(self.subscriptions):
            if subscription.established:
                self._learn(subscription)

    def confirmed(self) -> None:
        if not self.established:
            self.home.track_ended(self)
        for subscription in tuple(self.subscriptions):
            if subscription.established:
                self._ready(subscription)

    def close_upstream(self, *, publications: bool = True) -> None:
        """Unsubscribe and stop fetching; what is cached stays. Without `publications`, those
        are kept and paused."""
        for subscription in tuple(self.subscriptions):
            if publications or not subscription.published:
                self._give_up(subscription)
        self.ranges.stop()
        self.origin.stop()

    def malformed(self, reason: str) -> None:
        """MOQT "Malformed Tracks": end everything, forget the track."""
        if self.over:
            return
        self.over = True
        self.counters.malformed_tracks += 1
        self.close_upstream()
        self.store.ended = True
        self.store.end_code = PublishDoneCode.MALFORMED_TRACK
        self.store.end_reason = reason
        self.home.track_malformed(self, reason)

    # -- what is asked of upstream ---------------------------------------------------------

    def offered(self, publication: OutgoingPublish) -> None:
        """A PUBLISH of it went downstream (SUBSCRIBE_TRACKS)."""
        self.offers.add(publication)
        self.read_above |= publication.session in self.home.upstreams
        publication.updates.gate = self.demand.update_received
        self.idle_since = None
        self.home.track_busy(self)
        self.adjust()

    def adjust(self) -> None:
        """Resume or pause upstream, as it is wanted."""
        self.demand.adjust()

    # -- numbers and the cache -------------------------------------------------------------

    def _evicted(self, store: TrackStore, stored: StoredObject) -> None:
        """The cache dropped `stored`."""
        if self.home.tracks.get(self.name) is not self:
            return
        for fetch in self.ranges.fetches:
            fetch.read(stored)
        if self.published_here and not self.filling.whole:
            self.home.track_ended(self)
        if not store.octets:
            self.home.track_busy(self)  # perhaps there is nothing left of it

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for subscription in tuple(self.subscriptions):
            subscription.tick(now)
        if self.demand.is_out_of_patience():
            self._wait_no_more()
        self.downstream.prune()
        self._await_source()
        if not self.idle:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
            self.ranges.stop()
            self.origin.stop()
        elif now - self.idle_since >= self.config.linger:
            self.close_upstream(publications=False)
        self.demand.tick()
        self.ranges.tick(now)
        self.origin.tick(now)
        self.recovered()

    def _wait_no_more(self) -> None:
        """Upstream has not answered an update: go on with what is known."""
        self.counters.upstream_timeouts += 1
        for request in tuple(self.waiting) if self.established else ():
            self.home.track_serve(self, request)
        self.downstream.let_go()

    @property
    def settled(self) -> bool:
        """Nothing happens to it by time alone."""
        return (
            self.idle
            and self.ranges.idle
            and not self.origin.probing
            and all(
                each.published and each.paused and not each.expires for each in self.subscriptions
            )
        )

    @property
    def disposable(self) -> bool:
        """Nothing is known, wanted or on its way."""
        return (
            self.idle
            and not self.subscriptions
            and self.ranges.idle
            and not self.origin.probing
            and next(self.store.objects(), None) is None
        )
