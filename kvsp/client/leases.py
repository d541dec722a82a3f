"""A lease that is held for the length of an `async with` block (KVSP "Leases")."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self

from kvsp.client.caller import Caller
from kvsp.client.errors import ClientError, LeaseLostError, NotFoundError
from kvsp.client.limits import ClientLimits
from kvsp.names.uris import lease_path
from kvsp.records.records import LeaseGrant, LeaseRequest, TtlAnswer

_RENEW_AT: Final = 1 / 3
"""Part of the TTL after which a lease is renewed: two tries may fail."""


class Lease:
    """Blocks a holder must not evict while the `async with` block runs.

    Renewed before it ends, released on exit, also on cancellation. When it cannot be
    renewed, `lost` is set and leaving the block normally raises LeaseLostError; it ends by
    its TTL then.
    """

    def __init__(
        self,
        caller: Caller,
        limits: ClientLimits,
        holder: str,
        compat_id: bytes,
        scope_id: bytes,
        block_keys: Sequence[bytes],
        ttl_ms: int,
    ) -> None:
        self._caller = caller
        self._limits = limits
        self.holder = holder
        self._request = LeaseRequest(compat_id, scope_id, tuple(block_keys), ttl_ms)
        self._grant: LeaseGrant | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    @property
    def grant(self) -> LeaseGrant:
        """What was granted. Raises RuntimeError outside the `async with` block."""
        if self._grant is None:
            raise RuntimeError("the lease is held inside its `async with` block only")
        return self._grant

    @property
    def leased(self) -> tuple[bytes, ...]:
        """Block Keys under the lease."""
        return self.grant.leased

    @property
    def missing(self) -> tuple[bytes, ...]:
        """Block Keys the holder does not have."""
        return self.grant.missing

    async def __aenter__(self) -> Self:
        acquiring = asyncio.ensure_future(self._acquire())
        try:
            self._grant = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            # the holder may have granted it already: then it is given back
            await bounded(self._undo(acquiring), self._limits.release_s)
            raise
        self._renewing = asyncio.create_task(self._renew(self._grant))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._renewing is not None and self._grant is not None
        self._renewing.cancel()
        grant, self._grant = self._grant, None
        await bounded(self._release(grant.lease), self._limits.release_s)
        if self.lost.is_set() and kind is None:
            raise LeaseLostError(self.holder, "the lease ended before it was released")

    async def _acquire(self) -> LeaseGrant:
        answer = await self._caller.ask(
            "POST", self.holder, "leases", body=self._request.to_json(), expected=(201,)
        )
        return answer.record(LeaseGrant)

    async def _undo(self, acquiring: asyncio.Future[LeaseGrant]) -> None:
        with contextlib.suppress(ClientError):
            await self._release((await acquiring).lease)

    async def _release(self, lease: str) -> None:
        # unknown: it ended by itself; unreachable: it will
        with contextlib.suppress(ClientError):
            await self._caller.ask("DELETE", self.holder, lease_path(lease), expected=(204,))

    async def _renew(self, grant: LeaseGrant) -> None:
        loop = asyncio.get_running_loop()
        body = TtlAnswer(self._request.ttl_ms).to_json()
        ttl_s = grant.ttl_ms / 1000
        ends = loop.time() + ttl_s
        while True:
            await asyncio.sleep(ttl_s * _RENEW_AT)
            asked = loop.time()
            try:
                async with asyncio.timeout_at(ends):
                    answer = await self._caller.ask(
                        "PUT", self.holder, lease_path(grant.lease), body=body
                    )
                ttl_s = answer.record(LeaseGrant).ttl_ms / 1000
                ends = asked + ttl_s
            except NotFoundError:
                self.lost.set()
                return
            except (ClientError, TimeoutError):
                if loop.time() + ttl_s * _RENEW_AT >= ends:
                    self.lost.set()
                    return


async def bounded(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run clean-up to its end, `seconds` at most, also when the caller is cancelled."""
    task = asyncio.ensure_future(work)
    ends = asyncio.get_running_loop().time() + seconds
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := ends - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (failure := task.exception()) is not None:
        raise failure
    if cancelled is not None:
        raise cancelled
