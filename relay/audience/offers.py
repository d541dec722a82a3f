"""SUBSCRIBE_TRACKS: each track of a relay is offered with PUBLISH to who asked for such."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moqt.requests import IncomingSubscribeTracks, OutgoingPublish
from moqt.session import Session
from moqt.values.codes import PublishDoneCode
from moqt.values.errors import MoqtError
from moqt.values.names import TrackNamespace
from relay.audience.prefixes import PrefixMap
from relay.rights.policy import Action
from relay.rights.refusals import Desk
from relay.track import Home, UpstreamTrack


class Offers:
    """See the module (MOQT "Subscribing to Tracks", "Publisher Interactions").

    The tracks are those with an established upstream subscription, and those the relay
    holds complete without a publisher.
    """

    def __init__(self, home: Home, desk: Desk) -> None:
        self._home = home
        self._desk = desk
        self.wanted: dict[IncomingSubscribeTracks, TrackNamespace] = {}
        """SUBSCRIBE_TRACKS, with the prefix each is filed under."""
        self.by_prefix: PrefixMap[IncomingSubscribeTracks] = PrefixMap()
        self.on_wanted: Callable[[Session, TrackNamespace, object, bool], None] | None = None
        """Told when a SUBSCRIBE_TRACKS for a prefix has come (True) or gone."""

    def subscribe(self, request: IncomingSubscribeTracks, tracks: PrefixMap[UpstreamTrack]) -> None:
        if not self._desk.admits(request, Action.SUBSCRIBE_TRACKS, request.prefix):
            return
        if len(self.wanted) >= self._desk.config.max_namespaces:
            self._desk.overloaded(request, "too many SUBSCRIBE_TRACKS")
            return
        request.on_ended = lambda: self._forget(request)
        self._file(request)
        request.accept()
        self._offer_all(request, tracks.under(request.prefix))

    def changed(self, request: IncomingSubscribeTracks, tracks: PrefixMap[UpstreamTrack]) -> None:
        """Its prefix or its filters have changed."""
        self._forget(request)
        self._file(request)
        self._offer_all(request, tracks.under(request.prefix))

    def _file(self, request: IncomingSubscribeTracks) -> None:
        self.wanted[request] = request.prefix
        self.by_prefix.add(request.prefix, request)
        if self.on_wanted is not None:
            self.on_wanted(request.session, request.prefix, request, True)

    def _forget(self, request: IncomingSubscribeTracks) -> None:
        prefix = self.wanted.pop(request, None)
        if prefix is not None:
            self.by_prefix.remove(prefix, request)
            if self.on_wanted is not None:
                self.on_wanted(request.session, prefix, request, False)

    def _offer_all(self, request: IncomingSubscribeTracks, tracks: Iterable[UpstreamTrack]) -> None:
        for track in tracks:
            if track.established or track.held:
                self._offer(request, track)

    def available(self, track: UpstreamTrack) -> None:
        """A publisher of the track has come."""
        for request in list(self.by_prefix.above(track.name.namespace)):
            self._offer(request, track)

    def withdrawn(self, track: UpstreamTrack) -> None:
        """The track has no publisher any more: when it has one again, that is another offer."""
        for request in self.by_prefix.above(track.name.namespace):
            request.withdrawn(track.name)

    def _offer(self, request: IncomingSubscribeTracks, track: UpstreamTrack) -> None:
        session = request.session
        if (
            track.publishes(session)
            # a held SUBSCRIBE is answered instead
            or any(waiting.session is session for waiting in track.waiting)
            or not self._desk.may(request, Action.SUBSCRIBE, track.name.namespace)
        ):
            return
        made: list[OutgoingPublish] = []

        def ended(error: MoqtError | None) -> None:
            for publication in made:
                track.offers.pop(publication, None)

        publication = request.offer(track.store, on_ended=ended)
        if publication is None:
            return
        publication.tokens = request.tokens
        made.append(publication)
        self._home.counters.publications_offered += 1
        self._take(track, publication)

    def again(self, track: UpstreamTrack, publication: OutgoingPublish) -> None:
        """The subscriber wants it to move (GOAWAY on it): offer it anew, and end this one."""
        for request in list(self.by_prefix.above(track.name.namespace)):
            if request.session is publication.session:
                request.withdrawn(track.name)
                self._offer(request, track)
        publication.withdraw(PublishDoneCode.GOING_AWAY, "it has moved")

    def _take(self, track: UpstreamTrack, publication: OutgoingPublish) -> None:
        track.offers[publication] = None
        publication.gate = lambda update: track.update_received(publication, update)
        track.idle_since = None
        self._home.track_busy(track)
        track.adjust()
