"""What finding a publication costs: over a slow path, and with a warm Directory.

A relay, a publisher of many prefixes, and a path of `--delay` milliseconds (a round trip) in
front of the relay. For a prompt of `--tokens` tokens: the milliseconds until the longest
published prefix is known, or that there is none, once the session is up; by a listing and, as
it was, prefix by prefix; then with a Directory that is kept, milliseconds of CPU and datagrams
(a connection says little unasked; they are counted for a second of lookups).

    python -m tools.bench_discovery
    python -m tools.bench_discovery --publications 10000 --delay 40 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import moqt
from kvcs.finding.candidates import Candidates, DiscoveryMode
from kvcs.finding.listing import Directory
from kvcs.finding.relays import Sessions
from kvcs.names.namespace import PublicationNamespace
from kvsp.names.identity import Descriptor, Scope, block_keys
from moqt.quic.certificates import make_self_signed

SCOPE = Scope(bytes(range(32)))
DESCRIPTOR = Descriptor.parse(
    {
        "model": "bench",
        "model_digest": "sha-256:" + "00" * 32,
        "tokenizer_digest": "sha-256:" + "00" * 32,
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 16,
        "layout": "kvsp-layout-1",
    }
)
FOUND_BLOCKS = 4


class SlowPath(asyncio.DatagramProtocol):
    """Passes the datagrams of one client on to a port, each way half a round trip later."""

    def __init__(self, port: int, delay: float) -> None:
        self.datagrams = 0
        self._there = ("127.0.0.1", port)
        self._client: Any = None
        self._half = delay / 2
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, source: Any) -> None:
        self.datagrams += 1
        if source != self._there:
            self._client = source
        target = self._client if source == self._there else self._there
        self._loop.call_later(self._half, self._transport.sendto, data, target)


async def search(session: moqt.MoqtSession, keys: list[bytes], mode: DiscoveryMode) -> int:
    """Blocks of the longest publication, as a consumer looks for it; 0 for none."""
    changed, now = asyncio.Event(), asyncio.get_running_loop().time
    sessions = Sessions(session, None, changed.set)
    scope_id, compat_id = SCOPE.scope_id, DESCRIPTOR.compat_id
    candidates = Candidates(
        sessions, scope_id, compat_id, keys, changed=changed.set, discovery=mode
    )
    try:
        while True:
            changed.clear()
            due = candidates.poll(now())
            best = candidates.best()
            if best is not None and best.blocks >= candidates.open:
                return best.blocks
            if not candidates.searching:
                return 0
            try:
                async with asyncio.timeout_at(due):
                    await changed.wait()
            except TimeoutError:
                continue
    finally:
        candidates.close()
        await sessions.close()


async def timed(url: str, quic: moqt.QuicConfig, keys: list[bytes], mode: DiscoveryMode) -> float:
    async with moqt.connect(url, quic=quic) as session:
        started = time.perf_counter()
        found = await search(session, keys, mode)
        milliseconds = 1000 * (time.perf_counter() - started)
    assert found in (0, FOUND_BLOCKS), found
    return milliseconds


async def publish(url: str, quic: moqt.QuicConfig, keys: list[bytes], count: int) -> Any:
    """Announce `count` publications, one of them of the first blocks of `keys`."""
    session = await moqt.connect(url, quic=quic)
    anchors = [keys[FOUND_BLOCKS - 1], *(n.to_bytes(32) for n in range(1, count))]
    for anchor in anchors:
        namespace = PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, anchor)
        await session.publish_namespace(namespace.fields)
    return session


async def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokens = list(range(options.tokens))
    keys = block_keys(SCOPE, DESCRIPTOR, tokens)
    others = block_keys(SCOPE, DESCRIPTOR, [token + 1 for token in tokens])
    cert, key = make_self_signed(folder)
    relay = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "kvcs-relay"),
        *("--listen", "127.0.0.1:0", "--cert", str(cert), "--key", str(key)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert relay.stdout is not None
        match = re.search(rb"moqt://[^\s,]+:(\d+)", await relay.stdout.readline())
        assert match is not None
        loop, port = asyncio.get_running_loop(), int(match.group(1))
        quic = moqt.QuicConfig(cafile=cert)
        session = await publish(f"moqt://127.0.0.1:{port}", quic, keys, options.publications)
        transport, path = await loop.create_datagram_endpoint(
            lambda: SlowPath(port, options.delay / 1000), local_addr=("127.0.0.1", 0)
        )
        url = f"moqt://127.0.0.1:{transport.get_extra_info('sockname')[1]}"
        result: dict[str, Any] = {
            "tokens": options.tokens,
            "publications": options.publications,
            "delay_ms": options.delay,
        }
        for mode in (DiscoveryMode.LISTING, DiscoveryMode.PROBE):
            for name, wanted in (("hit", keys), ("miss", others)):
                times = [await timed(url, quic, wanted, mode) for _ in range(options.repeat)]
                result[f"{mode}_{name}_ms"] = round(statistics.median(times), 1)
        result |= await warm(url, quic, path, tokens)
        transport.close()
        session.close()
    finally:
        relay.kill()
        await relay.wait()
    return result


async def warm(
    url: str, quic: moqt.QuicConfig, path: SlowPath, tokens: list[int]
) -> dict[str, Any]:
    async with (
        moqt.connect(url, quic=quic) as session,
        Directory(session, SCOPE, DESCRIPTOR) as directory,
    ):
        await asyncio.sleep(0.5)
        datagrams, lookups, until = path.datagrams, 0, time.monotonic() + 1
        cpu = time.process_time()
        while time.monotonic() < until:
            assert directory.find(tokens)[0][0] == FOUND_BLOCKS
            lookups += 1
        cpu = time.process_time() - cpu
        await asyncio.sleep(0.1)
        return {
            "directory_cpu_ms": round(1000 * cpu / lookups, 2),
            "directory_lookups": lookups,
            "directory_datagrams": path.datagrams - datagrams,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt")
    parser.add_argument("--publications", type=int, default=128, help="of scope and model")
    parser.add_argument("--delay", type=float, default=20.0, help="round trip, milliseconds")
    parser.add_argument("--repeat", type=int, default=3, help="searches, medians are shown")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(bench(options, Path(folder)))
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"a prompt of {options.tokens:,} tokens among {options.publications:,} publications, "
        f"round trip {options.delay:g} ms"
    )
    for mode in ("listing", "probe"):
        print(
            f"  by {mode:8} {FOUND_BLOCKS} blocks found in {result[f'{mode}_hit_ms']:8.1f} ms, "
            f"a miss known in {result[f'{mode}_miss_ms']:8.1f} ms"
        )
    print(
        f"  a warm Directory: {result['directory_cpu_ms']:.2f} ms of CPU, "
        f"{result['directory_datagrams']} datagrams for {result['directory_lookups']} lookups"
    )
    print("  goals: by listing at most 50 ms, a warm Directory at most 20 ms and no datagram")


if __name__ == "__main__":
    main()
