"""Whatever publishers, relays and indexes do, in worlds drawn by lot, and in virtual time.

`CONSUMER_STORIES` is how many are told.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvcs.names.errors import RetrievalError
from tests.kvcs import virtual
from tests.kvcs.stories import World
from tests.kvcs.support import same

STORIES = int(os.environ.get("CONSUMER_STORIES", "300"))


@pytest.mark.parametrize("first", range(0, STORIES, 20))
def test_what_is_handed_over_is_the_true_cache_of_the_longest_prefix_that_an_honest_source_had(
    first: int,
) -> None:
    given = []
    for seed in range(first, first + 20):
        world = World(seed)
        virtual.run(tell(world, f"story {seed}: {world}", given))
    assert any(given)


async def tell(world: World, told: str, given: list[int]) -> None:
    least, most = world.expected()
    layers, came, error = [], [], None
    async with world.consumer() as consumer:
        try:
            async for layer in consumer.layers():
                layers.append(layer)
                came.append(replace(layer, k=layer.k.copy(), v=layer.v.copy()))
        except RetrievalError as caught:
            error = caught
    given.append(world.check(came))
    for layer, then in zip(layers, came, strict=True):
        assert same(layer.k, then.k) and same(layer.v, then.v), f"it has changed\n{told}"
    if error is None:
        assert given[-1] == consumer.stats.blocks, told
        assert least <= given[-1] <= most, f"{given[-1]} blocks\n{told}"
    else:
        # a publisher that was lost while it was followed: what was whole is given, and that is told
        assert least <= consumer.stats.whole_blocks, f"{error!r}\n{told}"
    assert consumer.octets_held == 0
