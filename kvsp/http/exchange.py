"""One request and its response as the application's own parts see them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from kvsp.http.call import Pace, json_response
from kvsp.http.limits import HttpLimits
from kvsp.records.problems import PROBLEM_MEDIA_TYPE, Problem

CONNECTION: Final = "kvsp.connection"
"""The ASGI extension in which the server tells about the connection (`kvsp.http.server`)."""


class Exchange:
    """One request and its response as they pass: identity, pace, and what gets logged."""

    def __init__(self, limits: HttpLimits, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = secrets.token_hex(8)
        self.principal: str | None = None
        self.method = "OTHER"
        self.template = "unknown"
        self.outcome = "aborted"
        self.octets_in = 0
        self.octets_out = 0
        self._limits = limits
        self._receive = receive
        self._send = send
        self._started = False
        self._pace: Pace | None = None
        scope["kvsp.exchange"] = self

    def check_head(self) -> None:
        """Raises Problem 431 when the header section is over its limit, 400 unless it says
        once which host is meant (RFC 9112)."""
        octets = sum(len(name) + len(value) + 4 for name, value in self.scope["headers"])
        octets += len(self.scope.get("raw_path") or b"") + len(self.scope["query_string"])
        if octets > self._limits.header_octets:
            raise Problem.http(
                431, f"the header section is over {self._limits.header_octets} octets"
            )
        hosts = sum(name == b"host" for name, _ in self.scope["headers"])
        if hosts > 1 or (hosts == 0 and self.scope["http_version"] == "1.1"):
            raise Problem.http(400, "a request has one Host field")

    async def receive(self) -> Message:
        message = await self._receive()
        self.octets_in += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send on; cut the connection when the receiver is too slow to be waited for."""
        loop = asyncio.get_running_loop()
        if message["type"] == "http.response.start":
            self._started = True
            self.outcome = str(message["status"])
            message["headers"] = self._fields(message.get("headers", []))
            self._pace = Pace(self._limits, loop.time())
        else:
            self.octets_out += len(message.get("body", b""))
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await self._send(message)
        except TimeoutError:
            await self._cut("stalled")
        if self._pace and self._pace.too_slow(self.octets_out, loop.time()):
            await self._cut("too-slow")

    async def _cut(self, outcome: str) -> None:
        connection = self.scope.get("extensions", {}).get(CONNECTION)
        if connection is not None:
            connection.abort()
            await asyncio.sleep(0)  # the server notices before its handler returns
        self.outcome = outcome
        raise ClientDisconnect

    def _fields(self, headers: Any) -> list[tuple[bytes, bytes]]:
        fields = list(headers)
        names = {name.lower() for name, _ in fields}
        if b"cache-control" not in names:
            fields.append((b"cache-control", b"no-store"))
        fields.append((b"x-content-type-options", b"nosniff"))
        fields.append((b"x-request-id", self.request_id.encode()))
        return fields

    async def refuse(self, problem: Problem) -> None:
        """Answer with problem details, or break off a response that has begun."""
        if self._started:
            await self._cut_quietly()
            return
        response = json_response(
            problem.document(f"urn:kvsp:request:{self.request_id}"),
            problem.status,
            problem.headers,
            media_type=PROBLEM_MEDIA_TYPE,
        )
        with contextlib.suppress(ClientDisconnect):
            await response(self.scope, self.receive, self.send)

    async def _cut_quietly(self) -> None:
        with contextlib.suppress(ClientDisconnect):
            await self._cut("broken-off")
