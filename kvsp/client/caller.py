"""The one way of KVSP to ask a service over HTTP: connections, credentials, deadlines, retries.

The client asks through a `Caller`, and so do the roles that ask each other.

No redirect is followed, no cookie kept, no content coding accepted, no proxy of the
environment used. A credential goes only to base URIs the rules of KVSP allow: `https`,
or `http` on loopback when switched on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp

from kvsp.client.errors import (
    BadAnswerError,
    ClientError,
    NoTokenError,
    ProblemDetails,
    RequestRefusedError,
    RequestTimeoutError,
    UnreachableError,
    plain,
    refusal,
)
from kvsp.client.limits import ClientLimits
from kvsp.client.policy import Course, course
from kvsp.client.tls import tls_context
from kvsp.names import ijson
from kvsp.names.codes import JSON_MEDIA_TYPE
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.uris import check_base_uri
from kvsp.records.members import Record

Token = str | Callable[[str], str | None]
"""A bearer token for every service, or a function from base URI to token (None: none). A
function may raise KvspError or OSError: then there is no token now."""

_PROBLEM_OCTETS: Final = 1 << 20
_BACKOFF_S: Final = 0.1
_READ_BUFFER: Final = 1 << 20

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class Answer(NamedTuple):
    """An answer that was read whole."""

    source: str
    status: int
    fields: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as strict JSON. Raises BadAnswerError."""
        try:
            return ijson.loads(self.body)
        except DecodeError as error:
            raise BadAnswerError(self.source, f"its answer is not JSON: {error}") from None

    def record(self, cls: type[R], **how: Any) -> R:
        """The body as a record. Raises BadAnswerError."""
        try:
            return cls.from_json(self.body, **how)
        except DecodeError as error:
            raise BadAnswerError(self.source, f"its answer is malformed: {error}") from None


class Caller:
    """The connections of one client or role, opened when they are needed; `close` it."""

    def __init__(
        self,
        *,
        token: Token | None = None,
        tls: ssl.SSLContext | None = None,
        http_loopback: bool = False,
        limits: ClientLimits,
    ) -> None:
        self._token = token
        self.http_loopback = http_loopback
        self._limits = limits
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self._limits
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=limits.connections,
                    limit_per_host=limits.connections_per_source,
                    ssl=self._tls if self._tls is not None else tls_context(),
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                read_bufsize=_READ_BUFFER,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self,
        method: str,
        source: str,
        path: str,
        *,
        body: bytes | None = None,
        expected: Collection[int] = (200,),
        limit: int | None = None,
        media_type: str = JSON_MEDIA_TYPE,
        absolute: bool = False,
        seconds: float | None = None,
    ) -> Answer:
        """One request with a small answer, tried again where that can help.

        `path` is below the base URI `source`, or on its host when `absolute`. An answer has
        at most `limit` octets and comes within `seconds`, however long the service is silent
        before; without, the limits of this caller hold. All requests made this way may be
        repeated. Raises what `kvsp.client.errors` has.
        """
        return await self.retrying(
            lambda: self._ask_once(
                method, source, path, body, expected, limit, media_type, absolute, seconds
            )
        )

    async def retrying(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request that may be repeated, again where that can help."""
        failures = 0
        while True:
            try:
                return await request()
            except ClientError as error:
                failures += 1
                wait = self._pause(error, failures)
                if wait is None:
                    raise
            await asyncio.sleep(wait)

    async def _ask_once(
        self,
        method: str,
        source: str,
        path: str,
        body: bytes | None,
        expected: Collection[int],
        limit: int | None,
        media_type: str,
        absolute: bool,
        seconds: float | None,
    ) -> Answer:
        fields = {} if body is None else {"Content-Type": media_type}
        async with (
            within(source, self._limits.request_s if seconds is None else seconds),
            self.open(
                method,
                source,
                path,
                data=body,
                fields=fields,
                expected=expected,
                absolute=absolute,
                stall_s=seconds,
            ) as response,
        ):
            most = self._limits.answer_octets if limit is None else limit
            octets = await read_whole(response, most)
            if octets is None:
                raise BadAnswerError(source, f"its answer is larger than {most} octets")
            return Answer(source, response.status, response.headers, octets)

    def _pause(self, error: ClientError, failures: int) -> float | None:
        """Seconds to wait before another try; None when there is to be none."""
        if failures >= self._limits.attempts:
            return None
        backoff: float = _BACKOFF_S * 2**failures * random.uniform(0.5, 1.0)
        if isinstance(error, UnreachableError | RequestTimeoutError):
            return backoff
        if not isinstance(error, RequestRefusedError):
            return None
        match course(error.problem):
            case Course.RETRY:
                return backoff
            case Course.WAIT:
                wait = error.problem.retry_after or 0.0
                return wait if wait <= self._limits.max_wait_s else None
        return None

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        source: str,
        path: str,
        *,
        data: Any = None,
        fields: Mapping[str, str] | None = None,
        expected: Collection[int] = (200,),
        absolute: bool = False,
        expect100: bool = False,
        stall_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request whose answer is read by whoever opens it; leaving early closes the
        connection.

        Who opens it sets the time for all of it. Raises RequestRefusedError for any status
        but the expected ones, UnreachableError, RequestTimeoutError, BadAnswerError,
        NoTokenError.
        """
        url = self._url(source, path, absolute)
        headers = dict(fields or {})
        token = self._shown(source)
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        limits = self._limits
        try:
            async with self._opened().request(
                method,
                url,
                data=data,
                headers=headers,
                allow_redirects=False,
                expect100=expect100,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=limits.connect_s,
                    sock_read=limits.stall_s if stall_s is None else stall_s,
                ),
            ) as response:
                if response.status not in expected:
                    raise await self._refused(source, response, token)
                yield response
                if not response.content.at_eof():
                    response.close()
        except ClientError:
            raise
        except TimeoutError as error:
            # aiohttp's own: no connection, or no octet for too long
            raise RequestTimeoutError(source, "it stopped answering") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(source, _why(source, error)) from error

    def _shown(self, source: str) -> str | None:
        """The token for a service, asked for each time, so that it can be replaced."""
        try:
            return self._token(source) if callable(self._token) else self._token
        except (KvspError, OSError) as error:
            raise NoTokenError(source, f"there is no token to show it: {error}") from error

    def _url(self, source: str, path: str, absolute: bool) -> str:
        check_base_uri(source, http_loopback=self.http_loopback)
        if not absolute:
            return source + path
        parts = urlsplit(source)
        return f"{parts.scheme}://{parts.netloc}{path}"

    async def _refused(
        self, source: str, response: aiohttp.ClientResponse, token: str | None
    ) -> ClientError:
        if 300 <= response.status < 400:
            return BadAnswerError(
                source, f"it answers with a redirect (status {response.status}); none is followed"
            )
        body = await read_whole(response, _PROBLEM_OCTETS) or b""
        fields = response.headers
        problem = ProblemDetails.read(
            response.status,
            body,
            fields.get("Content-Type", "").partition(";")[0].strip().lower(),
            fields.get("Retry-After"),
            token,
        )
        return refusal(source, problem)


