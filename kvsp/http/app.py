"""One ASGI application for any number of KVSP roles on one base URI.

Around every handler: routing, authentication, limits, problem details, common fields,
metrics and an access log. Handlers decide what a principal may do to which scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from kvsp.http import openapi
from kvsp.http.auth import Authenticator, Credentials, unauthorized
from kvsp.http.bodies import Bodies
from kvsp.http.call import Call, json_response
from kvsp.http.exchange import CONNECTION, Exchange
from kvsp.http.limits import HttpLimits, TokenBuckets
from kvsp.http.service import Handler, Operation, Service
from kvsp.names.errors import DecodeError
from kvsp.records.problems import Problem

logger = logging.getLogger("kvsp.http")
access_log = logging.getLogger("kvsp.access")

WELL_KNOWN: Final = "/.well-known/kvsp"


class App:
    """The ASGI application: every service of one process under one base URI."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        base_uri: str,
        authenticator: Authenticator,
        limits: HttpLimits | None = None,
        moqt: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`base_uri` is that of all `services`; `moqt` lists relays to name to clients."""
        self.services = tuple(services)
        self.base_uri = base_uri
        self.limits = limits or HttpLimits()
        self.registry = CollectorRegistry()
        self.draining = False
        self.authenticator = authenticator
        self._moqt = tuple(moqt)
        self._clock = clock
        self._principals = TokenBuckets(
            self.limits.requests_per_s, self.limits.burst, self.limits.clients
        )
        self._failures = TokenBuckets(
            self.limits.failures_per_s, self.limits.failure_burst, self.limits.clients
        )
        self.bodies = Bodies(
            self.limits, lambda whose: self._metrics.bodies_refused.labels(whose).inc()
        )
        self._metrics = _Metrics(self.registry, self.bodies)
        for service in self.services:
            service.register(self.registry)
        operations = _merge(item for each in self.services for item in each.operations())
        self.openapi = openapi.document(base_uri, operations)
        self._router = Router(
            self._routes(operations),
            redirect_slashes=False,
            default=_unknown_route,
            lifespan=self.lifespan,
        )

    def _routes(self, operations: Sequence[Operation]) -> list[Route]:
        base = urlsplit(self.base_uri).path
        table: dict[str, dict[str, Operation]] = {}
        for operation in operations:
            table.setdefault(base + operation.path, {})[operation.method] = operation
        for path, handler, public in (
            (WELL_KNOWN, self._well_known, True),
            ("/healthz", self._healthz, True),
            ("/readyz", self._readyz, True),
            ("/metrics", self._show_metrics, False),
            (base + "openapi.json", self._show_openapi, True),
        ):
            table[path] = {"GET": _own(path, handler, public)}
        return [Route(path, _Resource(self, path, methods)) for path, methods in table.items()]

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Any = None) -> AsyncIterator[None]:
        """Every service between its start and its stop. Raises what they raise at the start."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.bodies.close)
            for service in self.services:
                stack.push_async_callback(service.stop)
                await service.start()
            yield

    async def drain(self) -> None:
        """Let every service tell its peers; `/readyz` says no from now on."""
        self.draining = True
        for service in self.services:
            await service.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(Exchange(self.limits, scope, receive, send))

    async def _answer(self, exchange: Exchange) -> None:
        started = self._clock()
        with self._metrics.in_flight.track_inprogress():
            try:
                exchange.check_head()
                await self._router(exchange.scope, exchange.receive, exchange.send)
            except Problem as problem:
                await exchange.refuse(problem)
            except DecodeError as error:
                await exchange.refuse(Problem.from_decode_error(error))
            except ClientDisconnect:
                exchange.outcome = "disconnected"
            except Exception:
                logger.exception("request %s failed", exchange.request_id)
                await exchange.refuse(
                    Problem.http(500, "the server failed; its log has more under this instance")
                )
            finally:
                elapsed = self._clock() - started
                self._metrics.observe(exchange, elapsed)
                access_log.info(
                    "%s %s %s %s %s in=%d out=%d ms=%d",
                    exchange.request_id,
                    exchange.principal or "-",
                    exchange.method,
                    exchange.template,
                    exchange.outcome,
                    exchange.octets_in,
                    exchange.octets_out,
                    elapsed * 1000,
                )

    async def run(self, operation: Operation, call: Call) -> Response:
        """Authenticate and run one operation within its limits. Raises Problem."""
        if not operation.public:
            call._principal = self._authenticate(call)
        try:
            return await self._within_limits(operation, call)
        finally:
            call.give_back()

    async def _within_limits(self, operation: Operation, call: Call) -> Response:
        if operation.streaming:
            return await operation.handler(call)
        try:
            async with asyncio.timeout(self.limits.request_s) as limit:
                return await operation.handler(call)
        except TimeoutError:
            if not limit.expired():
                raise
            if call.reading:
                raise Problem.http(408, "the body did not arrive; send it again") from None
            raise Problem.http(
                503, f"not done within {self.limits.request_s:g} s", retry_after=1
            ) from None

    def _authenticate(self, call: Call) -> Any:
        exchange: Exchange = call.scope["kvsp.exchange"]
        now = self._clock()
        address = call.client.host if call.client else ""
        connection = call.scope.get("extensions", {}).get(CONNECTION)
        fields = call.headers.getlist("authorization")
        try:
            if len(fields) > 1:
                raise unauthorized("there is more than one Authorization field", invalid=True)
            principal = self.authenticator.authenticate(
                Credentials(
                    authorization=fields[0] if fields else None,
                    certificate_uris=connection.certificate_uris if connection else (),
                    loopback=is_loopback(address),
                )
            )
        except Problem as problem:
            self._metrics.refused.labels(str(problem.status)).inc()
            # good credentials from the same address are not held up by bad ones
            if wait := self._failures.take(address, now):
                raise self._slow_down("address", "too many refused credentials", wait) from None
            raise
        exchange.principal = principal.name
        if wait := self._principals.take(principal.name, now):
            raise self._slow_down("principal", "too many requests", wait)
        return principal

    def _slow_down(self, what: str, detail: str, wait: float) -> Problem:
        self._metrics.limited.labels(what).inc()
        return Problem.http(429, f"{detail} of this {what}; wait", retry_after=wait)

    # --- what every server has -------------------------------------------------------

    async def _well_known(self, _call: Call) -> Response:
        document: dict[str, Any] = {
            "kvsp": 1,
            "services": {service.role: self.base_uri for service in self.services},
        }
        for service in self.services:
            document |= service.describe()
        if self._moqt:
            document["moqt"] = list(self._moqt)
        return json_response(document, headers={"Cache-Control": "max-age=60"})

    async def _healthz(self, _call: Call) -> Response:
        return json_response({"status": "alive"})

    async def _readyz(self, _call: Call) -> Response:
        states = {service.role: service.health() for service in self.services}
        reasons = [
            f"{role}: {reason}" for role, state in states.items() for reason in state.degraded
        ]
        if self.draining or not all(state.ready for state in states.values()):
            why = ["draining"] if self.draining else []
            return json_response({"status": "unready", "reasons": why + reasons}, 503)
        return json_response({"status": "degraded" if reasons else "ready", "reasons": reasons})

    async def _show_metrics(self, call: Call) -> Response:
        call.principal.require_role("operator")
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _show_openapi(self, _call: Call) -> Response:
        return json_response(
            self.openapi,
            headers={"Cache-Control": "max-age=60"},
            media_type="application/json",
        )


