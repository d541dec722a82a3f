"""SUBSCRIBE_TRACKS: each track of a relay is offered with PUBLISH to who asked for such."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from moqt.requests import IncomingSubscribeTracks, OutgoingPublish
from moqt.session import Session, session_of
from moqt.track.store import TrackStore
from moqt.values.codes import PublishDoneCode
from moqt.values.errors import MoqtError
from moqt.values.names import FullTrackName, TrackNamespace
from relay.audience.downstream import TrackRequest
from relay.audience.prefixes import PrefixMap
from relay.audience.readers import Readers
from relay.rights.policy import Action
from relay.rights.refusals import Refusals


class Offered(Protocol):
    """A track, as far as offering it goes."""

    name: FullTrackName
    store: TrackStore
    published_here: bool
    """It is here in full and has no publisher."""
    waiting: Readers[TrackRequest]
    offers: Readers[OutgoingPublish]

    @property
    def established(self) -> bool:
        """Some publisher's Objects come."""

    def publishes(self, session: Session) -> bool:
        """Whether `session` is a publisher of the track."""

    def offered(self, publication: OutgoingPublish) -> None:
        """`publication` of it was made downstream."""


class Offers:
    """Who asked for tracks, and the PUBLISHes they are sent (MOQT "Subscribing to Tracks").

    The tracks are those with an established upstream subscription, and those published here
    (MOQT "Publisher Interactions").
    """

    def __init__(
        self, refusals: Refusals, tracks_under: Callable[[TrackNamespace], Iterable[Offered]]
    ) -> None:
        self._refusals = refusals
        self._tracks_under = tracks_under
        self.wanted: dict[IncomingSubscribeTracks, TrackNamespace] = {}
        """SUBSCRIBE_TRACKS, with the prefix each is filed under."""
        self.by_prefix: PrefixMap[IncomingSubscribeTracks] = PrefixMap()
        self.on_wanted: list[Callable[[Session, TrackNamespace, object, bool], None]] = []
        """Told when a SUBSCRIBE_TRACKS for a prefix has come (True) or gone."""

    def subscribe(self, request: IncomingSubscribeTracks) -> None:
        if not self._refusals.admits(request, Action.SUBSCRIBE_TRACKS, request.prefix):
            return
        if len(self.wanted) >= self._refusals.config.max_namespaces:
            self._refusals.overloaded(request, "max_namespaces", "SUBSCRIBE_TRACKS")
            return
        request.when_ended(lambda: self._forget(request))
        self._file(request)
        request.accept()
        self._offer_all(request)

    def changed(self, request: IncomingSubscribeTracks) -> None:
        """Its prefix or its filters have changed."""
        self._forget(request)
        self._file(request)
        self._offer_all(request)

    def _file(self, request: IncomingSubscribeTracks) -> None:
        self.wanted[request] = request.prefix
        self.by_prefix.add(request.prefix, request)
        for wanted in self.on_wanted:
            wanted(session_of(request), request.prefix, request, True)

    def _forget(self, request: IncomingSubscribeTracks) -> None:
        prefix = self.wanted.pop(request, None)
        if prefix is not None:
            self.by_prefix.remove(prefix, request)
            for wanted in self.on_wanted:
                wanted(session_of(request), prefix, request, False)

    def _offer_all(self, request: IncomingSubscribeTracks) -> None:
        for track in self._tracks_under(request.prefix):
            if track.established or track.published_here:
                self._offer(request, track)

    def available(self, track: Offered) -> None:
        """A publisher of the track has come."""
        for request in list(self.by_prefix.above(track.name.namespace)):
            self._offer(request, track)

    def withdrawn(self, track: Offered) -> None:
        """The track has no publisher any more: when it has one again, that is another offer."""
        for request in self.by_prefix.above(track.name.namespace):
            request.withdrawn(track.name)

    def _offer(self, request: IncomingSubscribeTracks, track: Offered) -> None:
        session = session_of(request)
        if (
            track.publishes(session)
            # a SUBSCRIBE that waits is answered instead
            or session in track.waiting.sessions
            or not self._refusals.may(request, Action.SUBSCRIBE, track.name.namespace)
        ):
            return
        made: list[OutgoingPublish] = []

        def ended(error: MoqtError | None) -> None:
            for publication in made:
                track.offers.discard(publication)

        publication = request.offer(track.store, on_ended=ended)
        if publication is None:
            return
        publication.tokens = request.tokens
        made.append(publication)
        self._refusals.counters.publications_offered += 1
        track.offered(publication)

    def again(self, track: Offered, publication: OutgoingPublish) -> None:
        """The subscriber wants it to move (GOAWAY on it): offer it anew, and end this one."""
        for request in list(self.by_prefix.above(track.name.namespace)):
            if request.session is publication.session:
                request.withdrawn(track.name)
                self._offer(request, track)
        publication.withdraw(PublishDoneCode.GOING_AWAY, "it has moved")
