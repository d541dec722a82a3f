"""Runs one `App` on uvicorn: TLS 1.3, client certificates, bounded connections, drain.

uvicorn hands neither certificates nor a way to cut a connection to the application and
has no bound on header sections or on how long one takes to arrive; the protocol class
here adds these four and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvsp.http.app import App, is_loopback
from kvsp.http.auth import Authenticator, LoopbackOnly
from kvsp.http.exchange import CONNECTION
from kvsp.http.limits import HttpLimits
from kvsp.names.errors import KvspError
from kvsp.records.problems import PROBLEM_MEDIA_TYPE, Problem

logger = logging.getLogger("kvsp.http")

_RETRY: Final = "retry-after: 1\r\n"
DISCARDED_OCTETS: Final = 16 << 20
"""Octets of a request body read and dropped after the answer, so that it arrives."""


class ServerSettingsError(KvspError):
    """The server must not run like this (an open port without TLS or credentials), or cannot
    with these files."""


class CannotStartError(KvspError):
    """Nothing is wrong with the settings, but something is in the way now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and how to listen. `client_ca` makes client certificates acceptable."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    """Listen beyond this machine even without TLS or credentials."""

    drain_s: float = 30.0
    """Longest time for open requests to finish on shutdown."""

    idle_s: int = 75
    """How long a connection without a request stays open."""


class Connection:
    """What the application learns of a connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.certificate_uris = _certificate_uris(transport)

    def abort(self) -> None:
        """Close now; what is still to be written is dropped."""
        self._transport.abort()


def _certificate_uris(transport: asyncio.Transport) -> tuple[str, ...]:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate = tls.getpeercert() if tls is not None else None
    names: Any = (certificate or {}).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind == "URI")