def _merge(operations: Iterable[Operation]) -> list[Operation]:
    merged: dict[tuple[str, str], Operation] = {}
    for operation in operations:
        other = merged.get((operation.path, operation.method))
        if other is None or other.shared:
            merged[operation.path, operation.method] = operation
        elif not operation.shared:
            raise ValueError(f"two roles answer to {operation.method} {operation.path}")
    return list(merged.values())


def _own(path: str, handler: Handler, public: bool) -> Operation:
    return Operation(method="GET", path=path, handler=handler, summary=path, public=public)


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class _Resource:
    """One path: finds the operation of the method."""

    def __init__(self, app: App, path: str, methods: Mapping[str, Operation]) -> None:
        self._app = app
        self._path = path
        self._methods = methods
        self._allow = ", ".join(sorted(methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["kvsp.exchange"]
        exchange.template = self._path
        operation = self._methods.get(scope["method"])
        if operation is None:
            raise Problem.http(
                405,
                f"this resource answers to {self._allow} only",
                headers={"Allow": self._allow},
            )
        exchange.method = operation.method
        call = Call(scope, receive, send)
        call.request_id = exchange.request_id
        call.limits = self._app.limits
        call.bodies = self._app.bodies
        call.base_uri = self._app.base_uri
        response = await self._app.run(operation, call)
        await response(scope, receive, send)


async def _unknown_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise Problem.http(404, "no service here answers to this path")


class _Metrics:
    def __init__(self, registry: CollectorRegistry, bodies: Bodies) -> None:
        held = Gauge(
            "kvsp_http_held_body_octets", "Octets of bodies held in memory.", registry=registry
        )
        held.set_function(lambda: bodies.octets)
        self.bodies_refused = Counter(
            "kvsp_http_bodies_refused",
            "Bodies there was no room for: in the share of their principal, or of all.",
            ["of"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvsp_http_requests_in_flight", "Requests being answered.", registry=registry
        )
        self.requests = Counter(
            "kvsp_http_requests",
            "Requests by operation and outcome (a status, or how the connection ended).",
            ["method", "path", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvsp_http_request_seconds",
            "Time until the last octet was handed to the connection.",
            ["method", "path"],
            registry=registry,
        )
        self.octets = Counter(
            "kvsp_http_body_octets", "Octets of bodies.", ["direction"], registry=registry
        )
        self.refused = Counter(
            "kvsp_http_credentials_refused",
            "Requests without an acceptable credential, by status.",
            ["status"],
            registry=registry,
        )
        self.limited = Counter(
            "kvsp_http_rate_limited", "Requests over a rate limit.", ["of"], registry=registry
        )

    def observe(self, exchange: Exchange, elapsed: float) -> None:
        self.requests.labels(exchange.method, exchange.template, exchange.outcome).inc()
        self.seconds.labels(exchange.method, exchange.template).observe(elapsed)
        self.octets.labels("in").inc(exchange.octets_in)
        self.octets.labels("out").inc(exchange.octets_out)
