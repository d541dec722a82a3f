"""What a server does with a connection once its ALPN is known: MOQT, or HTTP/3 first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moqt.quic.aio.transport import AioquicTransport, HandlerFactory
from moqt.quic.config import H3_ALPN
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.webtransport.server import WebTransportServer

MakeSession = Callable[[Transport], TransportHandler]


class _Undecided:
    """Stands in until the handshake has chosen a protocol; no session exists before that."""

    def __init__(
        self, transport: AioquicTransport, make: MakeSession, protocols: Sequence[str]
    ) -> None:
        self._transport, self._make, self._protocols = transport, make, protocols

    def connection_established(self, alpn: str) -> None:
        handler: TransportHandler
        if alpn == H3_ALPN:
            handler = WebTransportServer(self._transport, self._make, self._protocols)
        else:
            handler = self._make(self._transport)
        self._transport.attach(handler)
        handler.connection_established(alpn)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None: ...

    def stream_reset(self, stream_id: int, code: int) -> None: ...

    def stop_sending(self, stream_id: int, code: int) -> None: ...

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None: ...

    def connection_closed(self, code: int, reason: str, application: bool) -> None: ...


def by_alpn(make: MakeSession, protocols: Sequence[str]) -> HandlerFactory:
    """A handler factory for `endpoint.serve`: `make(transport)` for each session.

    `protocols` are those a WebTransport session may choose from, the preferred first.
    """
    return lambda transport: _Undecided(transport, make, protocols)
