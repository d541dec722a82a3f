"""The admin listener of a relay: health, metrics, what it holds and whom it serves, over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from moqt.session import Session
from moqt.values.names import (
    FullTrackName,
    TrackNamespace,
    namespace_of,
    printable_name,
    printable_namespace,
)
from relay.core import Relay
from relay.disk.tier import Shelf
from relay.scopes import Scopes, scope_of
from relay.service.told.grids import Grid, row
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
PAGE = 1000
"""Entries of an answer, unless fewer are asked for with `limit`."""
PUBLICATIONS = 16
"""Those of an answer with their grids, likewise."""
OCTETS = 16 << 10
"""Of a body that is sent here: nothing needs one."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Upstream:
    """A relay above, as the listener tells of it."""

    url: str
    session: Callable[[], Session | None]


class Admin:
    """Answers while the relay runs. `start` before anything else is served: it says "not ready"."""

    def __init__(
        self,
        scopes: Scopes,
        registry: CollectorRegistry,
        *,
        token: bytes | None = None,
        upstreams: Sequence[Upstream] = (),
    ) -> None:
        """`token` is what `Authorization: Bearer` must show for all that tells of tenants."""
        self.port = 0
        self.not_ready: str | None = "the relay has not begun to listen"
        """Why no new client should be sent here, as far as the relay itself knows."""
        self._scopes = scopes
        self._registry = registry
        self._token = token
        self._above = upstreams
        self._loopback = False
        app = web.Application(client_max_size=OCTETS)
        app.router.add_get("/", self._page)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/tracks.json", self._told(self._tracks))
        app.router.add_get("/publications.json", self._told(self._publications))
        app.router.add_get("/sessions.json", self._told(self._sessions))
        app.router.add_get("/upstreams.json", self._told(self._upstreams))
        app.router.add_post("/purge", self._told(self._purge, changes=True))
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
        why = self.not_ready
        if why is None and self._above and all(each.session() is None for each in self._above):
            urls = ", ".join(each.url for each in self._above)
            why = f"no upstream relay is connected ({urls})"
        return web.Response(text=f"{why or 'ready'}\n", status=200 if why is None else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            encode, kind = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):  # of a version that is none
            encode, kind = choose_encoder("")
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})

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

    def _told(
        self, answer: Callable[[web.Request], Awaitable[Any]], *, changes: bool = False
    ) -> Answer:
        async def told(request: web.Request) -> web.StreamResponse:
            try:  # a Host, or a URI, that cannot be read is a ValueError as well
                refusal = self._refusal(request, changes=changes)
                if refusal is not None:
                    return refusal
                return web.json_response(await answer(request))
            except ValueError as error:
                return _error(400, str(error))

        return told

    # -- what there is -----------------------------------------------------------------------

    def _relays(self, request: web.Request) -> list[tuple[str, Relay]]:
        return [(scope, relay) for scope, relay, _ in self._places(request) if relay is not None]

    def _places(self, request: web.Request) -> list[tuple[str, Relay | None, Shelf | None]]:
        """The scopes that are asked for, also those of which the disk alone has something."""
        scopes = self._scopes
        shelves = {} if scopes.disk is None else scopes.disk.shelves
        scope = request.query.get("scope")
        names = [*dict.fromkeys([*scopes.relays, *shelves])] if scope is None else [scope]
        return [(name, scopes.relays.get(name), shelves.get(name)) for name in names]

    async def _tracks(self, request: web.Request) -> dict[str, Any]:
        limit, prefix = _limit(request), namespace_of(request.query.get("namespace", ""))
        skip = _number(request, "after", 0)
        entries: list[dict[str, Any]] = []
        seen = 0
        for scope, relay, shelf in self._places(request):
            known = [] if relay is None else [*relay.tracks]
            kept = [] if shelf is None else [*shelf.entries]
            for name in dict.fromkeys([*known, *kept]):
                if name.namespace[: len(prefix)] != prefix:
                    continue
                seen += 1
                if seen <= skip or len(entries) >= limit:
                    continue
                if len(entries) % 100 == 99:
                    await asyncio.sleep(0)
                told = _track(relay, shelf, name)
                if told is not None:
                    entries.append({"scope": scope, **told})
        return {"tracks": entries, "of": seen, "after": skip + len(entries)}

    async def _publications(self, request: web.Request) -> dict[str, Any]:
        """Tracks by the Objects that are here, namespace by namespace."""
        limit = min(PUBLICATIONS, _number(request, "limit", PUBLICATIONS))
        prefix = namespace_of(request.query.get("namespace", ""))
        skip = _number(request, "after", 0)
        looked = seen = 0
        entries: list[dict[str, Any]] = []
        for scope, relay, shelf in self._places(request):
            found: dict[TrackNamespace, Grid] = {}
            known = [] if relay is None else [*relay.tracks]
            kept = [] if shelf is None else [*shelf.entries]
            for name in dict.fromkeys([*known, *kept]):
                looked += 1
                if looked % PAGE == 0:
                    await asyncio.sleep(0)
                if name.namespace[: len(prefix)] == prefix:
                    found.setdefault(name.namespace, Grid(scope, name)).add(name)
            for grid in found.values():
                seen += 1
                if seen <= skip or len(entries) >= limit:
                    continue
                entry = grid.told()
                for name in grid.names:
                    entry["rows"].append(row(relay, shelf, name))
                    await asyncio.sleep(0)
                entries.append(entry)
        return {"publications": entries, "of": seen, "after": skip + len(entries)}

    async def _sessions(self, request: web.Request) -> dict[str, Any]:
        limit, skip = _limit(request), _number(request, "after", 0)
        every: list[tuple[str, Relay | None, Session]] = [
            (scope, relay, session)
            for scope, relay in self._relays(request)
            for session in relay.sessions
        ]
        wanted = request.query.get("scope")
        every += [
            (scope, None, session)
            for session in self._scopes.threshold.sessions
            if wanted in (None, scope := scope_of(session.path))
        ]
        chosen = every[skip : skip + limit]
        entries = []
        for number, (scope, relay, session) in enumerate(chosen):
            if number % 100 == 99:
                await asyncio.sleep(0)
            entries.append(
                {
                    "scope": scope,
                    "connection": session.transport.connection_id,
                    "peer": session.transport.peer_address,
                    "upstream": relay is not None and session in relay.upstreams,
                    "leaving": session.goaway is not None,
                    "remembered": {
                        table: value
                        for table, value in asdict(session.remembered()).items()
                        if value
                    },
                }
            )
        return {"sessions": entries, "of": len(every), "after": skip + len(entries)}

    async def _upstreams(self, request: web.Request) -> dict[str, Any]:
        found = []
        for each in self._above:
            session = each.session()
            found.append(
                {
                    "url": each.url,
                    "connected": session is not None,
                    "peer": None if session is None else session.transport.peer_address,
                    "leaving": session is not None and session.goaway is not None,
                }
            )
        return {"upstreams": found}

    async def _purge(self, request: web.Request) -> dict[str, int]:
        if "namespace" not in request.query:
            raise ValueError("say which: ?namespace=, as /tracks.json shows it before --")
        prefix = namespace_of(request.query["namespace"])
        tracks = octets = used = 0
        for _, relay, shelf in self._places(request):
            if relay is not None:
                purged = relay.purge(prefix)
            elif shelf is not None:
                files = shelf.purge(prefix, ())
                purged = len(files), sum(files.values()), 0
            else:
                continue
            tracks, octets, used = tracks + purged[0], octets + purged[1], used + purged[2]
        logger.warning(
            "purged %d tracks, %d octets, under %r; %d are in use and stay",
            tracks,
            octets,
            printable_namespace(prefix),
            used,
        )
        return {"tracks": tracks, "octets": octets, "in_use": used}


