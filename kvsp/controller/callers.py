"""The controller's ways to instances and to the Index Service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from kvsp.client.caller import Answer, Caller
from kvsp.client.errors import ClientError, RequestRefusedError
from kvsp.controller.core.effects import Done, KeyPage, Refused, Report, Unreachable
from kvsp.index.app import IndexApp
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, parse_hex
from kvsp.names.uris import compat_path, instance_id
from kvsp.principals import EVERY_SCOPE, READ, Principal
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem
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
    """Instances at their base URIs."""

    def __init__(self, caller: Caller) -> None:
        """`caller` is its own, one that asks once: the core comes again by itself."""
        self._caller = caller

    async def send(
        self,
        method: str,
        instance: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> Report:
        """`Done` with the answer's JSON object, `Refused` or `Unreachable`; never raises for
        what the network, the peer or a token file does."""
        try:
            answer = await self._caller.ask(
                method,
                instance,
                path,
                body=None if body is None else msgspec.json.encode(body),
                expected=range(200, 300),
                limit=_ANSWER_OCTETS,
                seconds=timeout_s,
            )
            # an answer with many members does not hold up the event loop
            tree = await asyncio.to_thread(answer.json) if answer.body else {}
        except RequestRefusedError as error:
            return Refused(error.problem.type, str(error))
        except ClientError as error:
            return Unreachable(str(error))
        except DecodeError as error:  # an instance whose URI is none that may be asked
            return Unreachable(error.detail)
        return Done(tree) if isinstance(tree, dict) else Unreachable("no JSON object came")

    async def close(self) -> None:
        """Close the connections."""
        await self._caller.close()


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
    """An Index Service at `base_uri`."""

    def __init__(self, base_uri: str, caller: Caller, *, timeout_s: float = 5.0) -> None:
        """`caller` is its own, one that asks once."""
        self._base_uri = base_uri
        self._caller = caller
        self._timeout_s = timeout_s
        self._descriptors: dict[bytes, Descriptor] = {}

    async def find(
        self, scope_id: bytes, compat_id: bytes, block_keys: tuple[bytes, ...]
    ) -> Found | Unreachable:
        """The replicas of the leading keys; `Unreachable` when the index cannot answer."""
        request = LookupRequest(scope_id, compat_id, block_keys)
        answer, descriptor = await asyncio.gather(
            self._ask("POST", "lookup", request.to_json()), self._descriptor(compat_id)
        )
        if isinstance(answer, Unreachable):
            return answer
        try:
            # an answer with many records does not hold up the event loop
            found = await asyncio.to_thread(
                partial(answer.record, LookupResponse, http_loopback=self._caller.http_loopback)
            )
        except ClientError as error:
            return Unreachable(str(error))
        return _found([block.replicas for block in found.blocks], descriptor)

    async def _descriptor(self, compat_id: bytes) -> Descriptor | None:
        if (known := self._descriptors.get(compat_id)) is not None:
            return known
        answer = await self._ask("GET", compat_path(compat_id))
        if isinstance(answer, Unreachable):
            return None
        try:
            descriptor = Descriptor.parse(answer.body)
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
        answer = await self._ask("GET", path)
        if isinstance(answer, Unreachable):
            return answer
        try:
            return await asyncio.to_thread(_page, answer)
        except ClientError as error:
            return Unreachable(str(error))
        except (DecodeError, KeyError, TypeError) as error:
            return Unreachable(f"the index's answer is malformed: {error}")

    async def note_status(self, status: InstanceStatus) -> None:
        """PUT a status to the index."""
        path = f"status/{instance_id(status.instance)}"
        answer = await self._ask("PUT", path, status.to_json())
        if isinstance(answer, Unreachable):
            logger.warning(
                "the index did not take the status of %s: %s", status.instance, answer.reason
            )

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Answer | Unreachable:
        try:
            return await self._caller.ask(
                method,
                self._base_uri,
                path,
                body=body,
                expected=range(200, 300),
                limit=_LOOKUP_OCTETS,
                seconds=self._timeout_s,
            )
        except ClientError as error:
            return Unreachable(str(error))

    async def close(self) -> None:
        """Close the connections."""
        await self._caller.close()


def _page(answer: Answer) -> KeyPage:
    tree = answer.json()
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
