"""The connector in LMCache itself: `make test-engines`, in its own environment.

Everything else of it is tested without LMCache, with stand-ins that are held against it here."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest

from tests.kvcs.lmcache import base
from tests.kvcs.stand_ins import each_of, is_like, takes_every_call
from tests.paths import ROOT

pytestmark = [
    pytest.mark.skipif(
        find_spec("lmcache") is None or find_spec("torch") is None,
        reason="LMCache is not installed here: make test-engines",
    ),
    pytest.mark.timeout(600),  # importing it takes minutes on a busy machine
]


class Hashing(ModuleType):
    """The module of vLLM's in which LMCache looks for its hash: no vLLM is here."""

    NAME = "vllm.utils.hashing"

    @staticmethod
    def get_hash_fn_by_name(name: str):
        if name != "sha256_cbor":
            raise ValueError(name)
        return lambda each: hashlib.sha256(repr(each).encode()).digest()


@pytest.fixture
def hashing(monkeypatch) -> None:
    for name in ("vllm", "vllm.utils", Hashing.NAME):
        monkeypatch.setitem(sys.modules, name, Hashing(name))


@each_of(base.MODULES)
def test_the_stand_ins_have_the_methods_and_parameters_of_lmcache(path: str, stand_in: type):
    is_like(path, stand_in)


def test_the_connector_takes_every_call_as_lmcache_makes_it() -> None:
    from lmcache.v1.storage_backend.connector import ConnectorAdapter
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    from kvcs.lmcache import KvcsAdapter, KvcsConnector

    takes_every_call(KvcsConnector, RemoteConnector)
    takes_every_call(KvcsAdapter, ConnectorAdapter)


def test_lmcache_finds_the_adapter_by_its_plugins_name_and_refuses_with_its_reason() -> None:
    """In a process of its own: LMCache keeps what it has begun with."""
    script = """
import asyncio, torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorManager
config = LMCacheEngineConfig.from_defaults(
    chunk_size=8, remote_storage_plugins=["kvcs"], pre_caching_hash_algorithm="sha256_cbor",
    extra_config={
        "remote_storage_plugin.kvcs.module_path": "kvcs.lmcache",
        "remote_storage_plugin.kvcs.class_name": "KvcsAdapter",
        "kvcs": {"kvsp": "https://a/"},
    },
)
metadata = LMCacheMetadata(
    model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
    kv_dtype=torch.bfloat16, kv_shape=(3, 2, 8, 2, 4), chunk_size=8,
)
loop = asyncio.new_event_loop()
manager = ConnectorManager("plugin://kvcs", loop, None, config, metadata, "kvcs")
try:
    manager.create_connector()
except IrrecoverableException as error:
    print("REFUSED", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert "REFUSED kvcs: the settings of kvcs have no 'holder'" in done.stdout, done.stderr


def test_a_key_of_lmcache_is_named_by_all_of_it() -> None:
    import torch
    from lmcache.utils import CacheEngineKey

    keys = [
        CacheEngineKey("m", 1, 0, number, torch.bfloat16, tags)
        for number in (5, 1 << 255)
        for tags in ({}, {"lmcache.tag.user": "a"})
    ]
    assert len({each.to_string() for each in keys}) == 4


def test_the_example_is_a_configuration_that_lmcache_reads() -> None:
    from lmcache.v1.config import LMCacheEngineConfig

    from kvcs.lmcache.form import settings_of

    config = LMCacheEngineConfig.from_file(str(ROOT / "examples" / "engines" / "lmcache.yaml"))
    assert config.remote_storage_plugins == ["kvcs"] and config.remote_serde == "naive"
    assert config.pre_caching_hash_algorithm == "sha256_cbor" and config.chunk_size == 256
    assert settings_of(config).holder == "https://kvsp.example:8443/kvsp/"


def test_without_the_hash_that_is_configured_lmcache_takes_pythons_and_is_not_started(
    tmp_path,
) -> None:
    from lmcache.v1.exceptions import IrrecoverableException

    from kvcs.lmcache import KvcsAdapter
    from tests.kvcs.pages.services import settings

    context = base.context(settings(tmp_path, "http://127.0.0.1:9/kvsp/", kv_dtype="bf16"))
    with pytest.raises(IrrecoverableException, match="does not find sha256_cbor"):
        KvcsAdapter().create_connector(context)


@pytest.mark.usefixtures("hashing")
def test_a_chunk_is_named_by_64_bits_of_a_hash_of_all_tokens_up_to_its_end() -> None:
    """What docs/integration.md says of names: who relies on more would be wrong."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=4, pre_caching_hash_algorithm="sha256_cbor"
    )
    names = [
        [name for _, _, name in ChunkedTokenDatabase(config).process_tokens(tokens, make_key=False)]
        for tokens in (list(range(8)), [*range(4), 9, 9, 9, 9], [9, *range(1, 8)])
    ]
    assert all(0 <= name < 1 << 64 for each in names for name in each)
    assert names[0][0] == names[1][0]
    assert len({name for each in names for name in each}) == 5


@pytest.mark.usefixtures("hashing")
def test_chunks_of_lmcache_are_put_and_got_by_a_real_holder(tmp_path) -> None:
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat, TensorMemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import ConnectorContext

    from kvcs.lmcache import KvcsAdapter
    from tests.e2e.kvsp_support import Server
    from tests.e2e.support import Process, eventually
    from tests.kvcs.pages.services import settings

    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=base.SHAPE,
        chunk_size=base.SHAPE[2],
    )

    class Memory:
        def allocate(self, shapes, dtypes, fmt):
            from lmcache.v1.memory_management import MemoryObjMetadata

            raw = torch.zeros(base.OCTETS, dtype=torch.uint8)
            meta = MemoryObjMetadata(
                shapes[0], dtypes[0], 0, base.OCTETS, 1, 0, fmt, shapes=shapes, dtypes=dtypes
            )
            return TensorMemoryObj(raw, meta, None)

    server = Server(tmp_path, "both", "index,holder").begin().ready()
    ours = settings(tmp_path / "files", server.base, kv_dtype="bf16")
    config = LMCacheEngineConfig.from_defaults(
        pre_caching_hash_algorithm="sha256_cbor", extra_config={"kvcs": ours}
    )
    from lmcache.utils import CacheEngineKey

    key = CacheEngineKey("m", 1, 0, 1 << 200, torch.bfloat16)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        context = ConnectorContext("plugin://kvcs", loop, Memory(), config, metadata, "kvcs")
        connector = KvcsAdapter().create_connector(context)
        shapes, dtypes = metadata.get_shapes(), metadata.get_dtypes()
        chunk = Memory().allocate(shapes, dtypes, MemoryFormat.KV_2LTD)
        octets = np.random.default_rng(3).bytes(base.OCTETS)
        np.frombuffer(chunk.byte_array, np.uint8)[:] = np.frombuffer(octets, np.uint8)
        await connector.put(key, chunk)
        await asyncio.to_thread(eventually, lambda: connector.exists_sync(key), "the record")
        got = await connector.get(key)
        assert bytes(got.byte_array) == octets
        await connector.close()

    try:
        asyncio.run(asyncio.wait_for(story(), 60))
    finally:
        server.kill()
        Process.running.remove(server.process)
