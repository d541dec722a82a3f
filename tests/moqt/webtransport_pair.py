"""Two WebTransport endpoints in memory, or one against a peer that writes raw HTTP/3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.config import QuicConfig
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.webtransport.client import WebTransportClient
from moqt.quic.webtransport.h3 import (
    FrameType,
    HeaderCodec,
    Headers,
    StreamType,
    TypeLengthReader,
    encode_settings,
    encode_varint,
)
from moqt.quic.webtransport.server import WebTransportServer
from moqt.quic.webtransport.session import SETTINGS, WebTransport
from moqt.session import Session, SessionHandler
from tests.moqt.quic_pair import Pair, Recorder, Side, quic_config

PATH = "/moq?room=1"
AUTHORITY = "localhost:4433"


def h3_config(**changes: object) -> QuicConfig:
    return quic_config(alpn=("h3",), **changes)


class WebTransportPair(Pair):
    """`client.handler` and `server.handler` record what the sessions above are told.

    A side named in `raw` gets a plain recorder instead: the test writes its HTTP/3. `above`
    makes what stands above a session in the place of a recorder.
    """

    def __init__(
        self,
        client: QuicConfig | None = None,
        server: QuicConfig | None = None,
        *,
        offered: Sequence[str] = ("moqt-22",),
        known: Sequence[str] = ("moqt-22",),
        raw: str = "",
        above: Callable[[Transport], TransportHandler] | None = None,
        **options: Any,
    ) -> None:
        self.above = above
        self.offered, self.known, self.raw = offered, known, raw
        self.sessions: dict[str, WebTransport] = {}
        super().__init__(client or h3_config(), server or h3_config(), **options)

    def handler(self, side: Side, transport: AioquicTransport) -> TransportHandler:
        if side.name == self.raw:
            return super().handler(side, transport)

        def make(session: Transport) -> TransportHandler:
            if self.above is not None:
                return self.above(session)
            side.handler = Recorder(session)
            return side.handler

        session: WebTransport
        if side is self.client:
            session = WebTransportClient(
                transport, make, self.offered, authority=AUTHORITY, path=PATH
            )
        else:
            session = WebTransportServer(transport, make, self.known)
        self.sessions[side.name] = session
        return session

    @property
    def c(self) -> WebTransport:
        return self.sessions["client"]

    @property
    def s(self) -> WebTransport:
        return self.sessions["server"]


CONNECT: Headers = [
    (b":method", b"CONNECT"),
    (b":protocol", b"webtransport"),
    (b":scheme", b"https"),
    (b":authority", AUTHORITY.encode()),
    (b":path", PATH.encode()),
    (b"wt-available-protocols", b'"moqt-22"'),
]


def replaced(headers: Headers, **changes: bytes | None) -> Headers:
    """`headers` with the pseudo-headers (or, with `_` for `-`, fields) changed or left out."""
    new = dict(headers)
    for name, value in changes.items():
        key = name.replace("_", "-").encode()
        key = b":" + key if b":" + key in new else key
        if value is None:
            new.pop(key, None)
        else:
            new[key] = value
    return list(new.items())


class RawPeer:
    """One side that speaks HTTP/3 by hand; the other is our client or server."""

    def __init__(self, raw: str = "client", *, settings: Any = SETTINGS, **options: Any) -> None:
        self.pair = WebTransportPair(raw=raw, connect=False, **options)
        side = self.pair.client if raw == "client" else self.pair.server
        self.ours = self.pair.server if raw == "client" else self.pair.client
        self.codec = HeaderCodec()
        assert self.pair.run(lambda: side.connected)
        self.record, self.transport = side.record, side.live
        if settings is not None:
            self.open(encode_varint(StreamType.CONTROL) + encode_settings(settings))

    @property
    def session(self) -> WebTransport:
        return self.pair.sessions[self.ours.name]

    def open(self, data: bytes, *, bidirectional: bool = False, fin: bool = False) -> int:
        stream_id = self.transport.open_stream(bidirectional=bidirectional)
        assert stream_id is not None
        self.transport.send(stream_id, data, fin)
        return stream_id

    def connect(self, headers: Headers = CONNECT) -> int:
        return self.open(self.codec.encode(0, headers), bidirectional=True)

    def run(self, seconds: float = 0.2) -> None:
        self.pair.run(limit=seconds)

    def frames(self, stream_id: int) -> list[tuple[int, bytes]]:
        reader = TypeLengthReader({FrameType.HEADERS, FrameType.DATA, FrameType.SETTINGS})
        return reader.feed(bytes(self.record.data[stream_id]))

    def answer(self, stream_id: int) -> dict[bytes, bytes]:
        """The header fields of the response."""
        kind, section = self.frames(stream_id)[0]
        assert kind == FrameType.HEADERS
        return dict(self.codec.decode(stream_id, section))

    @property
    def closed_with(self) -> int:
        """The code our side closed the connection with."""
        assert self.pair.run(lambda: bool(self.record.closed), 5)
        code, _, application = self.record.closed[0]
        assert application
        return code


class SessionPeer(RawPeer):
    """A raw peer of a MOQT session; `moqt` is that session."""

    def __init__(self, raw: str) -> None:
        self.made: list[Session] = []
        super().__init__(raw, above=self.make)

    def make(self, transport: Transport) -> Session:
        self.made.append(Session(transport, SessionHandler()))
        return self.made[-1]

    @property
    def moqt(self) -> Session:
        return self.made[0]
