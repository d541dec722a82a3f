"""The controller's ways to instances and to the Index Service."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from kvsp.controller.core.effects import Done, KeyPage, Refused, Report, Unreachable
from kvsp.http.auth import EVERY_SCOPE, READ, Principal
from kvsp.index.app import IndexApp
from kvsp.names import ijson
from kvsp.names.codes import JSON_MEDIA_TYPE
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, parse_hex
from kvsp.names.uris import compat_path, instance_id
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem, problem_name
from kvsp.records.records import InstanceStatus, LookupRequest, LookupResponse, ReplicaRecord

logger = logging.getLogger("kvsp.controller")

_ANSWER_OCTETS: Final = 1 << 20
_LOOKUP_OCTETS: Final = 256 << 20
_DESCRIPTORS_KEPT: Final = 256
_SELF: Final = Principal(
    "placement controller",
    roles=frozenset({"placement"}),
    scopes={EVERY_SCOPE: frozenset({READ})},
)


class HttpInstances:
    """HTTP with a bearer token (`token` gives it for each request) or a client certificate."""

    def __init__(
        self,
        *,
        token: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self,
        method: str,
        uri: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        *,
        limit: int = _ANSWER_OCTETS,
    ) -> Report:
        """`Done` with the answer's JSON object, `Refused` or `Unreachable`; never raises for
        what the network or the peer does. Answers over `limit` octets are `Unreachable`."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {} if body is None else {"Content-Type": JSON_MEDIA_TYPE}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        try:
            async with self._session.request(
                method,
                uri,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                allow_redirects=False,
                ssl=self._tls if self._tls is not None else True,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = bytearray()
                async for chunk in response.content.iter_any():
                    text += chunk
                    if len(text) > limit:
                        return Unreachable(f"the answer is over {limit} octets")
                # an answer with many records does not hold up the event loop
                return await asyncio.to_thread(_report, response.status, bytes(text))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return Unreachable(type(error).__name__)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _report(status: int, text: bytes) -> Report:
    try:
        tree = ijson.loads(text) if text else {}
    except DecodeError:
        return Unreachable(f"status {status} without JSON")
    if not isinstance(tree, dict):
        return Unreachable(f"status {status} without a JSON object")
    if 200 <= status < 300:
        return Done(tree)
    return Refused(problem_name(tree), f"status {status}")


class LocalIndex:
    """The Index Service of the same process."""

    def __init__(self, app: IndexApp) -> None:
        self._app = app

    async def find(
        self, scope_id: bytes, compat_id: bytes, block_keys: tuple[bytes, ...]
    ) -> Found | Unreachable:
        """The replicas of the leading keys; `Unreachable` when the index cannot answer."""
        request = LookupRequest(scope_id, compat_id, block_keys)
        try:
            return await self._app.run(partial(self._find, request))
        except Problem as problem:
            return Unreachable(problem.detail)

    def _find(self, request: LookupRequest) -> Found:
        service = self._app.service
        answer = service.lookup(_SELF, request, self._app.clock_ms())
        return _found(answer.records(), service.descriptor(request.compat_id))

    async def list_keys(
        self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int | None
    ) -> KeyPage | Unreachable:
        """The Block Keys above `after`; `Unreachable` when the index cannot answer."""
        listing = partial(self._list, scope_id, compat_id, after, limit)
        try:
            return await self._app.run(listing)
        except Problem as problem:
            return Unreachable(problem.detail)

    def _list(self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int | None) -> KeyPage:
        part = self._app.service.list_keys(
            _SELF, scope_id, compat_id, self._app.clock_ms(), after=after, limit=limit
        )
        return KeyPage(part.records(), part.next)

    async def note_status(self, status: InstanceStatus) -> None:
        """Put a status on the index's board."""
        self._app.service.note_status(_SELF, status, self._app.clock_ms())

    async def close(self) -> None:
        """The index closes itself."""


class HttpIndex:
    """An Index Service at `base_uri`, asked through connections of its own."""

    def __init__(
        self,
        base_uri: str,
        instances: HttpInstances,
        *,
        timeout_s: float = 5.0,
        http_loopback: bool = False,
    ) -> None:
        """`http_loopback` allows holders with `http` on this machine (development)."""
        self._base_uri = base_uri
        self._http_loopback = http_loopback
        self._instances = instances
        self._timeout_s = timeout_s
        self._descriptors: dict[bytes, Descriptor] = {}

    async def find(
        self, scope_id: bytes, compat_id: bytes, block_keys: tuple[bytes, ...]
    ) -> Found | Unreachable:
        """The replicas of the leading keys; `Unreachable` when the index cannot answer."""
        request = LookupRequest(scope_id, compat_id, block_keys)
        report, descriptor = await asyncio.gather(
            self._send("POST", "lookup", request.to_dict()), self._descriptor(compat_id)
        )
        if not isinstance(report, Done):
            return Unreachable(getattr(report, "reason", "refused"))
        try:
            answer = await asyncio.to_thread(
                LookupResponse.from_json, report.body, http_loopback=self._http_loopback
            )
        except DecodeError as error:
            return Unreachable(f"the index's answer is malformed: {error}")
        return _found([block.replicas for block in answer.blocks], descriptor)

    async def _descriptor(self, compat_id: bytes) -> Descriptor | None:
        if (known := self._descriptors.get(compat_id)) is not None:
            return known
        report = await self._send("GET", compat_path(compat_id), None)
        if not isinstance(report, Done):
            return None
        try:
            descriptor = Descriptor.parse(report.body)
        except DecodeError:
            return None
        if descriptor.compat_id != compat_id:
            return None
        if len(self._descriptors) >= _DESCRIPTORS_KEPT:
            self._descriptors.clear()
        self._descriptors[compat_id] = descriptor
        return descriptor

    async def list_keys(
        self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int | None
    ) -> KeyPage | Unreachable:
        """The Block Keys above `after`; `Unreachable` when the index cannot answer."""
        query = {} if limit is None else {"limit": str(limit)}
        if after:
            query["after"] = after.hex()
        path = f"replicas/{compat_id.hex()}/{scope_id.hex()}?{urlencode(query)}"
        report = await self._send("GET", path, None)
        if not isinstance(report, Done):
            return Unreachable(getattr(report, "reason", "refused"))
        try:
            return await asyncio.to_thread(_page, report.body)
        except (DecodeError, KeyError, TypeError) as error:
            return Unreachable(f"the index's answer is malformed: {error}")

    async def note_status(self, status: InstanceStatus) -> None:
        """PUT a status to the index."""
        path = f"status/{instance_id(status.instance)}"
        report = await self._send("PUT", path, status.to_dict())
        if not isinstance(report, Done):
            logger.warning("the index did not take the status of %s", status.instance)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Report:
        return await self._instances.send(
            method, self._base_uri + path, body, self._timeout_s, limit=_LOOKUP_OCTETS
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._instances.close()


def _page(tree: Mapping[str, Any]) -> KeyPage:
    blocks = [
        [ReplicaRecord.from_json(each) for each in block["replicas"]] for block in tree["blocks"]
    ]
    following = tree["next"]
    return KeyPage(
        [replicas for replicas in blocks if replicas],
        None if following is None else parse_hex(following, 32),
    )


def _found(blocks: Any, descriptor: Descriptor | None) -> Found:
    if descriptor is None:
        return Found(blocks)
    return Found(blocks, descriptor.layers, descriptor.block_tokens)
