"""What a handler gets and gives: a `Call` with checked parts, and responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvsp.http.bodies import Bodies
from kvsp.http.limits import HttpLimits
from kvsp.names.codes import JSON_MEDIA_TYPE, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import parse_hex
from kvsp.principals import Principal
from kvsp.records.members import Record
from kvsp.records.problems import Problem, ProblemName

_DECIMAL: Final = re.compile("0|[1-9][0-9]{0,17}")
_JSON_TYPES: Final = frozenset({JSON_MEDIA_TYPE, "application/json"})


T = TypeVar("T")
R = TypeVar("R", bound=Record)


def _as_it_is(tree: Any) -> Any:
    return tree


def _object(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "the body is a JSON object")
    return tree


class Call(Request):
    """One request of an authenticated principal (or of nobody, for public operations)."""

    request_id: str
    limits: HttpLimits
    bodies: Bodies
    base_uri: str
    """The base URI of the service asked; what a Location field starts with."""

    template: str = ""
    """The path of the operation, for logs and metrics; never the path itself."""

    reading: bool = False
    """Whether the body is still to come."""

    held_octets: int = 0
    """What the body takes in memory while the request lasts."""

    _principal: Principal | None = None

    @property
    def principal(self) -> Principal:
        if self._principal is None:
            raise RuntimeError("a public operation has no principal")
        return self._principal

    def path_hex(self, name: str, octets: int) -> bytes:
        """A path parameter that is `<hexN>`. Raises Problem `kvsp-invalid-request`."""
        try:
            return parse_hex(self.path_params[name], octets)
        except DecodeError as error:
            raise Problem.from_decode_error(error.within(f"{name} in the path")) from None

    def field_hex(self, name: str, octets: int) -> bytes | None:
        """A request field that is `<hexN>`, None when absent. Raises Problem
        `kvsp-invalid-request`."""
        text = self.headers.get(name.lower())
        if text is None:
            return None
        try:
            return parse_hex(text.strip(), octets)
        except DecodeError as error:
            raise Problem.from_decode_error(error.within(f"the field {name}")) from None

    def query(self, name: str) -> str | None:
        """A query parameter, None when absent. Raises Problem 400 when it is given twice."""
        values = self.query_params.getlist(name)
        if len(values) > 1:
            raise Problem(ProblemName.INVALID_REQUEST, f"the parameter {name!r} is given twice")
        return values[0] if values else None

    def query_hex(self, name: str, octets: int) -> bytes | None:
        """A query parameter that is `<hexN>`. Raises Problem `kvsp-invalid-request`."""
        text = self.query(name)
        try:
            return None if text is None else parse_hex(text, octets)
        except DecodeError as error:
            raise Problem.from_decode_error(error.within(f"{name} in the query")) from None

    def query_integer(self, name: str, least: int, most: int) -> int | None:
        """A query parameter in decimal digits. Raises Problem `kvsp-invalid-request`."""
        text = self.query(name)
        if text is None:
            return None
        if not (_DECIMAL.fullmatch(text) and least <= int(text) <= most):
            raise Problem(
                ProblemName.INVALID_REQUEST, f"{name} is an integer from {least} to {most}"
            )
        return int(text)

    def require_media_type(self, *accepted: str) -> None:
        """Raises Problem 415 unless the body's media type is one of `accepted`, uncoded."""
        given = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given not in accepted:
            raise Problem.http(
                415,
                f"the body's media type is {' or '.join(accepted)}",
                headers={"Accept": ", ".join(accepted)},
            )
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Problem.http(
                415,
                "the body has a content coding; send it without",
                headers={"Accept-Encoding": "identity"},
            )

    async def read_octets(self, limit: int | None = None) -> bytes:
        """The whole body. Raises Problem `kvsp-too-large` beyond `limit` octets.

        The octets are counted as they come: a Content-Length is not trusted, only used
        to refuse early. The default limit is that of JSON bodies. Raises Problem 503
        when the bodies of all requests together take too much.
        """
        limit = self.limits.json_octets if limit is None else limit
        self.refuse_length(limit)
        body = bytearray()
        self.reading = True
        async for chunk in self._chunks():
            if len(body) + len(chunk) > limit:
                raise too_large("the body", limit)
            self._take(len(chunk))
            body += chunk
        self.reading = False
        return bytes(body)

    def _take(self, octets: int) -> None:
        self.bodies.take(self._whose, octets, self.held_octets)
        self.held_octets += octets

    def give_back(self) -> None:
        """The request is over: its body takes nothing any more."""
        self.bodies.give_back(self._whose, self.held_octets)
        self.held_octets = 0

    @property
    def _whose(self) -> str:
        return "" if self._principal is None else self._principal.name

    async def read_json(self, read: Callable[[Any], T] = _as_it_is) -> T:
        """The body as strict JSON (I-JSON), or what `read` makes of it, in a thread when the
        body is large.

        Raises Problem: 415 for another media type, `kvsp-too-large`, `kvsp-invalid-request`,
        429 or 503 when there is no room for it; DecodeError is the former's.
        """
        self.require_media_type(*sorted(_JSON_TYPES))
        text = await self.read_octets()
        try:
            return await self.bodies.parse(text, self._whose, self._take, read)
        except DecodeError as error:
            raise Problem.from_decode_error(error) from None

    async def read_object(self) -> dict[str, Any]:
        """The body as a JSON object. Raises as `read_json`, and `not-an-object`."""
        return await self.read_json(_object)

    async def read_record(self, record: type[R], *, http_loopback: bool = False) -> R:
        """The body as a record. Raises as `read_object`, and what `Record.from_json` raises."""
        return await self.read_json(
            lambda tree: record.from_json(_object(tree), http_loopback=http_loopback)
        )

    async def stream_body(self, limit: int) -> AsyncGenerator[bytes, None]:
        """The body in chunks as they come, each waited for at most `stall_s`.

        Raises Problem `kvsp-too-large` beyond `limit` octets, 408 when the sender stalls
        or stays below `min_octets_per_s`; ClientDisconnect when it goes away.
        """
        self.refuse_length(limit)
        loop = asyncio.get_running_loop()
        pace = Pace(self.limits, loop.time())
        octets = 0
        chunks = self._chunks()
        while True:
            try:
                async with asyncio.timeout(self.limits.stall_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise Problem.http(408, "the body stopped coming; send it again") from None
            if chunk is None:
                return
            octets += len(chunk)
            if octets > limit:
                raise too_large("the body", limit)
            if pace.too_slow(octets, loop.time()):
                raise Problem.http(408, "the body comes too slowly; send it again")
            yield chunk

    async def _chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body

    def refuse_length(self, limit: int) -> None:
        """Raises Problem `kvsp-too-large` when Content-Length alone says more than `limit`."""
        length = self.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise too_large("the body", limit)


class Pace:
    """Whether a stream keeps the least mean rate, once `stall_s` has passed."""

    def __init__(self, limits: HttpLimits, started: float) -> None:
        self._limits = limits
        self._started = started

    def too_slow(self, octets: int, now: float) -> bool:
        elapsed = now - self._started
        return elapsed > self._limits.stall_s and octets < elapsed * self._limits.min_octets_per_s


def too_large(what: str, limit: int) -> Problem:
    """413 `kvsp-too-large`: `what` is over `limit` (octets, or entries)."""
    return Problem(ProblemName.TOO_LARGE, f"{what} is over the limit of {limit}", limit=limit)


def json_response(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    media_type: str = JSON_MEDIA_TYPE,
) -> Response:
    """A response with a JSON body; `value` may hold msgspec Structs."""
    return Response(
        msgspec.json.encode(value), status_code=status, headers=headers, media_type=media_type
    )


def no_content() -> Response:
    """204."""
    return Response(status_code=204)
