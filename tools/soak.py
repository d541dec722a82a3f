"""`make soak`: a relay under churn for some minutes; its memory, files, tasks and tables stay flat.

Tenants, each with a path and a scope of its own, publish small caches to one relay with a disk tier
and less memory than they bring. Publications are whole, withdrawn or abandoned half-way; consumers
take all or break off, and leave with or without a word to those who publish. What a consumer was
given is compared with what was published, octet by octet.

Meanwhile the relay is asked, over its metrics, for its resident memory, open files, tasks, sessions
and what it remembers of them. The last fifth of the time is compared with the second: each has to
be within its bound of `GROWTH`. At the end, when everybody has left, nothing may be remembered of
sessions, and there may be as many tasks and files as before the first.

Prints one JSON object; exit status 1 when something grew, stayed behind or was wrong.

    python -m tools.soak --minutes 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

import moqt
from kvcs import Consumer, Publication, Scope, publish
from kvcs.names.errors import KvcsError
from kvcs.publishing.announcing import unpublish
from kvsp.names.identity import Descriptor
from moqt.values.errors import MoqtError
from tests.e2e.support import relay

TENANTS: Final = 8
AT_WORK: Final = 6
"""Publishers with their consumers, at a time."""
LAYERS, BLOCKS, BLOCK = 4, 8, 4
DESCRIPTOR: Final = Descriptor.parse(
    {
        "model": "soak",
        "model_digest": "sha-256:" + "00" * 32,
        "tokenizer_digest": "sha-256:" + "00" * 32,
        "layers": LAYERS,
        "kv_heads": 2,
        "head_dim": 64,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": BLOCK,
        "layout": "kvsp-layout-1",
    }
)
SHAPE: Final = (BLOCKS * BLOCK, 2, 64)
SAMPLES: Final = 40
"""Times that the relay is asked, over the whole run."""
LEAVING: Final = 25.0
"""Seconds in which the relay has forgotten everybody."""

GROWTH: Final = {
    "process_resident_memory_bytes": (1.05, 8 << 20),
    "process_open_fds": (1.2, 16),
    "kvcs_relay_tasks": (1.2, 8),
    "kvcs_relay_sessions": (1.3, 8),
    "kvcs_relay_remembered": (1.5, 20_000),
    "kvcs_relay_tracks": (1.2, 50),
    "kvcs_relay_disk_memory_bytes": (1.2, 1 << 20),
}
"""What is looked at, and how much of its median in the second fifth, and besides, it may have in
the last. Of a metric with labels the sum counts."""
EMPTY: Final = ("kvcs_relay_sessions", "kvcs_relay_remembered", "kvcs_relay_pending_requests")
"""What is 0 when everybody has left."""

Sample = dict[str, float]


@dataclass(slots=True)
class Tally:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tenant:
    """A path of the relay, and whose caches are there."""

    url: str
    scope: Scope


def taken(text: str) -> Sample:
    """The values of a text of metrics, those with labels summed up."""
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^(\w+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)
    return dict(found)


def arrays(tokens: list[int]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """The cache of a prompt, by its tokens alone."""
    random = np.random.default_rng(tokens)
    return [
        (random.random(SHAPE).astype(np.float16), random.random(SHAPE).astype(np.float16))
        for _ in range(LAYERS)
    ]


class Churn:
    """Publishers and consumers without end."""

    def __init__(self, tenants: list[Tenant], quic: moqt.QuicConfig, seed: int) -> None:
        self.tenants = tenants
        self.quic = quic
        self.lot = random.Random(seed)
        self.tally = Tally()

    async def work(self, ends: float) -> None:
        """One publication after the other, with its consumers, until `ends`."""
        while time.monotonic() < ends:
            try:
                await self.publication(self.lot.choice(self.tenants))
            except (MoqtError, KvcsError) as error:
                self.tally.counts[f"failed: {type(error).__name__}"] += 1

    async def publication(self, tenant: Tenant) -> None:
        tokens = [self.lot.randrange(1 << 16) for _ in range(BLOCKS * BLOCK)]
        cache, fate = arrays(tokens), self.lot.choice(("whole", "whole", "abandoned", "withdrawn"))
        published = Publication(tenant.scope, DESCRIPTOR, tokens)
        session = await moqt.connect(tenant.url, quic=self.quic)
        try:
            announced = await publish(session, published)
            readers = [
                asyncio.create_task(self.consumer(tenant, tokens))
                for _ in range(self.lot.randrange(1, 4))
            ]
            layers = self.lot.randrange(1, LAYERS) if fate == "abandoned" else LAYERS
            for layer in range(layers):
                published.put_layer(layer, *cache[layer])
                await asyncio.sleep(self.lot.random() * 0.02)
            if fate == "abandoned":
                session.close()
            if fate == "withdrawn":
                unpublish(session, published, announced)
            self.tally.counts[f"published: {fate}"] += 1
            await asyncio.wait(readers)
            for reader in readers:
                reader.result()
        finally:
            session.close()

    async def consumer(self, tenant: Tenant, tokens: list[int]) -> None:
        want = self.lot.choice((LAYERS, LAYERS, 1))
        cache, came = arrays(tokens), 0
        try:
            async with (
                moqt.connect(tenant.url, quic=self.quic) as session,
                Consumer(session, tenant.scope, DESCRIPTOR, tokens, timeout=5) as consumer,
            ):
                async for layer in consumer.layers():
                    for got, put in zip((layer.k, layer.v), cache[layer.index], strict=True):
                        if got.tobytes() != put.tobytes():
                            self.tally.wrong.append(f"layer {layer.index} of {tenant.url}")
                    came += 1
                    if came == want:
                        break
            self.tally.counts["consumed: all" if came == LAYERS else "consumed: a part"] += 1
        except (MoqtError, KvcsError) as error:
            self.tally.counts[f"not consumed: {type(error).__name__}"] += 1


def grown(samples: list[Sample]) -> list[str]:
    """What the last fifth has too much of, beside the second."""
    part = max(1, len(samples) // 5)
    early, late = samples[part : 2 * part], samples[-part:]
    told = []
    for name, (times, more) in GROWTH.items():
        before, after = (statistics.median(each[name] for each in span) for span in (early, late))
        if after > before * times + more:
            told.append(f"{name} went from {before:g} to {after:g}")
    return told


def left(before: Sample, after: Sample) -> list[str]:
    """What is still there although everybody has left."""
    told = [f"{name} is {after[name]:g}" for name in EMPTY if after[name]]
    for name in ("kvcs_relay_tasks", "process_open_fds"):
        if after[name] > before[name] + 2:
            told.append(f"{name} was {before[name]:g} and is {after[name]:g}")
    return told


def ask(url: str) -> Sample:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return taken(answer.read().decode())


async def churn(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    memory = ("--cache-memory", "2MiB", "--cache-dir", folder / "disk", "--cache-disk", "8MiB")
    limits = ("--limit", "publisher_linger=1")
    loop = asyncio.get_running_loop()
    with relay(folder, *memory, *limits) as hub:
        quic = moqt.QuicConfig(cafile=hub.cafile)
        tenants = [Tenant(f"{hub.url}/t{n}", Scope.generate()) for n in range(TENANTS)]
        world = Churn(tenants, quic, options.seed)
        metrics = hub.metrics_url

        async def asked() -> Sample:
            return await loop.run_in_executor(None, ask, metrics)

        before, samples = await asked(), list[Sample]()
        ends = time.monotonic() + options.minutes * 60
        workers = [asyncio.create_task(world.work(ends)) for _ in range(AT_WORK)]
        while time.monotonic() < ends:
            await asyncio.sleep(options.minutes * 60 / SAMPLES)
            samples.append(await asked())
            show(options, samples[-1], ends)
        await asyncio.gather(*workers)
        after = await asked()
        gone = time.monotonic() + LEAVING
        while left(before, after) and time.monotonic() < gone:
            await asyncio.sleep(0.5)
            after = await asked()
        stderr = hub.process.stderr
    faults = world.tally.wrong + grown(samples) + left(before, after)
    if "Traceback" in stderr:
        faults.append("the relay had an exception: " + stderr[stderr.index("Traceback") :][-2000:])
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "happened": dict(sorted(world.tally.counts.items())),
        "first": {name: samples[0][name] for name in GROWTH},
        "last": {name: samples[-1][name] for name in GROWTH},
        "faults": faults,
    }


def show(options: argparse.Namespace, sample: Sample, ends: float) -> None:
    if sys.stderr.isatty():
        memory = sample["process_resident_memory_bytes"] / 2**20
        print(
            f"{max(0, ends - time.monotonic()):4.0f} s to go, {memory:.0f} MiB, "
            f"{sample['kvcs_relay_sessions']:.0f} sessions  ",
            end="\r",
            file=sys.stderr,
        )


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; `faults` of the result says what was not as it should be."""
    return asyncio.run(churn(options, folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of churn (5)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = soak(options, Path(folder))
    print(json.dumps(told, indent=2))
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
