"""The MOQT session (draft-22): one connection's streams, requests and Objects.

Sans-IO: it implements `TransportHandler`, calls a `Transport`, and tells a
`SessionHandler` what the peer asks. No socket, no task, no clock: `tick(now)`
brings the time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import cast

from moqt.codes import (
    REQUEST_OPENERS,
    GroupOrder,
    MessageType,
    ObjectStatus,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
    StreamErrorCode,
)
from moqt.delivery import StreamDelivery
from moqt.errors import (
    MisuseError,
    MoqtError,
    RequestError,
    SessionClosed,
    SessionError,
    protocol_violation,
)
from moqt.filters import check_range_filters
from moqt.messages import (
    NO_PARAMETERS,
    Goaway,
    KeyValue,
    Message,
    Parameters,
    Properties,
    Request,
    RequestErrorMessage,
    Setup,
    property_value,
)
from moqt.names import FullTrackName, Location, TrackNamespace, is_reserved, overlap
from moqt.quic.base import Transport
from moqt.receiving import IncomingStream, Receiver, Via
from moqt.requests import (
    IncomingFetch,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingTrackStatus,
    OutgoingFetch,
    OutgoingPublishNamespace,
    OutgoingRequest,
    OutgoingSubscribe,
    OutgoingSubscribeNamespace,
    OutgoingTrackStatus,
    RequestState,
    RequestStream,
    build_incoming,
)
from moqt.scheduler import Scheduler
from moqt.store import IntervalSet, MalformedTrack
from moqt.tokens import Token, TokenCache
from moqt.wire.codec import Codec, FetchDecoder, SubgroupDecoder, codec_for
from moqt.wire.objects import (
    FetchHeader,
    ObjectHeader,
    PaddingDatagram,
    RangeMarker,
    StreamKind,
    SubgroupHeader,
)

logger = logging.getLogger("moqt.session")

IMPLEMENTATION = b"kvcs/0"
WRITE_QUANTUM = 64 * 1024
"""Octets one delivery may hand over before the priorities are looked at again."""
MAX_EARLY = 4096
"""Pieces of streams held before the peer's SETUP."""
MAX_REQUEST_ID_GAPS = 4096
"""Runs of the peer's Request IDs told apart; beyond it the oldest gap counts as used."""


def _ranges(parameters: Parameters) -> int:
    fill = parameters.fill_parameters
    own = sum(len(each.ranges) for each in parameters.range_filters)
    return own + (_ranges(fill) if fill is not None else 0)


def _number(options: Properties, kind: SetupOptionType) -> int:
    value = property_value(options, kind)
    return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session announces, and the limits it holds a peer to."""

    path: str = "/"
    authority: str = "localhost"
    setup_tokens: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded Token structures to send in SETUP."""
    max_filter_ranges: int = 16
    max_request_updates: int = 16
    max_auth_token_cache_size: int = 4096
    max_requests: int = 1024
    """Requests of the peer open at once; beyond, REQUEST_ERROR EXCESSIVE_LOAD."""
    max_namespaces: int = 4096
    """Namespaces one SUBSCRIBE_NAMESPACE of ours may be told."""
    max_held_octets: int = 4 << 20
    """Octets held for streams that came before SETUP or before their Track Alias."""
    send_budget: int = 256 * 1024
    """Octets kept unsent inside QUIC: enough to fill batches, little enough for priorities."""
    setup_timeout: float = 10.0
    alias_timeout: float = 5.0
    done_timeout: float = 10.0
    """How long PUBLISH_DONE waits at least for the streams it counts."""

    def __post_init__(self) -> None:
        if self.max_request_updates < 1:  # 0 would announce "unlimited"
            raise MisuseError("max_request_updates must be at least 1")


class SessionHandler:
    """What an application (publisher, relay) does with a session's events.

    The defaults refuse every request with NOT_SUPPORTED. Methods are called
    synchronously and must not block; a request may be answered later.
    """

    def session_established(self, session: Session) -> None: ...

    def session_closed(self, session: Session, error: SessionClosed) -> None: ...

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def fetch_received(self, request: IncomingFetch) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint accepts no publishers")

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None: ...

    def goaway_received(self, session: Session, goaway: Goaway) -> None: ...

    def request_goaway_received(self, request: OutgoingRequest, goaway: Goaway) -> None: ...


class SessionState(IntEnum):
    CONNECTING = 0
    """The QUIC handshake runs."""
    SETUP = 1
    """Our SETUP is sent, the peer's has not come."""
    ESTABLISHED = 2
    CLOSED = 3


_CONTROL_TYPES = frozenset({MessageType.SETUP})


