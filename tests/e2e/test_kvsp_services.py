"""Index and holders in separate processes: kill, restart, expiry, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvsp.blocks.container import Container
from kvsp.client import Client
from kvsp.instance.engines.toy import ToyEngine
from kvsp.names.uris import block_path, compat_path
from tests.e2e.kvsp_support import Model, Server, ask, sharing
from tests.e2e.support import eventually

TOKENS = [(3 * number + 1) % 256 for number in range(40)]
MOST = 32 << 10
"""No file of the holder `short` grows beyond this: the kernel refuses, as on a full disk."""

NEW_BLOCK = {"Content-Type": "application/kvsp-block", "If-None-Match": "*"}


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))


class Deployment:
    def __init__(self, folder):
        self.index = Server(folder, "index", "index", shared=True)
        peers = {"index": self.index.base}
        self.lasting = Server(folder, "lasting", "holder", shared=True, peers=peers)
        # in memory like the other's, blocks would not meet the disk
        settings = {"disk_mib": 16, "record_ttl_ms": 700}
        self.short = Server(folder, "short", "holder", shared=True, peers=peers, holder=settings)
        self.all = (self.index, self.lasting, self.short)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("services"))
    made.index.begin()
    made.lasting.begin()
    made.short.begin(preexec_fn=limited)
    with sharing(*made.all):
        for server in made.all:
            server.ready()
        yield made


def test_a_full_disk_refuses_blocks_and_harms_nothing_else(deployment, tmp_path):
    index, holder, model = deployment.index, deployment.short, Model(tmp_path)
    keys = model.store(index, holder, TOKENS)
    big = ToyEngine(layers=8, kv_heads=4, head_dim=32, block_tokens=16)
    compat = compat_path(big.descriptor.compat_id)
    assert index.ask("PUT", compat, json.loads(big.descriptor.jcs))[0] == 201
    context = big.context()
    context.prefill(range(16))
    container = Container.build(big.descriptor, context.block(0).sections())
    assert container.total_octets > MOST
    block = model.block_id(keys[0])._replace(compat_id=big.descriptor.compat_id)
    octets = b"".join(bytes(part) for part in container)
    for _ in range(2):
        status, problem = holder.ask("PUT", block_path(block), octets, headers=NEW_BLOCK)
        assert status == 507
        assert problem["type"].endswith("#kvsp-storage-full")
    assert holder.ask("GET", block_path(block))[0] == 404
    assert not list((holder.data / "blocks" / "incoming").iterdir())
    # blocks that were there are served, and others are still taken
    for key, stored in zip(keys, model.containers(TOKENS), strict=True):
        assert holder.ask("GET", block_path(model.block_id(key)))[1] == stored
    small = model.store(index, holder, TOKENS[::-1])
    eventually(lambda: model.lookup(index, small) == len(small), "the records")
    assert ask("GET", f"http://127.0.0.1:{holder.port}/healthz")[0] == 200
    rejected = holder.metric('kvsp_holder_stores_rejected_total{reason="disk-full"}')
    assert rejected == 2


def test_an_index_that_is_killed_keeps_its_records_and_gets_expired_ones_back(deployment, tmp_path):
    index, lasting, short = deployment.all
    model, other = Model(tmp_path / "a"), Model(tmp_path / "b")
    keys = model.store(index, lasting, TOKENS)
    passing = other.store(index, short, TOKENS)
    eventually(lambda: model.lookup(index, keys) == len(keys), "the records")
    eventually(lambda: other.lookup(index, passing) == len(passing), "the records")
    index.kill()
    died = time.monotonic()
    # health does not depend on others: a holder without its index serves on
    eventually(lambda: short.health("readyz") == (200, "degraded"), "the holder to notice")
    assert short.health("healthz") == (200, "alive")
    index.begin().ready()
    eventually(lambda: time.monotonic() - died > 0.7, "the end of the short records")
    # what SQLite had is there at once
    assert model.lookup(index, keys) == len(keys)
    # what expired meanwhile comes back by itself
    eventually(lambda: other.lookup(index, passing) == len(passing), "the refresh")
    # SIGTERM withdraws what the process that ends would not serve any more
    lasting.process.signal(signal.SIGTERM)
    lasting.process.finish(0)
    assert model.lookup(index, keys) == 0
    assert other.lookup(index, passing) == len(passing)


def test_a_block_that_rots_is_fetched_elsewhere_and_withdrawn_by_the_holder_that_is_told(tmp_path):
    index = Server(tmp_path, "index", "index").begin()
    never = {"scrub_mib_per_s": 0.0, "disk_mib": 64}
    rotten, sound = (
        Server(tmp_path, name, "holder", peers={"index": index.base}, holder=never).begin()
        for name in ("rotten", "sound")
    )
    for server in (index, rotten, sound):
        server.ready()
    model = Model(tmp_path / "model")
    keys = model.store(index, rotten, TOKENS)
    model.store(index, sound, TOKENS)

    async def replicas():
        async with Client(index.base, http_loopback=True) as client:
            scope, compat = model.scope.scope_id, model.descriptor.compat_id
            found = await client.lookup(scope, compat, keys)
            return [each.replicas for each in found.blocks]

    eventually(
        lambda: [len(each) for each in asyncio.run(replicas())] == [2] * len(keys), "the records"
    )
    for path in (rotten.data / "blocks" / "blocks").rglob("*.kvb"):
        octets = bytearray(path.read_bytes())
        octets[200] ^= 1
        path.write_bytes(octets)

    class Written(dict):
        def write(self, layer):
            self[layer.block, layer.layer] = (bytes(layer.k), bytes(layer.v))

    async def fetched():
        written = Written()
        async with Client(index.base, http_loopback=True) as client:
            result = await client.get_blocks(await replicas(), written, descriptor=model.descriptor)
        assert result.complete
        return written, result.bad_sources

    written, bad = asyncio.run(fetched())
    while rotten.base not in bad:  # it may not have been asked at all
        again, bad = asyncio.run(fetched())
        assert again == written
    context = model.engine.context()
    context.prefill(TOKENS)
    for block in range(len(keys)):
        for layer, (k, v) in enumerate(context.block(block).sections()):
            assert written[block, layer] == (bytes(k), bytes(v))
    eventually(lambda: rotten.metric("kvsp_holder_parts_quarantined_total") >= 1, "the report")
    assert rotten.metric('kvsp_holder_copies_verified_total{result="lost"}') >= 1
    eventually(lambda: min(len(each) for each in asyncio.run(replicas())) == 1, "the withdrawal")


def described(server, folder, *, block_tokens):
    """A model that the server knows, and the octets of a block."""
    engine = ToyEngine(layers=8, kv_heads=4, head_dim=64, block_tokens=block_tokens)
    context = engine.context()
    context.prefill(range(block_tokens))
    container = Container.build(engine.descriptor, context.block(0).sections())
    compat = compat_path(engine.descriptor.compat_id)
    assert server.ask("PUT", compat, json.loads(engine.descriptor.jcs))[0] == 201
    return Model(folder / "model", engine), b"".join(bytes(part) for part in container)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB."""
    (folder := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount: tests/kvsp/holder/tiers/test_disk.py covers it")
    if mounted.returncode:
        pytest.skip("mount is not permitted: tests/kvsp/holder/tiers/test_disk.py covers it")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_smaller_than_the_budget_goes_on_storing_and_starts_when_it_is_full(small_disk):
    server = Server(small_disk, "server", "index,holder").begin().ready()
    model, octets = described(server, small_disk, block_tokens=32)

    def put(number):
        block = block_path(model.block_id(number.to_bytes(32)))
        assert server.ask("PUT", block, octets, headers=NEW_BLOCK)[0] == 201
        assert server.ask("GET", block)[1] == octets
        return block

    needed = 3 * (6 << 20) // len(octets)
    leased = put(needed + 2)
    body = {
        "compat_id": model.descriptor.compat_id.hex(),
        "scope_id": model.scope.scope_id.hex(),
        "block_keys": [leased.rpartition("/")[2]],
        "ttl_ms": 60_000,
    }
    status, grant = server.ask("POST", "leases", body)
    assert status == 201
    last = [put(number) for number in range(needed)][-1]
    assert server.metric('kvsp_holder_evictions_total{tier="disk"}') > needed / 3
    # somebody else takes the rest of the disk
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
        while fill.write(bytes(4096)):
            pass
    assert server.ask("PUT", f"leases/{grant['lease']}", {"ttl_ms": 60_000})[0] == 200
    put(needed)
    assert server.metric('kvsp_holder_media_full_total{tier="disk"}') >= 1
    server.kill()
    with contextlib.suppress(OSError), (small_disk / "fill").open("ab", buffering=0) as fill:
        while fill.write(bytes(4096)):
            pass
    server.begin().ready()
    assert server.ask("GET", last)[0] == 200
    put(needed + 1)
    # a lease holds through all of it
    assert server.ask("GET", leased)[1] == octets


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))