class _Protocol(HttpToolsProtocol):
    """One HTTP connection, with the application's limits on header sections."""

    limits: HttpLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since: float | None = self.loop.time()
        if len(self.connections) > self.limits.connections:
            self._make_room()
        self._connection = Connection(transport)
        self._in_head = True
        self._ended = False
        self._head_octets = 0
        self._discarded = 0
        self._whole = True
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._wait_for_head()
        self._ended = False
        super().data_received(data)
        if self._in_head and not self._ended:
            self._head_octets += len(data)
            if self._head_octets > self.limits.header_octets:
                self._refuse(431, f"the header section is over {self.limits.header_octets} octets")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_octets, self._discarded, self._whole = True, 0, 0, False
        extensions: dict[str, Any] = {CONNECTION: self._connection}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._in_head, self._head_octets = False, 0
        self._idle_since = None
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > DISCARDED_OCTETS:
                self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # what follows in the same data is the next head's: at most one read's worth
        self._whole, self._in_head, self._ended = True, True, True
        self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._whole:
            self._idle_since = self.loop.time()
        else:
            # the rest of the body is dropped, but not for ever
            self._start_timer(self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has been without a request for longest, this one last:
        open connections that ask for nothing keep nobody out."""
        waiting = [
            each
            for each in self.connections
            if isinstance(each, _Protocol) and each is not self and each._idle_since is not None
        ]
        idlest = min(waiting, key=lambda each: each._idle_since or 0.0, default=self)
        idlest._refuse(503, f"{self.limits.connections} connections are open already")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request")

    def _refuse(self, status: int, detail: str) -> None:
        if self.transport.is_closing():
            return
        problem = Problem.http(status, detail)
        body = json.dumps(problem.document()).encode()
        self.transport.write(
            f"HTTP/1.1 {status} {problem.title}\r\ncontent-type: {PROBLEM_MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"{_RETRY if status == 503 else ''}\r\n".encode()
            + body
        )
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._timer is None:
            self._start_timer(lambda: self._refuse(408, "the header section did not arrive"))

    def _start_timer(self, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.head_s, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn for one `App`: says when it is ready and drains before it stops listening."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        """Raises ServerSettingsError when the settings would open the service to anybody or
        name files that cannot be used, CannotStartError when the port cannot be had."""
        check_open(app.authenticator, settings)
        self.app = app
        self.settings = settings
        tls = tls_context(settings)
        self._socket = _listen(settings)
        self._services = contextlib.AsyncExitStack()
        protocol = type("_AppProtocol", (_Protocol,), {"limits": app.limits})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",  # uvicorn would end the process with a traceback
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=settings.idle_s,
                timeout_graceful_shutdown=max(1, int(settings.drain_s)),
                ssl_certfile=settings.certificate,
                ssl_keyfile=settings.key,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Scheme, host and port it listens on."""
        scheme = "https" if self.settings.certificate else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self.port}"

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run until SIGINT, SIGTERM or `should_exit`. Raises CannotStartError."""
        async with self._services:
            await super().serve(sockets if sockets is not None else [self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self._services.enter_async_context(self.app.lifespan())
            await super().startup(sockets)
        except KvspError as error:
            raise CannotStartError(str(error)) from error
        except OSError as error:
            where = error.filename or f"{self.settings.host} port {self.port}"
            raise CannotStartError(f"{where}: {error.strerror or error}") from error
        if self.started:
            roles = ",".join(_shown(service.role) for service in self.app.services)
            print(f"ready {self.url} base={self.app.base_uri} roles={roles}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self.app.drain()
        except TimeoutError:
            logger.warning("peers were not told of the shutdown within the time for it")
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises the signal again afterwards; a drained server has ended well
        try:
            before = {
                number: signal.signal(number, self.handle_exit)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _shown(role: str) -> str:
    """A role as an operator names it; on the wire the controller is the service `placement`."""
    return "controller" if role == "placement" else role


def check_open(authenticator: Authenticator, settings: ServerSettings) -> None:
    """Raises ServerSettingsError for an open port that anybody could use or listen in on."""
    if (settings.certificate is None) != (settings.key is None):
        raise ServerSettingsError("TLS needs both a certificate and its key")
    if settings.client_ca is not None and settings.certificate is None:
        raise ServerSettingsError("client certificates need TLS: give a certificate and key")
    if is_loopback(settings.host) or settings.host == "localhost" or settings.insecure:
        return
    if isinstance(authenticator, LoopbackOnly):
        raise ServerSettingsError(
            f"{settings.host} is reachable from other machines and no principals file is "
            "given; set principals under [listen], or listen on 127.0.0.1"
        )
    if settings.certificate is None:
        raise ServerSettingsError(
            f"{settings.host} is reachable from other machines and there is no TLS; give a "
            "certificate and key, listen on 127.0.0.1, or, behind a proxy that ends TLS, set "
            "insecure = true under [listen]"
        )


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """TLS 1.3 with the files of the settings, None without a certificate.

    Raises ServerSettingsError that names the file at fault.
    """
    certificate, key, client_ca = settings.certificate, settings.key, settings.client_ca
    if certificate is None or key is None:
        return None
    for path in (certificate, key, client_ca):
        if path is not None:
            _check_readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _check_certificates(certificate, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    try:
        # without a password that is given here one would be asked for on the terminal
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ServerSettingsError(
            f"{key}: not the key of the certificate in {certificate}"
            if error.reason == "KEY_VALUES_MISMATCH"
            else f"{key}: not a private key in PEM without a password"
        ) from None
    if client_ca is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
        _check_certificates(client_ca, context)
    return context


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ServerSettingsError(f"{path}: {error.strerror or error}") from None


def _check_certificates(path: Path, context: ssl.SSLContext) -> None:
    """Add the certificates of a file to those that `context` trusts."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ServerSettingsError(f"{path}: not a file of PEM certificates") from None


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServerSettingsError(f"{settings.host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise CannotStartError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
            + ("; stop what listens there, or choose another port" if taken else "")
        ) from error
    return listener


def run(app: App, settings: ServerSettings) -> None:
    """Serve until told to stop. Raises ServerSettingsError, CannotStartError."""
    server = Server(app, settings)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve())
