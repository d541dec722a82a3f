"""Blocks from holders over HTTP, for what no MOQT path delivered in time (KVCS
"Verification and Recovery", "Operational Considerations"; KVSP "Lookup").

`HttpPath` is one retrieval's view of the index service and the holders. When and what to ask
is the consumer's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvcs.finding.candidates import Candidate, named_by
from kvcs.names.errors import (
    KvcsError,
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.layers import LayerBuffer
from kvcs.retrieving.retrieval import Retrieval
from kvsp.client import Client, ClientError, Fault, Layer, NotAuthorizedError, RequestTimeoutError
from kvsp.client.policy import SEVERITY
from kvsp.names import uris
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.records.records import ReplicaRecord, covers

ROUND_OCTETS: Final = 64 << 20
"""About how much is asked of holders before it is looked again at what is missing."""


class _Into:
    """Puts what a round brings into a buffer, until it is cut off."""

    def __init__(self, buffer: LayerBuffer, came: Callable[[], None]) -> None:
        self._buffer: LayerBuffer | None = buffer
        self._came = came

    def write(self, layer: Layer) -> None:
        if self._buffer is not None:
            self._buffer.block_received(layer.block, layer.layer, layer.k, layer.v, layer.source)
            self._came()

    def cut_off(self) -> None:
        self._buffer = None


class HttpPath:
    """What the index service says of a prefix, and rounds of requests to its holders.

    `start` looks the keys up; then `begin_round` asks holders, one at a time. `changed` is
    called whenever something came or ended. `close` ends everything.
    """

    def __init__(
        self,
        client: Client,
        scope_id: bytes,
        descriptor: Descriptor,
        keys: Sequence[bytes],
        layers: range,
        *,
        changed: Callable[[], None],
    ) -> None:
        self.looked_up = False
        self.error: RetrievalError | None = None
        """Why the index service said nothing."""
        self.failure: Exception | None = None
        """What the destination raised."""
        self.named: list[Candidate] = []
        """Publications, those with most of our blocks first."""
        self.blocks = 0
        """Leading blocks of which holders have every layer asked for."""
        self._client = client
        self._scope_id = scope_id
        self._descriptor = descriptor
        self._keys = keys
        self._layers = layers
        self._changed = changed
        self._replicas: list[list[ReplicaRecord]] = []
        self._gone: set[tuple[int, int]] = set()
        self._faults: dict[Fault, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._into: _Into | None = None
        self._under_way: asyncio.Task[None] | None = None

    @property
    def note(self) -> str | None:
        """What is to be said of the index service, when it was of no help."""
        if self.error is not None:
            return str(self.error)
        return None if self.looked_up else "the index service has not answered so far"

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self._into is not None

    def start(self) -> None:
        """Look the keys up."""
        self._run(self._look_up())

    def has(self, layer: int, block: int) -> bool:
        """Whether a holder is known for a layer of a block, and did not fail to give it."""
        if block >= len(self._replicas) or (layer, block) in self._gone:
            return False
        return covers(self._replicas[block], self._descriptor.layers, range(layer, layer + 1))

    def begin_round(
        self, buffer: LayerBuffer, wanted: Iterable[tuple[int, int]], within: float
    ) -> bool:
        """Begin a round for the first of `wanted`, (layer, block) in order of need, that
        holders have; False when there is nothing of it to be had."""
        if not self._replicas:
            return False
        size = 2 * self._descriptor.section_octets()
        room = max(1, ROUND_OCTETS // size)
        chosen: dict[int, list[int]] = {}
        for layer, block in wanted:
            if self.has(layer, block):
                chosen.setdefault(block, []).append(layer)
                room -= 1
                if not room:
                    break
        if not chosen:
            return False
        self._into = into = _Into(buffer, self._changed)
        self._under_way = self._run(self._round(into, chosen, within))
        return True

    def wanted(self, assembly: Assembly, late: bool) -> Iterator[tuple[int, int]]:
        """(layer, block) to ask holders for: beyond the publication and in place of bad Objects,
        and with `late` all that it has not brought."""
        if not late and not assembly.promised and assembly.total == assembly.blocks:
            return
        if late:
            yield from assembly.from_holders(self.has)
            return
        for layer, block in assembly.lacking():
            if block in assembly.foreign:
                continue
            if block >= assembly.blocks or (layer, block) in assembly.promised:
                yield layer, block

    def can_complete(self, retrieval: Retrieval) -> bool:
        """Whether holders have all that a publication that is gone did not bring."""
        assembly = retrieval.assembly
        if assembly.manifest is None or not isinstance(
            retrieval.error, PublisherLost | NotAuthorized
        ):
            return False
        return all(
            self.has(layer, block) and block not in assembly.foreign
            for layer, block in assembly.lacking()
        )

    def stop(self) -> None:
        """Cut the round off: nothing of it is written any more."""
        if self._into is not None:
            self._into.cut_off()
            self._into = None
        if self._under_way is not None:
            self._under_way.cancel()

    async def close(self) -> None:
        """End every request and wait for their connections to be let go."""
        self.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def why(self) -> RetrievalError:
        """Why not everything could be had."""
        if self.error is not None:
            return self.error
        fault = max(self._faults, key=SEVERITY.__getitem__, default=Fault.NO_REPLICA)
        detail = self._faults.get(fault) or str(fault)
        return _OF_FAULT.get(fault, PublisherLost)(detail)

    # -- inside --------------------------------------------------------------------------

    def _run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look_up(self) -> None:
        try:
            found = await self._client.lookup(
                self._scope_id,
                self._descriptor.compat_id,
                self._keys,
                descriptor=self._descriptor,
            )
        except ClientError as error:
            kind: type[RetrievalError] = RetrievalError
            if isinstance(error, NotAuthorizedError):
                kind = NotAuthorized
            if isinstance(error, RequestTimeoutError):
                kind = RetrievalTimeout
            self.error = kind(f"the index service: {error}")
        else:
            self.named = named_by(found)
            self._replicas = [
                [replica for replica in block.replicas if not uris.is_moqt(replica.holder)]
                for block in found.blocks
            ]
            self._count()
        self.looked_up = True
        self._changed()

    def _count(self) -> None:
        lacking = {block for _, block in self._gone}
        self.blocks = 0
        for block, replicas in enumerate(self._replicas):
            if block in lacking or not covers(replicas, self._descriptor.layers, self._layers):
                return
            self.blocks = block + 1

    async def _round(self, into: _Into, wanted: Mapping[int, Sequence[int]], within: float) -> None:
        try:
            result = await self._client.get_blocks(
                self._replicas,
                into,
                descriptor=self._descriptor,
                wanted=wanted,
                deadline_s=within,
            )
        except (KvcsError, KvspError, ValueError, LookupError, OSError) as error:
            self.failure = error
        else:
            for gap in result.missing:
                self._gone.update((layer, gap.block) for layer in gap.layers)
                self._faults[gap.reason] = result.details.get(gap.reason, "")
            if result.missing:
                self._count()
        finally:
            if self._into is into:
                self._into = None
            self._changed()


_OF_FAULT: Final[Mapping[Fault, type[RetrievalError]]] = {
    Fault.NO_REPLICA: NotFound,
    Fault.NOT_HELD: NotFound,
    Fault.CODEC: NotFound,
    Fault.TIMEOUT: RetrievalTimeout,
    Fault.NOT_AUTHORIZED: NotAuthorized,
    Fault.VERIFICATION: VerificationFailed,
}