def test_reading_while_blocks_are_evicted_fails_nothing_and_leaks_no_descriptor(tmp_path):
    server = Server(tmp_path, "server", "index,holder", holder={"disk_mib": 1})
    server.begin(preexec_fn=few_descriptors).ready()
    model, octets = described(server, tmp_path, block_tokens=8)
    blocks = [block_path(model.block_id(bytes([number]) * 32)) for number in range(48)]
    assert len(blocks) * len(octets) > 2 << 20

    def load(seed):
        numbers, statuses = random.Random(seed), Counter()
        for _ in range(60):
            block = numbers.choice(blocks)
            status, _ = server.ask("PUT", block, octets, headers=NEW_BLOCK)
            statuses["PUT", status] += 1
            query = numbers.choice(["", "?layers=2-3", "?codec=61441"])
            status, answer = server.ask("GET", numbers.choice(blocks) + query)
            statuses["GET", status] += 1
            assert query or status != 200 or answer == octets
        return statuses

    with ThreadPoolExecutor(10) as threads:
        statuses = sum(threads.map(load, range(10)), Counter())
    assert {status for _, status in statuses} <= {200, 201, 404, 412, 429, 503, 507}, statuses
    assert statuses["PUT", 201] > 50 and statuses["GET", 200] > 50
    assert server.metric('kvsp_holder_evictions_total{tier="disk"}') > 50
    pid = server.process.popen.pid
    eventually(
        lambda: not [each for each in os.listdir(f"/proc/{pid}/fd") if _is_block(pid, each)],
        "the end of every reader",
    )


