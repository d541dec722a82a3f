"""An index service and holders as a consumer's client shows them, without a socket."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvcs.publishing.publication import Publication
from kvcs.publishing.replicas import layer_digests, moqt_record
from kvsp.blocks.layout import block_section
from kvsp.client import Arrived, Fault, Layer, Missing, RetrievalResult
from kvsp.names.codes import Codec
from kvsp.names.identity import block_keys
from kvsp.records.records import LookupResponse, MatchedBlock, ReplicaRecord, replica_digest
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, LAYERS, SCOPE, TOKENS, kv, same

H1 = "https://h1.example/kvsp/"
OTHER_RELAY = "moqt://other.example"
CACHE = kv()


def check(layers, cache=CACHE, blocks=BLOCKS) -> None:
    """The layers are all of `cache`, in order, each of its first `blocks` blocks."""
    assert [layer.index for layer in layers] == list(range(LAYERS))
    for layer in layers:
        for got, wanted in zip((layer.k, layer.v), cache[layer.index], strict=True):
            assert same(got, wanted[: blocks * BLOCK])


def record(cache, block, *, holder=H1, key=None, described=DESCRIPTOR) -> ReplicaRecord:
    """The Replica Record of a block of `cache` at a holder."""
    if key is None:
        key = block_keys(SCOPE, described, TOKENS)[block]
    digests = tuple(layer_digests(cache, block, described))
    return ReplicaRecord(
        block_key=key,
        compat_id=described.compat_id,
        scope_id=SCOPE.scope_id,
        holder=holder,
        codec=int(Codec.RAW),
        size=2 * described.layers * described.section_octets(),
        digest=replica_digest(digests),
        ttl_ms=60_000,
        layer_digests=digests,
    )


class FakeClient:
    """Knows blocks of a cache at one holder, and publications at relays.

    `gives(block, layer)` is False for what the holder turns out not to have; `gate`, when it
    is given, is waited for before anything is answered.
    """

    def __init__(self, cache=CACHE, blocks=BLOCKS, *, error=None, gives=None, gate=None) -> None:
        self.cache = cache
        self.held = [[record(cache, block)] for block in range(blocks)]
        self.error = error
        self.gives = gives or (lambda block, layer: True)
        self.gate = gate
        self.fault = Fault.NOT_HELD
        self.looked_up: list = []
        self.asked: Counter = Counter()
        """How often a (block, layer) was asked for."""

    def knows(self, publication: Publication, cache, url: str) -> FakeClient:
        """The index has the records of a publication."""
        keys = block_keys(SCOPE, DESCRIPTOR, range(1000, 1000 + BLOCK * publication.blocks))
        for block in range(publication.blocks):
            if block == len(self.held):
                self.held.append([])
            self.held[block].append(
                moqt_record(publication.namespace, keys[block], cache, block, DESCRIPTOR, url)
            )
        return self

    async def lookup(self, scope_id, compat_id, keys, *, descriptor):
        self.looked_up.append(list(keys))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if (scope_id, compat_id) != (SCOPE.scope_id, DESCRIPTOR.compat_id):
            return LookupResponse(0, ())
        known = {replicas[0].block_key: tuple(replicas) for replicas in self.held}
        found = []
        for key in keys:
            if key not in known:
                break
            found.append(MatchedBlock(key, known[key]))
        return LookupResponse(len(found), tuple(found))

    async def get_blocks(self, blocks, destination, *, descriptor, wanted, deadline_s):
        arrived, missing = [], []
        if self.gate is not None:
            await self.gate.wait()
        order = sorted((layer, block) for block, layers in wanted.items() for layer in layers)
        for layer, block in order:
            self.asked[block, layer] += 1
            await asyncio.sleep(0)
            one = range(layer, layer + 1)
            if not self.gives(block, layer):
                missing.append(Missing(block, one, self.fault))
                continue
            k, v = (block_section(t, block, BLOCK) for t in self.cache[layer])
            destination.write(Layer(block, layer, k, v, blocks[block][0].holder))
            arrived.append(Arrived(block, one, blocks[block][0].holder))
        return RetrievalResult(len(blocks), tuple(arrived), tuple(missing), 0)
