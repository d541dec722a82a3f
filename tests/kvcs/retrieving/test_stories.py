"""Whatever publishers, relays and indexes do, in worlds drawn by lot, and in virtual time.

`CONSUMER_STORIES` is how many are told.
"""

from __future__ import annotations

import os

import pytest

from kvcs.names.errors import RetrievalError
from tests.kvcs import virtual
from tests.kvcs.stories import World

STORIES = int(os.environ.get("CONSUMER_STORIES", "300"))


@pytest.mark.parametrize("first", range(0, STORIES, 20))
def test_what_is_handed_over_is_the_true_cache_of_the_longest_prefix_that_an_honest_source_had(
    first: int,
) -> None:
    for seed in range(first, min(first + 20, STORIES)):
        world = World(seed)
        told = f"story {seed}: {world}"
        virtual.run(tell(world, told))


async def tell(world: World, told: str) -> None:
    least, most = world.expected()
    layers, error = [], None
    async with world.consumer() as consumer:
        try:
            async for layer in consumer.layers():
                layers.append(layer)
        except RetrievalError as caught:
            error = caught
    given = world.check(layers)
    if error is None:
        assert given == consumer.stats.blocks, told
        assert least <= given <= most, f"{given} blocks\n{told}"
    else:
        # a publisher that was lost while it was followed: what was whole is given, and that is told
        assert least <= consumer.stats.whole_blocks, f"{error!r}\n{told}"
    assert consumer.octets_held == 0
