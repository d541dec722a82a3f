"""The MOQT session (draft-22): one connection's streams, requests and Objects.

Sans-IO: it implements `TransportHandler`, calls a `Transport`, and tells a
`SessionHandler` what the peer asks. No socket, no task, no clock: `tick(now)`
brings the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moqt.delivery import FetchDelivery, StreamDelivery
from moqt.delivery.scheduler import Scheduler
from moqt.log.event_log import event_log
from moqt.log.logged_transport import LoggedTransport
from moqt.quic.transport import Transport, connection_of
from moqt.receiving.control_streams import ControlIn, RequestIn
from moqt.receiving.data_streams import DataIn, DataStreams
from moqt.receiving.datagrams import receive_datagram
from moqt.receiving.early import EarlyStreams
from moqt.receiving.host import Recipient
from moqt.receiving.receiver import Receiver
from moqt.receiving.request_octets import RequestOctets
from moqt.requests import (
    IncomingPublish,
    OpenRequest,
    OutgoingFetch,
    OutgoingPublish,
    OutgoingPublishNamespace,
    OutgoingSubscribe,
    OutgoingSubscribeNamespace,
    OutgoingSubscribeTracks,
    OutgoingTrackStatus,
    RequestStream,
)
from moqt.requests.rules import Rules
from moqt.session.events import SessionEvents
from moqt.session.handshake import SESSION_MOVES, SessionState, read_setup, setup_options
from moqt.session.open_requests import OpenRequests
from moqt.session.remembered import Remembered
from moqt.track.malformed import MalformedTracks
from moqt.track.store import TrackStore
from moqt.values.codes import (
    GroupOrder,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.values.config import SessionConfig, SessionCounters
from moqt.values.deadlines import Deadline, Deadlines
from moqt.values.errors import (
    MoqtError,
    RequestError,
    SessionClosed,
    SessionError,
    protocol_violation,
)
from moqt.values.messages import (
    NO_PARAMETERS,
    Goaway,
    Message,
    Parameters,
    PeerRelay,
    Setup,
)
from moqt.values.names import FullTrackName, TrackNamespace
from moqt.values.states import move
from moqt.values.tokens import Token
from moqt.wire.codec import Codec, codec_for
from moqt.wire.objects import StreamKind

logger = logging.getLogger("moqt.session")

WRITE_QUANTUM = 64 * 1024
"""Octets one delivery may hand over before the priorities are looked at again."""


class Session:
    """One MOQT session over `transport`; the handshake's ALPN chooses the codec."""

    codec: Codec

    def __init__(
        self,
        transport: Transport,
        handler: SessionEvents,
        config: SessionConfig | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        self.event_log = event_log(self, transport)
        """None costs nothing but a look for each message."""
        if self.event_log is not None:
            transport = LoggedTransport(transport, self.event_log)
        self.transport: Transport = transport
        self.handler = handler
        self.config: SessionConfig = config or SessionConfig()
        self.state = SessionState.CONNECTING
        self.clock = Deadlines(now)
        self.scheduler = Scheduler()
        self.malformed = MalformedTracks()
        """Tracks of the peer's that contradicted themselves."""
        self.data_streams: DataStreams = DataStreams(self)
        """The peer's, and for whom they are."""
        self.counters = SessionCounters()
        self.peer_max_request_updates = 0
        self.authority: str | None = None
        self.path: str | None = None
        """At a server: what the client dialled, from SETUP or WebTransport's CONNECT; with the
        authority the path (without its query) is the scope in which track names are unique."""
        self.peer_tokens: tuple[Token, ...] = ()
        self.peer_relay: PeerRelay | None = None
        """The peer is a relay of this implementation."""
        self.goaway: Goaway | None = None
        self.closed: SessionClosed | None = None
        self.observers: list[Callable[[SessionClosed | None], None]] = []
        """Called with None at establishment and with the reason at the end."""
        self.goaway_observers: list[Callable[[Goaway], None]] = []
        """Called with the peer's GOAWAY, after the handler."""
        self._goaway_sent = False
        self._draining = False
        self.rules = Rules(self.config, self, is_client=transport.is_client)
        self._streams: dict[int, ControlIn | RequestIn | DataIn] = {}
        self._control_out: int | None = None
        self._control_in: int | None = None
        self._early = EarlyStreams(transport, self.config.max_held_octets)
        self.request_octets = RequestOctets(self.config)
        self.requests: OpenRequests = OpenRequests(self)
        self._next_alias = 0
        self._setup_deadline: Deadline | None = None

    @property
    def now(self) -> float:
        """The time of the last `tick`, in seconds."""
        return self.clock.now

    def remembered(self) -> Remembered:
        """How much is kept of the peer's doing, table by table."""
        here = Remembered(
            request_octets=self.request_octets.total,
            deadlines=len(self.clock),
            streams_read=len(self._streams) - (self._control_in in self._streams),
            streams_sent=len(self.scheduler.sending),
            octets_held=self._early.octets,
            pieces_early=len(self._early),
            tokens=len(self.peer_tokens),
            token_octets=self.rules.token_cache.size,
            request_id_gaps=self.rules.request_id_gaps,
            malformed_tracks=len(self.malformed),
        )
        return here + Remembered(**self.requests.remembered(), **self.data_streams.remembered())

    @property
    def connected(self) -> bool:
        """Whether the QUIC handshake is over: requests can be made, and sent after SETUP."""
        return self.state is not SessionState.CONNECTING

    def move(self, to: SessionState) -> None:
        self.state = move(SESSION_MOVES, self.state, to)

    # -- requests of ours ----------------------------------------------------------------

    def subscribe(
        self, name: FullTrackName, receiver: Receiver, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingSubscribe:
        """SUBSCRIBE to a track; `receiver` gets the answer and the Objects.

        Raises RequestError MALFORMED_TRACK for a while after it was found to be malformed.
        """
        self.rules.check_name(name)
        self.malformed.refuse(name, self.clock.now)
        return self.requests.submit(OutgoingSubscribe(self, name, parameters, receiver))

    def fetch(
        self, name: FullTrackName, receiver: Receiver, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingFetch:
        """FETCH a range of a track; refused like `subscribe`."""
        self.rules.check_name(name)
        self.malformed.refuse(name, self.clock.now)
        return self.requests.submit(OutgoingFetch(self, name, parameters, receiver))

    def publish_namespace(
        self,
        namespace: TrackNamespace,
        parameters: Parameters = NO_PARAMETERS,
        *,
        on_ended: Callable[[MoqtError], None],
    ) -> OutgoingPublishNamespace:
        """PUBLISH_NAMESPACE; `on_ended` when it is refused, revoked or the session ends."""
        return self.requests.submit(
            OutgoingPublishNamespace(self, namespace, parameters, on_ended=on_ended)
        )

    def subscribe_namespace(
        self,
        prefix: TrackNamespace,
        parameters: Parameters = NO_PARAMETERS,
        *,
        on_namespace: Callable[[TrackNamespace, bool], None],
        on_ended: Callable[[MoqtError | None], None],
        on_full: Callable[[], None] | None = None,
    ) -> OutgoingSubscribeNamespace:
        """SUBSCRIBE_NAMESPACE; `on_namespace(full namespace, present)` as they come and go."""
        return self.requests.submit(
            OutgoingSubscribeNamespace(self, prefix, parameters, on_namespace, on_ended, on_full)
        )

    def track_status(
        self, name: FullTrackName, parameters: Parameters = NO_PARAMETERS
    ) -> OutgoingTrackStatus:
        """TRACK_STATUS; `on_answer` of what is returned tells when it was answered."""
        return self.requests.submit(OutgoingTrackStatus(self, name, parameters))

    def publish(
        self,
        store: TrackStore,
        parameters: Parameters = NO_PARAMETERS,
        *,
        include_properties: bool = True,
        on_ended: Callable[[MoqtError | None], None] | None = None,
    ) -> OutgoingPublish:
        """PUBLISH the track in `store`. `parameters` are as a subscriber would ask: FORWARD,
        LOCATION_FILTER (default Next Object), priority, group order, timeouts, EXPIRES; range
        filters and a fill are applied without being told.

        `on_ended` is called once: with None after PUBLISH_DONE, else with why it ended.
        """
        return self.requests.submit(
            OutgoingPublish(
                self, store, parameters, include_properties=include_properties, on_ended=on_ended
            )
        )

    def subscribe_tracks(
        self,
        prefix: TrackNamespace,
        parameters: Parameters = NO_PARAMETERS,
        *,
        on_publish: Callable[[IncomingPublish], None],
        on_skipped: Callable[[FullTrackName], None] | None = None,
        on_ended: Callable[[MoqtError | None], None],
    ) -> OutgoingSubscribeTracks:
        """SUBSCRIBE_TRACKS: every track under `prefix`, now and later, comes to `on_publish`.

        A PUBLISH may come before the answer does. `on_skipped` gets tracks that the publisher
        will not PUBLISH; they can be subscribed to.
        """
        return self.requests.submit(
            OutgoingSubscribeTracks(
                self,
                prefix,
                parameters,
                on_publish=on_publish,
                on_skipped=on_skipped,
                on_ended=on_ended,
            )
        )

    def send_goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """GOAWAY on the control stream, at most once."""
        if self.state is SessionState.CLOSED or self._goaway_sent or self._control_out is None:
            return
        self.rules.check_uri_to_peer(uri, "GOAWAY")
        self._goaway_sent = True
        if timeout_ms:
            self.clock.after(timeout_ms / 1000, self._goaway_timeout)
        self.send_message(self._control_out, Goaway(uri, timeout_ms), False)

    def _goaway_timeout(self) -> None:
        if self.busy:
            self.close(SessionErrorCode.GOAWAY_TIMEOUT, "the peer did not leave in time")

    @property
    def busy(self) -> bool:
        """Whether any request is open or waits, of either side."""
        return bool(len(self.requests))

    def drain(self) -> None:
        """Close with NO_ERROR as soon as no subscription or fetch is left, as a client does that
        has moved after GOAWAY (MOQT "GOAWAY"). Namespace requests do not keep it open."""
        self._draining = True
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._draining and not self.requests.holds_tracks:
            self.close(SessionErrorCode.NO_ERROR, "every subscription has moved")

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
        self.move(SessionState.SETUP)
        self._control_out = self.transport.open_stream(bidirectional=False, urgent=True)
        if self._control_out is None:
            self.close(SessionErrorCode.INTERNAL_ERROR, "the peer allows no control stream")
            return
        self.send_message(
            self._control_out, Setup(setup_options(self.config, self.transport)), False
        )
        for stream_id, data, fin in self._early.take_all():
            self.transport.resume_receiving(stream_id)
            self.stream_data(stream_id, data, fin)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if self.state is SessionState.CLOSED:
            return
        try:
            if self.state is SessionState.CONNECTING:
                self._early.hold(stream_id, data, fin)
                return
            stream = self._streams.get(stream_id)
            if stream is None:
                stream = self._new_stream(stream_id)
            if self.state is not SessionState.ESTABLISHED and not isinstance(stream, ControlIn):
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
                case ControlIn():
                    raise protocol_violation("the control stream was reset")
                case None | RequestIn(sink=None):
                    self._refuse_request_stream(stream_id)
                case RequestIn(sink=RequestStream() as request):
                    request.peer_cancelled(code)
                case DataIn():
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
            delivery = self.scheduler.sending.get(stream_id)
            if isinstance(stream, RequestIn) and stream.sink is not None:
                stream.sink.peer_cancelled(code)
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
            receive_datagram(self.data_streams, data)
        except SessionError as error:
            self._violated(error)

    def ready_to_send(self) -> None:
        if self.state is not SessionState.ESTABLISHED:
            return
        if self.requests.queued:
            self.requests.open_queued()
        if self._draining:
            self._close_if_drained()
        scheduler, budget = self.scheduler, self.config.send_budget
        scheduler.unblock(self.transport.take_credited())
        while self.transport.unsent < budget:
            if not scheduler.write_next(WRITE_QUANTUM):
                break

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        self._ended(SessionClosed(code, reason, transport=not application))

    def tick(self, now: float) -> None:
        """Time has passed: deadlines are looked at. Once a second is enough for the session's
        own; the deliveries' are in `scheduler.deadlines`, which says when the next one is."""
        self.clock.now = now
        if self.state is SessionState.CLOSED:
            return
        self.scheduler.tick(now)
        if self.state is SessionState.SETUP and self._setup_deadline is None:
            self._setup_deadline = self.clock.after(self.config.setup_timeout, self._setup_timeout)
        self.clock.run(now)
        if self.closed is not None:
            return
        self.requests.open_queued()
        self._close_if_drained()
        self.data_streams.tick(now)
        self.malformed.tick(now)

    def _setup_timeout(self) -> None:
        self.close(SessionErrorCode.CONTROL_MESSAGE_TIMEOUT, "the peer sent no SETUP")

    # -- Outlet, for deliveries ------------------------------------------------------------

    def open_data_stream(self, delivery: StreamDelivery) -> int | None:
        stream_id = self.transport.open_stream(bidirectional=False)
        if stream_id is not None:
            self.scheduler.sending[stream_id] = delivery
        return stream_id

    def data_stream_closed(self, stream_id: int) -> None:
        self.scheduler.sending.pop(stream_id, None)

    def sending_order(self, stream_id: int) -> GroupOrder:
        """In which order the groups of a fetch stream of ours go out."""
        delivery = self.scheduler.sending.get(stream_id)
        return delivery.group_order if isinstance(delivery, FetchDelivery) else GroupOrder.ASCENDING

    # -- Judge, for the rules --------------------------------------------------------------

    def check_token(self, token: Token) -> RequestErrorCode | None:
        return self.handler.check_token(self, token)

    def check_scope(self, authority: str | None, path: str | None) -> SessionErrorCode | None:
        return self.handler.check_scope(self, authority, path)

    # -- used by the request objects -------------------------------------------------------

    def send_message(self, stream_id: int, message: Message, fin: bool) -> None:
        if self.state is SessionState.CLOSED:
            return
        if self.event_log is not None:
            self.event_log.message("created", stream_id, message)
        self.transport.send(stream_id, self.codec.encode_message(message), fin)
        self.transport.wake()

    def next_track_alias(self) -> int:
        self._next_alias += 1
        return self._next_alias

    def read_stream(self, reader: RequestIn) -> None:
        """What comes on a stream that was opened here goes to `reader`."""
        self._streams[reader.stream_id] = reader

    @property
    def requests_waiting(self) -> int:
        """Requests of ours for which the peer grants no stream yet."""
        return len(self.requests.queued)

    @property
    def peer_max_filter_ranges(self) -> int:
        """The peer's MAX_FILTER_RANGES, 0 before its SETUP."""
        return self.rules.peer_max_filter_ranges

    @property
    def peer_update_limit(self) -> int:
        """REQUEST_UPDATEs that may be unanswered on one stream; 0 is no limit."""
        if self.state is SessionState.SETUP:
            return 1  # what the peer allows is not known yet
        return self.peer_max_request_updates

    def forget_stream(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        self.request_octets.forget(stream_id)
        self.requests.forget(stream_id)

    def at_limit(self, name: str, limit: int) -> None:
        self.requests.at_limit(name, limit)

    def track_malformed(self, recipient: Recipient, reason: str) -> None:
        """Give up every request for the track (MOQT "Malformed Tracks")."""
        self.malformed.add(recipient.name, reason, self.clock.now)
        error = RequestError(RequestErrorCode.MALFORMED_TRACK, reason)
        self.requests.give_up_track(recipient, error)

    def may_be_fill(self, request_id: int) -> bool:
        """Whether a PUBLISH with this ID may still come whose fill was asked for."""
        return request_id & 1 == self.transport.is_client and self.requests.wants_fills

    # -- called by the stream readers ------------------------------------------------------

    def control_opened(self, stream_id: int, data: bytes, fin: bool) -> None:
        if self._control_in is not None:
            raise protocol_violation("a second control stream")
        self._control_in = stream_id
        control = ControlIn(self, stream_id)
        self._streams[stream_id] = control
        control.data(data, fin)

    def control_message(self, message: Message) -> None:
        if self.state is SessionState.SETUP:
            if not isinstance(message, Setup):
                raise protocol_violation(f"{message.TYPE.name} before SETUP")
            self._setup_received(message)
        elif isinstance(message, Goaway):
            if self.goaway is not None:
                raise protocol_violation("a second GOAWAY")
            self.rules.check_goaway(message)
            self.goaway = message
            self.handler.goaway_received(self, message)
            for observer in tuple(self.goaway_observers):
                observer(message)
        else:
            raise protocol_violation(f"{message.TYPE.name} on the control stream")

    def request_opened(self, stream_id: int, message: Message) -> RequestStream:
        return self.requests.opened(stream_id, message, leaving=self._goaway_sent)

    # -- inside ----------------------------------------------------------------------------

    def _refuse_request_stream(self, stream_id: int) -> None:
        """The peer gave up a request stream of its own before its request was read."""
        if not stream_id & 2 and (stream_id & 1 == 0) != self.transport.is_client:
            self.transport.reset(stream_id, StreamErrorCode.CANCELLED)
            self.transport.stop_receiving(stream_id, StreamErrorCode.CANCELLED)
            self.forget_stream(stream_id)

    def _setup_received(self, setup: Setup) -> None:
        peer = read_setup(setup, self.codec, self.transport)
        self.authority, self.path = peer.authority, peer.path
        if not self.transport.is_client:
            self.rules.check_scope(peer.authority, peer.path)
        self.peer_tokens = self.rules.setup_tokens(peer.tokens)
        self.rules.sent_tokens.announced(
            peer.max_auth_token_cache_size, map(self.codec.decode_token, self.config.setup_tokens)
        )
        self.rules.peer_max_filter_ranges = peer.max_filter_ranges
        self.peer_max_request_updates = peer.max_request_updates
        self.peer_relay = peer.relay
        self.move(SessionState.ESTABLISHED)
        self.clock.cancel(self._setup_deadline)
        self.handler.session_established(self)
        if self.closed is not None:
            return
        for observer in tuple(self.observers):
            observer(None)
        for stream_id, data, fin in self._early.take_all():
            self.transport.resume_receiving(stream_id)  # also if it was reset meanwhile
            stream = self._streams.get(stream_id)
            if stream is not None and self.closed is None:
                stream.data(data, fin)

    def _new_stream(self, stream_id: int) -> RequestIn | DataIn:
        stream: RequestIn | DataIn
        if stream_id & 2:
            stream = DataIn(self.data_streams, stream_id)
        else:
            stream = RequestIn(self, stream_id)
        self._streams[stream_id] = stream
        return stream

    def _before_setup(
        self, stream_id: int, stream: RequestIn | DataIn, data: bytes, fin: bool
    ) -> None:
        """Hold what overtook the peer's SETUP; find the control stream among it."""
        if isinstance(stream, DataIn):
            found = self.codec.data_stream_type(self._early.head(stream_id, data))
            if found is not None and found[0] is StreamKind.CONTROL:
                held = self._early.take(stream_id)
                self.transport.resume_receiving(stream_id)
                stream.data(held + data, fin)
                return
        self._early.hold(stream_id, data, fin)

    def _violated(self, error: SessionError) -> None:
        logger.info("%s: closing the session: %s", connection_of(self.transport), error)
        self.close(error.code, error.reason)

    def _ended(self, closed: SessionClosed) -> None:
        if self.state is SessionState.CLOSED:
            return
        self.move(SessionState.CLOSED)
        self.closed = closed
        self._early.clear()
        for reader in self._streams.values():
            if isinstance(reader, DataIn):
                reader.discard = True
        self._streams.clear()
        self.request_octets.clear()
        self.data_streams.clear()
        self.requests.session_closed(closed)
        self.scheduler.sending.clear()
        self.clock.clear()
        self.handler.session_closed(self, closed)
        for observer in tuple(self.observers):
            observer(closed)


def session_of(request: OpenRequest) -> Session:
    """The session of a request, for who needs all of it: requests see a `RequestHost`."""
    session = request.session
    assert isinstance(session, Session)
    return session
