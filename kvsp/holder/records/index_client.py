"""The index service over HTTP, as a holder sees it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from kvsp.holder.records.publishing import (
    CompatUnknownError,
    IndexRefusedError,
    IndexUnavailableError,
    Published,
)
from kvsp.names import ijson
from kvsp.names.codes import JSON_MEDIA_TYPE
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import compat_path
from kvsp.records.problems import ProblemName, problem_name
from kvsp.records.records import ReplicaRecord, TtlAnswer

_ANSWER_OCTETS: Final = 1 << 20


class HttpIndexClient:
    """One index service. `token` gives the bearer token of each request."""

    def __init__(
        self,
        base_uri: str,
        *,
        token: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._base_uri = base_uri
        self._token = token
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def publish(self, record: ReplicaRecord) -> Published:
        status, body = await self._ask("PUT", record.path, record.to_json())
        if status not in (200, 201):
            raise _refused(status, body)
        try:
            granted = TtlAnswer.from_json(body)
        except DecodeError as error:
            raise IndexUnavailableError(f"its answer is malformed: {error}") from None
        return Published(granted.ttl_ms, created=status == 201)

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        status, body = await self._ask("PUT", compat_path(descriptor.compat_id), descriptor.jcs)
        if status not in (200, 201):
            raise _refused(status, body)

    async def withdraw(self, path: str) -> None:
        status, body = await self._ask("DELETE", path)
        if status not in (204, 404):
            raise _refused(status, body)

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        status, body = await self._ask("GET", compat_path(compat_id))
        if status == 404:
            return None
        if status != 200:
            raise _refused(status, body)
        try:
            descriptor = Descriptor.parse(body)
        except DecodeError as error:
            raise IndexUnavailableError(f"its descriptor is malformed: {error}") from None
        if descriptor.compat_id != compat_id:
            raise IndexUnavailableError("it answered with the descriptor of another ID")
        return descriptor

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        headers = {"Content-Type": JSON_MEDIA_TYPE} if body is not None else {}
        if self._token is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token()}"
            except KvspError as error:
                raise IndexUnavailableError(f"no token to show it: {error}") from error
        try:
            async with self._session.request(
                method,
                self._base_uri + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=self._tls if self._tls is not None else True,
            ) as response:
                answer = await response.content.read(_ANSWER_OCTETS)
                while len(answer) < _ANSWER_OCTETS and (more := await response.content.readany()):
                    answer += more
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise IndexUnavailableError(f"{self._base_uri}: {_reason(error)}") from error
        if response.status >= 500 or response.status in (408, 429):
            raise IndexUnavailableError(f"{self._base_uri}: status {response.status}")
        return response.status, answer


def _reason(error: Exception) -> str:
    """Why there is no answer, for the log."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        detail = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return (
            f"its certificate is not trusted ({detail}); set cafile under [peers] to the "
            "authority that signed it, or to itself when it is self-signed"
        )
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _refused(status: int, body: bytes) -> IndexRefusedError:
    try:
        document: Any = ijson.loads(body)
    except DecodeError:
        document = None
    name = problem_name(document)
    kind = CompatUnknownError if name == ProblemName.COMPAT_UNKNOWN else IndexRefusedError
    return kind(f"status {status}, {name or 'no problem details'}")
