"""Engines of LMCache's and SGLang's kind share their pages at holders of KVSP, whatever fails."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from kvcs.pages.counters import COUNTERS, Doing
from tests.e2e.kvsp_support import Server, sharing, start
from tests.e2e.support import eventually
from tests.kvcs.lmcache import base as lmcache
from tests.kvcs.pages.services import settings
from tests.kvcs.sglang import base as sglang

RANDOM = np.random.default_rng(7)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """An index and a holder, in processes of their own."""
    folder = tmp_path_factory.mktemp("services")
    index = Server(folder, "index", "index", shared=True)
    holder = Server(
        folder,
        "holder",
        "holder",
        shared=True,
        peers={"index": index.base},
        holder={"disk_mib": 64, "host_mib": 1, "scrub_mib_per_s": 0.0},
    )
    start(index, holder)
    with sharing(index, holder):
        yield index, holder


@pytest.fixture
def engines(services, tmp_path, monkeypatch):
    """Makes SGLang's storage on a pool; those made share files and are closed."""
    sglang.install(monkeypatch)
    from kvcs.sglang import KvcsStorage

    made = []

    def storage(pool, folder: Path = tmp_path / "files", **more):
        index, holder = services
        ours = settings(folder, index.base, holder.base, **more)
        made.append(KvcsStorage(sglang.Config({"kvcs": ours}), {}))
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield storage
    for each in made:
        each.close()


def filled(layout: str, pages: int) -> sglang.Pool:
    pool = sglang.Pool(layout)
    for page in range(pages):
        octets = RANDOM.random((2, 3, 8, 2, 4)).astype(np.float16)
        pool.put(page * pool.page_size, octets)
    return pool


def backed_up(storage, pool, names: list[str]) -> bool:
    """As HiCache does it."""
    values = [pool.get_data_page(place * pool.page_size) for place in range(len(names))]
    return storage.batch_set(names, values)


def prefetched(storage, pool, names: list[str]) -> int:
    """As HiCache does it: look up, then get what was found into pages of the pool."""
    there = names[: storage.batch_exists(names)]
    targets = [pool.get_dummy_flat_data_page() for _ in there]
    count = 0
    for place, page in enumerate(storage.batch_get(there, targets)):
        if page is None:
            break
        pool.set_from_flat_data_page(place * pool.page_size, page)
        count += 1
    return count


@pytest.mark.parametrize("here", ["layer_first", "page_first", "page_first_direct"])
def test_sglang_takes_from_holders_what_another_one_has_stored_in_whatever_layout(engines, here):
    names = sglang.chain(list(range(32)))
    first, second = filled("layer_first", 4), sglang.Pool(here)
    storing = engines(first)
    assert backed_up(storing, first, names)
    eventually(lambda: storing.exists(names[0]), "the first record")
    loading = engines(second)
    eventually(lambda: loading.batch_exists(names) == 4, "the records")
    assert loading.batch_exists([*names, "ff" * 32]) == 4
    assert prefetched(loading, second, names) == 4
    for place in range(4):
        assert np.array_equal(second.page(8 * place), first.page(8 * place))
    assert backed_up(storing, first, names), "what is there already is stored"


def test_no_other_scope_model_or_engine_takes_a_page_for_its_own(engines, tmp_path):
    names = sglang.chain(list(range(100, 116)))
    pool = filled("layer_first", 2)
    storing = engines(pool)
    assert backed_up(storing, pool, names)
    eventually(lambda: storing.batch_exists(names) == 2, "the records")
    assert engines(pool, tmp_path / "other scope").batch_exists(names) == 0
    other = engines(pool, model_digest="sha-256:" + 64 * "3")
    assert other.batch_exists(names) == 0
    assert prefetched(other, sglang.Pool(), names) == 0