def _track(relay: Relay | None, shelf: Shelf | None, name: FullTrackName) -> dict[str, Any] | None:
    """What there is of a track, in memory and on the disk."""
    track = None if relay is None else relay.tracks.get(name)
    entry = None if shelf is None else shelf.entries.get(name)
    if track is None and entry is None:
        return None
    told: dict[str, Any] = {
        "track": printable_name(name.namespace, name.name),
        "groups": 0,
        "octets": 0,
        "disk_octets": 0 if entry is None else entry.octets,
        "expires": None if entry is None else entry.expires,
        "largest": None,
        "ended": True,
        "publishers": 0,
        "fetches": 0,
        "readers": 0,
        "waiting": 0,
    }
    if entry is not None and entry.largest is not None:
        told["largest"] = list(entry.largest)
    if track is not None:
        store = track.store
        told |= {
            "groups": len(store.groups),
            "octets": store.octets,
            "largest": None if store.largest is None else list(store.largest),
            "ended": store.ended,
            "publishers": len(track.subscriptions),
            "fetches": len(track.ranges.fetches),
            "readers": len(track.requests) + len(track.offers),
            "waiting": len(track.waiting),
        }
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


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(f"{name} must be a whole number")
    return int(text)


def _limit(request: web.Request) -> int:
    return min(PAGE, _number(request, "limit", PAGE))
