"""The requests of a client that one answer settles: records, descriptors, leases, directives,
sessions and discovery. `kvsp.client.client` adds lookup, retrieval and storing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvsp.client.answers import WELL_KNOWN, Published, Services, json_object
from kvsp.client.behind import Behind
from kvsp.client.caller import Caller, Token
from kvsp.client.errors import BadAnswerError, ClientError, NotFoundError, VerificationError
from kvsp.client.leases import Lease
from kvsp.client.limits import ClientLimits
from kvsp.client.retrieving.doubts import Doubts
from kvsp.client.tls import tls_context
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import (
    BlockId,
    block_path,
    check_base_uri,
    compat_path,
    directive_path,
    replicas_path,
    session_path,
)
from kvsp.records.records import (
    Link,
    PrefetchDirective,
    PrefetchStatus,
    ReplicaList,
    ReplicaRecord,
    TtlAnswer,
)

_DESCRIPTORS_KEPT: Final = 64


class ServiceClient:
    """A pool of connections, and what is asked of services with it."""

    def __init__(
        self,
        index: str | None = None,
        *,
        token: Token | None = None,
        cafile: str | Path | None = None,
        client_cert: tuple[str | Path, str | Path] | None = None,
        http_loopback: bool = False,
        limits: ClientLimits | None = None,
    ) -> None:
        """`index` is the base URI of the index service, `token` a bearer token (or a
        function from base URI to token). `http_loopback` allows `http` to this machine.
        Raises DecodeError `bad-uri`, FileError for a certificate file.
        """
        if index is not None:
            check_base_uri(index, http_loopback=http_loopback)
        self.index = index
        self.limits = limits or ClientLimits()
        self.http_loopback = http_loopback
        self._token = token
        self._tls = tls_context(cafile, client_cert)
        self._open: Caller | None = None
        self._behind = Behind(self.limits.release_s)
        self._doubts: Doubts | None = None
        self._descriptors: OrderedDict[bytes, Descriptor] = OrderedDict()
        self._links: OrderedDict[str, Link] = OrderedDict()

    async def __aenter__(self) -> Self:
        self._open = Caller(
            token=self._token,
            tls=self._tls,
            http_loopback=self.http_loopback,
            limits=self.limits,
        )
        self._doubts = Doubts(self._open, self._behind, self.limits.release_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; harmless when closed."""
        self._doubts = None
        await self._behind.close()
        caller, self._open = self._open, None
        if caller is not None:
            await caller.close()

    @property
    def links(self) -> list[Link]:
        """What was measured towards holders; the one used last comes last."""
        return list(self._links.values())

    @property
    def _caller(self) -> Caller:
        if self._open is None:
            raise RuntimeError("the client is closed: use it inside `async with Client(...)`")
        return self._open

    def _tell(self, holder: str, block: BlockId) -> None:
        """A holder's octets of a block fail verification."""
        if self._doubts is not None:
            self._doubts.tell(holder, block)

    @property
    def _index(self) -> str:
        if self.index is None:
            raise RuntimeError("this client has no index service: Client(index=...)")
        return self.index

    # --- blocks ---------------------------------------------------------------------

    async def delete(self, holder: str, block: BlockId) -> bool:
        """Withdraw and evict a block; False when the holder did not have it."""
        return await self._gone(holder, block_path(block))

    async def delete_blocks(
        self, holder: str, blocks: Iterable[BlockId]
    ) -> dict[BlockId, bool | ClientError]:
        """Delete several blocks; each has its own result, and none stops the others."""
        return await self._each(blocks, lambda block: self.delete(holder, block))

    # --- records and descriptors -----------------------------------------------------

    async def replicas(self, block: BlockId) -> list[ReplicaRecord]:
        """All replicas of a block that the index knows."""
        answer = await self._caller.ask("GET", self._index, replicas_path(block))
        found = answer.record(ReplicaList, http_loopback=self.http_loopback)
        if any(record.block != block for record in found.replicas):
            raise BadAnswerError(self._index, "it answered with a record of another block")
        return list(found.replicas)

    async def publish(self, record: ReplicaRecord) -> Published:
        """Publish a replica, or refresh it: the same, and idempotent."""
        answer = await self._caller.ask(
            "PUT", self._index, record.path, body=record.to_json(), expected=(200, 201)
        )
        return Published(answer.record(TtlAnswer).ttl_ms, answer.status == 201)

    refresh = publish

    async def withdraw(self, record: ReplicaRecord) -> bool:
        """Withdraw a replica; False when it was not published any more."""
        return await self._gone(self._index, record.path)

    async def withdraw_records(
        self, records: Iterable[ReplicaRecord]
    ) -> dict[str, bool | ClientError]:
        """Withdraw several replicas, by path; each has its own result."""
        by_path = {record.path: record for record in records}
        return await self._each(by_path, lambda path: self.withdraw(by_path[path]))

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        """Store a descriptor at the index; needed before replicas of it are published."""
        await self._caller.ask(
            "PUT",
            self._index,
            compat_path(descriptor.compat_id),
            body=descriptor.jcs,
            expected=(200, 201),
        )

    async def get_descriptor(self, compat_id: bytes, *, source: str | None = None) -> Descriptor:
        """The descriptor of a Compatibility ID, from the index or another `source`.

        The ID is computed again from what came. Raises VerificationError for another.
        """
        if (known := self._descriptors.get(compat_id)) is not None:
            self._descriptors.move_to_end(compat_id)
            return known
        asked = source if source is not None else self._index
        answer = await self._caller.ask("GET", asked, compat_path(compat_id))
        try:
            descriptor = Descriptor.parse(answer.body)
        except DecodeError as error:
            raise BadAnswerError(asked, f"its descriptor is malformed: {error}") from None
        if descriptor.compat_id != compat_id:
            raise VerificationError(asked, "the descriptor is of another Compatibility ID")
        self._descriptors[compat_id] = descriptor
        while len(self._descriptors) > _DESCRIPTORS_KEPT:
            self._descriptors.popitem(last=False)
        return descriptor

    # --- leases, directives, sessions, discovery -------------------------------------

    def lease(
        self,
        holder: str,
        scope_id: bytes,
        compat_id: bytes,
        block_keys: Sequence[bytes],
        *,
        ttl_ms: int = 10_000,
    ) -> Lease:
        """A lease to hold in an `async with` block: renewed inside, released at its end."""
        return Lease(self._caller, self.limits, holder, compat_id, scope_id, block_keys, ttl_ms)

    async def prefetch(self, instance: str, directive: PrefetchDirective) -> None:
        """Send a prefetch directive to an instance, which accepts it (202) or refuses."""
        await self._caller.ask(
            "POST", instance, "prefetch", body=directive.to_json(), expected=(202,)
        )

    async def prefetch_status(self, instance: str, directive: str) -> PrefetchStatus:
        """How far a directive came: what was loaded, not what was promised."""
        answer = await self._caller.ask("GET", instance, directive_path(directive))
        return answer.record(PrefetchStatus)

    async def cancel_prefetch(self, instance: str, directive: str) -> bool:
        """Cancel a directive; False when it is not known any more."""
        return await self._gone(instance, directive_path(directive))

    async def session(self, placement: str, session: str) -> dict[str, Any]:
        """What a placement controller knows of a session."""
        return json_object(await self._caller.ask("GET", placement, session_path(session)))

    async def end_session(self, placement: str, session: str) -> bool:
        """End a session; False when it is not known."""
        return await self._gone(placement, session_path(session))

    async def instances(self, placement: str) -> dict[str, Any]:
        """The instances a placement controller knows, with their states."""
        return json_object(await self._caller.ask("GET", placement, "instances"))

    async def discover(self, uri: str) -> Services:
        """What the host of a base URI says at `/.well-known/kvsp`."""
        answer = await self._caller.ask("GET", uri, WELL_KNOWN, absolute=True)
        return Services.read(answer, http_loopback=self.http_loopback)

    async def ready(self, uri: str) -> dict[str, Any]:
        """The `/readyz` of the host of a base URI; `unready` also when it says so by 503."""
        answer = await self._caller.ask("GET", uri, "/readyz", expected=(200, 503), absolute=True)
        return json_object(answer)

    # --- helpers ---------------------------------------------------------------------

    async def _gone(self, source: str, path: str) -> bool:
        try:
            await self._caller.ask("DELETE", source, path, expected=(204,))
        except NotFoundError:
            return False
        return True

    async def _each(self, items: Iterable[Any], act: Any) -> dict[Any, bool | ClientError]:
        """Run an action for each item, a few at a time; exceptions become results."""
        results: dict[Any, bool | ClientError] = {}
        gate = asyncio.Semaphore(self.limits.requests)

        async def one(item: Any) -> None:
            async with gate:
                try:
                    results[item] = await act(item)
                except ClientError as error:
                    results[item] = error

        async with asyncio.TaskGroup() as group:
            for item in dict.fromkeys(items):
                group.create_task(one(item))
        return results
