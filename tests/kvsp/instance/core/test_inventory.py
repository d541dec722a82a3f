"""Which blocks an instance has: each once, in order, page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsp.instance.core.inventory import Inventory
from kvsp.names.uris import BlockId
from tests.kvsp.instance.support import (
    ENGINE,
    OCTETS,
    SCOPE,
    block_id,
    directive,
    keys,
    running,
    until,
)

COMPAT, SCOPES = bytes(32), (bytes(16), b"\x01" * 16)


@given(st.lists(st.tuples(st.sampled_from(SCOPES), st.integers(0, 9), st.booleans()), max_size=60))
def test_a_block_is_there_as_long_as_it_is_in_one_place_and_listed_once(
    moves: list[tuple[bytes, int, bool]],
) -> None:
    inventory, places = Inventory(), dict[BlockId, int]()
    for scope, number, comes in moves:
        block = BlockId(COMPAT, scope, bytes([number]) * 32)
        before = places.get(block, 0)
        if comes and before < 2:
            inventory.change(block, 1)
            places[block] = before + 1
        elif not comes and before:
            inventory.change(block, -1)
            places[block] = before - 1
    there = [block for block, count in places.items() if count]
    assert len(inventory) == len(there)
    for scope in SCOPES:
        wanted = sorted(block.block_key for block in there if block.scope_id == scope)
        listed, after = list[bytes](), b""
        while True:
            page, more = inventory.keys(COMPAT, scope, after, 3)
            listed += page
            assert len(page) == 3 or not more
            if not more:
                break
            after = page[-1]
        assert listed == wanted


async def test_what_is_in_memory_and_in_the_store_is_one_block_until_it_has_left_both() -> None:
    async with running() as instance:
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        await until(lambda: len(instance.holder.store) == len(keys()))
        inventory = instance.shell.inventory
        assert len(inventory) == len(keys())
        compat, scope = ENGINE.descriptor.compat_id, SCOPE.scope_id
        assert inventory.keys(compat, scope, b"", 10) == (sorted(keys()), False)
        await until(lambda: not instance.agent.directives.under_way)
        await instance.holder.delete(block_id(keys()[-1]))
        assert len(inventory) == len(keys())
        # of a prompt that nobody uses the end goes first
        instance.agent.pool.reserve(instance.agent.pool.budget - 2 * OCTETS)
        assert len(inventory) == len(keys()) - 1
        assert block_id(keys()[0]) in instance.agent.pool
