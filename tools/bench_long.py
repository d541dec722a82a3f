"""A long context through a relay: publisher, relay and consumer, each the program that users have.

A cache of `--tokens` tokens and `--layers` layers in blocks of `--block-tokens`, of small heads so
that the Objects count and not their octets: 131,072 x 80 in blocks of 16 are 1,310,720 Objects
and a manifest of 88 MB. Shown are the seconds to layer 0 and to the end, and of each process CPU
seconds, most memory, the longest time in which its event loop looked at no socket, and the most
CPU time between two looks, which says the same on a busy machine. `--live`: the consumer is there
before the first Object. `--sign`, `--seal` and `--chunk-tokens`: the manifest is signed, everything
sealed, and the publication in segments.

    python -m tools.bench_long
    python -m tools.bench_long --tokens 16384 --json
    python -m tools.bench_long --tokens 16384 --layers 40 --sign ES256 --seal --chunk-tokens 2048
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from kvcs.trust.producers import Algorithm, ProducerKey
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Descriptor, Scope
from moqt.quic.certificates import make_self_signed
from tools.bench import Role

BIN = Path(sys.executable).parent
DEADLINE = 1800.0
"""Seconds that publishing, and retrieving, may take."""


def make_cache(folder: Path, options: argparse.Namespace) -> list[str]:
    """Write scope, descriptor, tokens and KV file; returns the options that name them."""
    tree = {
        "model": "bench",
        "model_digest": "sha-256:" + "00" * 32,
        "tokenizer_digest": "sha-256:" + "00" * 32,
        "layers": options.layers,
        "kv_heads": 1,
        "head_dim": options.head_dim,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": options.block_tokens,
        "layout": "kvsp-layout-1",
    }
    descriptor = Descriptor.parse(tree)
    keys = (ContentKey.generate(),) if options.seal else ()
    Scope.generate(keys).save(folder / "scope.json")
    (folder / "compat.json").write_text(json.dumps(tree))
    (folder / "tokens.json").write_text(json.dumps(list(range(options.tokens))))
    octets = np.random.default_rng(0).bytes(2 * options.tokens * options.head_dim)
    tensor = np.frombuffer(octets, np.float16).reshape(options.tokens, 1, options.head_dim)
    with KvFileWriter(folder / "cache", descriptor, tokens=options.tokens) as out:
        for layer in range(options.layers):
            out.k(layer)[:] = tensor
            out.v(layer)[:] = np.roll(tensor, layer + 1, axis=0)
        out.commit()
    names = ("scope-key-file", "scope.json"), ("compat", "compat.json"), ("tokens", "tokens.json")
    return [part for option, name in names for part in (f"--{option}", str(folder / name))]


def how_published(folder: Path, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What the publisher is told besides, and the consumer."""
    publisher: list[str] = []
    consumer: list[str] = []
    if options.sign is not None:
        key = ProducerKey.generate(Algorithm[options.sign.upper()])
        key.save(folder / "producer.json")
        (folder / "producers.json").write_text(json.dumps({"keys": [key.public]}))
        publisher += ["--sign-key", str(folder / "producer.json")]
        consumer += ["--producers", str(folder / "producers.json")]
    if options.chunk_tokens is not None:
        publisher += ["--chunk-tokens", str(options.chunk_tokens)]
        consumer += ["--follow"]
    return publisher, consumer


def started(program: str, *arguments: str | Path) -> Role:
    return Role([BIN / program, *arguments])


def usage(process: Role) -> dict[str, float]:
    """CPU seconds and most memory of a process that runs."""
    return {"cpu_s": process.cpu(), "peak_mb": process.peak() / 1e6}


