"""The aioquic adapter: `Transport` over `moqt.quic.aio.sending`.

Sans-IO: datagrams and times come in, datagrams go out. An endpoint drives it with a socket,
tests with a list.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from aioquic import tls
from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from cryptography import x509

from moqt.quic.aio.handshake import explain
from moqt.quic.aio.sending import Connection
from moqt.quic.aio.streams import PathNarrowed, SendingFinished, Stream
from moqt.quic.config import MIN_DATAGRAM_SIZE, NO_ANSWER, QuicConfig
from moqt.quic.congestion.controller import ControllerState
from moqt.quic.counters import TransportCounters, Waits
from moqt.quic.packets.layout import Address, Datagram, show_address
from moqt.quic.qlog import QlogWriter
from moqt.quic.transport import TransportHandler, connection_of
from moqt.values.codes import SessionErrorCode

log = logging.getLogger(__name__)

HandlerFactory = Callable[["AioquicTransport"], TransportHandler]

LINGER = 1.0
"""Seconds a connection that was asked to linger is kept."""

MAX_REASON = 512
"""A CONNECTION_CLOSE must fit one packet, whatever reason was given."""


class _Closed:
    """The handler of a connection that has been reported closed."""

    def connection_established(self, alpn: str) -> None: ...

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None: ...

    def stream_reset(self, stream_id: int, code: int) -> None: ...

    def stop_sending(self, stream_id: int, code: int) -> None: ...

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None: ...

    def connection_closed(self, code: int, reason: str, application: bool) -> None: ...


_CLOSED = _Closed()


def _nothing() -> None:
    """Nobody drives the connection yet."""


class AioquicTransport:
    """One connection: `Transport` for the session, datagrams and timers for the endpoint.

    A stream that is paused when it ends, by FIN or reset, keeps the octets that came on the
    session's account, and its place among the open streams, until `resume_receiving` or
    `stop_receiving`: they are the application's to consume.
    """

    def __init__(self, connection: Connection, config: QuicConfig, *, now: float) -> None:
        self.is_client = connection.configuration.is_client
        self.authority: str | None = None
        self.path: str | None = None
        self.config = config
        self.alpn: str | None = None
        self.on_wake: Callable[[], None] = _nothing
        self.on_cid_issued: Callable[[bytes], None] | None = None
        self.on_cid_retired: Callable[[bytes], None] | None = None
        self.on_refused: Callable[[str], None] | None = None
        self.more = False
        self.closed: tuple[int, str, bool] | None = None
        self._connection = connection
        self._handler: TransportHandler = _CLOSED
        self._paused: dict[int, Stream] = {}
        self._handshake_at: float | None = now + config.handshake_timeout
        self._heard_at = now
        self._pinged_at = now
        self._busy = False  # inside a call of the endpoint's: it transmits afterwards
        self._closing_locally = False
        self._greeted = False  # the handler knows that there is a connection
        self._repeats = 0
        self._largest = 0  # octets of a datagram that came
        self._now = now
        self._deadline: tuple[float, int, str] | None = None
        self.leaving = False
        self._on_acknowledged: dict[int, Callable[[], None]] = {}
        self._stopped_at = now
        self.counters = TransportCounters()
        self.waits = Waits()

    # ---- Transport

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int | None:
        return self._connection.open_stream(bidirectional, urgent)

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        stream = self._connection.stream(stream_id)
        if stream is None or self._connection.over or (not fin and not len(data)):
            return
        if stream.out.is_finished:
            raise ValueError(f"stream {stream_id} cannot be sent on")
        stream.out.write(data, fin)
        self.wake()

    def reset(self, stream_id: int, code: int) -> None:
        stream = self._connection.stream(stream_id)
        if stream is not None and not self._connection.over:
            stream.out.reset(code)
            self.wake()

    def stop_receiving(self, stream_id: int, code: int) -> None:
        paused = self._paused.pop(stream_id, None)
        stream = paused or self._connection.stream(stream_id)
        if stream is None or stream.stopped or self._connection.over:
            return
        self._connection.stop_receiving(stream, code)
        self.wake()

    def send_datagram(self, data: bytes) -> bool:
        connection = self._connection
        if (
            connection.over
            or len(data) > connection.max_datagram_payload()
            or connection.datagram_backlog + len(data) > self.config.max_datagram_queue
        ):
            return False
        connection.datagram_backlog += len(data)
        connection.send_datagram_frame(data)
        self.wake()
        return True

    def pause_receiving(self, stream_id: int) -> None:
        stream = self._connection.stream(stream_id)
        if stream is not None and not stream.stopped and not stream.settled:
            self._connection.pause(stream)
            self._paused[stream_id] = stream

    def resume_receiving(self, stream_id: int) -> None:
        stream = self._paused.pop(stream_id, None)
        if stream is not None and stream.paused:
            self._connection.resume(stream)
            self.wake()

    @property
    def qlog(self) -> QlogWriter | None:
        trace = self._connection.trace
        return None if trace is None else trace.writer

    @property
    def unsent(self) -> int:
        return self._connection.unsent

    def send_room(self, stream_id: int) -> int:
        stream = self._connection.stream(stream_id)
        if stream is None or self._connection.over:
            return 0
        room = stream.send_room
        if not room:
            self._connection.without_credit.add(stream_id)
        return room

    def acknowledged(self, stream_id: int) -> bool:
        stream = self._connection.stream(stream_id)
        return stream is None or self._connection.over or stream.out.acknowledged

    def take_credited(self) -> Iterable[int]:
        credited, self._connection.credited = self._connection.credited, set()
        return credited

    @property
    def packet_sizes(self) -> tuple[int, int]:
        return self.packet_size, self._largest

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        return self._connection.tls._peer_certificate

    def wake(self) -> None:
        if not self._busy:
            self.on_wake()

    def close(self, code: int, reason: str) -> None:
        if self._connection.close_event is None:
            self._closing_locally = True
            self._connection.close(error_code=code, reason_phrase=_shorten(reason))
            self.wake()

    # ---- for what runs between this and the session

    def set_deadline(self, seconds: float | None, code: int = 0, reason: str = "") -> None:
        """Close with `code` when so many seconds have passed; None takes it back."""
        self._deadline = None if seconds is None else (self._now + seconds, code, reason)
        self.wake()

    def note_refusal(self, why: str) -> None:
        """Tell the operator that the peer gets no session."""
        if self.on_refused is not None:
            self.on_refused(why)

    def linger(self, code: int) -> None:
        """Close with `code` in `LINGER` seconds: what is queued still goes out."""
        self.leaving = True
        self.set_deadline(LINGER, code)

    def when_acknowledged(self, stream_id: int, action: Callable[[], None]) -> None:
        """Call `action` once the peer has all of what we sent on the stream, its end included.

        Nothing is called when the stream is reset, is over already or the connection ends.
        """
        if self._connection.watch(stream_id):
            self._on_acknowledged[stream_id] = action

    @property
    def live_streams(self) -> list[int]:
        """The streams of which a direction is open."""
        return self._connection.live_streams

    # ---- for the endpoint

    @property
    def established(self) -> bool:
        return self.alpn is not None

    @property
    def started(self) -> bool:
        """Whether a packet of the peer's could be read."""
        return self._connection.heard_from_peer

    @property
    def terminated(self) -> bool:
        """Whether nothing more will come: the closing period is over."""
        return self._connection.terminated

    @property
    def closed_by_peer(self) -> bool:
        """Whether the connection ends because the peer closed it."""
        return self._connection.closed_by_peer

    @property
    def held(self) -> int:
        """Octets received that wait for a gap before them to close, with their overhead."""
        return self._connection.held

    @property
    def congestion(self) -> ControllerState:
        """What congestion control thinks of the path."""
        return self._connection.recovery.state()

    @property
    def in_flight(self) -> int:
        """Octets sent that are neither acknowledged nor found lost."""
        return self._connection.recovery.bytes_in_flight

    @property
    def packet_size(self) -> int:
        """Octets of UDP payload a packet may have: what the path is known to carry so far."""
        return self._connection.mtu.size

    def ask_interface(self, limit: Callable[[Address], int | None]) -> None:
        """`limit` tells the octets that the interface towards an address takes, if known."""
        self._connection.interface_limit = limit

    @property
    def connection_id(self) -> str:
        return self._connection._original_destination_connection_id.hex()

    @property
    def peer_address(self) -> str:
        return show_address(self.remote_address)

    @property
    def remote_address(self) -> Address | None:
        address: Address | None = self._connection.get_peer_address()
        return address

    @property
    def local_cid(self) -> bytes:
        return self._connection.host_cid

    def attach(self, handler: TransportHandler) -> None:
        self._handler = handler

    def receive(self, datagrams: list[bytes], addr: Address, now: float) -> list[Datagram]:
        """Take datagrams from `addr`; returns those that answer a peer that missed our close."""
        connection = self._connection
        if connection.closing:
            # RFC 9000 section 10.2.1: repeat the close, ever more rarely.
            before = self._repeats.bit_length()
            self._repeats += len(datagrams)
            if self._repeats.bit_length() > before:
                return connection.close_datagrams
            return []
        self._heard_at = now
        if datagrams and len(datagrams[0]) > self._largest:  # mostly they are of one size
            self._largest = len(datagrams[0])
        self._time(now)
        self._busy = True
        paths = connection.path_changes
        try:
            connection.receive_batch(datagrams, addr, now)
            self.counters.path_changes += connection.path_changes - paths
            if connection.trace is not None:
                connection.trace.settle()
        except Exception:
            # A fault in the library or the adapter costs this connection, not the endpoint.
            log.exception("%s: receiving failed, closing the connection", connection_of(self))
            self._fail()
        finally:
            self._busy = False
        return []

    def timer(self) -> float | None:
        """When `handle_timer` wants to be called."""
        connection = self._connection
        if connection.terminated:
            return None
        at: float | None = connection.get_timer()
        if connection.over:
            return at
        due = inf if at is None else at
        if connection.probe_again is not None:
            due = min(due, connection.probe_again)
        if self._deadline is not None:
            due = min(due, self._deadline[0])
        if self._handshake_at is not None:
            due = min(due, self._handshake_at)
        elif (interval := self._keep_alive()) > 0:
            due = min(due, max(self._heard_at, self._pinged_at) + interval)
        return None if due == inf else due

    def handle_timer(self, now: float) -> None:
        connection = self._connection
        if connection.terminated:
            return
        self._time(now)
        at = connection.get_timer()
        if at is not None and now >= at:
            # aioquic arms the loss timer for sent + delay but then looks for what was sent
            # before now - delay; rounding can make these disagree, and the timer would fire
            # for ever while the clock stands still.
            try:
                connection.handle_timer(now + 1e-6)
            except Exception:
                log.exception("%s: a timer failed, closing the connection", connection_of(self))
                self._fail()
        if connection.over:
            return
        if self._deadline is not None and now >= self._deadline[0]:
            _, code, reason = self._deadline
            self._deadline = None
            self.close(code, reason)
            return
        if self._handshake_at is not None:
            if now >= self._handshake_at:
                self._handshake_at = None
                connection.close(
                    QuicErrorCode.INTERNAL_ERROR,
                    QuicFrameType.PADDING,
                    f"the handshake did not complete within {self.config.handshake_timeout:g} s"
                    + (f": {NO_ANSWER}" if self.is_client else ""),
                )
        elif (interval := self._keep_alive()) > 0 and (
            now >= max(self._heard_at, self._pinged_at) + interval
        ):
            self._pinged_at = now
            connection.send_ping(0)

    def datagrams_to_send(self, now: float, *, again: bool = False) -> list[Datagram]:
        """Deliver events, let the handler add data, and return what may go out now.

        Call with `again` while `more` is set: the window took all there was and the handler may
        have more. Nothing but new data is looked for then.
        """
        connection = self._connection
        self._time(now)
        self.more = False
        self.waits.seconds[connection.waits_for] += now - self._stopped_at
        self._stopped_at = now
        if connection.recovery.news:
            lost, late = connection.recovery.take_news()
            self.counters.packets_lost += lost
            self.counters.packets_spurious += late
        if connection.terminated:
            self.deliver()
            return []
        self._busy = True
        try:
            self.deliver()
            if self.established and not connection.over:
                try:
                    self._handler.ready_to_send()
                except Exception:
                    log.exception(
                        "%s: a handler failed, closing the connection", connection_of(self)
                    )
                    self._fail()
                connection.credited.clear()
            if again and connection.unsent == 0 and not connection.capped and not connection.over:
                connection.sending_stopped()
                return []
            datagrams = connection.datagrams_to_send(now)
            self.more = (
                bool(datagrams)
                and (connection.capped or connection.unsent == 0)
                and not connection.over
            )
            if not self.more:
                connection.sending_stopped()
            if connection.trace is not None:
                connection.trace.settle()
            self.deliver()
            return datagrams
        except Exception:
            log.exception("%s: sending failed, closing the connection", connection_of(self))
            self._fail()
            return []
        finally:
            self._busy = False

    def takes_reset(self, data: bytes, addr: Address, now: float) -> bool:
        """Whether a datagram of no connection is a Stateless Reset of this one, which then ends."""
        reset = self._connection.is_reset(data, addr)
        if reset:
            self._connection.take_reset(now)
        return reset

    def abort(self, reason: str) -> None:
        """Report the connection closed without a word to the peer (the socket is gone)."""
        if self._connection.close_event is None:
            self._connection.close(QuicErrorCode.NO_ERROR, QuicFrameType.PADDING, reason)
        self.deliver()

    # ---- events to handler calls

    def deliver(self) -> None:
        connection = self._connection
        queue: deque[Any] = connection._events
        try:
            while queue:
                event = queue.popleft()
                if type(event) is not tuple:
                    self._deliver_event(event)
                    continue
                stream, data, upto, fin = event
                if queue and type(queue[0]) is tuple and queue[0][0] is stream:
                    pieces = [data]
                    while queue and type(queue[0]) is tuple and queue[0][0] is stream:
                        _, data, upto, fin = queue.popleft()
                        pieces.append(data)
                    data = b"".join(pieces)
                if self._closing_locally:
                    continue
                stream.delivered = upto
                if not stream.stopped:
                    self._handler.stream_data(stream.id, data, fin)
                if not stream.paused:
                    connection.consume(stream, upto)
                    connection.grant(stream)
                if fin:
                    connection.settle(stream)
        except Exception:
            log.exception("%s: a handler failed, closing the connection", connection_of(self))
            self._fail()
        if connection.close_event is not None and self.closed is None:
            self._report_closed(connection.close_event)

    def _deliver_event(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.ConnectionIdIssued):
            if self.on_cid_issued is not None:
                self.on_cid_issued(event.connection_id)
        elif isinstance(event, events.ConnectionIdRetired):
            if self.on_cid_retired is not None:
                self.on_cid_retired(event.connection_id)
        elif self._closing_locally:
            return
        elif isinstance(event, events.StreamReset):
            stream = self._connection.stream(event.stream_id)
            if stream is not None:
                self._connection.cut_off(stream)
                if not stream.stopped:
                    self._handler.stream_reset(event.stream_id, event.error_code)
                self._connection.settle(stream)
        elif isinstance(event, events.StopSendingReceived):
            self._handler.stop_sending(event.stream_id, event.error_code)
        elif isinstance(event, events.DatagramFrameReceived):
            self._handler.datagram(event.data)
        elif isinstance(event, PathNarrowed):
            self.counters.paths_narrowed += 1
            log.warning(
                "%s: the path no longer carries packets of %d octets: the connection goes on "
                "with %d and looks for what it does carry",
                connection_of(self),
                event.octets,
                MIN_DATAGRAM_SIZE,
            )
        elif isinstance(event, SendingFinished):
            self._on_acknowledged.pop(event.stream_id, _nothing)()
        elif isinstance(event, events.ProtocolNegotiated):
            if not self.is_client and event.alpn_protocol is not None:
                # A server says its first words with the handshake's flight, half a round trip
                # before the client can have answered: they are the same for everybody.
                self._greeted = True
                self._handler.connection_established(event.alpn_protocol)
        elif isinstance(event, events.HandshakeCompleted):
            self._handshake_at = None
            self.counters.handshakes_resumed += event.session_resumed
            self._connection.begin_credit()
            if event.alpn_protocol is None:
                self._connection.close(
                    QuicErrorCode.CRYPTO_ERROR + tls.AlertDescription.no_application_protocol,
                    QuicFrameType.CRYPTO,
                    "the peer chose none",
                )
            else:
                self.alpn = event.alpn_protocol
                if not self._greeted:
                    self._handler.connection_established(self.alpn)

    def _report_closed(self, event: events.ConnectionTerminated) -> None:
        application = event.frame_type is None
        reason = event.reason_phrase
        if not application:
            reason = explain(
                event.error_code,
                reason,
                is_client=self.is_client,
                by_peer=self.closed_by_peer,
                offered=self.config.alpn,
            )
        self.closed = (event.error_code, reason, application)
        self.counters.connections_over_budget += self._connection.over_budget
        self._connection.remember_path()
        self._connection.drop_streams()
        self._paused.clear()
        self._on_acknowledged.clear()
        handler, self._handler = self._handler, _CLOSED
        try:
            handler.connection_closed(event.error_code, reason, application)
        except Exception:
            log.exception("%s: a handler failed in connection_closed", connection_of(self))
        if self.qlog is not None:
            self.qlog.flush()

    def _time(self, now: float) -> None:
        self._now = self._connection.now = now
        if self._connection.trace is not None:
            self._connection.trace.now = now

    def _fail(self) -> None:
        self._closing_locally = True
        self._connection.close(
            error_code=SessionErrorCode.INTERNAL_ERROR, reason_phrase="internal error"
        )

    def _keep_alive(self) -> float:
        if self.config.keep_alive is not None:
            return self.config.keep_alive
        return self._connection._idle_timeout() / 3


def _shorten(reason: str) -> str:
    return reason.encode()[:MAX_REASON].decode(errors="ignore")
