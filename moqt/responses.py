"""What requests give to a task: Objects, namespaces, offered tracks, to await and iterate over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from moqt.receiving.receiver import IncomingStream, ObjectReceiver, ReceivedObject, Via
from moqt.requests import (
    IncomingPublish,
    OpenRequest,
    OutgoingFetch,
    OutgoingPublish,
    OutgoingPublishNamespace,
    OutgoingRequest,
    OutgoingSubscribe,
    OutgoingSubscribeNamespace,
    OutgoingSubscribeTracks,
)
from moqt.track.stored import buffer_length
from moqt.values.codes import EndOfRange, RequestErrorCode, StreamErrorCode
from moqt.values.errors import MisuseError, MoqtError, RequestError, StreamReset
from moqt.values.messages import Parameters, Properties, RequestOk
from moqt.values.names import FullTrackName, Location, TrackNamespace
from moqt.wire.objects import ObjectHeader, Payload, RangeMarker

QUEUE_OCTETS = 8 << 20
"""Octets an unread Subscription or Fetch holds before it stops granting credit."""
MAX_OFFERS = 1024
"""Tracks offered by PUBLISH that may wait to be looked at; beyond, EXCESSIVE_LOAD."""
OBJECT_OVERHEAD = 256
"""What an Object counts in a queue beyond its payload, so that empty ones count too."""

_T = TypeVar("_T")


class NamespaceEvent(NamedTuple):
    namespace: TrackNamespace
    present: bool
    """True for NAMESPACE, False for NAMESPACE_DONE."""


def _size(received: ReceivedObject) -> int:
    return OBJECT_OVERHEAD + len(received.properties) + buffer_length(received.payload)


class _Iterated(Generic[_T]):
    """What a session fills and a task iterates over; leaving `async with` cancels the request."""

    request: OutgoingRequest | IncomingPublish

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._error: MoqtError | None = None

    def _take(self) -> _T | None:
        """What is next to hand out, None when there is nothing now."""
        raise NotImplementedError

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _finish(self, error: MoqtError | None) -> None:
        """Nothing more comes: iteration ends after what is here, with `error` if there is one."""
        if not self._over:
            self._over, self._error = True, error
            self._wake()

    def cancel(self) -> None:
        """Give up the request; iteration ends."""
        self.request.cancel()
        self._finish(None)

    def __aiter__(self) -> AsyncIterator[_T]:
        return self

    async def __anext__(self) -> _T:
        while (item := self._take()) is None:
            if self._over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class ObjectQueue(_Iterated[ReceivedObject], ObjectReceiver):
    """Objects between the session and a task that iterates.

    Beyond `max_octets` its streams get no more credit, so that it holds what their windows let
    come; more than `max_unread_objects`, as of empty ones, end the request with EXCESSIVE_LOAD.
    """

    def __init__(self, max_octets: int) -> None:
        super().__init__()
        self._max_octets = max_octets
        self._objects: deque[ReceivedObject] = deque()
        self._octets = 0
        self._paused: set[int] = set()
        self.datagrams_dropped = 0
        """Datagrams that came while more was unread than may be."""

    # called by the session

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self._refuse(f"an Object of {header.length} octets is more than {self.max_object_octets}")

    def object_received(self, received: ReceivedObject) -> None:
        if received.via is Via.DATAGRAM and self._octets > self._max_octets:
            self.datagrams_dropped += 1  # nothing holds them back, and they may be lost
            return
        session = self.request.session
        if len(self._objects) >= session.config.max_unread_objects:
            session.requests.at_limit("max_unread_objects", session.config.max_unread_objects)
            session.counters.requests_unread += 1
            self._refuse(
                f"more than {session.config.max_unread_objects} Objects wait to be read "
                "(max_unread_objects)"
            )
            return
        self._objects.append(received)
        self._octets += _size(received)
        self._wake()

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        taken = super().object_arrived(stream, header, payload)
        self._hold_back(stream)
        return taken

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        super().object_ended(stream, header)
        self._hold_back(stream)

    def _refuse(self, reason: str) -> None:
        self.request.cancel()
        self.request_failed(RequestError(RequestErrorCode.EXCESSIVE_LOAD, reason))

    def _hold_back(self, stream: IncomingStream) -> None:
        if self._octets > self._max_octets and stream.via is not Via.DATAGRAM:
            self._paused.add(stream.stream_id)
            self.request.session.transport.pause_receiving(stream.stream_id)

    def stream_opened(self, stream: IncomingStream) -> None:
        self._hold_back(stream)

    def request_failed(self, error: MoqtError) -> None:
        self._finish(error)

    # called by the task

    def _finish(self, error: MoqtError | None) -> None:
        super()._finish(error)
        self._resume()  # nothing more comes on its streams

    def _take(self) -> ReceivedObject | None:
        if not self._objects:
            return None
        received = self._objects.popleft()
        self._octets -= _size(received)
        if self._octets <= self._max_octets // 2:
            self._resume()
        return received

    def _resume(self) -> None:
        """Grant credit again, also for streams that have ended meanwhile."""
        if self._paused:
            paused, self._paused = self._paused, set()
            transport = self.request.session.transport
            for stream_id in paused:
                transport.resume_receiving(stream_id)
            transport.wake()

    def cancel(self) -> None:
        super().cancel()
        self._objects.clear()
        self._octets = 0


class Subscription(ObjectQueue):
    """An established subscription: iterate over it for Objects, fills included.

    Iteration ends with PUBLISH_DONE (see `done_code`) and raises SessionClosed or
    RequestError when the subscription was lost.
    """

    request: OutgoingSubscribe | IncomingPublish

    def __init__(self, max_octets: int) -> None:
        super().__init__(max_octets)
        self.done_code: int | None = None
        self.done_reason = ""

    @property
    def largest(self) -> Location | None:
        """Largest Object when the publisher processed the SUBSCRIBE."""
        return self.request.largest

    @property
    def properties(self) -> Properties:
        return self.request.properties

    async def update(self, parameters: Parameters) -> RequestOk:
        """REQUEST_UPDATE: pause or resume (FORWARD), filters, priority, a fill.

        Raises RequestError when it is refused, which ends the subscription.
        """
        return await _updated(self.request, parameters)

    def subscription_done(self, code: int, reason: str) -> None:
        self.done_code, self.done_reason = code, reason
        self._finish(None)


class FetchResponse(ObjectQueue):
    """The Objects of a FETCH, in order; raises StreamReset when some or the rest is unknown."""

    request: OutgoingFetch
    _unknown = False
    """The publisher marked a range of which it could not tell."""

    @property
    def end_location(self) -> Location | None:
        return self.request.end_location

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None:
        self._unknown = self._unknown or marker.kind is not EndOfRange.NON_EXISTENT

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is None and self._unknown:
            error = StreamErrorCode.UNKNOWN_OBJECT_STATUS
        self._finish(None if error is None else StreamReset(error, "the fetch stream"))


async def _updated(request: OpenRequest, parameters: Parameters) -> RequestOk:
    answer: asyncio.Future[RequestOk] = asyncio.get_running_loop().create_future()

    def answered(result: RequestOk | RequestError) -> None:
        if answer.done():
            return
        if isinstance(result, RequestOk):
            answer.set_result(result)
        else:
            answer.set_exception(result)

    request.update(parameters, answered)
    return await answer


class OfferedTrack:
    """A track that a publisher offers with PUBLISH, or says it will not offer (`skipped`).

    Take it with `accept`, or `reject` it; a skipped one can be subscribed to.
    """

    def __init__(self, name: FullTrackName, publish: IncomingPublish | None) -> None:
        self.name = name
        self.publish = publish
        """The request, None for a track that was skipped."""

    @property
    def skipped(self) -> bool:
        return self.publish is None

    @property
    def properties(self) -> Properties:
        return self.publish.properties if self.publish is not None else ()

    @property
    def largest(self) -> Location | None:
        return self.publish.largest if self.publish is not None else None

    def accept(
        self, *, update: Parameters | None = None, queue_octets: int = QUEUE_OCTETS
    ) -> Subscription:
        """PUBLISH_OK, then `update` when it is given; iterate over what is returned.

        Without an `update` Objects come as the publisher said, from the Next Object on.
        """
        if self.publish is None:
            raise MisuseError(f"{self.name} was skipped by the publisher: subscribe to it")
        subscription = Subscription(queue_octets)
        subscription.request = self.publish
        if not self.publish.pending:
            subscription.request_failed(
                RequestError(RequestErrorCode.INTERNAL_ERROR, "the publisher took it back")
            )
        self.publish.accept(subscription, update=update)
        return subscription

    def reject(
        self, code: RequestErrorCode = RequestErrorCode.UNINTERESTED, reason: str = ""
    ) -> None:
        if self.publish is not None:
            self.publish.reject(code, reason)


class TrackOffers(_Iterated[OfferedTrack]):
    """An established SUBSCRIBE_TRACKS: iterate over it for `OfferedTrack`s.

    Leaving it stops new offers; accepted ones go on. What is unread then is rejected.
    """

    request: OutgoingSubscribeTracks

    def __init__(self, max_offers: int = MAX_OFFERS) -> None:
        super().__init__()
        self._max_offers = max_offers
        self._offers: dict[FullTrackName, OfferedTrack] = {}

    def offered(self, publish: IncomingPublish) -> None:
        if self._over or len(self._offers) >= self._max_offers or publish.name in self._offers:
            publish.reject(
                RequestErrorCode.EXCESSIVE_LOAD, "too many offers wait", retry_after_ms=1000
            )
            return
        publish.when_ended(lambda: self._taken_back(publish))
        self._offers[publish.name] = OfferedTrack(publish.name, publish)
        self._wake()

    def skipped(self, name: FullTrackName) -> None:
        if len(self._offers) < self._max_offers:
            self._offers.setdefault(name, OfferedTrack(name, None))
            self._wake()

    def _taken_back(self, publish: IncomingPublish) -> None:
        offer = self._offers.get(publish.name)
        if offer is not None and offer.publish is publish:
            del self._offers[publish.name]

    def end(self, error: MoqtError | None) -> None:
        self._finish(error)

    def _take(self) -> OfferedTrack | None:
        if not self._offers:
            return None
        return self._offers.pop(next(iter(self._offers)))

    def cancel(self) -> None:
        super().cancel()
        self.reject_unread()

    def reject_unread(self) -> None:
        """Nobody will look at what was offered."""
        self._finish(None)
        while (offer := self._take()) is not None:
            offer.reject()


class PublishedTrack:
    """An accepted PUBLISH."""

    request: OutgoingPublish

    def __init__(self) -> None:
        self.ended: asyncio.Future[MoqtError | None] = asyncio.get_running_loop().create_future()
        """Done with None after PUBLISH_DONE, else with why the subscription ended."""

    def end(self, error: MoqtError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def withdraw(self) -> None:
        """End the publication with PUBLISH_DONE TRACK_ENDED."""
        self.request.withdraw()


class PublishedNamespace:
    """An accepted PUBLISH_NAMESPACE."""

    request: OutgoingPublishNamespace

    def __init__(self) -> None:
        self.ended: asyncio.Future[MoqtError] = asyncio.get_running_loop().create_future()
        """Done when the peer revoked it or the session ended."""

    def end(self, error: MoqtError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def withdraw(self) -> None:
        """Announce the namespace no longer."""
        self.request.cancel()


class NamespaceListing(_Iterated[NamespaceEvent]):
    """An established SUBSCRIBE_NAMESPACE: iterate over it for `NamespaceEvent`s.

    A namespace that comes and goes before it was read about is not told of, so that no more
    is held than the session's `max_namespaces_told` allows.
    """

    request: OutgoingSubscribeNamespace

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[TrackNamespace, bool] = {}

    @property
    def namespaces(self) -> set[TrackNamespace]:
        """What is present now."""
        return set(self.request.namespaces)

    def changed(self, namespace: TrackNamespace, present: bool) -> None:
        if self._events.pop(namespace, None) is None:
            self._events[namespace] = present
            self._wake()

    def end(self, error: MoqtError | None) -> None:
        self._finish(error)

    def _take(self) -> NamespaceEvent | None:
        if not self._events:
            return None
        namespace = next(iter(self._events))
        return NamespaceEvent(namespace, self._events.pop(namespace))