class _ControlIn:
    """The peer's control stream."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.decoder = session.codec.message_decoder(_CONTROL_TYPES)

    def data(self, data: bytes, fin: bool) -> None:
        for message in self.decoder.feed(data):
            self.session.control_message(message)
            if self.session.closed is not None:
                return
        if fin:
            raise protocol_violation("the control stream ended")


class _RequestIn:
    """A bidirectional stream, from its first octet."""

    def __init__(
        self, session: Session, stream_id: int, stream: RequestStream | None = None
    ) -> None:
        self.session = session
        self.stream_id = stream_id
        self.decoder = session.codec.message_decoder(None if stream else REQUEST_OPENERS)
        self.stream = stream

    def data(self, data: bytes, fin: bool) -> None:
        session = self.session
        for message in self.decoder.feed(data):
            if self.stream is None:
                self.stream = session.request_opened(self.stream_id, message)
            else:
                self.stream.receive(message)
            if session.closed is not None:
                return
        if not fin:
            return
        if self.decoder.buffered:
            raise protocol_violation("FIN inside a message")
        if self.stream is not None:
            self.stream.peer_finished()
        else:
            session.transport.send(self.stream_id, b"", fin=True)
            session.forget_stream(self.stream_id)


class _DataIn:
    """A unidirectional stream: placed by its header, then decoded for its owner.

    What comes before the owner is known (its Track Alias, or the group order of a fill) is
    held as octets, bounded over all streams, and the stream's credit is held back.
    """

    def __init__(self, session: Session, stream_id: int) -> None:
        self.session = session
        self.stream_id = stream_id
        self.decoder: SubgroupDecoder | FetchDecoder | None = None
        self.header: SubgroupHeader | FetchHeader | None = None
        self.incoming: IncomingStream | None = None
        self.owner: OutgoingSubscribe | OutgoingFetch | None = None
        self.held = bytearray()
        self.held_since = 0.0
        self.ended = False
        self.error: int | None = None
        """The code of a reset, once `ended`."""
        self.discard = False

    def data(self, data: bytes, fin: bool) -> None:
        self.ended = self.ended or fin
        if self.discard:  # padding
            if fin:
                self.session.forget_stream(self.stream_id)
        elif self.owner is not None:
            self._decode(data)
        elif self.header is not None:
            self._hold(data)
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Read the header, octet by octet so that nothing after it is decoded yet."""
        session, decoder = self.session, self.decoder
        if decoder is None:
            data = bytes(self.held) + data
            found = session.codec.data_stream_type(data)
            if found is None:
                if self.ended and data:
                    raise protocol_violation("a stream ended inside its type")
                if self.ended:
                    session.forget_stream(self.stream_id)
                self.held[:] = data
                return
            self.held.clear()
            match found[0]:
                case StreamKind.CONTROL:
                    session.control_opened(self.stream_id, data, self.ended)
                    return
                case StreamKind.PADDING:
                    self.discard = True
                    if self.ended:
                        session.forget_stream(self.stream_id)
                    return
                case StreamKind.SUBGROUP:
                    decoder = session.codec.subgroup_decoder()
                case StreamKind.FETCH:
                    decoder = session.codec.fetch_decoder(GroupOrder.ASCENDING)
            self.decoder = decoder
        for position in range(len(data)):
            events = decoder.feed(data[position : position + 1])
            if events:
                header = events[0]
                assert isinstance(header, SubgroupHeader | FetchHeader)
                self.header = header
                self.place(data[position + 1 :])
                return
        if self.ended:
            raise protocol_violation("a data stream ended inside its header")

    @property
    def waiting(self) -> bool:
        return self.stream_id in self.session.waiting_for_alias

    @property
    def wanted(self) -> bool:
        """Whether an owner is there or may still come."""
        if isinstance(self.header, SubgroupHeader):
            died = self.session.dead_aliases.get(self.header.track_alias)
            # an alias may be used again once nothing of its old track is on its way
            return died is None or self.session.now - died > self.session.config.alias_timeout
        return self.header is not None and self.header.request_id in self.session.fetch_receivers

    def place(self, data: bytes = b"") -> None:
        """Start for the owner, wait for it, or drop what nobody wants."""
        session, header = self.session, self.header
        owner: OutgoingSubscribe | OutgoingFetch | None
        if isinstance(header, SubgroupHeader):
            owner = session.aliases.get(header.track_alias)
            incoming = IncomingStream(self.stream_id, Via.SUBSCRIPTION, subgroup=header)
        else:
            assert header is not None
            owner = session.fetch_receivers.get(header.request_id)
            via = Via.FETCH if isinstance(owner, OutgoingFetch) else Via.FILL
            incoming = IncomingStream(self.stream_id, via, request_id=header.request_id)
            if isinstance(owner, OutgoingSubscribe) and not owner.order_known:
                owner = None
        if owner is not None:
            self._start(owner, incoming, data)
        elif self.wanted:
            self._hold(data)
        else:
            self.drop()

    def _hold(self, data: bytes) -> None:
        session = self.session
        if not self.waiting:
            self.held_since = session.now
            session.waiting_for_alias[self.stream_id] = self
            session.transport.pause_receiving(self.stream_id)
        self.held += data
        session.held_octets += len(data)
        if session.held_octets > session.config.max_held_octets:
            session.streams_dropped += 1
            self.drop()

    def _release(self) -> bytes:
        """Leave the waiting room with what was held."""
        session = self.session
        held, self.held = bytes(self.held), bytearray()
        if session.waiting_for_alias.pop(self.stream_id, None) is not None:
            session.held_octets -= len(held)
        return held

    def _start(
        self, owner: OutgoingSubscribe | OutgoingFetch, incoming: IncomingStream, data: bytes
    ) -> None:
        if self.waiting:
            data = self._release() + data
            self.session.transport.resume_receiving(self.stream_id)
        self.owner, self.incoming = owner, incoming
        if isinstance(self.header, FetchHeader):
            cast(FetchDecoder, self.decoder).group_order = owner.group_order
            # There is one stream for each request: another one of this ID is unwanted.
            del self.session.fetch_receivers[self.header.request_id]
        owner.receiver.stream_opened(incoming)
        if not self.discard:
            self._decode(data)

    def _decode(self, data: bytes) -> None:
        decoder, owner, incoming = self.decoder, self.owner, self.incoming
        assert decoder is not None and owner is not None and incoming is not None
        events = decoder.feed(data)
        if self.ended and self.error is None and decoder.mid_object:
            raise protocol_violation("a data stream ended inside an object")
        receiver = owner.receiver
        try:
            for event in events:
                if isinstance(event, bytes | memoryview):
                    header = incoming.header
                    assert header is not None
                    receiver.object_part(incoming, event)
                    incoming.remaining -= len(event)
                    if not incoming.remaining and not self.discard:
                        incoming.header = None
                        receiver.object_ended(incoming, header)
                elif isinstance(event, ObjectHeader):
                    receiver.object_begun(incoming, event)
                    incoming.remaining = event.length
                    if event.length:
                        incoming.header = event
                    elif not self.discard:
                        receiver.object_ended(incoming, event)
                elif isinstance(event, RangeMarker):
                    receiver.range_marker(incoming, event)
                if self.discard:  # a callback gave the request up, or closed the session
                    return
        except MalformedTrack as malformed:
            self.session.track_malformed(owner, str(malformed))
            return
        if self.ended:
            self._over()

    def reset(self, code: int) -> None:
        self.ended, self.error = True, code
        if self.owner is not None:
            self._over()
        elif not self.waiting:
            self.discard = True
            self.session.forget_stream(self.stream_id)

    def _over(self) -> None:
        owner, incoming = self.owner, self.incoming
        assert owner is not None and incoming is not None
        self.discard = True
        self.session.forget_stream(self.stream_id)
        try:
            owner.receiver.stream_ended(incoming, self.error)
        except MalformedTrack as malformed:
            self.session.track_malformed(owner, str(malformed))
            return
        owner.stream_ended()

    def drop(self) -> None:
        """Nobody wants what comes on this stream."""
        if self.discard:
            return
        self.discard = True
        self._release()
        if not self.ended:
            self.session.transport.stop_receiving(self.stream_id, StreamErrorCode.CANCELLED)
        self.session.forget_stream(self.stream_id)


