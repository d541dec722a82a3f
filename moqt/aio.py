"""The asyncio face of a session: awaitable requests and async iteration.

Cancelling any await here cancels the request it made: nothing stays behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from moqt.codes import GroupOrder, RequestErrorCode, SessionErrorCode
from moqt.errors import MisuseError, MoqtError, RequestError, SessionClosed, StreamReset
from moqt.messages import LocationFilter, Parameters, Properties, RangeFilter
from moqt.names import FullTrackName, Location, TrackNamespace
from moqt.publisher import Publisher
from moqt.receiving import IncomingStream, ObjectReceiver, ReceivedObject, Receiver, Via
from moqt.requests import (
    OutgoingFetch,
    OutgoingPublishNamespace,
    OutgoingRequest,
    OutgoingSubscribe,
    OutgoingSubscribeNamespace,
)
from moqt.session import Session
from moqt.store import TrackStore, buffer_length
from moqt.wire.objects import ObjectHeader

QUEUE_OCTETS = 8 << 20
"""Octets an unread Subscription or Fetch holds before it stops granting credit."""
OBJECT_OVERHEAD = 256
"""What an Object counts in a queue beyond its payload, so that empty ones count too."""

_R = TypeVar("_R", bound=OutgoingRequest)
_T = TypeVar("_T")


class NamespaceEvent(NamedTuple):
    namespace: TrackNamespace
    present: bool
    """True for NAMESPACE, False for NAMESPACE_DONE."""


def _size(received: ReceivedObject) -> int:
    return OBJECT_OVERHEAD + len(received.properties) + buffer_length(received.payload)


class _Iterated(Generic[_T]):
    """What a session fills and a task iterates over; leaving `async with` cancels the request."""

    request: OutgoingRequest

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


class _ObjectQueue(_Iterated[ReceivedObject], ObjectReceiver):
    """Objects between the session and a task that iterates; bounded by flow control."""

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
        self.request.cancel()
        self.request_failed(
            RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                f"an Object of {header.length} octets is more than {self.max_object_octets}",
            )
        )

    def object_received(self, received: ReceivedObject) -> None:
        if received.via is Via.DATAGRAM and self._octets > self._max_octets:
            self.datagrams_dropped += 1  # nothing holds them back, and they may be lost
            return
        self._objects.append(received)
        self._octets += _size(received)
        self._wake()

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        super().object_ended(stream, header)
        if self._octets > self._max_octets and stream.via is not Via.DATAGRAM:
            self._paused.add(stream.stream_id)
            self.request.session.transport.pause_receiving(stream.stream_id)

    def stream_opened(self, stream: IncomingStream) -> None:
        if self._octets > self._max_octets:
            self._paused.add(stream.stream_id)
            self.request.session.transport.pause_receiving(stream.stream_id)

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


class Subscription(_ObjectQueue):
    """An established subscription: iterate over it for Objects, fills included.

    Iteration ends with PUBLISH_DONE (see `done_code`) and raises SessionClosed or
    RequestError when the subscription was lost.
    """

    request: OutgoingSubscribe

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

    def subscription_done(self, code: int, reason: str) -> None:
        self.done_code, self.done_reason = code, reason
        self._finish(None)


class FetchResponse(_ObjectQueue):
    """The Objects of a FETCH, in order; raises StreamReset when the rest is unknown."""

    request: OutgoingFetch

    @property
    def end_location(self) -> Location | None:
        return self.request.end_location

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        self._finish(None if error is None else StreamReset(error, "the fetch stream"))


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
    is held than the session's `max_namespaces` allows.
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


class MoqtSession:
    """A session as asyncio code uses it. Made by `moqt.connect` and `moqt.serve`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[SessionClosed] = asyncio.get_running_loop().create_future()
        session.observers.append(self._session_changed)

    def _session_changed(self, closed: SessionClosed | None) -> None:
        if not self._established.done():
            if closed is None:
                self._established.set_result(None)
            else:
                self._established.set_exception(closed)
                self._established.exception()  # no warning when nobody was waiting
        if closed is not None and not self._closed.done():
            self._closed.set_result(closed)

    # -- life ----------------------------------------------------------------------------

    @property
    def closed(self) -> SessionClosed | None:
        return self.session.closed

    @property
    def publisher(self) -> Publisher:
        """The session's handler, when it is a Publisher."""
        handler = self.session.handler
        if isinstance(handler, Publisher):
            return handler
        raise MisuseError("this session was made with a handler that is not a Publisher")

    async def wait_established(self) -> None:
        """Both SETUPs have crossed. Raises SessionClosed when the session ended instead."""
        await asyncio.shield(self._established)

    async def wait_closed(self) -> SessionClosed:
        return await asyncio.shield(self._closed)

    def close(self, code: SessionErrorCode = SessionErrorCode.NO_ERROR, reason: str = "") -> None:
        self.session.close(code, reason)

    # -- publishing ----------------------------------------------------------------------

    def publish_track(
        self, namespace: TrackNamespace, name: bytes, properties: Properties = ()
    ) -> TrackStore:
        """A new track of this session's publisher; append Objects to what is returned."""
        store = TrackStore(FullTrackName(namespace, name), properties)
        self.publisher.add_track(store)
        return store

    async def publish_namespace(
        self, namespace: TrackNamespace, *, parameters: Parameters | None = None
    ) -> PublishedNamespace:
        """Announce a namespace. Raises RequestError when the peer refuses it."""
        published = PublishedNamespace()
        published.request = await self._request(
            lambda: self.session.publish_namespace(
                namespace, parameters or Parameters(), on_ended=published.end
            )
        )
        return published

    # -- subscribing ---------------------------------------------------------------------

    async def subscribe(
        self,
        namespace: TrackNamespace,
        name: bytes,
        *,
        location_filter: LocationFilter | None = None,
        fill: LocationFilter | None = None,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int | None = None,
        group_order: GroupOrder | None = None,
        parameters: Parameters | None = None,
        queue_octets: int = QUEUE_OCTETS,
    ) -> Subscription:
        """SUBSCRIBE. With `fill`, what lies in that range and was published before comes too.

        `parameters`, when given, replaces all the other filters and priorities.
        Raises RequestError when refused, SessionClosed when the session ends.
        """
        subscription = Subscription(queue_octets)
        await self.subscribe_with(
            namespace,
            name,
            subscription,
            parameters
            or Parameters(
                location_filter=location_filter,
                fill_parameters=Parameters(location_filter=fill) if fill is not None else None,
                range_filters=range_filters,
                subscriber_priority=priority,
                group_order=group_order,
            ),
        )
        return subscription

    async def subscribe_with(
        self,
        namespace: TrackNamespace,
        name: bytes,
        receiver: Receiver,
        parameters: Parameters,
    ) -> OutgoingSubscribe:
        """SUBSCRIBE with a receiver of your own; returns once SUBSCRIBE_OK has come."""
        full_name = FullTrackName(namespace, name)
        return await self._request(
            lambda: self.session.subscribe(full_name, receiver, parameters), receiver
        )

    async def fetch(
        self,
        namespace: TrackNamespace,
        name: bytes,
        location_filter: LocationFilter | None = None,
        *,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int | None = None,
        group_order: GroupOrder | None = None,
        queue_octets: int = QUEUE_OCTETS,
    ) -> FetchResponse:
        """FETCH a range (all of the track when no filter is given)."""
        response = FetchResponse(queue_octets)
        await self.fetch_with(
            namespace,
            name,
            response,
            Parameters(
                location_filter=location_filter,
                range_filters=range_filters,
                subscriber_priority=priority,
                group_order=group_order,
            ),
        )
        return response

    async def fetch_with(
        self,
        namespace: TrackNamespace,
        name: bytes,
        receiver: Receiver,
        parameters: Parameters,
    ) -> OutgoingFetch:
        """FETCH with a receiver of your own; returns once FETCH_OK has come."""
        full_name = FullTrackName(namespace, name)
        return await self._request(
            lambda: self.session.fetch(full_name, receiver, parameters), receiver
        )

    async def subscribe_namespace(
        self, prefix: TrackNamespace, *, parameters: Parameters | None = None
    ) -> NamespaceListing:
        """SUBSCRIBE_NAMESPACE; the listing tells what is there and what changes."""
        listing = NamespaceListing()
        listing.request = await self._request(
            lambda: self.session.subscribe_namespace(
                prefix,
                parameters or Parameters(),
                on_namespace=listing.changed,
                on_ended=listing.end,
            )
        )
        return listing

    async def track_status(
        self, namespace: TrackNamespace, name: bytes
    ) -> tuple[Location | None, Properties]:
        """TRACK_STATUS: (Largest Object or None, Track Properties)."""
        request = await self._request(
            lambda: self.session.track_status(FullTrackName(namespace, name))
        )
        return request.largest, request.properties

    # -- inside --------------------------------------------------------------------------

    async def _request(self, make: Callable[[], _R], receiver: Receiver | None = None) -> _R:
        """Make a request once the session is established; return it when it is accepted.

        Waits while the peer grants no further request stream. A cancelled wait cancels
        the request.
        """
        await self.wait_established()
        while True:
            try:
                request = make()
                break
            except RequestError as error:
                if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                    raise
            await asyncio.sleep(0.02)
        if isinstance(receiver, _ObjectQueue):
            receiver.request = request
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(error: MoqtError | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        request.on_answer = answered
        try:
            await answer
        except asyncio.CancelledError:
            request.cancel()
            raise
        return request
