"""The client's half of WebTransport: extended CONNECT, and what the server chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.webtransport.h3 import (
    WEBTRANSPORT_SETTINGS,
    H3Code,
    Headers,
    Setting,
    field,
    format_strings,
    parse_strings,
)
from moqt.quic.webtransport.session import (
    AVAILABLE,
    CHOSEN,
    DRAFT02_REQUEST,
    UPGRADE_TOKENS,
    QuicTransport,
    Request,
    WebTransport,
)


class WebTransportClient(WebTransport):
    """Asks for a session at `https://authority path`, offering `protocols` in that order."""

    def __init__(
        self,
        transport: QuicTransport,
        make_handler: Callable[[Transport], TransportHandler],
        protocols: Sequence[str],
        *,
        authority: str,
        path: str,
    ) -> None:
        super().__init__(transport, make_handler, protocols)
        self.authority, self.path = authority, path
        self._waiting: TransportHandler | None = make_handler(self)

    def _report(self) -> None:
        if self._waiting is not None:
            self._handler, self._waiting = self._waiting, None
        super()._report()

    def _settings_received(self, settings: dict[int, int]) -> None:
        if not any(settings.get(name) for name in WEBTRANSPORT_SETTINGS):
            self._fail(H3Code.SETTINGS_ERROR, "the server offers HTTP/3 but no WebTransport")
            return
        stream_id = self._connect_id = self._transport.open_stream(bidirectional=True, urgent=True)
        if stream_id is None:
            self._fail(H3Code.STREAM_CREATION_ERROR, "the server allows no request")
            return
        self._requests[stream_id] = Request()
        headers = [
            (b":method", b"CONNECT"),
            (b":protocol", UPGRADE_TOKENS[self._is_late_draft(settings)].encode()),
            (b":scheme", b"https"),
            (b":authority", (self.authority or "").encode()),
            (b":path", (self.path or "/").encode()),
            (DRAFT02_REQUEST, b"1"),
            (AVAILABLE, format_strings(self._protocols).encode()),
        ]
        self._transport.send(stream_id, self._qpack.encode(stream_id, headers))

    @staticmethod
    def _is_late_draft(settings: dict[int, int]) -> bool:
        """Whether the server knows only the upgrade token of draft 15 and later."""
        return {name for name in WEBTRANSPORT_SETTINGS if settings.get(name)} == {
            Setting.WT_ENABLED
        }

    def _headers_received(self, stream_id: int, request: Request, headers: Headers) -> None:
        status = field(headers, b":status") or ""
        if status.startswith("1"):
            return
        request.headers_seen = True
        if not status.startswith("2"):
            self._lost(
                f"the server refused the WebTransport session at {self.path} with status {status}; "
                f"offered were {', '.join(self._protocols)}"
            )
            return
        protocol = self._chosen(headers)
        if protocol is None or self._waiting is None:
            return
        handler, self._waiting = self._waiting, None
        self._opened(stream_id, protocol, handler)

    def _chosen(self, headers: Headers) -> str | None:
        """The protocol the server chose; some do not say so when there was nothing to choose."""
        answer = field(headers, CHOSEN)
        chosen = parse_strings(answer) if answer is not None else []
        if not chosen and len(self._protocols) == 1:
            return self._protocols[0]
        if len(chosen) == 1 and chosen[0] in self._protocols:
            return chosen[0]
        offered = ", ".join(self._protocols)
        what = f"chose {answer!r}" if chosen else "chose no protocol"
        self._lost(f"the server {what}, offered were {offered}")
        return None
