"""The requests of one session that are open or wait to be, of both sides (MOQT "Request ID").

A peer's opening message becomes a request object, is judged here by what holds for every request,
and goes to the application by one table. A request of ours is sent as soon as the peer grants a
stream for it, in the order in which they were submitted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from moqt.quic.transport import connection_of
from moqt.receiving.control_streams import RequestIn
from moqt.receiving.host import Recipient, StreamHost
from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
    OpenRequest,
    OutgoingFetch,
    OutgoingRequest,
    OutgoingSubscribeNamespace,
    OutgoingSubscribeTracks,
    PublisherSide,
    RequestState,
    RequestStream,
    SubscriberSide,
)
from moqt.requests.host import RequestHost
from moqt.session.prefixes import Prefixes
from moqt.session.request_rate import RequestRate
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import (
    MisuseError,
    MoqtError,
    RequestError,
    SessionClosed,
    protocol_violation,
)
from moqt.values.messages import (
    Fetch,
    Message,
    Publish,
    PublishNamespace,
    Request,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
)
from moqt.values.names import FullTrackName, TrackNamespace, is_reserved

logger = logging.getLogger("moqt.session")

R = TypeVar("R", bound=OutgoingRequest)


class Host(RequestHost, StreamHost, Protocol):
    """The session, as the table of its requests sees it."""

    @property
    def connected(self) -> bool:
        """Whether the QUIC handshake is over."""
        ...

    def read_stream(self, reader: RequestIn) -> None:
        """What comes on a stream that was opened here goes to `reader`."""


class Opening(NamedTuple):
    """What a peer's opening message becomes, and the method of the handler that gets it."""

    request: Callable[[Any, Any, RequestStream], IncomingRequest]
    received: str


OPENINGS: dict[type[Request], Opening] = {
    Subscribe: Opening(IncomingSubscribe, "subscribe_received"),
    Publish: Opening(IncomingPublish, "publish_received"),
    Fetch: Opening(IncomingFetch, "fetch_received"),
    TrackStatus: Opening(IncomingTrackStatus, "track_status_received"),
    PublishNamespace: Opening(IncomingPublishNamespace, "publish_namespace_received"),
    SubscribeNamespace: Opening(IncomingSubscribeNamespace, "subscribe_namespace_received"),
    SubscribeTracks: Opening(IncomingSubscribeTracks, "subscribe_tracks_received"),
}