class Session:
    """One MOQT session over `transport`; the handshake's ALPN chooses the codec."""

    codec: Codec

    def __init__(
        self,
        transport: Transport,
        handler: SessionHandler,
        config: SessionConfig | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        self.transport = transport
        self.handler = handler
        self.config = config or SessionConfig()
        self.state = SessionState.CONNECTING
        self.now = now
        self.scheduler = Scheduler()
        self.aliases: dict[int, OutgoingSubscribe] = {}
        self.dead_aliases: OrderedDict[int, float] = OrderedDict()
        self.waiting_for_alias: dict[int, _DataIn] = {}
        """Data streams, by id, that came before the SUBSCRIBE_OK they belong to."""
        self.fetch_receivers: dict[int, OutgoingSubscribe | OutgoingFetch] = {}
        self.held_octets = 0
        self.streams_dropped = 0
        self.peer_max_filter_ranges = 0
        self.peer_max_request_updates = 0
        self.peer_tokens: tuple[Token, ...] = ()
        self.goaway: Goaway | None = None
        self.closed: SessionClosed | None = None
        self.observers: list[Callable[[SessionClosed | None], None]] = []
        """Called with None at establishment and with the reason at the end."""
        self._goaway_sent = False
        self._goaway_deadline: float | None = None
        self._token_cache = TokenCache(self.config.max_auth_token_cache_size)
        self._streams: dict[int, _ControlIn | _RequestIn | _DataIn] = {}
        self._sending: dict[int, StreamDelivery] = {}
        self._control_out: int | None = None
        self._control_in: int | None = None
        self._early: list[tuple[int, bytes, bool]] = []
        self._early_octets = 0
        self._incoming: dict[int, IncomingRequest] = {}
        self._used_request_ids = IntervalSet()
        self._outgoing: dict[int, OutgoingRequest] = {}
        self._next_request_id = 0 if transport.is_client else 1
        self._next_alias = 0
        self._setup_deadline: float | None = None

    # -- requests of ours ----------------------------------------------------------------

    def subscribe(
        self, name: FullTrackName, receiver: Receiver, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingSubscribe:
        """SUBSCRIBE to a track; `receiver` gets the answer and the Objects."""
        return OutgoingSubscribe(self, name, parameters, receiver)

    def fetch(
        self, name: FullTrackName, receiver: Receiver, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingFetch:
        """FETCH a range of a track."""
        return OutgoingFetch(self, name, parameters, receiver)

    def publish_namespace(
        self,
        namespace: TrackNamespace,
        parameters: Parameters = NO_PARAMETERS,
        *,
        on_ended: Callable[[MoqtError], None],
    ) -> OutgoingPublishNamespace:
        """PUBLISH_NAMESPACE; `on_ended` when it is refused, revoked or the session ends."""
        return OutgoingPublishNamespace(self, namespace, parameters, on_ended=on_ended)

    def subscribe_namespace(
        self,
        prefix: TrackNamespace,
        parameters: Parameters = NO_PARAMETERS,
        *,
        on_namespace: Callable[[TrackNamespace, bool], None],
        on_ended: Callable[[MoqtError | None], None],
    ) -> OutgoingSubscribeNamespace:
        """SUBSCRIBE_NAMESPACE; `on_namespace(full namespace, present)` as they come and go."""
        return OutgoingSubscribeNamespace(
            self, prefix, parameters, on_namespace=on_namespace, on_ended=on_ended
        )

    def track_status(
        self, name: FullTrackName, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingTrackStatus:
        """TRACK_STATUS; `on_answer` of what is returned tells when it was answered."""
        return OutgoingTrackStatus(self, name, parameters)

    def send_goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """GOAWAY on the control stream, at most once."""
        if self.state is SessionState.CLOSED or self._goaway_sent or self._control_out is None:
            return
        if uri and self.transport.is_client:
            raise MisuseError("a client's GOAWAY carries no URI")
        self._goaway_sent = True
        if timeout_ms:
            self._goaway_deadline = self.now + timeout_ms / 1000
        self.send_message(self._control_out, Goaway(uri, timeout_ms), False)

    def close(self, code: SessionErrorCode = SessionErrorCode.NO_ERROR, reason: str = "") -> None:
        """End the session and every request of it."""
        if self.state is SessionState.CLOSED:
            return
        self.transport.close(code, reason)
        self._ended(SessionClosed(code, reason))

    # -- TransportHandler ----------------------------------------------------------------

    def connection_established(self, alpn: str) -> None:
        if self.state is not SessionState.CONNECTING:
            return
        self.codec = codec_for(alpn)
        self.state = SessionState.SETUP
        self._control_out = self.transport.open_stream(bidirectional=False)
        if self._control_out is None:
            self.close(SessionErrorCode.INTERNAL_ERROR, "the peer allows no control stream")
            return
        self.send_message(self._control_out, Setup(self._setup_options()), False)
        early, self._early, self._early_octets = self._early, [], 0
        for stream_id, data, fin in early:
            self.transport.resume_receiving(stream_id)
            self.stream_data(stream_id, data, fin)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if self.state is SessionState.CLOSED:
            return
        try:
            if self.state is SessionState.CONNECTING:
                self._hold_early(stream_id, data, fin)
                return
            stream = self._streams.get(stream_id)
            if stream is None:
                stream = self._new_stream(stream_id)
            if self.state is not SessionState.ESTABLISHED and not isinstance(stream, _ControlIn):
                self._before_setup(stream_id, stream, data, fin)
            else:
                stream.data(data, fin)
        except SessionError as error:
            self._violated(error)

    def stream_reset(self, stream_id: int, code: int) -> None:
        if self.state is SessionState.CLOSED:
            return
        try:
            stream = self._streams.get(stream_id)
            match stream:
                case _ControlIn():
                    raise protocol_violation("the control stream was reset")
                case None | _RequestIn(stream=None):
                    self._refuse_request_stream(stream_id)
                case _RequestIn(stream=RequestStream() as request):
                    request.peer_cancelled(code)
                case _DataIn():
                    stream.reset(code)
        except SessionError as error:
            self._violated(error)

    def stop_sending(self, stream_id: int, code: int) -> None:
        if self.state is SessionState.CLOSED:
            return
        try:
            if stream_id == self._control_out:
                raise protocol_violation("STOP_SENDING on the control stream")
            stream = self._streams.get(stream_id)
            delivery = self._sending.get(stream_id)
            if isinstance(stream, _RequestIn) and stream.stream is not None:
                stream.stream.peer_cancelled(code)
            elif delivery is not None:
                delivery.stopped()
            else:
                self._refuse_request_stream(stream_id)
        except SessionError as error:
            self._violated(error)

    def datagram(self, data: bytes) -> None:
        if self.state is not SessionState.ESTABLISHED:
            return
        try:
            self._datagram(data)
        except SessionError as error:
            self._violated(error)

    def ready_to_send(self) -> None:
        if self.state is not SessionState.ESTABLISHED:
            return
        scheduler, budget = self.scheduler, self.config.send_budget
        scheduler.unblock()
        while self.transport.unsent < budget:
            if not scheduler.write_next(WRITE_QUANTUM):
                break

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        self._ended(SessionClosed(code, reason, transport=not application))

    def tick(self, now: float) -> None:
        """Time has passed: deadlines are looked at. Once a second is enough."""
        self.now = now
        if self.state is SessionState.CLOSED:
            return
        if self.state is SessionState.SETUP and self._setup_deadline is None:
            self._setup_deadline = now + self.config.setup_timeout
        if self.state is SessionState.SETUP and now > (self._setup_deadline or now):
            self.close(SessionErrorCode.CONTROL_MESSAGE_TIMEOUT, "the peer sent no SETUP")
            return
        if self._goaway_deadline is not None and now > self._goaway_deadline:
            self._goaway_deadline = None
            if self._incoming or self._outgoing:
                self.close(SessionErrorCode.GOAWAY_TIMEOUT, "the peer did not leave in time")
                return
        for stream in tuple(self.waiting_for_alias.values()):
            if now - stream.held_since > self.config.alias_timeout:
                self.streams_dropped += 1
                stream.drop()
        for request in tuple(self._outgoing.values()):
            if (
                isinstance(request, OutgoingSubscribe)
                and request.done is not None
                and now > request.done_deadline
            ):
                request.check_done(expired=True)

    # -- Outlet, for deliveries ------------------------------------------------------------

    def open_data_stream(self, delivery: StreamDelivery) -> int | None:
        stream_id = self.transport.open_stream(bidirectional=False)
        if stream_id is not None:
            self._sending[stream_id] = delivery
        return stream_id

    def data_stream_closed(self, stream_id: int) -> None:
        self._sending.pop(stream_id, None)

    # -- used by the request objects -------------------------------------------------------

    def send_message(self, stream_id: int, message: Message, fin: bool) -> None:
        if self.state is SessionState.CLOSED:
            return
        logger.debug("send on stream %d: %r", stream_id, message)
        self.transport.send(stream_id, self.codec.encode_message(message), fin)
        self.transport.wake()

    def next_request_id(self) -> int:
        request_id = self._next_request_id
        self._next_request_id += 2
        return request_id

    def next_track_alias(self) -> int:
        self._next_alias += 1
        return self._next_alias

    def open_request(self, message: Request, owner: OutgoingRequest) -> RequestStream:
        if self.closed is not None:
            raise self.closed
        if self.state is SessionState.CONNECTING:
            raise MisuseError("the session is not connected yet")
        ranges = _ranges(message.parameters)
        if ranges > self.peer_max_filter_ranges:
            self._next_request_id -= 2
            raise RequestError(
                RequestErrorCode.INVALID_FILTER,
                f"{ranges} filter ranges, the peer allows {self.peer_max_filter_ranges}",
            )
        stream_id = self.transport.open_stream(bidirectional=True)
        if stream_id is None:
            self._next_request_id -= 2  # the message's ID was not used
            raise RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                "the peer allows no further request stream at the moment",
                retry_after_ms=100,
            )
        stream = RequestStream(self, stream_id, message.TYPE, requester=True)
        stream.owner = owner
        self._streams[stream_id] = _RequestIn(self, stream_id, stream)
        self._outgoing[stream_id] = owner
        self.send_message(stream_id, message, False)
        return stream

    def forget_stream(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        self._outgoing.pop(stream_id, None)

    def request_closed(self, stream_id: int) -> None:
        self._outgoing.pop(stream_id, None)

    def request_over(self, request: IncomingRequest) -> None:
        self._incoming.pop(request.stream.stream_id, None)

    def register_alias(self, alias: int, owner: OutgoingSubscribe) -> None:
        other = self.aliases.get(alias)
        if other is not None and other is not owner and other.name != owner.name:
            raise SessionError(
                SessionErrorCode.DUPLICATE_TRACK_ALIAS, f"Track Alias {alias} is in use"
            )
        self.dead_aliases.pop(alias, None)
        self.aliases.setdefault(alias, owner)

    def release_alias(self, alias: int, owner: OutgoingSubscribe) -> None:
        """`owner` uses `alias` no more; another subscription to the track may."""
        if self.aliases.get(alias) is not owner:
            return
        for other in self._outgoing.values():
            if (
                isinstance(other, OutgoingSubscribe)
                and other is not owner
                and other.track_alias == alias
                and other.state is RequestState.ESTABLISHED
            ):
                self.aliases[alias] = other
                return
        del self.aliases[alias]
        self.dead_aliases[alias] = self.now
        if len(self.dead_aliases) > 1024:
            self.dead_aliases.popitem(last=False)

    def place_waiting(self) -> None:
        """A SUBSCRIBE_OK has come: find the owners of the streams that came before it."""
        for stream in tuple(self.waiting_for_alias.values()):
            if not stream.discard:
                stream.place()

    def reset_streams(self, owner: OutgoingFetch, code: int) -> bool:
        """The peer gave `owner` up: its streams end as if reset; False when there is none."""
        readers = [
            reader
            for reader in self._streams.values()
            if isinstance(reader, _DataIn) and reader.owner is owner
        ]
        for reader in readers:
            reader.drop()
            reader.reset(code)
        return bool(readers)

    def drop_streams(self, owner: OutgoingSubscribe | OutgoingFetch) -> None:
        """`owner` is over: STOP_SENDING on its streams that are still open."""
        for reader in tuple(self._streams.values()):
            if isinstance(reader, _DataIn) and (
                reader.owner is owner or (reader.waiting and not reader.wanted)
            ):
                reader.drop()

    def track_malformed(self, owner: OutgoingSubscribe | OutgoingFetch, reason: str) -> None:
        """Give up every request for the track (MOQT "Malformed Tracks")."""
        error = RequestError(RequestErrorCode.MALFORMED_TRACK, reason)
        for request in (owner, *self._outgoing.values()):
            if isinstance(request, OutgoingSubscribe | OutgoingFetch) and (
                request.name == owner.name and request.state is not RequestState.CLOSED
            ):
                request.give_up(error)

    def use_request_id(self, request_id: int) -> None:
        """Check parity and that the ID is new (MOQT "Request ID"). Kept as intervals: IDs may
        be skipped for good, when a request is cancelled before it was ever read."""
        if request_id & 1 != self.transport.is_client:
            raise SessionError(
                SessionErrorCode.INVALID_REQUEST_ID,
                f"Request ID {request_id} has the wrong least significant bit",
            )
        used, mark = self._used_request_ids, Location(0, request_id >> 1)
        if mark in used:
            raise SessionError(
                SessionErrorCode.INVALID_REQUEST_ID, f"Request ID {request_id} was used before"
            )
        used.add(mark, mark)
        if len(used) > MAX_REQUEST_ID_GAPS:
            hole = used.first_missing(Location(0, 0), mark) or mark
            used.add(hole, used.missing_end(hole, mark))

    def prefix_overlaps(
        self, prefix: TrackNamespace, but: IncomingSubscribeNamespace | None
    ) -> bool:
        """Whether another SUBSCRIBE_NAMESPACE of this session overlaps `prefix`."""
        return any(
            isinstance(other, IncomingSubscribeNamespace)
            and other is not but
            and overlap(other.prefix, prefix)
            for other in self._incoming.values()
        )

    def check_filters(self, parameters: Parameters) -> None:
        """Raise RequestError INVALID_FILTER; MAX_FILTER_RANGES counts a request and its fill."""
        limit = self.config.max_filter_ranges
        check_range_filters(parameters.range_filters, limit)
        fill = parameters.fill_parameters
        if fill is not None:
            used = sum(len(each.ranges) for each in parameters.range_filters)
            check_range_filters(fill.range_filters, limit - used)

    def resolve_tokens(self, parameters: Parameters) -> tuple[Token, ...]:
        return self._token_cache.resolve(parameters.authorization_tokens)

    def check_goaway(self, goaway: Goaway) -> None:
        if goaway.uri and not self.transport.is_client:
            raise protocol_violation("a client's GOAWAY carries a URI")

    def check_redirect(self, message: RequestErrorMessage, opening: MessageType) -> None:
        redirect = message.redirect
        if redirect is None:
            return
        if redirect.uri and not self.transport.is_client:
            raise protocol_violation("a client's REDIRECT carries a URI")
        namespace_scoped = opening in (
            MessageType.PUBLISH_NAMESPACE,
            MessageType.SUBSCRIBE_NAMESPACE,
            MessageType.SUBSCRIBE_TRACKS,
        )
        if redirect.name and namespace_scoped:
            raise protocol_violation("a REDIRECT of a namespace request carries a track name")

    # -- called by the stream readers ------------------------------------------------------

    def control_opened(self, stream_id: int, data: bytes, fin: bool) -> None:
        if self._control_in is not None:
            raise protocol_violation("a second control stream")
        self._control_in = stream_id
        control = _ControlIn(self)
        self._streams[stream_id] = control
        control.data(data, fin)

    def control_message(self, message: Message) -> None:
        logger.debug("received on the control stream: %r", message)
        if self.state is SessionState.SETUP:
            if not isinstance(message, Setup):
                raise protocol_violation(f"{message.TYPE.name} before SETUP")
            self._setup_received(message)
        elif isinstance(message, Goaway):
            if self.goaway is not None:
                raise protocol_violation("a second GOAWAY")
            self.check_goaway(message)
            self.goaway = message
            self.handler.goaway_received(self, message)
        else:
            raise protocol_violation(f"{message.TYPE.name} on the control stream")

    def request_opened(self, stream_id: int, message: Message) -> RequestStream:
        logger.debug("received on stream %d: %r", stream_id, message)
        if message.TYPE not in REQUEST_OPENERS:
            raise protocol_violation(f"a request stream begins with {message.TYPE.name}")
        stream = RequestStream(self, stream_id, message.TYPE, requester=False)
        self.use_request_id(message.request_id)  # type: ignore[union-attr]
        request = build_incoming(self, stream, message)  # type: ignore[arg-type]
        self._incoming[stream_id] = request
        try:
            request.tokens = self.resolve_tokens(request.parameters)
            self.check_filters(request.parameters)
        except RequestError as error:
            request.reject(RequestErrorCode(error.code), error.reason)
            return stream
        self._dispatch(request)
        return stream

    # -- inside ----------------------------------------------------------------------------

    def _refuse_request_stream(self, stream_id: int) -> None:
        """The peer gave up a request stream of its own before its request was read."""
        if not stream_id & 2 and (stream_id & 1 == 0) != self.transport.is_client:
            self.transport.reset(stream_id, StreamErrorCode.CANCELLED)
            self.transport.stop_receiving(stream_id, StreamErrorCode.CANCELLED)
            self.forget_stream(stream_id)

    def _dispatch(self, request: IncomingRequest) -> None:
        if len(self._incoming) > self.config.max_requests:
            request.reject(
                RequestErrorCode.EXCESSIVE_LOAD, "too many requests are open", retry_after_ms=1000
            )
            return
        if self._goaway_sent:
            request.reject(RequestErrorCode.GOING_AWAY, "this endpoint is going away")
            return
        if is_reserved(request.namespace):
            request.reject(RequestErrorCode.DOES_NOT_EXIST, "the namespace is reserved")
            return
        request.dispatch(self.handler)

    def _setup_options(self) -> Properties:
        option, config = SetupOptionType, self.config
        pairs: list[KeyValue] = []
        if self.transport.is_client:
            pairs.append(KeyValue(option.PATH, config.path.encode()))
        pairs += [KeyValue(option.AUTHORIZATION_TOKEN, token) for token in config.setup_tokens]
        if config.max_auth_token_cache_size:
            pairs.append(
                KeyValue(option.MAX_AUTH_TOKEN_CACHE_SIZE, config.max_auth_token_cache_size)
            )
        if self.transport.is_client:
            pairs.append(KeyValue(option.AUTHORITY, config.authority.encode()))
        pairs.append(KeyValue(option.MAX_FILTER_RANGES, config.max_filter_ranges))
        pairs.append(KeyValue(option.MOQT_IMPLEMENTATION, IMPLEMENTATION))
        pairs.append(KeyValue(option.MAX_REQUEST_UPDATES, config.max_request_updates))
        return tuple(pairs)

    def _setup_received(self, setup: Setup) -> None:
        options = setup.options
        for kind, code in (
            (SetupOptionType.PATH, SessionErrorCode.INVALID_PATH),
            (SetupOptionType.AUTHORITY, SessionErrorCode.INVALID_AUTHORITY),
        ):
            if self.transport.is_client and property_value(options, kind) is not None:
                raise SessionError(code, f"{kind.name} from a server")
        tokens = [
            self.codec.decode_token(pair.value)
            for pair in options
            if pair.type == SetupOptionType.AUTHORIZATION_TOKEN and isinstance(pair.value, bytes)
        ]
        self.peer_tokens = self._token_cache.resolve(tokens, setup=True)
        self.peer_max_filter_ranges = _number(options, SetupOptionType.MAX_FILTER_RANGES)
        self.peer_max_request_updates = _number(options, SetupOptionType.MAX_REQUEST_UPDATES)
        self.state = SessionState.ESTABLISHED
        self.handler.session_established(self)
        if self.closed is not None:
            return
        for observer in tuple(self.observers):
            observer(None)
        early, self._early, self._early_octets = self._early, [], 0
        for stream_id, data, fin in early:
            stream = self._streams.get(stream_id)
            if stream is not None and self.closed is None:
                self.transport.resume_receiving(stream_id)
                stream.data(data, fin)

    def _new_stream(self, stream_id: int) -> _RequestIn | _DataIn:
        stream: _RequestIn | _DataIn
        if stream_id & 2:
            stream = _DataIn(self, stream_id)
        else:
            stream = _RequestIn(self, stream_id)
        self._streams[stream_id] = stream
        return stream

    def _before_setup(
        self, stream_id: int, stream: _RequestIn | _DataIn, data: bytes, fin: bool
    ) -> None:
        """Hold what overtook the peer's SETUP; find the control stream among it."""
        if isinstance(stream, _DataIn):
            held = b"".join(d for s, d, _ in self._early if s == stream_id)
            found = self.codec.data_stream_type(held + data)
            if found is not None and found[0] is StreamKind.CONTROL:
                self._early = [e for e in self._early if e[0] != stream_id]
                self._early_octets -= len(held)
                self.transport.resume_receiving(stream_id)
                stream.data(held + data, fin)
                return
        self._hold_early(stream_id, data, fin)

    def _hold_early(self, stream_id: int, data: bytes, fin: bool) -> None:
        self._early.append((stream_id, data, fin))
        self._early_octets += len(data)
        if self._early_octets > self.config.max_held_octets or len(self._early) > MAX_EARLY:
            raise SessionError(SessionErrorCode.INTERNAL_ERROR, "too much was sent before SETUP")
        if not stream_id & 2 or self._early_octets > 65536:
            self.transport.pause_receiving(stream_id)

    def _datagram(self, data: bytes) -> None:
        decoded = self.codec.decode_datagram(data)
        if isinstance(decoded, PaddingDatagram):
            return
        owner = self.aliases.get(decoded.track_alias)
        if owner is None:
            return
        incoming = IncomingStream(
            -1,
            Via.DATAGRAM,
            subgroup=SubgroupHeader(
                decoded.track_alias, decoded.group, None, decoded.priority, decoded.end_of_group
            ),
        )
        header = ObjectHeader(
            group=decoded.group,
            object=decoded.object,
            subgroup=None,
            priority=decoded.priority,
            properties=decoded.properties,
            length=len(decoded.payload),
            status=ObjectStatus(decoded.status),
        )
        receiver = owner.receiver
        try:
            receiver.object_begun(incoming, header)
            if decoded.payload and owner.state is RequestState.ESTABLISHED:
                receiver.object_part(incoming, decoded.payload)
            if owner.state is RequestState.ESTABLISHED:
                receiver.object_ended(incoming, header)
        except MalformedTrack as malformed:
            self.track_malformed(owner, str(malformed))

    def _violated(self, error: SessionError) -> None:
        logger.info("closing the session: %s", error)
        self.close(error.code, error.reason)

    def _ended(self, closed: SessionClosed) -> None:
        if self.state is SessionState.CLOSED:
            return
        self.state = SessionState.CLOSED
        self.closed = closed
        self._early.clear()
        self._early_octets = 0
        for reader in self._streams.values():
            if isinstance(reader, _DataIn):
                reader.discard = True
        self._streams.clear()
        self.waiting_for_alias.clear()
        self.held_octets = 0
        for incoming in tuple(self._incoming.values()):
            incoming.session_closed(closed)
        for outgoing in tuple(self._outgoing.values()):
            outgoing.session_closed(closed)
        self._incoming.clear()
        self._outgoing.clear()
        self._sending.clear()
        self.handler.session_closed(self, closed)
        for observer in tuple(self.observers):
            observer(closed)