@contextlib.asynccontextmanager
async def within(source: str, seconds: float | None) -> AsyncIterator[None]:
    """Raises RequestTimeoutError when what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RequestTimeoutError(source, f"not answered within {seconds or 0:g} s") from error


async def read_whole(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body, or None when it has more than `limit` octets."""
    parts = bytearray()
    async for chunk in response.content.iter_any():
        parts += chunk
        if len(parts) > limit:
            response.close()
            return None
    return bytes(parts)


_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""What OpenSSL finds in octets that are no TLS."""


def _why(source: str, error: Exception) -> str:
    """Why there is no answer, without what only a Python programmer can read."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return _distrust(error.certificate_error, error.host)
        case aiohttp.ClientConnectorDNSError():
            return f"no address is known for the host {plain(error.host)}"
        case aiohttp.ServerDisconnectedError():
            hint = " (is it https://?)" if source.startswith("http:") else ""
            return f"the answer broke off{hint}"
        case aiohttp.ClientPayloadError():
            return "the answer broke off"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ssl.SSLError):
        reason = cause.reason or "no reason is given"
        if reason in _NO_TLS:
            return "the server does not speak TLS (is it http://?)"
        return f"TLS failed: {plain(reason.replace('_', ' ').lower())}"
    number = getattr(cause, "errno", None)
    if isinstance(error, aiohttp.ClientConnectorError):
        at = f"[{error.host}]:{error.port}" if ":" in error.host else f"{error.host}:{error.port}"
        if number == errno.ECONNREFUSED:
            return f"connection refused: nobody listens on {at}"
        return f"no connection to {at}: {os.strerror(number) if number else 'no reason is given'}"
    return os.strerror(number) if number else type(error).__name__


def _distrust(error: Exception, host: str) -> str:
    """Why the certificate of `host` was not accepted."""
    match getattr(error, "verify_code", None):
        case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            return "its certificate is not trusted: it has expired"
        case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
            return f"its certificate is not trusted: it is not for {plain(host)}"
        case 18 | 19 | 20 | 21 | None:  # signed by nobody known here
            return (
                "its certificate is not trusted (does cafile name the authority that signed it, "
                "or itself when it is self-signed?)"
            )
    why = getattr(error, "verify_message", "") or "no reason is given"
    return f"its certificate is not trusted: {plain(why)}"
