"""A cache that is handed over layer by layer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvcs.client.counters import Dropped
from kvcs.client.saving import Save
from kvcs.names.errors import KvcsError, MisuseError
from kvcs.publishing.publication import Publication
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    kv,
    manifests,
    produced,
    until,
)

CACHE = kv()


class Host:
    """A client that has one Save."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.offered, self.let, self.progress = [], [], 0
        self.loop = asyncio.get_running_loop()

    def soon(self, call, *args):
        self.loop.call_soon(call, *args)

    def reserve(self, octets):
        if octets > self.room:
            return False
        self.room -= octets
        return True

    def release(self, octets):
        self.room += octets

    def offer(self, save, publication):
        self.offered.append(publication)

    def progressed(self, save):
        self.progress += 1

    def let_go(self, save, reason, why):
        self.let.append(reason)
        save.end(why)


def save_of(host, tokens=TOKENS, first=BLOCKS, **settings):
    make = partial(
        Publication, SCOPE, DESCRIPTOR, tokens[: first * BLOCK], growing=first < BLOCKS, **settings
    )
    return Save(host, DESCRIPTOR, make, list(tokens), first)


async def test_it_is_offered_before_any_layer_and_whole_after_the_last():
    host = Host()
    save = save_of(host)
    running = asyncio.create_task(save.run())
    await until(lambda: host.offered)
    for layer, (k, v) in enumerate(CACHE):
        assert save.put_layer(layer, k, v)
    await running
    assert save.complete and save.failed is None
    assert host.progress == LAYERS and host.room == 1 << 30
    assert manifests(save.publication)[-1].segments[0].object_digests.keys() == (
        manifests(produced())[-1].segments[0].object_digests.keys()
    )


async def test_chunks_are_segments():
    host = Host()
    save = save_of(host, first=2)
    running = asyncio.create_task(save.run())
    for first, stop in ((0, 2), (2, 5)):
        for layer, tensors in enumerate(CACHE):
            rows = slice(first * BLOCK, stop * BLOCK)
            assert save.put_chunk(first, layer, *(tensor[rows] for tensor in tensors))
    await running
    assert save.complete
    spans = [(each.first_block, each.blocks) for each in manifests(save.publication)[-1].segments]
    assert spans == [(0, 2), (2, 3)]


async def test_layers_are_given_in_order_and_a_mistake_says_which_is_due():
    save = save_of(Host(), first=2)
    k, v = CACHE[0]
    with pytest.raises(MisuseError, match="layer 0 of the chunk at block 0 is due"):
        save.put_chunk(0, 1, k, v)
    for layer in range(LAYERS):
        save.put_chunk(0, layer, k, v)
    with pytest.raises(MisuseError, match="layer 0 of the chunk at block 2 is due"):
        save.put_chunk(0, 0, k, v)
    with pytest.raises(MisuseError, match="3 tokens, and 4 are needed"):
        save.put_chunk(2, 0, k[:3], v)
    assert save.put_chunk(2, 0, k[: 2 * BLOCK], v[: 2 * BLOCK])
    with pytest.raises(MisuseError, match="4 tokens, and 8 are needed"):
        save.put_chunk(2, 1, k[:BLOCK], v)


async def test_after_the_last_layer_nothing_more_is_due():
    save = save_of(Host())
    for layer, (k, v) in enumerate(CACHE):
        save.put_layer(layer, k, v)
    with pytest.raises(MisuseError, match="nothing more is due"):
        save.put_layer(0, *CACHE[0])


async def test_what_comes_faster_than_it_can_be_hashed_is_dropped_and_no_mistake():
    host = Host(room=2 * CACHE[0][0].nbytes)
    save = save_of(host)
    assert save.put_layer(0, *CACHE[0])
    assert not save.put_layer(1, *CACHE[1])
    assert "faster" in save.failed
    assert not save.put_layer(1, *CACHE[1])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert host.let == [Dropped.PENDING]
    assert host.room == 2 * CACHE[0][0].nbytes, "what waited waits no longer"


async def test_one_that_is_aborted_tells_its_readers_and_ends():
    host = Host()
    save = save_of(host)
    running = asyncio.create_task(save.run())
    await until(lambda: host.offered)
    save.put_layer(0, *CACHE[0])
    save.abort("preempted")
    save.abort()
    await asyncio.wait_for(running, 10)
    assert (save.failed, host.let) == ("preempted", [Dropped.ABORTED])
    assert all(store.ended for store in save.publication.tracks)
    assert not save.complete


async def test_one_that_cannot_be_published_says_why():
    def make():
        raise KvcsError("the manifest would list too much")

    host = Host()
    save = Save(host, DESCRIPTOR, make, TOKENS, BLOCKS)
    await save.run()
    await asyncio.sleep(0)
    assert save.failed == "the manifest would list too much"
    assert host.let == [Dropped.FAILED]


async def test_after_the_end_of_its_client_it_can_be_aborted():
    class Closed(Host):
        def soon(self, call, *args):
            raise MisuseError("this Client was closed")

    save = save_of(Closed())
    with pytest.raises(MisuseError, match="closed"):
        save.put_layer(0, *CACHE[0])
    save.abort("it was closed")
    assert save.failed == "it was closed"
