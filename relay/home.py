"""What the parts of a relay know of each other: the seam between a track and its relay."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from moqt.requests import IncomingFetch, IncomingSubscribe, IncomingTrackStatus
from moqt.session import Session
from moqt.values.errors import RequestError
from moqt.values.names import FullTrackName, TrackNamespace
from relay.cache import Cache
from relay.config import Counters, RelayConfig

if TYPE_CHECKING:
    from relay.track import UpstreamTrack

TrackRequest = IncomingSubscribe | IncomingFetch | IncomingTrackStatus
"""What a downstream session may ask about a track."""


class Home(Protocol):
    """What a track needs of its relay."""

    config: RelayConfig
    cache: Cache
    counters: Counters
    now: float
    tracks: OrderedDict[FullTrackName, UpstreamTrack]
    upstreams: dict[Session, None]
    """Sessions to upstream relays."""
    upstream_subscriptions: int
    """Established subscriptions to publishers."""

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions that may be asked for a track of `namespace`."""

    def track_serve(self, track: UpstreamTrack, request: TrackRequest) -> None:
        """Upstream is established and up to date: serve `request`, which waited for that."""

    def track_available(self, track: UpstreamTrack) -> None:
        """A publisher has it: offer it to who asked for such tracks."""

    def track_refused(self, track: UpstreamTrack, error: RequestError) -> None:
        """No publisher gave the track: tell who waits."""

    def track_ended(self, track: UpstreamTrack) -> None:
        """No upstream subscription is left, or the store lost an Object."""

    def track_malformed(self, track: UpstreamTrack, reason: str) -> None:
        """The track is unusable: end all its requests and forget it."""

    def track_busy(self, track: UpstreamTrack) -> None:
        """The track has something to do on tick."""
