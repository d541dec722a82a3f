"""What every upstream request does with the streams it is brought."""

from __future__ import annotations

from dataclasses import dataclass

from moqt.receiving.receiver import IncomingStream, Receiver
from moqt.session import Session
from moqt.track.stored import Buffer, StoredObject
from moqt.values.codes import ObjectStatus
from moqt.values.errors import MalformedTrack
from moqt.values.names import Location
from moqt.wire.objects import ObjectHeader, Payload
from relay.sources.filling import Arrival, Filling


@dataclass(slots=True, eq=False)
class StreamState:
    """What a receiver remembers of one incoming data stream."""

    incoming: IncomingStream
    previous: int | None = None
    """Last Object ID on it, for the "next object" rule (MOQT "Subgroup Streams")."""
    subgroup: tuple[int, int] | None = None
    arrival: Arrival | None = None
    sifted: bool = False
    """A filter of ours may leave out Objects of its Subgroup."""
    lossy: bool = False
    """An Object of it was not stored: its FIN does not make the Subgroup known."""


class UpstreamReceiver(Receiver):
    """Objects of one upstream request, on their way into the store."""

    live: bool
    """It is a subscription: what it brings is new."""
    whole: bool
    """What came on a live one is all there was: nothing was reset, or a datagram."""

    sifted_to = -1
    """Up to this group filters of ours leave out Objects, or have left some out."""

    def __init__(self, filling: Filling, session: Session) -> None:
        self.filling = filling
        self.session = session
        self.streams: dict[int, StreamState] = {}

    def _stream(self, incoming: IncomingStream) -> StreamState:
        state = incoming.state
        if not isinstance(state, StreamState):
            state = incoming.state = StreamState(incoming)
            if incoming.stream_id >= 0:  # a datagram is no stream and has no end
                self.streams[incoming.stream_id] = state
        return state

    def stream_opened(self, stream: IncomingStream) -> None:
        self._stream(stream)

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        try:
            return self._add(stream, header, payload) is not None
        except MalformedTrack as contradiction:
            self._settle(contradiction)
            return self._add(stream, header, payload) is not None

    def _settle(self, contradiction: MalformedTrack) -> None:
        """What comes contradicts what is here: raise that, unless there is another store now."""
        if not self.filling.contradicted(str(contradiction)):
            raise contradiction

    def _add(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> StoredObject | None:
        """Store a whole Object; None for one that takes a closer look, step by step."""
        state = self._stream(stream)
        follows = state.previous
        first = follows is None
        if first:
            follows = self._before_first(stream, header)
            if self.live:  # before room is made, which may forget a Subgroup that nobody brings
                self._opened(state, header)
        stored = self.filling.add(header, payload, follows, live=self.live)
        if stored is not None:
            if self.live and first:
                self._first_of_subgroup(stream, header)
            state.previous = header.object
        return stored

    def _before_first(self, stream: IncomingStream, header: ObjectHeader) -> int | None:
        """The Object ID up to which the Subgroup may have Objects that a stream, which begins
        with this one, does not bring; None when it may lack any."""
        return None

    def _opened(self, state: StreamState, header: ObjectHeader) -> None:
        """A live stream, or a datagram, brings its first Object."""
        if header.subgroup is None:
            self.whole = False  # others like it may have been lost
        elif state.subgroup is None:
            state.subgroup = (header.group, header.subgroup)
            self.filling.feed_opened(state.subgroup, header.priority)
            if header.group <= self.sifted_to:
                self._sift(state)

    def _sift(self, state: StreamState) -> None:
        state.sifted = True
        if state.subgroup is not None:
            self.filling.feed_sifted(state.subgroup)

    def _first_of_subgroup(self, stream: IncomingStream, header: ObjectHeader) -> None:
        """The first Object of a live stream is stored, and may be its Subgroup's first, too."""
        opened = stream.subgroup
        if self._stream(stream).lossy:
            return  # earlier ones may have come of it
        if header.subgroup is not None and opened is not None and opened.first_object:
            log = self.filling.store.subgroup(header.group, header.subgroup)
            log.first_id = header.object if log.first_id is None else log.first_id

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        state = self._stream(stream)
        follows, state.previous = state.previous, header.object
        first = follows is None
        try:
            if first:
                follows = self._before_first(stream, header)
                if self.live:
                    self._opened(state, header)
            if header.status is not ObjectStatus.NORMAL:
                self.filling.status(header, follows)
                return
            if self.filling.declared_nonexistent(header):
                self.filling.counters.objects_nonexistent += 1
                state.arrival = None
                return
            state.arrival = self.filling.begin(header, follows, live=self.live)
        except MalformedTrack as contradiction:
            self._settle(contradiction)
            if self.live:
                UpstreamReceiver.object_begun(self, stream, header)
            return
        if state.arrival is None:
            state.lossy = True
            self.rejected(Location(header.group, header.object))
        elif self.live and first:
            self._first_of_subgroup(stream, header)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        state = self._stream(stream)
        arrival = state.arrival
        if arrival is None:
            return
        try:
            grown = self.filling.grow(arrival, part)
        except MalformedTrack as contradiction:
            self._settle(contradiction)
            return  # what came of it before is not there any more
        if not grown:
            state.arrival = None
            state.lossy = True
            if not arrival.stored.complete:
                self.rejected(arrival.stored.location)

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self._stream(stream).arrival = None

    def rejected(self, location: Location) -> None:
        """The cache had no room for an Object."""

    def _cut(self, state: StreamState) -> None:
        """The stream ended; a last Object may be incomplete."""
        if state.arrival is not None:
            arrival, state.arrival = state.arrival, None
            self.filling.cut(arrival)
