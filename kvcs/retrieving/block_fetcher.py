"""Blocks of publications for inference instances: `moqt` sources of prefetch directives
(KVSP "Prefetch Directives").

A directive names a block by its key and a publication that has it, but not where in the
publication it stands. The block's Replica Record tells: a block of the publication is the
one asked for when it has the record's digest. So a publication is retrieved whole, once,
and its blocks are handed out while it is kept. Who knows one key cannot show more of its
place than the Anchor Key does, and that no block has two keys: an index service that lies
within that can have two blocks of one publication exchanged.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcs.finding.relays import Connect
from kvcs.names.errors import NotAuthorized, RetrievalError, UnknownKey, VerificationFailed
from kvcs.names.limits import KEPT_OCTETS, reached
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.refusals import not_authorized
from kvcs.retrieving.asking.threads import in_thread
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.layers import Layer
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Stats
from kvcs.trust.producers import Producers
from kvcs.trust.terms import Terms
from kvsp.blocks.container import layer_digest
from kvsp.blocks.layout import block_section
from kvsp.client import Client, ClientError
from kvsp.instance.core.directives import CAPACITY, TIMEOUT
from kvsp.instance.loading.fetchers import DIGEST_MISMATCH, UNREACHABLE, LoadError, WriteLayer
from kvsp.names import uris
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName
from kvsp.records.records import ReplicaRecord, replica_digest
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.quic.config import QuicConfig
from moqt.values.errors import MoqtError

FETCH_SECONDS: Final = 60.0
"""Longest time a publication may take."""
RETRIEVALS: Final = 4
"""Publications that are retrieved at a time, each as large as what is kept may be."""


@dataclass(frozen=True, slots=True)
class _Retrieved:
    """A publication as it came, while it is kept."""

    anchor_key: bytes
    layers: list[Layer]
    """Those of each segment, one segment after the other."""
    digests: list[list[bytes]]
    """Replica digest of each block, by segment."""
    keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The Block Keys of those handed over, by segment and place."""

    def find(self, digest: bytes, key: bytes) -> tuple[list[Layer], int]:
        """The layers of the segment with the block that has `key`, and its place there: one of that
        digest that was not had for another key, and the last of segment 0 for the Anchor Key alone.
        Raises LoadError."""
        each, last = len(self.layers) // len(self.digests), (0, len(self.digests[0]) - 1)
        found = False
        for segment, digests in enumerate(self.digests):
            for place, has in enumerate(digests):
                if has != digest:
                    continue
                found = True
                at = segment, place
                if (at == last) is (key == self.anchor_key) and self.keys.get(at, key) == key:
                    self.keys[at] = key
                    return self.layers[segment * each : (segment + 1) * each], place
        raise LoadError(
            DIGEST_MISMATCH,
            "the index's record of the block is that of another one"
            if found
            else "no block of the publication has the digest",
        )

    @property
    def octets(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A retrieval, and how many wait for it."""

    task: asyncio.Task[_Retrieved]
    waiting: int = 0


class MoqtFetcher:
    """The way to blocks of publications. Kept publications go, least recently used first."""

    def __init__(
        self,
        client: Client,
        connecting: Connect,
        *,
        kept_octets: int = KEPT_OCTETS,
        timeout: float = FETCH_SECONDS,
        scopes: Iterable[Scope] = (),
        producers: Producers | None = None,
    ) -> None:
        """`client` is that of the instance: its index service has the records. Of a scope among
        `scopes` that has content keys only what is sealed with one of them is taken, and with
        `producers` only what one of them has signed and listed."""
        self._client = client
        self._connect = connecting
        self._kept_octets = kept_octets
        self._timeout = timeout
        self._terms = {each.scope_id: Terms(each.content_keys, producers) for each in scopes}
        self._others = Terms(producers=producers)
        """For publications of any other scope."""
        self._kept: OrderedDict[str, _Retrieved] = OrderedDict()
        # The blocks of a directive are of the same publication: whoever asks for one of them waits
        # for the same retrieval, which goes on as long as somebody does.
        self._under_way: dict[tuple[str, str], _UnderWay] = {}
        self._places = asyncio.Semaphore(RETRIEVALS)

    @property
    def octets(self) -> int:
        """Octets of the publications kept."""
        return sum(each.octets for each in self._kept.values())

    def takes(self, source: str) -> bool:
        return uris.is_moqt(source)

    async def fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        """Give every verified layer of a block to `write`, ascending; there are no leases
        on publications. Raises LoadError."""
        try:
            url, text = uris.split_moqt_source(source)
            namespace = PublicationNamespace.from_text(text)
        except DecodeError as error:
            raise LoadError(UNREACHABLE, error.detail) from None
        if (namespace.scope_id, namespace.compat_id) != (block.scope_id, block.compat_id):
            raise LoadError(
                str(ProblemName.UNKNOWN_RESOURCE), "the publication is of another scope"
            )
        record = await self._record(block, text)
        retrieved = await self._shared(url, namespace, descriptor)
        layers, place = retrieved.find(record.digest, block.block_key)
        for layer in layers:
            rows = descriptor.block_tokens
            k, v = (block_section(tensor, place, rows) for tensor in (layer.k, layer.v))
            write(layer.index, k, v)

    # -- inside --------------------------------------------------------------------------

    async def _record(self, block: BlockId, namespace: str) -> ReplicaRecord:
        if self._client.index is None:
            raise LoadError(UNREACHABLE, "without an index service nothing tells which block it is")
        try:
            records = await self._client.replicas(block)
        except ClientError as error:
            raise LoadError(UNREACHABLE, str(error)) from None
        for record in records:
            if record.moqt_namespace == namespace and record.codec == Codec.RAW:
                return record
        raise LoadError(str(ProblemName.UNKNOWN_RESOURCE), "the index has no record of it")

    async def _shared(
        self, url: str, namespace: PublicationNamespace, descriptor: Descriptor
    ) -> _Retrieved:
        found = self._kept.get(namespace.text)
        if found is not None:
            self._kept.move_to_end(namespace.text)
            return found
        key = url, namespace.text
        under_way = self._under_way.get(key)
        if under_way is None:
            task = asyncio.create_task(self._retrieved(url, namespace, descriptor))
            under_way = self._under_way[key] = _UnderWay(task)
        under_way.waiting += 1
        try:
            return await asyncio.shield(under_way.task)
        finally:
            under_way.waiting -= 1
            if not under_way.waiting:
                under_way.task.cancel()
                if self._under_way.get(key) is under_way:
                    del self._under_way[key]

    async def _retrieved(
        self, url: str, namespace: PublicationNamespace, descriptor: Descriptor
    ) -> _Retrieved:
        async with self._places:
            found = self._kept.get(namespace.text)  # by way of another relay, meanwhile
            if found is None:
                found = await self._retrieve(url, namespace, descriptor)
                self._kept[namespace.text] = found
        self._kept.move_to_end(namespace.text)
        while len(self._kept) > 1 and self.octets > self._kept_octets:
            self._kept.popitem(last=False)
        return found

    async def _retrieve(
        self, url: str, namespace: PublicationNamespace, descriptor: Descriptor
    ) -> _Retrieved:
        session: MoqtSession | None = None
        try:
            async with asyncio.timeout(self._timeout):
                session = await self._connect(url)
                layers = await self._layers(session, namespace, descriptor)
        except TimeoutError:
            raise LoadError(TIMEOUT, f"{url} took more than {self._timeout:g} s") from None
        except (RetrievalError, MoqtError) as error:
            raise LoadError(_reason(error), str(error)) from None
        finally:
            if session is not None:
                session.close()
        digests = await asyncio.to_thread(_digests, layers, descriptor)
        return _Retrieved(namespace.anchor_key, layers, digests)

    async def _layers(
        self, session: MoqtSession, namespace: PublicationNamespace, descriptor: Descriptor
    ) -> list[Layer]:
        changed, stats, layers = asyncio.Event(), Stats(), list[Layer]()
        every, now = range(descriptor.layers), asyncio.get_running_loop().time
        block_octets = 2 * descriptor.layers * descriptor.section_octets()
        terms = self._terms.get(namespace.scope_id, self._others)
        listed = terms.producers is not None
        assembly = Assembly(
            namespace,
            descriptor,
            None,
            every,
            MemoryDestination(descriptor),
            stats,
            require_listed=listed,
            terms=terms,
        )
        retrieval = Retrieval(
            session.session,
            assembly,
            stats,
            require_listed=listed,
            changed=changed.set,
            beside=in_thread,
        )
        retrieval.start()
        try:
            while True:
                changed.clear()
                due = retrieval.poll(now())
                layers += retrieval.ready
                retrieval.ready.clear()
                if retrieval.error is not None:
                    raise retrieval.error
                if (octets := assembly.total * block_octets) > self._kept_octets:
                    detail = (
                        f"a publication of {assembly.total} blocks has {octets} octets, and "
                        f"{self._kept_octets} are kept"
                    )
                    reached("kept_octets", detail)
                    raise LoadError(CAPACITY, detail)
                if retrieval.finished:
                    return layers
                await _wait(changed, due)
        finally:
            retrieval.close()


def fetcher(
    client: Client,
    cafile: Path | None,
    scopes: Iterable[Scope] = (),
    producers: Path | None = None,
) -> MoqtFetcher:
    """What `kvsp-server` makes of the entry point: relays are authenticated with `cafile`,
    publications of `scopes` opened with their content keys, and signed by one of the file of
    `producers`, if there is one. Raises FileError for that file."""
    quic = QuicConfig(cafile=cafile)

    async def connecting(url: str) -> MoqtSession:
        return await connect(url, quic=quic)

    accepted = None if producers is None else Producers.load(producers)
    return MoqtFetcher(client, connecting, scopes=scopes, producers=accepted)


async def _wait(changed: asyncio.Event, due: float | None) -> None:
    try:
        async with asyncio.timeout_at(due):
            await changed.wait()
    except TimeoutError:
        if due is None or asyncio.get_running_loop().time() < due:
            raise


def _digests(layers: list[Layer], descriptor: Descriptor) -> list[list[bytes]]:
    rows, each = descriptor.block_tokens, descriptor.layers

    def digest(layer: Layer, block: int) -> bytes:
        return layer_digest(*(block_section(half, block, rows) for half in (layer.k, layer.v)))

    segments = [layers[at : at + each] for at in range(0, len(layers), each)]
    return [
        [
            replica_digest([digest(layer, block) for layer in segment])
            for block in range(len(segment[0].k) // rows)
        ]
        for segment in segments
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, VerificationFailed):
        return DIGEST_MISMATCH
    refused = isinstance(error, MoqtError) and not_authorized(error)
    if refused or isinstance(error, NotAuthorized | UnknownKey):
        return str(ProblemName.FORBIDDEN)
    return UNREACHABLE
