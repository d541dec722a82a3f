"""Leases of one retrieval: many blocks with one request to a source, given back as they come.

Nothing here is waited for when the retrieval ends: a source that does not answer gets the
release later, or the lease ends by its TTL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvsp.client.behind import Behind
from kvsp.client.caller import Caller
from kvsp.client.errors import (
    ClientError,
    LeaseLostError,
    NotFoundError,
    ProblemDetails,
    QuotaError,
    RequestRefusedError,
)
from kvsp.client.leases import Lease
from kvsp.client.limits import ClientLimits
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName

_TOO_LARGE: Final = 413


@dataclass(eq=False)
class _Leased:
    """Blocks under one lease, or that one is asked for."""

    blocks: list[BlockId]
    task: asyncio.Task[tuple[Lease, frozenset[bytes]]]
    """The lease, and what the source does not have: that is known when the lease is given back
    before somebody who waits for it goes on."""

    needed: set[BlockId] = field(default_factory=set)

    @property
    def granted(self) -> bool:
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None


class _AtSource:
    """The leases at one source."""

    def __init__(self, blocks: Sequence[BlockId], most: int) -> None:
        self.blocks = tuple(dict.fromkeys(blocks))
        self.places = {block: place for place, block in enumerate(self.blocks)}
        self.most = most
        """Blocks of one lease: fewer after the source found that too many."""

        self.leased: dict[BlockId, _Leased] = {}
        self.open: set[_Leased] = set()
        """Those asked for and not given back."""

        self._closed = asyncio.Event()

    def close(self, leased: _Leased) -> None:
        """A lease was given back, or not granted."""
        self.open.discard(leased)
        # what was refused makes no room: who waits would but be refused, too, and wake this one
        if leased.granted or not self.open:
            self._closed.set()
            self._closed = asyncio.Event()

    async def closed(self) -> None:
        """Wait until one was given back, or there is none to wait for."""
        await self._closed.wait()


class Leasing:
    """Leases at every source of a retrieval."""

    def __init__(
        self,
        caller: Caller,
        limits: ClientLimits,
        behind: Behind,
        ttl_ms: int,
        sources: Mapping[str, Sequence[BlockId]],
        answered: Callable[[str, float], None],
    ) -> None:
        """`sources` are the blocks that each may be asked for, in order; `answered` is told in
        how many seconds one granted a lease."""
        self._caller = caller
        self._limits = limits
        self._behind = behind
        self._ttl_ms = ttl_ms
        self._answered = answered
        self._done: set[BlockId] = set()
        self._sources = {
            holder: _AtSource(blocks, limits.keys_per_lease) for holder, blocks in sources.items()
        }

    async def hold(self, holder: str, block: BlockId) -> None:
        """Have a block under a lease at a source, with those that come after it.

        Raises ClientError when the source refuses, does not have it or does not answer.
        """
        at = self._sources[holder]
        while True:
            leased = at.leased.get(block) or self._ask(holder, at, block)
            try:
                # others wait for it, too; and it is given back even when nobody does any more
                _, missing = await asyncio.shield(leased.task)
            except ClientError as error:
                self._drop(at, leased)
                quota = isinstance(error, QuotaError)
                if len(leased.blocks) > 1 and (quota or _is_too_large(error)):
                    at.most = max(1, min(at.most, len(leased.blocks) // 2))
                elif quota and at.open:
                    await at.closed()  # what this retrieval has there is all it may have
                else:
                    raise
                continue
            if block.block_key in missing:
                problem = ProblemDetails(404, str(ProblemName.UNKNOWN_RESOURCE), "it has gone")
                raise NotFoundError(holder, problem)
            return

    def _ask(self, holder: str, at: _AtSource, block: BlockId) -> _Leased:
        blocks = [block]
        for each in at.blocks[at.places[block] + 1 :]:
            if len(blocks) == at.most:
                break
            if each not in at.leased and each not in self._done and _beside(each, block):
                blocks.append(each)
        leased = _Leased(blocks, asyncio.create_task(self._acquire(holder, blocks)), set(blocks))
        # a failure is told to whoever waits; when nobody does it is nobody's
        leased.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        at.leased.update(dict.fromkeys(blocks, leased))
        at.open.add(leased)
        return leased

    async def _acquire(
        self, holder: str, blocks: Sequence[BlockId]
    ) -> tuple[Lease, frozenset[bytes]]:
        compat_id, scope_id, _ = blocks[0]
        keys = [block.block_key for block in blocks]
        lease = Lease(self._caller, self._limits, holder, compat_id, scope_id, keys, self._ttl_ms)
        now = asyncio.get_running_loop().time
        asked = now()
        await lease.__aenter__()
        self._answered(holder, now() - asked)
        return lease, frozenset(lease.missing)

    def _drop(self, at: _AtSource, leased: _Leased) -> None:
        for block in leased.blocks:
            if at.leased.get(block) is leased:
                del at.leased[block]
        at.close(leased)

    def done(self, block: BlockId) -> None:
        """A block is needed no more: a lease of which that is true of all is given back."""
        self._done.add(block)
        for at in self._sources.values():
            leased = at.leased.pop(block, None)
            if leased is not None:
                leased.needed.discard(block)
                if not leased.needed:
                    self._behind.start(self._give_back(at, leased))

    def end(self) -> None:
        """Nothing is needed any more."""
        for at in self._sources.values():
            for leased in dict.fromkeys(at.leased.values()):
                self._behind.start(self._give_back(at, leased))
            at.leased.clear()

    async def _give_back(self, at: _AtSource, leased: _Leased) -> None:
        try:
            # one that is still asked for is given back by itself when this is cancelled
            lease, _ = await leased.task
            with contextlib.suppress(LeaseLostError):  # what came under it is verified
                await lease.__aexit__(None, None, None)
        finally:
            at.close(leased)


def _is_too_large(error: ClientError) -> bool:
    """Whether a source takes fewer blocks in one request."""
    return isinstance(error, RequestRefusedError) and error.problem.status == _TOO_LARGE


def _beside(one: BlockId, other: BlockId) -> bool:
    """Whether one lease can be of both."""
    return (one.compat_id, one.scope_id) == (other.compat_id, other.scope_id)
