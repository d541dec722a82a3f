"""LMCache's calls are answered without an exception, and what cannot be right is refused."""

from __future__ import annotations

import asyncio
import sys

import pytest

import kvcs.lmcache
from kvcs.pages.counters import COUNTERS, Doing
from tests.kvcs.lmcache import base
from tests.kvcs.pages.services import settings

NOBODY = "http://127.0.0.1:9/kvsp/"


@pytest.fixture
def create(tmp_path, monkeypatch):
    """Makes connectors on services that are not there, and closes them."""
    base.install(monkeypatch)
    from kvcs.lmcache import KvcsAdapter

    made = []

    def connector(memory=None, more=None, **members):
        ours = settings(tmp_path, NOBODY, kv_dtype="bf16", **(more or {}))
        made.append(KvcsAdapter().create_connector(base.context(ours, memory, **members)))
        return made[-1]

    yield connector
    for each in made:
        asyncio.run(each.close())


async def test_without_services_everything_is_a_miss(create) -> None:
    memory = base.Memory()
    connector = create(memory)
    keys = [base.Key(1), base.Key(2)]
    assert not await connector.exists(keys[0])
    assert await asyncio.to_thread(connector.batched_contains, keys) == 0
    assert await connector.batched_async_contains("look-up", keys) == 0
    assert await connector.batched_get(keys) == [None, None]
    assert await connector.batched_get_non_blocking("look-up", keys) == []
    await connector.put(keys[0], base.Chunk(bytearray(base.OCTETS)))
    assert memory.given == []


async def test_a_chunk_that_is_not_full_is_left_out(create) -> None:
    before = COUNTERS.of(Doing.PUT).get("form", 0)
    short = base.Chunk(bytearray(base.OCTETS // 2), tokens=base.SHAPE[2] // 2)
    await create().batched_put([base.Key(1)], [short])
    assert COUNTERS.of(Doing.PUT)["form"] == before + 1


async def test_it_says_that_it_takes_batches(create) -> None:
    connector = create()
    assert connector.support_batched_get()
    assert connector.support_batched_put()
    assert connector.support_batched_contains()


@pytest.mark.parametrize(
    "members, said",
    [
        ({"use_mla": True}, "multi-head latent attention has no K and V"),
        ({"use_layerwise": True}, "use_layerwise makes keys of single layers"),
        ({"remote_serde": "cachegen"}, "remote_serde is 'cachegen'"),
        ({"pre_caching_hash_algorithm": "builtin"}, 'set it to "sha256_cbor"'),
        ({"pre_caching_hash_algorithm": "xxhash_cbor"}, "anybody can make two prompts of one name"),
        ({"pre_caching_hash_algorithm": "sha256_of_nobody"}, "install a vLLM that has it"),
        ({"groups": 2}, "groups of layers of several shapes"),
        ({"kv_dtype": "torch.float16"}, "kv_dtype is fp16 in the engine and bf16"),
        ({"kv_shape": (4, 2, 8, 2, 4)}, "layers is 4 in the engine and 3 in the descriptor"),
        ({"extra_config": None}, 'extra_config has no "kvcs"'),
        ({"more": {"time_out": 1}}, "'time_out' is no setting of kvcs"),
    ],
)
def test_a_configuration_that_cannot_work_ends_the_start_with_the_reason(
    create, members, said: str
) -> None:
    with pytest.raises(base.IrrecoverableException) as error:
        create(**members)
    assert said in str(error.value)


def test_without_lmcache_the_name_says_what_to_install(monkeypatch) -> None:
    base.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "lmcache.v1.exceptions", None)
    with pytest.raises(ImportError, match="install lmcache into this environment"):
        _ = kvcs.lmcache.KvcsAdapter
    with pytest.raises(AttributeError):
        _ = kvcs.lmcache.Nothing