def metric(address: str, name: str) -> float:
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
    found = re.search(rf"^kvcs_relay_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


def retrieve(arguments: list[str | Path]) -> dict[str, Any]:
    """Run a consumer to its end; its JSON with its CPU and memory."""
    consumer = started("kvcs-subscribe", *arguments, "--json", "--timeout", str(DEADLINE))
    assert consumer.popen.stdout is not None
    out = consumer.popen.stdout.read()
    _, status, used = os.wait4(consumer.popen.pid, 0)
    if status:
        raise SystemExit(f"the consumer failed: {out}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result | {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss * 1024 / 1e6}


def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    identity = make_cache(folder, options)
    cert, key = make_self_signed(folder)
    processes = [
        started(
            "kvcs-relay",
            *("--listen", "127.0.0.1:0", "--cert", cert, "--key", key),
            *("--metrics", "127.0.0.1:0", "--cache-memory", options.cache_memory),
        )
    ]
    try:
        ready = processes[0].line()
        url = ready.split()[3]
        metrics = ready.split("metrics http://")[1].split("/")[0]
        common: list[str | Path] = [url, "--cafile", cert, *identity]
        began = time.monotonic()
        how, asked = how_published(folder, options)
        publisher = started("kvcs-publish", *common, "--kv", folder / "cache", "--json", *how)
        processes.append(publisher)
        publisher.line()
        if not options.live:
            wait_until_put(publisher)
        published = time.monotonic() - began
        arguments: list[str | Path] = [*common, "--out", folder / "out", *asked]
        runs = [retrieve(arguments) for _ in range(options.consumers)]
        for run in runs:
            assert run["duplicates"] == 0 and not run["discarded"], run
            assert run["objects_verified"] == run["objects_confirmed"] == objects(options), run
        if (folder / "out").read_bytes()[-4096:] != (folder / "cache").read_bytes()[-4096:]:
            raise SystemExit("what came is not what was published")
        relay = usage(processes[0]) | {
            "hold_s": metric(metrics, "loop_hold_seconds"),
            "work_s": metric(metrics, "loop_work_seconds"),
        }
        used = usage(publisher)
        publisher.popen.terminate()
        ended = json.loads(publisher.line())
        used |= {"hold_s": ended["loop_hold_seconds"], "work_s": ended["loop_work_seconds"]}
    finally:
        for process in reversed(processes):
            process.popen.kill()
            process.popen.wait()
    return {
        "tokens": options.tokens,
        "layers": options.layers,
        "objects": objects(options),
        "published_s": published,
        "manifest_octets": ended["manifest_octets"],
        "publisher": used,
        "relay": relay,
        "consumers": [
            {
                "first_layer_s": run["first_layer_seconds"],
                "seconds": run["seconds"],
                "cpu_s": run["cpu_s"],
                "peak_mb": run["peak_mb"],
                "hold_s": run["loop_hold_seconds"],
                "work_s": run["loop_work_seconds"],
            }
            for run in runs
        ],
    }


def wait_until_put(publisher: Role) -> None:
    """Until a publisher has nothing to do: everything is put."""
    until, before = time.monotonic() + DEADLINE, -1.0
    while time.monotonic() < until:
        time.sleep(1)
        now = publisher.cpu()
        if now - before < 0.05:
            return
        before = now
    raise SystemExit("the publisher did not come to its end")


def objects(options: argparse.Namespace) -> int:
    return int(2 * options.layers * (options.tokens // options.block_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=8, help="of the one head there is")
    parser.add_argument("--consumers", type=int, default=1, help="one after another")
    parser.add_argument("--sign", choices=[each.label for each in Algorithm])
    parser.add_argument("--seal", action="store_true", help="with a content key")
    parser.add_argument("--chunk-tokens", type=int, help="of each segment")
    parser.add_argument("--live", action="store_true", help="retrieve while it is produced")
    parser.add_argument("--cache-memory", default="3GiB", help="of the relay")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = bench(options, Path(folder))
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['tokens']:,} tokens x {result['layers']} layers, {result['objects']:,} Objects, "
        f"put within {result['published_s']:.1f} s, "
        f"{result['manifest_octets'] / 1e6:.1f} MB of manifests"
    )
    for name in ("publisher", "relay"):
        print(f"  {name:10} {shown(result[name])}")
    for run in result["consumers"]:
        print(
            f"  consumer   {shown(run)}; layer 0 after {run['first_layer_s']:.2f} s, "
            f"all after {run['seconds']:.1f} s"
        )


def shown(process: dict[str, float]) -> str:
    return (
        f"{process['cpu_s']:7.1f} s of CPU, {process['peak_mb']:7.0f} MB at most, "
        f"loop held for {1000 * process['hold_s']:.0f} ms at most, "
        f"{1000 * process['work_s']:.0f} ms of its CPU"
    )


if __name__ == "__main__":
    main()
