"""What happens to Objects that arrive: the receiver interface and its assembling default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from moqt.track.malformed import TrackChecker
from moqt.track.stored import Buffer, buffer_length
from moqt.values.codes import ObjectStatus
from moqt.values.errors import MoqtError
from moqt.values.messages import Properties
from moqt.values.names import Location
from moqt.wire.objects import ObjectHeader, Payload, RangeMarker, SubgroupHeader


class Via(IntEnum):
    """How an Object came."""

    SUBSCRIPTION = 0
    FILL = 1
    FETCH = 2
    DATAGRAM = 3


@dataclass(slots=True, eq=False)
class IncomingStream:
    """One data stream while it is being read. `state` belongs to the receiver."""

    stream_id: int
    via: Via
    request_id: int | None = None
    subgroup: SubgroupHeader | None = None
    header: ObjectHeader | None = None
    remaining: int = 0
    state: object = None
    last: ObjectHeader | None = None
    """The Object that began last, once an `ObjectReceiver` has checked it."""
    receiver: Receiver | None = None
    """Who takes it in the place of the request's receiver, which has said so in `stream_opened`."""


class AcceptedSubscribe(Protocol):
    """A SUBSCRIBE, as SUBSCRIBE_OK has answered it."""

    @property
    def largest(self) -> Location | None:
        """Largest Object when the publisher processed it; None when there was none."""
        ...

    @property
    def properties(self) -> Properties: ...


class AcceptedFetch(Protocol):
    """A FETCH, as FETCH_OK has answered it."""

    @property
    def end_location(self) -> Location | None: ...

    @property
    def end_of_track(self) -> bool:
        """Whether nothing exists beyond `end_location`."""
        ...

    @property
    def properties(self) -> Properties: ...


class Receiver:
    """Takes what one SUBSCRIBE or FETCH brings. Every method is optional.

    All are called synchronously from the session and must neither block nor raise,
    except `moqt.values.errors.MalformedTrack`, which cancels the request.
    """

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None: ...

    def fetch_accepted(self, request: AcceptedFetch) -> None: ...

    def request_failed(self, error: MoqtError) -> None:
        """REQUEST_ERROR, or the session ended: nothing more will come."""

    def subscription_done(self, code: int, reason: str) -> None:
        """PUBLISH_DONE, after the streams it counts have ended."""

    def stream_opened(self, stream: IncomingStream) -> None: ...

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        """All of an Object is there at once: whether it was taken.

        If not, it is told in steps as one that comes bit by bit: `object_begun`, `object_part`
        unless it is empty, `object_ended`.
        """
        return False

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None: ...

    def object_part(self, stream: IncomingStream, part: Buffer) -> None: ...

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None: ...

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None: ...

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        """FIN (`error` None) or a reset with that code; a cut Object never `object_ended`."""


class ReceivedObject(NamedTuple):
    """A whole Object as an application gets it. `subgroup` is None for a datagram.

    `status` is NORMAL, or says that a group or the track ends at `location`.
    """

    # A tuple, because one is made for every Object that arrives.
    location: Location
    subgroup: int | None
    priority: int | None
    status: ObjectStatus
    payload: Buffer
    properties: bytes = b""
    via: Via = Via.SUBSCRIPTION

    def __repr__(self) -> str:
        """Without the payload, which belongs in no log."""
        return (
            f"ReceivedObject({self.location.group}/{self.location.object} {self.status.name}, "
            f"{buffer_length(self.payload)} octets, {self.via.name})"
        )


_TOLD = frozenset({"object_arrived", "object_begun", "object_part", "object_ended"})

MAX_OBJECT_OCTETS = 64 << 20
"""Payload that is assembled at the most, unless a receiver says otherwise."""


class ObjectReceiver(Receiver):
    """Assembles each Object and hands it over whole, through `object_received`.

    It checks that the Objects do not contradict each other (MOQT "Malformed Tracks"). A
    subclass that has its own `object_begun`, `object_part` or `object_ended`, be it mixed in, is
    told of every Object in steps, unless it has its own `object_arrived`, too.
    """

    max_object_octets = MAX_OBJECT_OCTETS
    """A longer Object is thrown away as it comes, after `object_too_large`."""
    checker: TrackChecker | None = None
    """Receivers of one track from one publisher may share one; each makes its own otherwise."""

    _in_steps = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # whichever comes first of those it is made of, be they ObjectReceivers or not
        own = next(each for each in cls.__mro__ if not _TOLD.isdisjoint(vars(each)))
        cls._in_steps = "object_arrived" not in vars(own)

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        if self._in_steps:
            return False
        checker = self.checker
        if checker is None:
            checker = self.checker = TrackChecker()
        checker.object(header)
        stream.last = header
        if header.length <= self.max_object_octets:
            self.object_whole(stream, header, [payload] if payload else [])
        else:
            self.object_too_large(stream, header)
        return True

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        checker = self.checker
        if checker is None:
            checker = self.checker = TrackChecker()
        checker.object(header)
        stream.last = header
        if header.length <= self.max_object_octets:
            stream.state = []
        else:
            stream.state = None
            self.object_too_large(stream, header)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        parts = stream.state
        if isinstance(parts, list):
            parts.append(part)

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        parts = stream.state
        stream.state = None
        if isinstance(parts, list):
            self.object_whole(stream, header, parts)

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        """All of an Object is there, its payload in `parts`; joins them for `object_received`."""
        self.object_received(
            ReceivedObject(
                location=Location(header.group, header.object),
                subgroup=header.subgroup,
                priority=header.priority,
                status=header.status,
                payload=parts[0] if len(parts) == 1 else b"".join(parts),
                properties=header.properties,
                via=stream.via,
            )
        )

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        """A subclass that has its own calls this one too."""
        opened, last = stream.subgroup, stream.last
        if error is None and opened is not None and last is not None and self.checker is not None:
            self.checker.finished(last, end_of_group=opened.end_of_group)

    def object_received(self, received: ReceivedObject) -> None: ...

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        """An Object longer than `max_object_octets` has begun; nothing of it is kept."""
