"""The asyncio face of a session: awaitable requests and async iteration.

Cancelling any await here cancels the request it made: nothing stays behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cryptography import x509

from moqt.publisher import Publisher
from moqt.receiving.receiver import Receiver
from moqt.requests import (
    OutgoingFetch,
    OutgoingRequest,
    OutgoingSubscribe,
)
from moqt.responses import (
    MAX_OFFERS,
    QUEUE_OCTETS,
    FetchResponse,
    NamespaceEvent,
    NamespaceListing,
    ObjectQueue,
    OfferedTrack,
    PublishedNamespace,
    PublishedTrack,
    Subscription,
    TrackOffers,
)
from moqt.session import Session
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, RequestErrorCode, SessionErrorCode
from moqt.values.errors import MisuseError, MoqtError, RequestError, SessionClosed
from moqt.values.messages import (
    AuthorizationToken,
    Goaway,
    LocationFilter,
    Parameters,
    Properties,
    RangeFilter,
)
from moqt.values.names import FullTrackName, Location, TrackNamespace

__all__ = [
    "FetchResponse",
    "MoqtSession",
    "NamespaceEvent",
    "NamespaceListing",
    "ObjectQueue",
    "OfferedTrack",
    "PublishedNamespace",
    "PublishedTrack",
    "Subscription",
    "TrackOffers",
]

_R = TypeVar("_R", bound=OutgoingRequest)


class MoqtSession:
    """A session as asyncio code uses it. Made by `moqt.connect` and `moqt.serve`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[SessionClosed] = asyncio.get_running_loop().create_future()
        self._goaway: asyncio.Future[Goaway] = asyncio.get_running_loop().create_future()
        session.observers.append(self._session_changed)
        session.goaway_observers.append(self._goaway.set_result)

    def _session_changed(self, closed: SessionClosed | None) -> None:
        if not self._established.done():
            if closed is None:
                self._established.set_result(None)
            else:
                self._established.set_exception(closed)
                self._established.exception()  # no warning when nobody was waiting
        if closed is not None and not self._closed.done():
            self._closed.set_result(closed)
            self._goaway.cancel()

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

    @property
    def packet_sizes(self) -> tuple[int, int]:
        """Octets of UDP payload: the most that a packet of ours may have, as far as is known of
        the path, and the most that one had that came."""
        return self.session.transport.packet_sizes

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        """The certificate that the peer has shown, None without one."""
        return self.session.transport.peer_certificate

    async def wait_established(self) -> None:
        """Both SETUPs have crossed. Raises SessionClosed when the session ended instead."""
        await asyncio.shield(self._established)

    async def wait_closed(self) -> SessionClosed:
        return await asyncio.shield(self._closed)

    async def wait_goaway(self) -> Goaway:
        """The peer's GOAWAY: connect to its URI ("" = the same), repeat there what is wanted,
        then `drain` this session. Raises SessionClosed when the session ends before."""
        await asyncio.wait((self._goaway, self._closed), return_when=asyncio.FIRST_COMPLETED)
        if self._closed.done():
            raise self._closed.result()
        return self._goaway.result()

    def drain(self) -> None:
        """Close with NO_ERROR as soon as no subscription or fetch is left on this session."""
        self.session.drain()

    def close(self, code: SessionErrorCode = SessionErrorCode.NO_ERROR, reason: str = "") -> None:
        self.session.close(code, reason)

    def retire_token(self, token: AuthorizationToken) -> None:
        """It will not be sent again: the peer need not keep it any longer."""
        self.session.rules.sent_tokens.retire(token)

    # -- publishing ----------------------------------------------------------------------

    def publish_track(
        self, namespace: TrackNamespace, name: bytes, properties: Properties = ()
    ) -> TrackStore:
        """A new track of this session's publisher; append Objects to what is returned."""
        store = TrackStore(FullTrackName(namespace, name), properties)
        self.publisher.add_track(store)
        return store

    async def publish(
        self, store: TrackStore, *, parameters: Parameters | None = None
    ) -> PublishedTrack:
        """PUBLISH the track in `store`: start a subscription at the peer.

        With FORWARD 0 nothing is sent until the peer resumes it, so that it can ask for a fill
        first. Raises RequestError when the peer refuses it (UNINTERESTED).
        """
        published = PublishedTrack()
        published.request = await self._request(
            lambda: self.session.publish(store, parameters or Parameters(), on_ended=published.end)
        )
        return published

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
        """SUBSCRIBE: what is published from now on and passes the filters comes.

        With `fill`, what lies in that range and was published before comes too.

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

    async def subscribe_tracks(
        self,
        prefix: TrackNamespace,
        *,
        parameters: Parameters | None = None,
        max_offers: int = MAX_OFFERS,
    ) -> TrackOffers:
        """SUBSCRIBE_TRACKS: iterate over the tracks under `prefix`, present and future.

        `parameters` go into each subscription: FORWARD 0 leaves them paused until resumed.
        """
        offers = TrackOffers(max_offers)
        try:
            offers.request = await self._request(
                lambda: self.session.subscribe_tracks(
                    prefix,
                    parameters or Parameters(),
                    on_publish=offers.offered,
                    on_skipped=offers.skipped,
                    on_ended=offers.end,
                )
            )
        except BaseException:
            offers.reject_unread()  # offers may have overtaken the answer
            raise
        return offers

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
        the request. After the peer's GOAWAY nothing new is asked for.
        """
        await self.wait_established()
        if self.session.goaway is not None:
            raise RequestError(RequestErrorCode.GOING_AWAY, "the peer has said GOAWAY")
        request = make()
        if isinstance(receiver, ObjectQueue):
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
