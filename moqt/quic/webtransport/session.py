"""WebTransport over HTTP/3 (draft-ietf-webtrans-http3): one session per QUIC connection.

`WebTransport` is a `Transport` for the MOQT session above it and the `TransportHandler` of the
QUIC connection below. Stream ids are QUIC's, and payloads pass through untouched, so that flow
control by consumption, pausing and `send_room` work as on native QUIC.

What comes before the session is established is held, within bounds, and beyond them refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from cryptography import x509

from moqt.quic.counters import TransportCounters
from moqt.quic.qlog import QlogWriter
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.webtransport.codes import code_name, from_http_code, to_http_code
from moqt.quic.webtransport.h3 import (
    MAX_FRAME,
    RESERVED_FRAMES,
    Capsule,
    FrameType,
    H3Code,
    H3Error,
    HeaderCodec,
    Headers,
    Setting,
    StreamType,
    TypeLengthReader,
    encode_frame,
    encode_settings,
    encode_varint,
    read_varint,
)
from moqt.quic.webtransport.h3_critical import CRITICAL, CriticalStreams
from moqt.quic.webtransport.held import HeldStreams

log = logging.getLogger(__name__)

GONE_TIMEOUT = 1.0
"""Seconds between the end of a session's streams and what says why (RFC 9000 keeps no order
between streams)."""
MAX_REASON = 1024
"""Octets of the reason in CLOSE_WEBTRANSPORT_SESSION."""

MAX_QUARTER_STREAM_ID = (1 << 60) - 1

AVAILABLE, CHOSEN = b"wt-available-protocols", b"wt-protocol"
DRAFT02_REQUEST, DRAFT02_RESPONSE = (
    b"sec-webtransport-http3-draft02",
    b"sec-webtransport-http3-draft",
)
UPGRADE_TOKENS = ("webtransport", "webtransport-h3")

SETTINGS = (
    (Setting.QPACK_MAX_TABLE_CAPACITY, 0),
    (Setting.QPACK_BLOCKED_STREAMS, 0),
    (Setting.MAX_FIELD_SECTION_SIZE, MAX_FRAME),
    (Setting.ENABLE_CONNECT_PROTOCOL, 1),
    (Setting.H3_DATAGRAM, 1),
    (Setting.H3_DATAGRAM_DRAFT04, 1),
    (Setting.ENABLE_WEBTRANSPORT, 1),
    (Setting.WEBTRANSPORT_MAX_SESSIONS, 1),
    (Setting.WT_MAX_SESSIONS, 1),
    (Setting.WT_ENABLED, 1),
)
"""WebTransport has been announced by four settings; a peer heeds the one it knows."""


class QuicTransport(Transport, Protocol):
    """What a WebTransport session needs of the connection it runs on."""

    counters: TransportCounters

    def set_deadline(self, seconds: float | None, code: int = 0, reason: str = "") -> None:
        """Close with `code` when so many seconds have passed; None takes it back."""

    def note_refusal(self, why: str) -> None:
        """Tell the operator that the peer gets no session."""

    def linger(self, code: int) -> None:
        """Close with `code` a moment later: what is queued still goes out."""

    def when_acknowledged(self, stream_id: int, action: Callable[[], None]) -> None:
        """Call `action` once the peer has all of what we sent on the stream, its end included."""

    @property
    def live_streams(self) -> list[int]:
        """The streams of which a direction is open."""
        ...


class State(IntEnum):
    CONNECTING = 0
    """SETTINGS and CONNECT have not both crossed."""
    OPEN = 1
    GONE = 2
    """The peer has let the session's streams go; why it did is still on its way."""
    CLOSED = 3


class Request:
    """A client-initiated bidirectional stream that carries HTTP messages."""

    def __init__(self) -> None:
        self.frames = TypeLengthReader(
            {*FrameType, *RESERVED_FRAMES} - {FrameType.DATA}, {FrameType.DATA}
        )
        self.capsules = TypeLengthReader(
            {Capsule.CLOSE_SESSION, Capsule.DRAIN_SESSION}, limit=4 + MAX_REASON
        )
        self.headers_seen = False


