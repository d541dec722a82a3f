"""An HTTP client that calls an ASGI application in memory."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kvsp.client.caller import Caller, Token
from kvsp.client.limits import ClientLimits
from kvsp.http.app import App
from kvsp.http.auth import Credentials, unauthorized
from kvsp.principals import Principal

BASE = "https://h1.example/kvsp/"


def caller(token: Token | None = None, tls: ssl.SSLContext | None = None) -> Caller:
    """How a role of this machine asks others: once, each role with its own."""
    return Caller(token=token, tls=tls, http_loopback=True, limits=ClientLimits(attempts=1))


class Principals:
    """Finds principals by bearer tokens that are their names."""

    def __init__(self, *principals: Principal) -> None:
        self.by_token = {f"Bearer {each.name}": each for each in principals}

    def authenticate(self, credentials: Credentials) -> Principal:
        try:
            return self.by_token[credentials.authorization or ""]
        except KeyError:
            raise unauthorized("no such principal") from None


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The name of the problem; asserts that it is one."""
        assert self.headers["content-type"] == "application/problem+json"
        assert self.json["status"] == self.status
        return str(self.json["type"]).rpartition("#")[2]


class Client:
    """Calls `app` as the principal whose bearer token is given."""

    def __init__(self, app: App, token: str | None = None, address: str = "192.0.2.1") -> None:
        self.app = app
        self.token = token
        self.address = address
        self.extensions: dict[str, Any] = {}

    def as_(self, token: str | None) -> Client:
        other = Client(self.app, token, self.address)
        other.extensions = self.extensions
        return other

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        json_body: Any = None,
        on_chunk: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """`path` is below the base URI, or absolute with a leading slash."""
        fields = {"host": "h1.example"}
        fields |= {name.lower(): value for name, value in (headers or {}).items()}
        if json_body is not None:
            body = json.dumps(json_body).encode()
            fields.setdefault("content-type", "application/kvsp+json")
        if self.token is not None:
            fields.setdefault("authorization", f"Bearer {self.token}")
        path, _, query = path.partition("?")
        path = path if path.startswith("/") else "/kvsp/" + path
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "https",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            "client": (self.address, 1234),
            "server": ("h1.example", 443),
            "extensions": self.extensions,
        }
        chunks = iter([body] if isinstance(body, bytes) else body or ())
        ended = False

        async def receive() -> dict[str, Any]:
            nonlocal ended
            if ended:
                return await _for_ever()
            chunk = next(chunks, None)
            ended = chunk is None
            return {"type": "http.request", "body": chunk or b"", "more_body": not ended}

        answer = Answer(0, {}, b"")
        parts: list[bytes] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                for name, value in message["headers"]:
                    answer.headers[name.decode().lower()] = value.decode()
            elif on_chunk is not None:
                on_chunk(bytes(message.get("body", b"")))
            else:
                parts.append(bytes(message.get("body", b"")))

        await self.app(scope, receive, send)
        answer.body = b"".join(parts)
        return answer

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.request("GET", path, headers=headers)


async def _for_ever() -> Any:
    await asyncio.Event().wait()


@asynccontextmanager
async def running(app: App) -> AsyncIterator[App]:
    """The application between its start and its stop."""
    async with app.lifespan():
        yield app
