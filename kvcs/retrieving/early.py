"""The first layer, on its way before the manifest has come.

How many blocks the first segment has, the Anchor Key tells; how long an Object is, the descriptor.
So the first Objects of the first layer are asked for with the manifest, of the tracks that a
publication nearly always has, and held. Once the manifest has shown that they are of our tokens
they are judged as those that come later; until then nothing is done with them.
"""

from __future__ import annotations

from typing import Final, Protocol

from kvcs.names.codes import PAYLOAD_HEADER_OCTETS, Component
from kvcs.names.tracks import DataTrack, raw_octets
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.receivers import DataNeeds, TrackState
from kvsp.names.codes import Codec
from moqt.receiving.receiver import IncomingStream, ObjectReceiver
from moqt.requests import OutgoingFetch, RequestState
from moqt.session import Session
from moqt.track.stored import Buffer
from moqt.values.codes import GroupOrder
from moqt.values.errors import MoqtError
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader

EARLY_OCTETS: Final = 4 << 20
"""Octets that are asked for before the manifest is known, of all tracks together; as much may be
held, and is wasted when the publication is not the one that is retrieved,"""
EARLY_OBJECTS: Final = 512
"""and Objects of each track."""


class EarlyNeeds(DataNeeds, Protocol):
    """What the early requests need of the retrieval that they are a part of."""

    def early_over(self, state: TrackState) -> None:
        """The early request of a track brought what it will bring."""


class Early:
    """The early requests of one retrieval: none when the first segment's length is not known."""

    def __init__(self, session: Session, assembly: Assembly) -> None:
        self._session = session
        self._requests: dict[DataTrack, EarlyFetch] = {}
        for component in (Component.K, Component.V):
            track = DataTrack(component, Codec.RAW.label, 0)
            octets = PAYLOAD_HEADER_OCTETS + raw_octets(assembly.descriptor, component)
            blocks = min(assembly.first_blocks, EARLY_OBJECTS, EARLY_OCTETS // (2 * octets))
            if blocks:
                name = FullTrackName(assembly.namespace.fields, track.name)
                self._requests[track] = EarlyFetch(name, assembly.layers.start, blocks, octets)

    def ask(self) -> None:
        """Make the requests. Raises moqt RequestError, SessionClosed as `Session.fetch`."""
        for request in self._requests.values():
            request.ask(self._session)

    def begin(self, state: TrackState, blocks: int, retrieval: EarlyNeeds) -> None:
        """The manifest is there, and `blocks` of the track are needed from `state.first` on: hand
        over what came, and what comes. What is to be asked for now begins at `state.first`."""
        request = self._requests.pop(state.track, None)
        if request is None or state.first != request.start:
            return
        request.begin(state, blocks, retrieval)

    def cancel(self) -> None:
        """Cancel what no track has begun with; harmless when repeated."""
        for request in self._requests.values():
            request.cancel()
        self._requests.clear()


class EarlyFetch(ObjectReceiver):
    """The FETCH of the first Objects of one track."""

    def __init__(self, name: FullTrackName, layer: int, blocks: int, octets: int) -> None:
        self.start = Location(layer, 0)
        self.over = False
        """It brought what it will bring."""
        self.max_object_octets = octets
        self._name = name
        self._blocks = blocks
        self._request: OutgoingFetch | None = None
        self._held: list[tuple[ObjectHeader, list[Buffer]]] = []
        self._state: TrackState | None = None
        self._retrieval: EarlyNeeds | None = None

    def ask(self, session: Session) -> None:
        """Make the request. Raises as `Session.fetch`."""
        end = Location(self.start.group, self._blocks - 1)
        self._request = session.fetch(
            self._name,
            self,
            Parameters(
                location_filter=LocationFilter.range(self.start, end),
                group_order=GroupOrder.ASCENDING,
            ),
        )

    def begin(self, state: TrackState, blocks: int, retrieval: EarlyNeeds) -> None:
        """See `Early.begin`."""
        self._state, self._retrieval = state, retrieval
        covered = self._blocks
        if self.over:
            # a part that follows from the first is as good as all: the rest is asked for as ever
            came = {header.object for header, _ in self._held}
            covered = next(n for n in range(self._blocks + 1) if n not in came)
        else:
            state.early = self
        group = self.start.group
        state.first = Location(group, covered) if covered < blocks else Location(group + 1, 0)
        held, self._held = self._held, []
        for header, parts in held:
            retrieval.object_received(state, header, parts)

    def cancel(self) -> None:
        """Nothing of it is needed any more; harmless when repeated."""
        request = self._request
        if request is not None and request.state is not RequestState.CLOSED:
            request.cancel()
        self._held.clear()
        self._end()

    # -- what it brings ------------------------------------------------------------------

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        if header.status or self.over or len(self._held) >= self._blocks:
            return
        if self._state is None or self._retrieval is None:
            self._held.append((header, parts))
            return
        self._state.arrivals += 1
        self._retrieval.object_received(self._state, header, parts)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        self._end()

    def request_failed(self, error: MoqtError) -> None:
        self._end()

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        if self._state is not None and self._retrieval is not None:
            self._state.early = None
            self._retrieval.early_over(self._state)
