"""Large caches, slow readers: what is held stays bounded, and nobody waits for the slowest."""

from __future__ import annotations

import hashlib
import json
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvcs.publishing.publication import Publication
from kvsp.blocks.kv_files import KvFile, load_descriptor
from kvsp.names.identity import Scope
from tests.e2e.support import MIB, Cache, Process, eventually, relay

MTU = ("--mtu", "8952")
CACHE_MEMORY = 64 * MIB
TRANSIT = 64 * MIB
"""`transit_octets`: what is under way may take so much beyond the cache."""
RELAY_LIMIT = (CACHE_MEMORY + TRANSIT) * 1.15 + 80 * MIB
BUDGETS = 8 * MIB
"""Send budgets and socket backlogs of a handful of sessions."""


def large_cache(directory: Path, *, layers: int) -> Cache:
    """16 MiB a tensor, in Objects of 128 KiB; sparse but for some octets of each Object."""
    tokens, heads, dim, rows = 8192, 8, 128, 64
    descriptor = {
        "model": "large",
        "model_digest": "sha-256:" + "11" * 32,
        "tokenizer_digest": "sha-256:" + "22" * 32,
        "layers": layers,
        "kv_heads": heads,
        "head_dim": dim,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": rows,
        "layout": "kvsp-layout-1",
    }
    directory.mkdir()
    scope = directory / "scope.json"
    Scope.generate().save(scope)
    size = tokens * heads * dim * 2
    names = [f"layers.{layer}.{part}" for layer in range(layers) for part in "kv"]
    header = json.dumps(
        {
            name: {
                "dtype": "F16",
                "shape": [tokens, heads, dim],
                "data_offsets": [n * size, (n + 1) * size],
            }
            for n, name in enumerate(names)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    cache = Cache(directory, descriptor, list(range(tokens)), scope, {})
    with cache.kv.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size * len(names))
    data = np.memmap(cache.kv, np.uint8, "r+", offset=8 + len(header))
    section = rows * heads * dim * 2
    for n in range(len(data) // section):
        data[n * section : n * section + 8] = np.frombuffer(struct.pack("<Q", n), np.uint8)
    data.flush()
    cache.compat.write_text(json.dumps(descriptor))
    cache.tokens_file.write_text(json.dumps(cache.tokens))
    return cache


def data_digest(path: Path) -> str:
    """Of the tensors, wherever the header ends."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + length)
        while part := file.read(MIB):
            digest.update(part)
    return digest.hexdigest()


class Watch(threading.Thread):
    """The most anonymous memory that each process had, sampled all along."""

    def __init__(self, *processes: Process) -> None:
        super().__init__(daemon=True)
        self.most = {process.name: 0 for process in processes}
        self.base = {process.name: process.anonymous_memory() for process in processes}
        self._processes = processes
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            for process in self._processes:
                if process.popen.poll() is None:
                    now = process.anonymous_memory()
                    self.most[process.name] = max(self.most[process.name], now)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()
        for name, most in self.most.items():
            print(f"{name}: {most / MIB:.0f} MiB, {self.base[name] / MIB:.0f} MiB before")


@pytest.mark.timeout(200)
def test_1_gib_to_a_slow_reader_and_to_a_fast_one(tmp_path):
    cache = large_cache(tmp_path / "cache", layers=32)
    with relay(tmp_path, "--cache-memory", "64MiB", *MTU) as hub:
        publisher = hub.publish(cache, *MTU, "--live-delay", "1", "--json")
        namespace = publisher.wait_for(r'"namespace": "(\S+)"').group(1)
        with Watch(hub.process, publisher) as watch:
            slow = hub.peer(
                "read", "--namespace", namespace, *MTU, "--slow", 10, "--rate", 4, "--stop"
            )
            slow.wait_for("reading")
            out = tmp_path / "out"
            fast = hub.subscribe(cache, out, *MTU, "--json", "--timeout", "120")
            result = fast.finish(0, deadline=130).json()
            read = slow.finish(0).json()
        print(f"fast {result['megabytes_per_second']} MB/s, slow {read['octets'] / 1e6} MB")
        assert result["octets"] == 1 << 30
        assert data_digest(out) == data_digest(cache.kv)
        assert read["duplicates"] == 0
        assert 4 * MIB < read["octets"] < 256 * MIB
    out.unlink()
    assert watch.most["publish"] < watch.base["publish"] + 64 * MIB
    assert watch.most["relay"] < RELAY_LIMIT + BUDGETS


@pytest.mark.parametrize("window", [[], ["session_window=4194304", "stream_window=4194304"]])
def test_a_reader_that_takes_next_to_nothing_does_not_keep_the_next_one_waiting(window, tmp_path):
    """What it was fetched for stands still upstream, K and V each on a stream of its own; only
    after `stall_timeout` would the relay give that up."""
    cache = large_cache(tmp_path / "cache", layers=1)
    limits = [part for limit in ("stall_timeout=600", *window) for part in ("--limit", limit)]
    with relay(tmp_path, "--cache-memory", "16MiB", *limits) as hub:
        publisher = hub.publish(cache, "--json")
        namespace = publisher.wait_for(r'"namespace": "(\S+)"').group(1)
        slow = hub.peer("read", "--namespace", namespace, "--slow", 600, "--rate", 0.2)
        slow.wait_for("reading")
        eventually(lambda: hub.metric("objects_out_total") >= 2, "something of the slow reader's")
        fast = hub.subscribe(cache, tmp_path / "out", "--json", "--timeout", "60")
        assert fast.finish(0, deadline=70).json()["objects_verified"] == cache.objects
        assert slow.popen.poll() is None
        assert data_digest(tmp_path / "out") == data_digest(cache.kv)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_reader_that_stands_still_for_a_while_gets_everything_afterwards(readers, tmp_path):
    cache = large_cache(tmp_path / "cache", layers=6)
    with relay(tmp_path, "--cache-memory", "64MiB", *MTU) as hub:
        publisher = hub.publish(cache, *MTU)
        publisher.wait_for("publishing")
        with Watch(hub.process, publisher) as watch:
            consumers = [
                hub.subscribe(cache, tmp_path / f"out-{n}", *MTU, "--json", name=f"subscribe-{n}")
                for n in range(readers)
            ]
            stopped = consumers[0]
            eventually(lambda: hub.metric("out_bytes_total") > 8 * MIB, "the transfer")
            stopped.signal(signal.SIGSTOP)
            for consumer in consumers[1:]:
                consumer.finish(0)
            until = time.monotonic() + 4
            eventually(lambda: time.monotonic() > until, "some seconds")
            assert stopped.popen.poll() is None
            stopped.signal(signal.SIGCONT)
            stopped.finish(0)
        for number, consumer in enumerate(consumers):
            assert consumer.json()["objects_verified"] == cache.objects
            assert consumer.json()["duplicates"] == 0
            assert data_digest(tmp_path / f"out-{number}") == data_digest(cache.kv)
    assert watch.most["publish"] < watch.base["publish"] + 64 * MIB
    assert watch.most["relay"] < RELAY_LIMIT + BUDGETS


def test_a_large_cache_is_published_by_reference(tmp_path):
    """The arrays given to `put_layer` are what is served, not copies of them."""
    cache = large_cache(tmp_path / "cache", layers=1)
    descriptor = load_descriptor(cache.compat)
    with KvFile.open(cache.kv, descriptor) as file:
        publication = Publication(Scope.load(cache.scope), descriptor, cache.tokens)
        publication.put_layer(0, file.k(0), file.v(0))
        track = publication.tracks[1]
        parts = [np.frombuffer(o.parts[1], np.uint8) for o in track.objects() if o.length]
        assert len(parts) == cache.blocks
        assert all(np.shares_memory(part, file.k(0)) for part in parts)
