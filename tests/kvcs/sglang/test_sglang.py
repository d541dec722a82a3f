"""The storage in SGLang itself: `make test-engines`, in its own environment.

Everything else of it is tested without SGLang, with stand-ins that are held against it here."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec

import pytest

from tests.kvcs.sglang import base
from tests.kvcs.stand_ins import each_of, is_like, takes_every_call

pytestmark = [
    pytest.mark.skipif(
        find_spec("sglang") is None or find_spec("torch") is None,
        reason="SGLang is not installed here: make test-engines",
    ),
    pytest.mark.timeout(600),  # importing it takes minutes on a busy machine
]


@each_of(base.MODULES)
def test_the_stand_ins_have_the_methods_and_parameters_of_sglang(path: str, stand_in: type):
    is_like(path, stand_in)


def test_the_members_of_the_configuration_that_are_read_are_there() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    assert {each.name for each in fields(base.Config)} <= {
        each.name for each in fields(HiCacheStorageConfig)
    }


def test_the_storage_takes_every_call_as_sglang_makes_it() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from kvcs.sglang import KvcsStorage

    takes_every_call(KvcsStorage, HiCacheStorage)


def test_sglang_makes_it_by_its_name_and_gets_back_the_tensors_that_it_has_set(tmp_path) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from tests.e2e.kvsp_support import Server
    from tests.e2e.support import Process, eventually
    from tests.kvcs.pages.services import settings

    server = Server(tmp_path, "both", "index,holder").begin().ready()
    pool = base.Pool()
    pool.dtype = torch.bfloat16
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config={
            "backend_name": "kvcs",
            "module_path": "kvcs.sglang",
            "class_name": "KvcsStorage",
            "kvcs": settings(tmp_path / "files", server.base, kv_dtype="bf16"),
        },
    )
    try:
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        names = base.chain(list(range(24)))
        pages = [torch.randn(384).to(torch.bfloat16) for _ in names]
        assert storage.batch_set(names, pages)
        eventually(lambda: storage.batch_exists(names) == 3, "the records")
        got = storage.batch_get(names, [torch.zeros_like(each) for each in pages])
        for page, came in zip(pages, got, strict=True):
            assert torch.equal(page, came)
        storage.close()
    finally:
        server.kill()
        Process.running.remove(server.process)