def _is_block(pid, descriptor):
    with contextlib.suppress(OSError):
        return ".kvb" in os.readlink(f"/proc/{pid}/fd/{descriptor}")


def test_a_lease_holds_although_its_holder_is_killed(tmp_path):
    index = Server(tmp_path, "index", "index").begin()
    peers = {"index": index.base}
    holder = Server(tmp_path, "holder", "holder", peers=peers, holder={"disk_mib": 1}).begin()
    for server in (index, holder):
        server.ready()
    engine = ToyEngine(layers=8, kv_heads=4, head_dim=64, block_tokens=8)
    model = Model(tmp_path / "model", engine)
    leased = model.store(index, holder, [(5 * number) % 256 for number in range(40)])
    body = {
        "compat_id": engine.descriptor.compat_id.hex(),
        "scope_id": model.scope.scope_id.hex(),
        "block_keys": [key.hex() for key in leased[:3]],
        "ttl_ms": 60_000,
    }
    status, grant = holder.ask("POST", "leases", body)
    assert status == 201
    for end in (signal.SIGKILL, signal.SIGTERM):
        holder.process.signal(end)
        holder.process.popen.wait()
        holder.begin().ready()
        model.store(index, holder, [(7 * number + end) % 256 for number in range(160)])
        assert holder.metric('kvsp_holder_evictions_total{tier="disk"}') > 0
        for key in leased[:3]:
            assert holder.ask("GET", block_path(model.block_id(key)))[0] == 200
        assert holder.ask("GET", f"leases/{grant['lease']}")[0] == 200
    assert holder.ask("DELETE", f"leases/{grant['lease']}")[0] == 204


