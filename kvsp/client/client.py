"""`Client`: an index service and its holders, as a program uses them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Final

from kvsp.blocks.container import Container, layers_parameter, repr_digest_field
from kvsp.client.answers import (
    Explanation,
    PrefixMatch,
    PutResult,
    check_lookup,
)
from kvsp.client.caller import read_whole, within
from kvsp.client.errors import (
    BadAnswerError,
    ClientError,
    ConflictError,
    NotFoundError,
    ProblemDetails,
    VerificationError,
)
from kvsp.client.policy import SEVERITY, Fault
from kvsp.client.retrieving.flights import Cancel
from kvsp.client.retrieving.leasing import Leasing
from kvsp.client.retrieving.planner import Planner
from kvsp.client.retrieving.receiving import BlockReceiver, Layer
from kvsp.client.retrieving.retrieval import (
    Destination,
    Retrieval,
    RetrievalResult,
    needed_runs,
)
from kvsp.client.retrieving.sources import Replica, Source
from kvsp.client.retrieving.ways import HttpWay, Way, decoded
from kvsp.client.services import ServiceClient
from kvsp.names import prefix
from kvsp.names.codes import BLOCK_MEDIA_TYPE, PRIOR_FIELD, Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.tokens import Tokens
from kvsp.names.uris import (
    BlockId,
    block_path,
)
from kvsp.records.problems import ProblemName
from kvsp.records.records import (
    Link,
    LookupRequest,
    LookupResponse,
    MatchedBlock,
    ReplicaRecord,
    StoredBlock,
)

_DESCRIPTORS_KEPT: Final = 64
_SOURCES_KEPT: Final = 1024
_EXPECT_OCTETS: Final = 1 << 20
"""Containers above this are sent only after the holder said that it wants them."""


class Client(ServiceClient):
    """Looks up, retrieves, stores and leases blocks. An `async with` block opens it.

    One client is for one event loop and holds one pool of connections. Exceptions are
    those of `kvsp.client.errors`.
    """

    # --- lookup ----------------------------------------------------------------------

    async def lookup(
        self,
        scope_id: bytes,
        compat_id: bytes,
        block_keys: Sequence[bytes],
        *,
        targets: Sequence[str] | None = None,
        descriptor: Descriptor | None = None,
    ) -> LookupResponse:
        """The leading keys that have replicas (KVSP "Lookup").

        Many keys without `targets` are asked for in several requests, up to the first
        that is not matched. Records are checked against `descriptor` when it is given.
        """
        step = self.limits.keys_per_lookup if targets is None else max(1, len(block_keys))
        blocks: list[MatchedBlock] = []
        estimates = None
        for start in range(0, max(1, len(block_keys)), step):
            keys = tuple(block_keys[start : start + step])
            request = LookupRequest(
                scope_id, compat_id, keys, None if targets is None else tuple(targets)
            )
            answer = await self._caller.ask("POST", self._index, "lookup", body=request.to_json())
            found = answer.record(
                LookupResponse, descriptor=descriptor, http_loopback=self.http_loopback
            )
            check_lookup(self._index, request, found)
            blocks += found.blocks
            estimates = found.targets
            if found.matched < len(keys):
                break
        return LookupResponse(len(blocks), tuple(blocks), estimates)

    async def longest_prefix(
        self, scope: Scope, descriptor: Descriptor, tokens: Tokens, *, held: int = 0
    ) -> PrefixMatch:
        """How many leading blocks of a prompt are cached somewhere.

        Only blocks a prompt can use are asked for: complete ones, and one token stays to
        be computed. `held` blocks the caller has already are counted, not asked for twice.
        """
        usable = prefix.usable_blocks(len(tokens), descriptor.block_tokens)
        keys = tuple(block_keys(scope, descriptor, tokens)[:usable])
        blocks: tuple[MatchedBlock, ...] = ()
        if keys:
            found = await self.lookup(
                scope.scope_id, descriptor.compat_id, keys, descriptor=descriptor
            )
            blocks = found.blocks
        return PrefixMatch(keys, blocks, held, descriptor.block_tokens)

    async def explain(
        self, scope_id: bytes, compat_id: bytes, block_keys: Sequence[bytes]
    ) -> Explanation:
        """Why a lookup of the same keys stops where it does.

        Not every index service offers it: NotFoundError or status 405 then.
        """
        request = LookupRequest(scope_id, compat_id, tuple(block_keys))
        answer = await self._caller.ask("POST", self._index, "explain", body=request.to_json())
        return Explanation.read(answer)

    # --- retrieval -------------------------------------------------------------------

    async def get(
        self,
        block: BlockId | ReplicaRecord | Sequence[ReplicaRecord],
        *,
        layers: range | None = None,
        codec: int | None = None,
        allow_lossy: bool = False,
        descriptor: Descriptor | None = None,
    ) -> AsyncGenerator[Layer, None]:
        """The verified layers of one block, in ascending order, each as soon as it is proven.

        `block` is a replica, several of one block, or a block whose replicas the index
        tells. When a source fails, the next one goes on with the layer that is due. Every
        layer given is right by the record; an answer whose last check (Repr-Digest) fails all
        the same raises VerificationError at the end. Use `contextlib.aclosing`.

        Raises the exception that tells most of why a layer cannot be had.
        """
        replicas = await self._replicas(block)
        described = await self._described(descriptor, replicas)
        wanted = range(described.layers) if layers is None else layers
        _check_layers(wanted, described)
        now = asyncio.get_running_loop().time
        planner = Planner(
            [replicas],
            [needed_runs(wanted)],
            described.layers,
            limits=self.limits,
            links=self._links,
            codec=codec,
            allow_lossy=allow_lossy,
            ordered=True,
            now=now(),
        )
        ways = [HttpWay(self._caller, described)]
        retrieval = Retrieval(ways, planner, self.limits, self._tell)
        while not planner.done and not planner.missing():
            for action in planner.poll(now()):
                if isinstance(action, Cancel):
                    continue
                async with contextlib.aclosing(retrieval.layers(action)) as arriving:
                    async for layer in arriving:
                        yield layer
            if planner.done:
                break
            if (time := planner.next_time(now())) is not None:
                await asyncio.sleep(max(0.0, time - now()))
        self._remember(planner.sources.values())
        if gaps := planner.missing():
            raise _cannot_have(retrieval, gaps[0].reason, gaps[0].layers)
        if retrieval.unproven is not None:
            raise retrieval.unproven

    async def get_from(
        self,
        holder: str,
        block: BlockId,
        descriptor: Descriptor,
        *,
        layers: range | None = None,
        codec: int | None = None,
    ) -> list[Layer]:
        """Layers of a block at a holder, without a Replica Record.

        Only Repr-Digest protects them: they are what the holder meant to send.
        """
        wanted = range(descriptor.layers) if layers is None else layers
        _check_layers(wanted, descriptor)
        query = [] if layers is None else [f"layers={layers_parameter(layers)}"]
        query += [] if codec is None else [f"codec={codec}"]
        path = block_path(block) + ("?" + "&".join(query) if query else "")
        async with (
            within(holder, self.limits.block_s),
            self._caller.open("GET", holder, path) as response,
        ):
            receiver = BlockReceiver(
                holder, descriptor, response.headers, layers=wanted, codec=codec
            )
            async for chunk in response.content.iter_any():
                receiver.feed(chunk)
            sections = receiver.close()
        came = receiver.codec if receiver.codec is not None else int(Codec.RAW)
        return [await decoded(holder, descriptor, came, 0, each) for each in sections]

    async def get_blocks(
        self,
        blocks: Sequence[Sequence[Replica]],
        destination: Destination,
        *,
        descriptor: Descriptor,
        layers: range | None = None,
        wanted: Mapping[int, Collection[int]] | None = None,
        codec: int | None = None,
        allow_lossy: bool = False,
        links: Iterable[Link] = (),
        budget_octets: int | None = None,
        deadline_s: float | None = None,
        by_block: bool = False,
        lease_ms: int | None = None,
        ways: Sequence[Way] = (),
        late: Collection[str] = (),
    ) -> RetrievalResult:
        """Layers of many blocks, from all their holders at once, into `destination`.

        `blocks` are the replicas of each block, in order. `layers` of every block are
        needed, or of block i only `wanted[i]` (and of a block not in `wanted`, none).
        Sources are chosen by `kvsp.records.costs` and what was measured; a source that is slow,
        fails or lies costs only what it was asked for. Blocks beyond `budget_octets` are
        missing for `capacity`, what has not come after `deadline_s` for `timeout`: the answer
        waits for nobody then.

        With `by_block` the first blocks come first, whole, else the lower layers of all. With
        `lease_ms` blocks are leased where they are asked for, many with one request, until they
        have come. `ways` other than HTTP are gone first; holders in `late` are asked after
        the others.

        Raises what the destination raises; failures of sources are in the result.
        """
        every = range(descriptor.layers) if layers is None else layers
        _check_layers(every, descriptor)
        runs = [
            needed_runs(every if wanted is None else list(wanted.get(place, ())))
            for place in range(len(blocks))
        ]
        for run in (run for each in runs for run in each):
            _check_layers(run, descriptor)
        gone = (*ways, HttpWay(self._caller, descriptor))
        planner = Planner(
            blocks,
            runs,
            descriptor.layers,
            limits=self.limits,
            links={**self._links, **{link.holder: link for link in links}},
            codec=codec,
            allow_lossy=allow_lossy,
            by_block=by_block,
            late=late,
            takes=lambda source: any(way.takes(source) for way in gone),
            budget_octets=budget_octets,
            now=asyncio.get_running_loop().time(),
        )
        leasing = None if lease_ms is None else self._leasing(lease_ms, blocks, planner)
        retrieval = Retrieval(gone, planner, self.limits, self._tell, leasing)
        try:
            return await retrieval.run(destination, len(blocks), deadline_s)
        finally:
            self._remember(planner.sources.values())

    def _leasing(
        self, ttl_ms: int, blocks: Sequence[Sequence[Replica]], planner: Planner
    ) -> Leasing:
        sources: dict[str, list[BlockId]] = {}
        for replica in (each for replicas in blocks for each in replicas):
            sources.setdefault(replica.holder, []).append(replica.block)
        return Leasing(
            self._caller,
            self.limits,
            self._behind,
            ttl_ms,
            sources,
            lambda holder, seconds: planner.sources[holder].answered(seconds),
        )

    async def _replicas(
        self, block: BlockId | ReplicaRecord | Sequence[ReplicaRecord]
    ) -> list[ReplicaRecord]:
        if isinstance(block, ReplicaRecord):
            return [block]
        if isinstance(block, BlockId):
            return await self.replicas(block)
        return list(block)

    async def _described(
        self, descriptor: Descriptor | None, replicas: Sequence[ReplicaRecord]
    ) -> Descriptor:
        if descriptor is not None:
            return descriptor
        if not replicas:
            raise _not_found(self.index or "index", "no replica of the block is known")
        return await self.get_descriptor(replicas[0].compat_id)

    def _remember(self, sources: Iterable[Source]) -> None:
        """Keep the measured rates for the next retrieval."""
        for source in sources:
            if not source.measured_rate:
                continue
            link = Link(source.holder, source.mbit_per_s, source.rtt_us)
            self._links[source.holder] = link
            self._links.move_to_end(source.holder)
        while len(self._links) > _SOURCES_KEPT:
            self._links.popitem(last=False)

    # --- storing ---------------------------------------------------------------------

    async def put(
        self, holder: str, block: BlockId, container: Container, *, prior: bytes | None = None
    ) -> PutResult:
        """Store a whole block at a holder; one that is there already stays (412).

        `prior` is the key of the block before it in its prompt: a holder that takes the hint
        lets that one go no sooner than this one.
        """
        digest = await asyncio.to_thread(container.repr_digest)
        layer_digests = await asyncio.to_thread(container.layer_digests)
        try:
            # made again after a failure: if it had been stored all the same, that is 412
            body = await self._caller.retrying(
                lambda: self._put_once(holder, block, container, digest, prior)
            )
        except ConflictError as error:
            if error.problem.name is ProblemName.BLOCK_EXISTS:
                return PutResult(False, None)
            raise
        try:
            stored = StoredBlock.from_json(body)
        except DecodeError as error:
            raise BadAnswerError(holder, f"its answer is malformed: {error}") from None
        if stored.layer_digests != tuple(layer_digests):
            raise VerificationError(holder, "it stored other layers than were sent")
        return PutResult(True, stored)

    async def _put_once(
        self,
        holder: str,
        block: BlockId,
        container: Container,
        digest: bytes,
        prior: bytes | None,
    ) -> bytes:
        fields = {
            "Content-Type": BLOCK_MEDIA_TYPE,
            "Content-Length": str(container.total_octets),
            "If-None-Match": "*",
            "Repr-Digest": repr_digest_field(digest),
        }
        if prior is not None:
            fields[PRIOR_FIELD] = prior.hex()
        async with (
            within(holder, self.limits.block_s),
            self._caller.open(
                "PUT",
                holder,
                block_path(block),
                data=_parts(container),
                fields=fields,
                expected=(201,),
                expect100=container.total_octets > _EXPECT_OCTETS,
            ) as response,
        ):
            return await read_whole(response, self.limits.answer_octets) or b""


async def _parts(container: Container) -> AsyncIterator[bytes | memoryview]:
    for part in container:
        yield part


def _check_layers(layers: range, descriptor: Descriptor) -> None:
    if layers.step != 1 or not layers or layers.start < 0 or layers.stop > descriptor.layers:
        raise ValueError(f"{layers} is no range of layers within 0 to {descriptor.layers - 1}")


def _cannot_have(retrieval: Retrieval, reason: Fault, layers: range) -> ClientError:
    """The exception for layers that are missing."""
    if (error := retrieval.errors.get(reason)) is not None:
        return error
    if retrieval.errors:
        return retrieval.errors[max(retrieval.errors, key=SEVERITY.__getitem__)]
    return _not_found("every source", f"layers {layers_parameter(layers)}: {reason}")


def _not_found(source: str, detail: str) -> NotFoundError:
    return NotFoundError(source, ProblemDetails(404, str(ProblemName.UNKNOWN_RESOURCE), detail))
