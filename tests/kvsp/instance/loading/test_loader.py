"""Many blocks at once, whatever sources do: leases by lists, hedging, exact deadlines (virtual
time)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvsp.client.client import Client
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.loading.fetchers import LoadError
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.loading.sources import Wanted
from kvsp.names.uris import BlockId
from tests.kvsp import scheduler
from tests.kvsp.inside import ask_with
from tests.kvsp.instance.loading.holders import Holders
from tests.kvsp.instance.support import (
    BASE,
    ENGINE,
    SIZE,
    block_id,
    computed,
    keys,
    make_instance,
)

TOKENS = [(7 * number + 3) % 256 for number in range(16 * SIZE)]
KEYS = keys(TOKENS)
BLOCKS = computed(TOKENS)
GOOD, HUNG, OTHER = (f"https://{name}.example/kvsp/" for name in ("good", "hung", "other"))


@dataclass
class Site:
    """A loader, the holders around it, and what came when."""

    holders: Holders
    loader: BlockLoader
    client: Client
    came: dict[BlockId, KvBlock | LoadError] = field(default_factory=dict)

    async def load(self, wanted: Sequence[bytes], *sources: str, **options: Any) -> float:
        """How many seconds it took."""
        now = asyncio.get_running_loop().time
        began = now()
        blocks = [Wanted(block_id(key), sources) for key in wanted]
        options.setdefault("publish", False)
        await self.loader.load(blocks, "user", self.came.__setitem__, **options)
        return now() - began

    @property
    def whole(self) -> list[bytes]:
        """The keys of what came, in the order in which it did."""
        return [
            block.block_key
            for block, made in self.came.items()
            if isinstance(made, KvBlock) and made.sections() == BLOCKS[block.block_key].sections()
        ]

    @property
    def reasons(self) -> dict[bytes, str]:
        return {
            block.block_key: error.reason
            for block, error in self.came.items()
            if isinstance(error, LoadError)
        }


def story(seed: int, tell: Callable[[Site], Coroutine[Any, Any, None]], **holders: Any) -> None:
    """Run a story in a time of its own; afterwards nothing is reserved or under lease."""

    async def main(_random: object) -> None:
        instance = make_instance()
        around = Holders(blocks=BLOCKS, **holders)
        ask_with(instance.shell.client, around)
        loader = BlockLoader(
            ENGINE.descriptor,
            instance.agent.pool,
            instance.holder,
            (),
            base_uri=BASE,
            client=instance.shell.client,
            clock=asyncio.get_running_loop().time,
        )
        site = Site(around, loader, instance.shell.client)
        await tell(site)
        assert instance.agent.pool.reserved == 0
        await site.client.close()
        assert not [lease for lease in around.leases.values() if lease[0] not in around.hung]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    scheduler.run(seed, main)


@pytest.mark.parametrize("seed", range(5))
def test_a_source_that_hangs_costs_a_moment_and_no_block(seed: int) -> None:
    async def tell(site: Site) -> None:
        took = await site.load(KEYS, HUNG, GOOD, seconds=60.0)
        assert sorted(site.whole) == sorted(KEYS)
        assert took < 2.0
        # it is asked after the others the next time
        asked = len(site.holders.asked)
        site.loader.pool.unpin_all("user")
        for key in KEYS:
            site.loader.pool.discard(block_id(key))
        await site.load(KEYS, HUNG, GOOD, seconds=60.0)
        assert all(source == GOOD for _, source in site.holders.asked[asked:])

    story(seed, tell, hung={HUNG})


@pytest.mark.parametrize("seed", range(5))
def test_the_deadline_is_kept_exactly_and_what_came_before_is_told_at_once(seed: int) -> None:
    async def tell(site: Site) -> None:
        told = []
        now = asyncio.get_running_loop().time
        wanted = [
            Wanted(block_id(key), (GOOD if place % 2 else HUNG,)) for place, key in enumerate(KEYS)
        ]

        def came(block: BlockId, outcome: KvBlock | LoadError) -> None:
            site.came[block] = outcome
            told.append(now())

        began = now()
        await site.loader.load(wanted, "user", came, seconds=3.0, publish=False)
        assert now() - began == pytest.approx(3.0, abs=1e-9)
        assert sorted(site.whole) == sorted(KEYS[1::2])
        assert site.reasons == dict.fromkeys(KEYS[::2], "timeout")
        assert all(at - began < 0.5 for at in told[: len(KEYS) // 2])

    story(seed, tell, hung={HUNG})


def test_blocks_are_leased_by_lists_and_given_back_when_they_have_come() -> None:
    async def tell(site: Site) -> None:
        await site.load(KEYS, GOOD)
        assert (len(site.whole), site.holders.requests("POST", GOOD)) == (len(KEYS), 1)

    story(1, tell)


def test_a_source_that_grants_fewer_blocks_at_once_gets_smaller_lists() -> None:
    async def tell(site: Site) -> None:
        await site.load(KEYS, GOOD)
        assert len(site.whole) == len(KEYS)
        # 16 and 8 are refused, then there are four lists of 4
        assert site.holders.requests("POST", GOOD) <= 2 + len(KEYS) // 4 + 2

    story(1, tell, most=5)


def test_blocks_are_fetched_at_the_same_time_and_the_first_ones_first() -> None:
    async def tell(site: Site) -> None:
        one = await site.load(KEYS[:1], GOOD)
        rest = await site.load(KEYS[1:], GOOD, OTHER)
        assert set(site.whole[:3]) <= set(KEYS[:9])
        assert len(site.whole) == len(KEYS)
        assert rest < len(KEYS[1:]) * one / 3

    story(1, tell)


def test_what_one_source_lacks_comes_from_the_other_and_what_both_lack_is_named() -> None:
    async def tell(site: Site) -> None:
        await site.load(KEYS, GOOD, OTHER)
        assert sorted(site.whole) == sorted(KEYS[1:])
        assert site.reasons == {KEYS[0]: "kvsp-unknown-resource"}

    story(1, tell, lacking={GOOD: set(KEYS[:4]), OTHER: {KEYS[0], *KEYS[8:]}})


def test_two_that_want_the_same_blocks_fetch_each_once() -> None:
    async def tell(site: Site) -> None:
        other = Site(site.holders, site.loader, site.client)
        await asyncio.gather(site.load(KEYS[:9], GOOD), other.load(KEYS, GOOD))
        assert len(site.whole) == 9
        assert len(other.whole) == len(KEYS)
        assert site.holders.requests("GET", GOOD) == len(KEYS)

    story(1, tell)


def test_a_load_that_is_cancelled_gives_its_memory_back_and_the_next_one_goes_on() -> None:
    async def tell(site: Site) -> None:
        loading = asyncio.create_task(site.load(KEYS, HUNG))
        await asyncio.sleep(1.0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert site.loader.pool.reserved == 0
        await site.load(KEYS, GOOD)
        assert len(site.whole) == len(KEYS)

    story(1, tell, hung={HUNG})
