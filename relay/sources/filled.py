"""What those who bring a track's Objects see of it."""

from __future__ import annotations

from typing import Protocol

from moqt.session import Session
from moqt.track.store import TrackStore
from moqt.values.names import FullTrackName
from relay.cache import Cache
from relay.config import Clock, Counters, RelayConfig
from relay.sources.filling import Filling


class Filled(Protocol):
    """The track whose store is filled."""

    name: FullTrackName
    store: TrackStore
    filling: Filling
    cache: Cache
    config: RelayConfig
    counters: Counters
    clock: Clock

    @property
    def established(self) -> bool:
        """A publisher brings it."""

    def sources(self) -> list[Session]:
        """Who can be asked for a range, in order."""

    def recovered(self) -> None:
        """What those who listen have missed has come, or a FETCH has ended."""

    def malformed(self, reason: str) -> None:
        """The publishers contradict each other: end everything."""