class WebTransport:
    """A session and the HTTP/3 connection around it; see its client and its server."""

    def __init__(
        self,
        transport: QuicTransport,
        make_handler: Callable[[Transport], TransportHandler],
        protocols: Sequence[str],
    ) -> None:
        self.is_client = transport.is_client
        self.authority: str | None = ""
        self.path: str | None = ""
        self.state = State.CONNECTING
        self.draining = False
        """The peer asked for the session to end soon (DRAIN_WEBTRANSPORT_SESSION)."""
        self._transport = transport
        self._make_handler = make_handler
        self._handler: TransportHandler | None = None
        self._protocols = tuple(protocols)
        self._qpack = HeaderCodec()
        self._critical = CriticalStreams(self._qpack, is_client=self.is_client)
        self._asked = False  # the peer's SETTINGS have been acted upon
        self._own: set[int] = set()  # our control and QPACK streams
        self._heads: dict[int, bytearray] = {}  # streams whose type has not come yet
        self._requests: dict[int, Request] = {}
        self._receiving: set[int] = set()  # the session's streams
        self._held = HeldStreams()
        self._session_id: int | None = None
        self._connect_id: int | None = None  # a client's request, from before its answer
        self._uni_header = self._bidi_header = self._datagram_header = b""
        self._end: tuple[int, str, bool] | None = None

    # ---- Transport

    @property
    def qlog(self) -> QlogWriter | None:
        return self._transport.qlog

    @property
    def unsent(self) -> int:
        return self._transport.unsent

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int | None:
        if self.state is not State.OPEN:
            return None
        stream_id = self._transport.open_stream(bidirectional=bidirectional, urgent=urgent)
        if stream_id is not None:
            header = self._bidi_header if bidirectional else self._uni_header
            self._transport.send(stream_id, header)
            if bidirectional:
                self._receiving.add(stream_id)
        return stream_id

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        if self.state is State.OPEN:
            self._transport.send(stream_id, data, fin)

    def reset(self, stream_id: int, code: int) -> None:
        self._transport.reset(stream_id, to_http_code(code))

    def stop_receiving(self, stream_id: int, code: int) -> None:
        self._receiving.discard(stream_id)
        self._transport.stop_receiving(stream_id, to_http_code(code))

    def send_datagram(self, data: bytes) -> bool:
        if self.state is not State.OPEN:
            return False
        return self._transport.send_datagram(self._datagram_header + data)

    def pause_receiving(self, stream_id: int) -> None:
        self._transport.pause_receiving(stream_id)

    def resume_receiving(self, stream_id: int) -> None:
        self._transport.resume_receiving(stream_id)

    def send_room(self, stream_id: int) -> int:
        return self._transport.send_room(stream_id) if self.state is State.OPEN else 0

    def acknowledged(self, stream_id: int) -> bool:
        return self._transport.acknowledged(stream_id)

    def take_credited(self) -> Iterable[int]:
        return self._transport.take_credited()

    @property
    def packet_sizes(self) -> tuple[int, int]:
        return self._transport.packet_sizes

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        return self._transport.peer_certificate

    @property
    def connection_id(self) -> str:
        return self._transport.connection_id

    @property
    def peer_address(self) -> str:
        return self._transport.peer_address

    def wake(self) -> None:
        self._transport.wake()

    def close(self, code: int, reason: str) -> None:
        """CLOSE_WEBTRANSPORT_SESSION; the connection ends when the peer has answered it.

        The streams are reset when the peer has the capsule and not with it: QUIC keeps no
        order between streams, and who sees the resets first takes them for the reason.
        """
        if self.state is State.CLOSED:
            return
        opened = self.state in (State.OPEN, State.GONE)
        self.state = State.CLOSED
        self._end = (code, reason, True)
        if not opened or self._session_id is None:
            self._transport.close(H3Code.NO_ERROR, reason)
            return
        text = reason.encode()[:MAX_REASON].decode(errors="ignore").encode()
        capsule = encode_frame(Capsule.CLOSE_SESSION, (code & 0xFFFFFFFF).to_bytes(4, "big") + text)
        self._transport.send(self._session_id, encode_frame(FrameType.DATA, capsule), True)
        self._transport.when_acknowledged(self._session_id, self._let_streams_go)
        self._transport.linger(H3Code.NO_ERROR)

    def _let_streams_go(self) -> None:
        """WebTransport "Session Termination": both directions of all the session's streams."""
        kept = {self._session_id, *self._own, *self._critical.ids}
        for stream_id in self._transport.live_streams:
            if stream_id not in kept:
                self._transport.reset(stream_id, H3Code.WT_SESSION_GONE)
                self._transport.stop_receiving(stream_id, H3Code.WT_SESSION_GONE)

    # ---- TransportHandler

    def connection_established(self, alpn: str) -> None:
        settings = encode_varint(StreamType.CONTROL) + encode_settings(SETTINGS)
        for first in (
            settings,
            encode_varint(StreamType.QPACK_ENCODER),
            encode_varint(StreamType.QPACK_DECODER),
        ):
            stream_id = self._transport.open_stream(bidirectional=False, urgent=True)
            if stream_id is None:
                self._fail(H3Code.STREAM_CREATION_ERROR, "the peer allows too few streams")
                return
            self._own.add(stream_id)
            self._transport.send(stream_id, first)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if stream_id in self._receiving:
            if fin:
                self._receiving.discard(stream_id)
            if self._handler is not None and self.state is not State.CLOSED:
                self._handler.stream_data(stream_id, data, fin)
            return
        try:
            self._data(stream_id, data, fin)
        except H3Error as error:
            self._fail(error.code, error.reason)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self._heads.pop(stream_id, None)
        held = self._held.get(stream_id)
        if stream_id in self._receiving:
            self._receiving.discard(stream_id)
            if not self._is_gone(code) and self._handler is not None:
                self._handler.stream_reset(stream_id, from_http_code(code))
        elif held is not None:
            held.reset = code
        elif stream_id in self._critical:
            self._fail(H3Code.CLOSED_CRITICAL_STREAM, "a critical stream was reset")
        elif self._requests.pop(stream_id, None) is not None and (
            stream_id in (self._session_id, self._connect_id)
        ):
            self._lost(f"the peer reset the session ({code_name(code)})")

    def stop_sending(self, stream_id: int, code: int) -> None:
        if stream_id in self._own:
            self._fail(H3Code.CLOSED_CRITICAL_STREAM, "the peer does not read a critical stream")
        elif stream_id == self._session_id:
            self._lost(f"the peer left the session ({code_name(code)})")
        elif (held := self._held.get(stream_id)) is not None:
            held.stop = code
        elif (
            stream_id not in self._requests
            and not self._is_gone(code)
            and self._handler is not None
        ):
            self._handler.stop_sending(stream_id, from_http_code(code))

    def datagram(self, data: bytes) -> None:
        if self.state is State.OPEN and self._handler is not None:
            quarter = read_varint(data)
            if quarter is None:
                self._fail(H3Code.DATAGRAM_ERROR, "a datagram without a Quarter Stream ID")
            elif quarter[0] > MAX_QUARTER_STREAM_ID:
                self._fail(H3Code.DATAGRAM_ERROR, f"no stream has the id {quarter[0]} * 4")
            elif quarter[0] * 4 == self._session_id:
                self._handler.datagram(data[quarter[1] :])

    def ready_to_send(self) -> None:
        if self.state is State.OPEN and self._handler is not None:
            self._handler.ready_to_send()

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        if self._end is None:
            if application:
                name = code_name(code)
                reason, application = f"{reason} ({name})" if reason else name, False
            self._end = (code, reason, application)
        self._report()

    # ---- ends

    def _is_gone(self, code: int) -> bool:
        """Whether `code` says that the whole session ended, which is not for its streams to know.

        The capsule with the real code, or the end of the CONNECT stream, is waited for a moment.
        """
        if code != H3Code.WT_SESSION_GONE:
            return False
        if self.state is State.OPEN:
            self.state = State.GONE
            self._transport.set_deadline(
                GONE_TIMEOUT, code, "the peer ended the session without saying why"
            )
        return True

    def _report(self) -> None:
        """Tell the session, once, how it ended."""
        self.state = State.CLOSED
        handler, self._handler = self._handler, None
        if handler is not None and self._end is not None:
            handler.connection_closed(*self._end)
        self._receiving.clear()
        self._held.take()
        self._heads.clear()

    def _lost(self, reason: str) -> None:
        """The session is over without a code."""
        if self._end is None:
            self._end = (H3Code.REQUEST_CANCELLED, reason, False)
        self._transport.close(H3Code.NO_ERROR, "")
        self._report()

    def _fail(self, code: H3Code, reason: str) -> None:
        if self._end is None:
            self._end = (code, f"{reason} ({code_name(code)})", False)
        self._transport.close(code, reason)
        self._report()

    def _closed_by_peer(self, code: int, reason: str) -> None:
        if self._end is None:
            self._end = (code, reason, True)
        self._transport.close(H3Code.NO_ERROR, "")
        self._report()

    # ---- streams of the peer

    def _data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if stream_id in self._critical:
            self._critical.feed(stream_id, data, fin)
            self._heed_settings()
        elif stream_id in self._requests:
            self._request_data(stream_id, data, fin)
        elif self._held.get(stream_id) is not None:
            self._hold(stream_id, data, fin)
        else:
            self._begin(stream_id, data, fin)

    def _begin(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Read what kind of stream the peer has opened."""
        head = self._heads.pop(stream_id, bytearray()) + data
        kind = read_varint(head)
        wt_kind = StreamType.WT_STREAM if stream_id & 2 else FrameType.WT_STREAM
        if kind is None:
            if not fin:
                self._heads[stream_id] = head
            return
        if kind[0] == wt_kind:
            session_id = read_varint(head, kind[1])
            if session_id is None:
                if not fin:
                    self._heads[stream_id] = head
                return
            self._session_stream(stream_id, session_id[0], bytes(head[session_id[1] :]), fin)
        elif stream_id & 2:
            self._unidirectional(stream_id, kind[0], bytes(head[kind[1] :]), fin)
        elif self.is_client:
            raise H3Error(H3Code.STREAM_CREATION_ERROR, "a server opened a request stream")
        else:
            self._requests[stream_id] = Request()
            self._request_data(stream_id, bytes(head), fin)

    def _unidirectional(self, stream_id: int, kind: int, data: bytes, fin: bool) -> None:
        if kind == StreamType.PUSH:
            raise H3Error(H3Code.STREAM_CREATION_ERROR, "nobody asked for a push")
        if kind in CRITICAL:
            self._critical.begin(stream_id, kind, data, fin)
            self._heed_settings()
        elif not fin:
            self._transport.stop_receiving(stream_id, H3Code.STREAM_CREATION_ERROR)

    def _heed_settings(self) -> None:
        self.draining = self.draining or self._critical.going_away
        if self._critical.settings is not None and not self._asked:
            self._asked = True
            self._settings_received(self._critical.settings)

    def _settings_received(self, settings: dict[int, int]) -> None: ...

    # ---- the session's streams

    def _session_stream(self, stream_id: int, session_id: int, data: bytes, fin: bool) -> None:
        if session_id & 3:
            raise H3Error(H3Code.ID_ERROR, f"{session_id} is no session id")
        if self.state in (State.OPEN, State.GONE) and session_id == self._session_id:
            if not fin:
                self._receiving.add(stream_id)
            assert self._handler is not None
            self._handler.stream_data(stream_id, data, fin)
        elif self.state is State.CONNECTING and self._held.add(stream_id, session_id):
            self._transport.pause_receiving(stream_id)
            self._hold(stream_id, data, fin)
        else:
            gone = self.state in (State.GONE, State.CLOSED)
            self._refuse_stream(
                stream_id, H3Code.WT_SESSION_GONE if gone else H3Code.WT_BUFFERED_STREAM_REJECTED
            )

    def _hold(self, stream_id: int, data: bytes, fin: bool) -> None:
        if not self._held.feed(stream_id, data, fin):
            self._refuse_stream(stream_id, H3Code.WT_BUFFERED_STREAM_REJECTED)

    def _refuse_stream(self, stream_id: int, code: H3Code) -> None:
        self._transport.counters.webtransport_streams_refused += 1
        self._transport.stop_receiving(stream_id, code)
        if not stream_id & 2:
            self._transport.reset(stream_id, code)

    def _opened(self, session_id: int, protocol: str, handler: TransportHandler) -> None:
        """The session is established: start it, then hand over what came early."""
        self._session_id = session_id
        self._transport.counters.webtransport_sessions += 1
        self.state = State.OPEN
        self._handler = handler
        encoded = encode_varint(session_id)
        self._uni_header = encode_varint(StreamType.WT_STREAM) + encoded
        self._bidi_header = encode_varint(FrameType.WT_STREAM) + encoded
        self._datagram_header = encode_varint(session_id // 4)
        handler.connection_established(protocol)
        for stream_id, stream in self._held.take().items():
            self._transport.resume_receiving(stream_id)
            self._session_stream(stream_id, stream.session_id, bytes(stream.data), stream.fin)
            if stream.session_id != session_id:
                continue
            if stream.stop is not None:
                self.stop_sending(stream_id, stream.stop)
            if stream.reset is not None:
                self.stream_reset(stream_id, stream.reset)

    # ---- requests

    def _request_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        request = self._requests[stream_id]
        for kind, payload in request.frames.feed(data):
            if kind == FrameType.HEADERS:
                if request.headers_seen:
                    raise H3Error(H3Code.FRAME_UNEXPECTED, "HEADERS after those of a session")
                headers = self._qpack.decode(stream_id, payload)
                self._headers_received(stream_id, request, headers)
            elif kind == FrameType.WT_STREAM:
                raise H3Error(H3Code.FRAME_ERROR, "WT_STREAM inside a request")
            elif kind != FrameType.DATA:
                raise H3Error(H3Code.FRAME_UNEXPECTED, f"frame {kind:#x} on a request stream")
            elif not request.headers_seen:
                raise H3Error(H3Code.FRAME_UNEXPECTED, "DATA before HEADERS")
            elif stream_id == self._session_id:
                self._capsules(request, payload)
            if stream_id not in self._requests or self.state is State.CLOSED:
                break
        if fin and stream_id in self._requests:
            self._request_ended(stream_id, request)

    def _request_ended(self, stream_id: int, request: Request) -> None:
        del self._requests[stream_id]
        if request.frames.inside:
            raise H3Error(H3Code.FRAME_ERROR, "a request stream ended inside a frame")
        if request.capsules.inside:
            raise H3Error(H3Code.MESSAGE_ERROR, "a request stream ended inside a capsule")
        if stream_id == self._session_id:
            self._closed_by_peer(0, "")
        elif stream_id == self._connect_id:
            self._lost("the server ended the request for a session without an answer")
        elif not request.headers_seen:
            self._transport.reset(stream_id, H3Code.REQUEST_INCOMPLETE)

    def _capsules(self, request: Request, data: bytes) -> None:
        for kind, value in request.capsules.feed(data):
            if kind == Capsule.DRAIN_SESSION:
                self.draining = True
                continue
            if len(value) < 4:
                raise H3Error(H3Code.MESSAGE_ERROR, "a CLOSE_WEBTRANSPORT_SESSION without code")
            code = int.from_bytes(value[:4], "big")
            self._closed_by_peer(code, value[4:].decode(errors="replace"))
            return

    def _headers_received(self, stream_id: int, request: Request, headers: Headers) -> None:
        raise NotImplementedError
