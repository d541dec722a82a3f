"""The server's half of WebTransport: which CONNECT requests become a session."""

from __future__ import annotations

from moqt.quic.webtransport.h3 import (
    FrameType,
    H3Code,
    Headers,
    encode_frame,
    field,
    format_strings,
    parse_strings,
)
from moqt.quic.webtransport.session import (
    AVAILABLE,
    CHOSEN,
    DRAFT02_REQUEST,
    DRAFT02_RESPONSE,
    UPGRADE_TOKENS,
    Request,
    State,
    WebTransport,
)
from moqt.uri import is_authority, is_path

SESSION_TIMEOUT = 10.0
"""Seconds a client that speaks HTTP/3 has to ask for a session."""


class WebTransportServer(WebTransport):
    """Accepts one session for one of `protocols`, the server's preference first."""

    def connection_established(self, alpn: str) -> None:
        super().connection_established(alpn)
        self._transport.set_deadline(
            SESSION_TIMEOUT, H3Code.REQUEST_CANCELLED, "no WebTransport session was asked for"
        )

    def _headers_received(self, stream_id: int, request: Request, headers: Headers) -> None:
        request.headers_seen = True
        pseudo = [key for key, _ in headers if key.startswith(b":")]
        if len(pseudo) != len(set(pseudo)) or any(key.lower() != key for key, _ in headers):
            self._reset_request(stream_id, H3Code.MESSAGE_ERROR)
            return
        if field(headers, b":method") != "CONNECT":
            self._answer(stream_id, b"404", "only WebTransport is spoken here")
        elif field(headers, b":protocol") not in UPGRADE_TOKENS:
            self._answer(stream_id, b"501", "only WebTransport is spoken here")
        elif self._session_id is not None or self.state is not State.CONNECTING:
            self._transport.counters.webtransport_sessions_refused += 1
            self._reset_request(stream_id, H3Code.REQUEST_REJECTED)
        else:
            self._connect(stream_id, headers)

    def _connect(self, stream_id: int, headers: Headers) -> None:
        authority, path = field(headers, b":authority"), field(headers, b":path")
        if field(headers, b":scheme") != "https" or not authority or not path:
            self._reset_request(stream_id, H3Code.MESSAGE_ERROR)
            return
        if not (path.startswith("/") and is_path(path.encode())):
            self._refuse(stream_id, "the path has characters that a URI must percent-encode")
            return
        if not is_authority(authority.encode()):
            self._refuse(stream_id, "the authority is none that a URI may have")
            return
        offered = parse_strings(field(headers, AVAILABLE) or "")
        chosen = next((name for name in self._protocols if name in offered), None)
        if chosen is None:
            known = ", ".join(self._protocols)
            said = ", ".join(offered)[:200] or "no protocol"
            self._refuse(stream_id, f"WT-Available-Protocols offers {said}; known here: {known}")
            return
        self.authority, self.path = authority, path
        answer = [(b":status", b"200"), (CHOSEN, format_strings([chosen]).encode())]
        if field(headers, DRAFT02_REQUEST) is not None:
            answer.append((DRAFT02_RESPONSE, b"draft02"))
        self._transport.send(stream_id, self._qpack.encode(stream_id, answer))
        self._transport.set_deadline(None)
        self._opened(stream_id, chosen, self._make_handler(self))

    def _refuse(self, stream_id: int, why: str) -> None:
        """Make no session of what the client has asked for."""
        self._transport.counters.webtransport_sessions_refused += 1
        self._transport.note_refusal(why)
        self._answer(stream_id, b"400", why)

    def _answer(self, stream_id: int, status: bytes, text: str) -> None:
        """A refusal a person can read; the rest of the request is not."""
        fields = [(b":status", status), (b"content-type", b"text/plain; charset=utf-8")]
        body = encode_frame(FrameType.DATA, text.encode())
        self._transport.send(stream_id, self._qpack.encode(stream_id, fields) + body, True)
        self._transport.stop_receiving(stream_id, H3Code.NO_ERROR)
        self._requests.pop(stream_id, None)

    def _reset_request(self, stream_id: int, code: H3Code) -> None:
        self._transport.reset(stream_id, code)
        self._transport.stop_receiving(stream_id, code)
        self._requests.pop(stream_id, None)
