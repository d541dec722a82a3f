"""The admin listener of a relay: health, metrics, what it holds and whom it serves, over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import choose_encoder

from relay.service.told.answers import Answers
from relay.service.told.page import page

logger = logging.getLogger("relay")
_http_logger = logging.getLogger("relay.admin")
"""What aiohttp has to say, but for what clients did wrong: they are told, and may do it often."""

MAX_CONNECTIONS = 64
"""At once; one more is closed."""
CONNECTION_SECONDS = 60.0
"""How long a connection may last, whatever it does: who wants more connects again."""
CLOSING_SECONDS = 1.0
"""How long what is being answered may take when the relay ends, and once more to be broken off."""
OCTETS = 16 << 10
"""Of a body that is sent here: nothing needs one."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """Answers while the relay runs. `start` before anything else is served: it says "not ready"."""

    def __init__(
        self,
        answers: Answers,
        *,
        token: bytes | None = None,
    ) -> None:
        """`token` is what `Authorization: Bearer` must show for all that tells of tenants."""
        self.port = 0
        self.not_ready: str | None = "the relay has not begun to listen"
        """Why no new client should be sent here, as far as the relay itself knows."""
        self._answers = answers
        self._token = token
        self._loopback = False
        app = web.Application(client_max_size=OCTETS)
        app.router.add_get("/", self._page)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/tracks.json", self._told("tracks"))
        app.router.add_get("/publications.json", self._told("publications"))
        app.router.add_get("/sessions.json", self._told("sessions"))
        app.router.add_get("/upstreams.json", self._told("upstreams"))
        app.router.add_post("/purge", self._told("purge", changes=True))
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_http_logger,
            keepalive_timeout=CONNECTION_SECONDS,
            shutdown_timeout=CLOSING_SECONDS,
        )
        self._server: asyncio.Server | None = None

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of all that is answered."""
        return [
            (route.method, route.resource.canonical)
            for route in self._runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        ]

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        await self._runner.setup()
        self._loopback = _is_loopback(host)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connect, host, port)
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connect(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= MAX_CONNECTIONS:
            return _Refused()
        protocol = server()

        def over() -> None:
            if protocol.transport is not None:
                protocol.transport.abort()

        asyncio.get_running_loop().call_later(CONNECTION_SECONDS, over)
        return protocol

    # -- health ------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        found = page()
        return web.Response(text=found.text, content_type="text/html", headers=found.headers)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        why = self.not_ready or await self._answers.not_ready()
        return web.Response(text=f"{why or 'ready'}\n", status=200 if why is None else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            encode, kind = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):  # of a version that is none
            encode, kind = choose_encoder("")
        numbers = await self._answers.numbers()
        return web.Response(body=encode(numbers), headers={"Content-Type": kind})

    # -- rights ------------------------------------------------------------------------------

    def _refusal(self, request: web.Request, *, changes: bool) -> web.Response | None:
        if self._token is not None:
            shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if hmac.compare_digest(shown.encode("utf-8", "replace"), self._token):
                return None
            return _error(
                401,
                "show the token of --admin-token-file as Authorization: Bearer",
                {"WWW-Authenticate": "Bearer"},
            )
        if changes:
            return _error(403, "the relay was started without --admin-token-file")
        # A page in a browser here may be led to this port under a name of its own.
        if not self._loopback or not _is_loopback(request.url.host or ""):
            return _error(
                403, "without --admin-token-file this is told on a loopback address alone"
            )
        return None

    def _told(self, what: str, *, changes: bool = False) -> Answer:
        async def told(request: web.Request) -> web.StreamResponse:
            try:  # a Host, or a URI, that cannot be read is a ValueError as well
                refusal = self._refusal(request, changes=changes)
                if refusal is not None:
                    return refusal
                return web.json_response(await self._answers.tell(what, request.query))
            except ValueError as error:
                return _error(400, str(error))

        return told


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_http_logger.addFilter(_is_ours)


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _error(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=f"{why}\n", status=status, headers=headers)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