def test_a_directive_is_carried_out_although_the_instance_is_killed_after_it_took_it(tmp_path):
    core = Server(tmp_path, "core", "index,controller,holder", holder={"disk_mib": 16})
    model = Model(tmp_path / "model")
    peers = {"index": core.base, "placement": core.base}
    scopes = {"scopes": [str(model.scope_file)], "block_tokens": model.descriptor.block_tokens}
    instance = Server(tmp_path, "instance", "instance", peers=peers, instance=scopes)
    for server in (core.begin(), instance.begin()):
        server.ready()
    keys = model.store(core, core, TOKENS)
    missing = bytes(32)
    directive = {
        "directive": "00000000-0000-4000-8000-000000000001",
        "scope_id": model.scope.scope_id.hex(),
        "compat_id": model.descriptor.compat_id.hex(),
        "blocks": [{"block_key": key.hex(), "sources": [core.base]} for key in (*keys, missing)],
        "deadline_ms": 60_000,
        "lease_ms": 5000,
    }
    # the holder does not answer: nothing has come when the instance dies
    core.process.signal(signal.SIGSTOP)
    assert instance.ask("POST", "prefetch", directive)[0] == 202
    instance.kill()
    core.process.signal(signal.SIGCONT)
    instance.begin().ready()
    path = f"prefetch/{directive['directive']}"
    eventually(lambda: instance.ask("GET", path)[1]["state"] == "partial", "the blocks")
    status = instance.ask("GET", path)[1]
    assert status["loaded"] == [key.hex() for key in keys]
    assert [each["block_key"] for each in status["failed"]] == [missing.hex()]
    assert instance.metric('kvsp_instance_blocks_events_total{event="fetched"}') == len(keys)
    # the outcome outlives the process, too, when its time is over
    assert instance.ask("DELETE", path)[0] == 204
    instance.kill()
    instance.begin().ready()
    assert instance.ask("GET", path)[0] == 404


def test_records_are_kept_alive_together_and_end_with_their_holder_however_it_ends(tmp_path):
    index = Server(tmp_path, "index", "index").begin()
    peers = {"index": index.base}
    # in memory: nothing of it is there after kill -9
    settings = {"host_mib": 16, "record_ttl_ms": 3000}
    holder = Server(tmp_path, "holder", "holder", peers=peers, holder=settings).begin()
    for server in (index, holder):
        server.ready()
    model = Model(tmp_path / "model")
    keys = model.store(index, holder, TOKENS)
    eventually(lambda: model.lookup(index, keys) == len(keys), "the records")
    published = index.metric("kvsp_index_published_total")
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 7, "two TTLs")
    assert model.lookup(index, keys) == len(keys)
    # nothing was published again for that, nor did every record ask for itself
    assert index.metric("kvsp_index_published_total") == published == len(keys)
    assert index.metric("kvsp_index_refreshed_total") == 0
    assert holder.health("readyz") == (200, "ready")
    holder.kill()
    assert model.lookup(index, keys) == len(keys)
    holder.begin().ready()
    # long before their TTL is over what is not true any more is gone
    eventually(lambda: model.lookup(index, keys) == 0, "the withdrawal", 2.5)
    model.store(index, holder, TOKENS)
    eventually(lambda: model.lookup(index, keys) == len(keys), "the records")
    holder.process.signal(signal.SIGTERM)
    holder.process.finish(0)
    assert model.lookup(index, keys) == 0


def test_a_directive_is_carried_out_although_one_of_its_sources_hangs(tmp_path):
    core = Server(tmp_path, "core", "index,controller,holder").begin()
    model = Model(tmp_path / "model")
    peers = {"index": core.base, "placement": core.base}
    hung = Server(tmp_path, "hung", "holder", peers={"index": core.base}).begin()
    scopes = {"scopes": [str(model.scope_file)], "block_tokens": model.descriptor.block_tokens}
    instance = Server(tmp_path, "instance", "instance", peers=peers, instance=scopes).begin()
    for server in (core, hung, instance):
        server.ready()
    keys = model.store(core, core, TOKENS)
    hung.process.signal(signal.SIGSTOP)

    def prefetch(number, deadline_ms, *sources):
        name = f"00000000-0000-4000-8000-{number:012}"
        directive = {
            "directive": name,
            "scope_id": model.scope.scope_id.hex(),
            "compat_id": model.descriptor.compat_id.hex(),
            "blocks": [{"block_key": key.hex(), "sources": list(sources)} for key in keys],
            "deadline_ms": deadline_ms,
            "lease_ms": 5000,
        }
        assert instance.ask("POST", "prefetch", directive)[0] == 202
        path = f"prefetch/{name}"
        eventually(lambda: instance.ask("GET", path)[1]["state"] != "pending", "the outcome")
        return instance.ask("GET", path)[1]

    failed = prefetch(1, 700, hung.base)
    assert (failed["state"], {each["reason"] for each in failed["failed"]}) == (
        "failed",
        {"timeout"},
    )
    status = prefetch(2, 60_000, hung.base, core.base)
    assert status["state"] == "complete"
    assert status["loaded"] == [key.hex() for key in keys]
    assert instance.metric('kvsp_instance_blocks_events_total{event="fetched"}') == len(keys)
    hung.process.signal(signal.SIGCONT)
