"""Leases of a retrieval, with holders that need no network."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kvsp.client.behind import Behind
from kvsp.client.caller import Answer, Caller
from kvsp.client.errors import NotFoundError
from kvsp.client.limits import ClientLimits
from kvsp.client.retrieving.leasing import Leasing
from kvsp.names.errors import DecodeError
from tests.kvsp.instance.loading.holders import ROUND_TRIP_S, Holders
from tests.kvsp.instance.support import block_id, keys

SOURCE = "https://holder.example/kvsp/"


async def test_who_waited_for_a_lease_that_was_given_back_at_once_knows_what_it_was_of() -> None:
    there, gone = (block_id(key) for key in keys()[:2])
    holders: Any = Holders(lacking={SOURCE: {gone.block_key}})
    behind, sources = Behind(2.0), {SOURCE: [there, gone]}
    leasing = Leasing(holders, ClientLimits(), behind, 1000, sources, lambda holder, seconds: None)
    waiting = [asyncio.create_task(leasing.hold(SOURCE, block)) for block in (there, gone)]
    await asyncio.sleep(0)
    for block in (there, gone):  # they came from elsewhere
        leasing.done(block)
    await waiting[0]
    with pytest.raises(NotFoundError):
        await waiting[1]
    await behind.close()
    assert not holders.leases and holders.requests("POST", SOURCE) == 1


class OneAtATime(Holders):
    """Of one lease at a time."""

    async def ask(self, method: str, source: str, path: str, **more: Any) -> Answer:
        self.most = 0 if self.leases else 1
        return await super().ask(method, source, path, **more)


async def test_who_waits_for_a_lease_to_be_given_back_asks_again_then_and_not_before() -> None:
    holders: Any = OneAtATime()
    limits, behind = ClientLimits(keys_per_lease=1), Behind(2.0)
    first, *others = [block_id(key) for key in keys()]
    sources = {SOURCE: [first, *others]}
    leasing = Leasing(holders, limits, behind, 1000, sources, lambda holder, seconds: None)
    await leasing.hold(SOURCE, first)
    waiting = [asyncio.create_task(leasing.hold(SOURCE, block)) for block in others]
    await asyncio.sleep(20 * ROUND_TRIP_S)
    assert holders.requests("POST", SOURCE) == 3
    leasing.done(first)
    for task, block in zip(waiting, others, strict=True):
        await task
        leasing.done(block)
    await behind.close()
    assert not holders.leases


async def test_a_source_that_is_no_base_uri_is_told_to_who_asks_it_and_to_no_one_else() -> None:
    loose: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: loose.append(context))
    limits, behind, block = ClientLimits(), Behind(2.0), block_id(keys()[0])
    caller = Caller(limits=limits)
    leasing = Leasing(
        caller, limits, behind, 1000, {"no URI": [block]}, lambda holder, seconds: None
    )
    with pytest.raises(DecodeError):
        await leasing.hold("no URI", block)
    leasing.end()
    await behind.close()
    await caller.close()
    gc.collect()
    assert not loose
