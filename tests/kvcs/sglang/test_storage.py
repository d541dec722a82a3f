"""SGLang's calls are answered without an exception, and what cannot be right is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import kvcs.sglang
from kvcs.pages.counters import COUNTERS, Doing
from kvcs.pages.settings import PagesError
from tests.kvcs.pages.services import settings
from tests.kvcs.sglang import base

NOBODY = "http://127.0.0.1:9/kvsp/"
NAMES = base.chain(list(range(16)))


@pytest.fixture
def create(tmp_path, monkeypatch):
    """Makes storages on services that are not there, and closes them."""
    base.install(monkeypatch)
    from kvcs.sglang import KvcsStorage

    made = []

    def storage(pool=None, extra=None, **members):
        whole = {"kvcs": settings(tmp_path, NOBODY)} if extra is None else extra
        made.append(KvcsStorage(base.Config(whole, **members), {}))
        made[-1].register_mem_pool_host(pool or base.Pool())
        return made[-1]

    yield storage
    for each in made:
        each.close()


def test_without_services_everything_is_a_miss(create) -> None:
    pool = base.Pool()
    storage = create(pool)
    page = pool.get_data_page(0)
    assert storage.batch_exists(NAMES) == 0
    assert not storage.exists(NAMES[0])
    assert storage.get(NAMES[0], pool.get_dummy_flat_data_page()) is None
    assert storage.batch_get(NAMES, [page, page]) == [None, None]
    assert not storage.set(NAMES[0], page)
    assert not storage.batch_set(NAMES, [page, page])


def test_what_is_no_page_of_the_pool_is_neither_got_nor_set(create) -> None:
    storage = create()
    before = {doing: COUNTERS.of(doing).get("form", 0) for doing in (Doing.GET, Doing.PUT)}
    for wrong in (np.zeros(5), None, "page"):
        assert storage.batch_get(NAMES[:1], [wrong]) == [None]
        assert not storage.batch_set(NAMES[:1], [wrong])
    for doing, count in before.items():
        assert COUNTERS.of(doing)["form"] == count + 3
    assert storage.batch_get(NAMES, None) == [None, None]
    assert storage.get(NAMES[0]) is None
    assert not storage.batch_set(NAMES, None)
    assert not storage.batch_set(NAMES, [np.zeros(5)])


def test_a_storage_that_knows_no_pool_so_far_has_nothing(tmp_path, monkeypatch) -> None:
    base.install(monkeypatch)
    from kvcs.sglang import KvcsStorage

    storage = KvcsStorage(base.Config({"kvcs": settings(tmp_path, NOBODY)}), {})
    assert storage.batch_exists(NAMES) == 0
    assert storage.batch_get(NAMES, [None, None]) == [None, None]
    assert not storage.batch_set(NAMES, [None, None])
    storage.close()


class Latent:
    """A pool of another kind: no heads."""

    layout, layer_num, page_size, dtype = "layer_first", 3, 8, np.dtype(np.float16)


class Uneven(base.Pool):
    v_head_dim = 8


@pytest.mark.parametrize(
    "members, said",
    [
        ({"is_mla_model": True}, "only K and V of every layer make a block"),
        ({"pool": Latent()}, "this pool is Latent"),
        ({"pool": base.Pool("page_head")}, "--hicache-mem-layout is page_head; known are layer"),
        ({"pool": Uneven()}, "K and V have heads of several sizes"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"dcp_size": 2}, "context parallelism in decode"),
        ({"tp_size": 2}, "kv_heads is 2 in the engine and 1 in the descriptor"),
        ({"extra": {}}, 'extra-config has no "kvcs"'),
        ({"extra": {"kvcs": {}, "interface_v1": 1}}, '"interface_v1" hands out addresses'),
        ({"extra": {"kvcs": {"kvsp": "https://a/"}}}, "have no 'holder'"),
    ],
)
def test_a_configuration_that_cannot_work_ends_the_start_with_the_reason(
    create, members, said: str
) -> None:
    with pytest.raises(PagesError) as error:
        create(**members)
    assert said in str(error.value)


def test_a_second_pool_of_a_hybrid_model_is_refused(create) -> None:
    with pytest.raises(PagesError, match=r"a second pool of pages \(mamba\)"):
        create().register_mem_host_pool_v2(base.Pool(), "mamba")


def test_without_sglang_the_name_says_what_to_install(monkeypatch) -> None:
    base.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", None)
    with pytest.raises(ImportError, match="install sglang into this environment"):
        _ = kvcs.sglang.KvcsStorage
    with pytest.raises(AttributeError):
        _ = kvcs.sglang.Nothing