class OpenRequests:
    """Every request of one session until it is over."""

    def __init__(self, session: Host) -> None:
        self._session = session
        self.incoming: dict[int, IncomingRequest] = {}
        """The peer's, by stream."""
        self.outgoing: dict[int, OutgoingRequest] = {}
        """Ours that are sent, by stream."""
        self.queued: dict[OutgoingRequest, None] = {}
        """Ours for which the peer grants no stream yet, in order."""
        self._tracks_requests: dict[int, OutgoingSubscribeTracks] = {}
        """Of ours that are sent, the ones that PUBLISHes answer."""
        self._prefixes: defaultdict[type, Prefixes] = defaultdict(Prefixes)
        """By kind of the peer's requests: those of one kind may not overlap."""
        self._told: set[str] = set()
        """Limits of which the log has heard that the peer came to them."""
        config = session.config
        self._rate = RequestRate(
            config.max_request_rate, config.max_request_rate + config.max_requests
        )
        self._next_id = 0 if session.transport.is_client else 1

    def __len__(self) -> int:
        return len(self.incoming) + len(self.outgoing) + len(self.queued)

    def __iter__(self) -> Iterator[OpenRequest]:
        yield from self.outgoing.values()
        yield from self.queued
        yield from self.incoming.values()

    @property
    def holds_tracks(self) -> bool:
        """Whether a subscription or a fetch of either side is among them."""
        return any(
            isinstance(request, SubscriberSide | PublisherSide | OutgoingFetch | IncomingFetch)
            for request in self
        )

    def remembered(self) -> dict[str, int]:
        """Of a session's `Remembered` what is here."""
        told = (r for r in self.outgoing.values() if isinstance(r, OutgoingSubscribeNamespace))
        return {
            "requests_incoming": len(self.incoming),
            "requests_outgoing": len(self.outgoing),
            "requests_queued": len(self.queued),
            "updates": sum(len(request.updates) for request in self),
            "prefixes": sum(map(len, self._prefixes.values())),
            "namespaces": sum(len(request.namespaces) for request in told),
        }

    # -- ours ------------------------------------------------------------------------------

    def submit(self, request: R) -> R:
        """Send a request of ours now, or queue it until the peer grants a stream.

        Raises SessionClosed; MisuseError before the session is connected, for what no message can
        carry and for a token that cannot be registered; RequestError INVALID_FILTER for more
        ranges than the peer's MAX_FILTER_RANGES, EXCESSIVE_LOAD when `max_queued_requests` wait.
        """
        session = self._session
        if session.closed is not None:
            raise session.closed
        if not session.connected:
            raise MisuseError("the session is not connected yet")
        # Encoded once for nothing: what cannot be sent is refused before anything is kept of it.
        session.codec.encode_message(replace(request.message_sent, request_id=0))
        parameters = request.parameters
        session.rules.check_ranges_to_peer(parameters.range_filters, parameters.fill_parameters)
        session.rules.check_tokens_to_peer(parameters)
        if not self.queued and self._open(request):
            return request
        if len(self.queued) >= session.config.max_queued_requests:
            session.counters.requests_streamless += 1
            self.at_limit("max_queued_requests", session.config.max_queued_requests)
            raise RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                f"the peer grants no request stream, and {len(self.queued)} requests wait already",
                retry_after_ms=100,
            )
        session.counters.requests_queued += 1
        self.queued[request] = None
        timeout = session.config.stream_timeout
        if timeout is not None:
            request.await_stream(timeout, self._no_stream)
        return request

    def _no_stream(self, request: OutgoingRequest) -> None:
        """The time is up that it may wait for a stream."""
        session = self._session
        session.counters.requests_streamless += 1
        request.give_up(
            RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                f"the peer grants no more request streams ({len(self.outgoing)} are open, "
                f"{len(self.queued)} requests wait)",
                retry_after_ms=1000,
            )
        )

    def open_queued(self) -> None:
        """Send what the peer grants streams for now."""
        while self.queued and self._session.closed is None:
            request = next(iter(self.queued))
            if not self._open(request):
                return
            self.queued.pop(request, None)

    def _open(self, request: OutgoingRequest) -> bool:
        session = self._session
        stream_id = session.transport.open_stream(bidirectional=True)
        if stream_id is None:
            return False
        session.read_stream(RequestIn(session, stream_id, request.stream))
        self.outgoing[stream_id] = request
        if isinstance(request, OutgoingSubscribeTracks):
            self._tracks_requests[stream_id] = request
        session.counters.requests_sent += 1
        request.open(stream_id, self.next_id())
        return True

    def next_id(self) -> int:
        """A Request ID of ours."""
        request_id = self._next_id
        self._next_id += 2
        return request_id

    def take_back(self, request: OutgoingRequest) -> None:
        """It is cancelled before it was sent."""
        self.queued.pop(request, None)

    def tracks_request_for(self, name: FullTrackName) -> OutgoingSubscribeTracks | None:
        """The SUBSCRIBE_TRACKS of ours that a PUBLISH of this track answers."""
        for request in self._tracks_requests.values():
            if request.state is not RequestState.CLOSED and request.covers(name.namespace):
                return request
        return None

    @property
    def wants_fills(self) -> bool:
        """Whether a SUBSCRIBE_TRACKS of ours asks for fills: they come under the ID of PUBLISH."""
        return any(request.wants_fill for request in self._tracks_requests.values())

    # -- the peer's ------------------------------------------------------------------------

    @property
    def _open_here(self) -> int:
        """What of the peer's is open: its requests, and fills, which are requests in all but
        their streams."""
        return len(self.incoming) + self._session.scheduler.fills

    @property
    def has_room(self) -> bool:
        """Whether the peer may have one more request, or fill, open."""
        return self._open_here < self._session.config.max_requests

    def opened(self, stream_id: int, message: Message, *, leaving: bool) -> RequestStream:
        """The message that opens a request stream. Raises SessionError for another one.

        `leaving`: we have sent GOAWAY, and take no new requests.
        """
        if not isinstance(message, Request):
            raise protocol_violation(f"a request stream begins with {message.TYPE.name}")
        session, rules = self._session, self._session.rules
        if message.parameters.relay_path is not None and session.config.relay_id is None:
            raise protocol_violation("RELAY_PATH, which was not announced (RELAY_ID)")
        opening = OPENINGS[type(message)]
        stream = RequestStream(session, message.TYPE, requester=False, stream_id=stream_id)
        rules.use_request_id(message.request_id)
        request = opening.request(session, message, stream)
        self.incoming[stream_id] = request
        session.counters.requests_received += 1
        try:
            request.tokens = rules.resolve_tokens(request.parameters)
            rules.check_filters(request.parameters)
        except RequestError as error:
            if error.code != RequestErrorCode.INVALID_FILTER:
                session.counters.tokens_refused += 1
            request.reject(RequestErrorCode(error.code), error.reason)
            return stream
        config = session.config
        if self._open_here > session.config.max_requests:
            self.over_limit(
                request,
                "max_requests",
                config.max_requests,
                f"{config.max_requests} requests and fills are open, and no more may be",
            )
        elif not self._rate.take(session.clock.now):
            self.over_limit(
                request,
                "max_request_rate",
                config.max_request_rate,
                f"more than {config.max_request_rate} requests a second have come",
            )
        elif session.request_octets.exceeded:
            self.over_limit(
                request,
                "max_request_octets",
                config.max_request_octets,
                f"the requests that are open have {session.request_octets.total} octets of "
                f"messages, and {config.max_request_octets} may be",
            )
        elif leaving:
            request.reject(RequestErrorCode.GOING_AWAY, "this endpoint is going away")
        elif is_reserved(request.namespace):
            request.reject(RequestErrorCode.DOES_NOT_EXIST, "the namespace is reserved")
        elif request.admit():
            getattr(session.handler, opening.received)(request)
        return stream

    def over_limit(self, request: IncomingRequest, name: str, limit: int, why: str) -> None:
        """Refuse what is beyond the limit `name`; `why` is for the peer."""
        self._session.counters.requests_over_limit += 1
        self.at_limit(name, limit)
        request.reject(RequestErrorCode.EXCESSIVE_LOAD, f"{why} ({name})", retry_after_ms=1000)

    def claim_prefix(self, request: IncomingRequest, prefix: TrackNamespace) -> bool:
        """Have `request` claim `prefix`; False when it overlaps that of another of its kind."""
        return self._prefixes[type(request)].claim(request, prefix)

    def at_limit(self, name: str, limit: int) -> None:
        """The session has come to one of its limits: the log says so, once for each."""
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "%s: a session is at its limit of %d (%s): what goes beyond is refused",
                connection_of(self._session.transport),
                limit,
                name,
            )

    # -- their end -------------------------------------------------------------------------

    def forget(self, stream_id: int) -> None:
        """Ours on that stream is over."""
        self.outgoing.pop(stream_id, None)
        self._tracks_requests.pop(stream_id, None)

    def over(self, stream_id: int) -> None:
        """The peer's request is over."""
        request = self.incoming.pop(stream_id, None)
        prefixes = self._prefixes.get(type(request))
        if prefixes is not None:
            prefixes.release(request)

    def give_up_track(self, recipient: Recipient, error: RequestError) -> None:
        """End `recipient` and whatever else takes Objects of its track."""
        for request in (recipient, *self.outgoing.values(), *self.incoming.values()):
            if isinstance(request, SubscriberSide | OutgoingFetch) and (
                request.name == recipient.name and not request.over
            ):
                request.give_up(error)

    def session_closed(self, closed: SessionClosed | MoqtError) -> None:
        """Every request hears of the end of the session; none is left."""
        for incoming in tuple(self.incoming.values()):
            incoming.session_closed(closed)
        for outgoing in (*self.outgoing.values(), *self.queued):
            outgoing.session_closed(closed)
        self.incoming.clear()
        self._prefixes.clear()
        self._tracks_requests.clear()
        self.outgoing.clear()
        self.queued.clear()