def test_lmcache_takes_from_holders_what_another_one_has_put(services, tmp_path, monkeypatch):
    lmcache.install(monkeypatch)
    from kvcs.lmcache import KvcsAdapter

    index, holder = services
    ours = settings(tmp_path / "files", index.base, holder.base, kv_dtype="bf16")
    memory = lmcache.Memory()
    adapter = KvcsAdapter()
    assert adapter.can_parse("plugin://kvcs")
    putting, getting = (
        adapter.create_connector(lmcache.context(ours, where)) for where in (None, memory)
    )
    keys = [lmcache.Key(number) for number in (5, 6, 7)]
    chunks = [lmcache.Chunk(bytearray(RANDOM.bytes(lmcache.OCTETS))) for _ in keys]
    sent = [bytes(each.octets) for each in chunks]

    async def story() -> None:
        assert not await getting.exists(keys[0])
        assert await getting.get(keys[0]) is None
        await putting.batched_put(keys[:2], chunks[:2])
        await putting.put(keys[2], chunks[2])
        await asyncio.to_thread(eventually, lambda: getting.exists_sync(keys[2]), "the records")
        assert await getting.batched_async_contains("look-up", keys) == 3
        assert [bytes(each.octets) for each in await getting.batched_get(keys)] == sent
        missing = [keys[0], lmcache.Key(9), keys[1]]
        got = await getting.batched_get(missing)
        assert [each is None for each in got] == [False, True, True]
        assert bytes((await getting.get(keys[1])).octets) == sent[1]
        leading = await getting.batched_get_non_blocking("look-up", missing)
        assert [bytes(each.octets) for each in leading] == sent[:1]
        assert await getting.list() == []
        assert not getting.remove_sync(keys[0])

    async def closed() -> None:
        await putting.close()
        await getting.close()
        assert await getting.batched_get(keys) == [None] * 3  # and nothing is raised

    asyncio.run(asyncio.wait_for(story(), 60))
    assert getting.exists_sync(keys[0])
    assert getting.batched_contains([*keys, lmcache.Key(9)]) == 3
    assert all(each.references == 1 for each in memory.given), "all that was given out is used"
    asyncio.run(closed())


def test_a_page_that_has_rotted_at_its_holder_is_never_handed_over(services, engines):
    names = sglang.chain(list(range(200, 216)))
    pool = filled("layer_first", 2)
    storing = engines(pool)
    assert backed_up(storing, pool, names)
    eventually(lambda: storing.batch_exists(names) == 2, "the records")
    _, holder = services
    holder.kill()  # what it has in memory is sound
    wanted = pool.get_data_page(8)[:16].tobytes()
    rotten = 0
    for path in (holder.data / "blocks").rglob("*"):
        if path.is_file() and wanted in (octets := path.read_bytes()):
            path.write_bytes(octets.replace(wanted, bytes(len(wanted))))
            rotten += 1
    assert rotten == 1
    holder.begin().ready()
    there = sglang.Pool()
    eventually(lambda: prefetched(storing, there, names) == 1, "the page before it, alone")
    assert np.array_equal(there.page(0), pool.page(0))
    assert not there.page(8).any()


def test_services_that_stand_still_cost_a_deadline_once_and_then_nothing(services, engines):
    index, holder = services
    names = sglang.chain(list(range(300, 316)))
    pool = filled("layer_first", 2)
    storing = engines(pool)
    assert backed_up(storing, pool, names)
    eventually(lambda: storing.batch_exists(names) == 2, "the records")
    short = engines(pool, lookup_timeout=0.2, timeout=0.4, failed_seconds=600.0)
    opened = COUNTERS.of(Doing.LOOK_UP).get("open", 0)
    holder.process.signal(signal.SIGSTOP)
    try:
        assert prefetched(short, sglang.Pool(), names) == 0
        assert not backed_up(short, pool, names)
        began = time.monotonic()
        for _ in range(20):
            assert short.batch_get(names, [pool.get_dummy_flat_data_page()] * 2) == [None, None]
        index.process.signal(signal.SIGSTOP)
        assert short.batch_exists(names) == 0
        for _ in range(1000):
            assert short.batch_exists(names) == 0
        assert COUNTERS.of(Doing.LOOK_UP)["open"] - opened == 2000
        assert time.monotonic() - began < 60  # a thousand deadlines would be 200 s
    finally:
        index.process.signal(signal.SIGCONT)
        holder.process.signal(signal.SIGCONT)
    assert storing.batch_exists(names) == 2
