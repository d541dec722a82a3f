"""Many tracks through one relay and one session each way: what a track costs beside its octets.

1,000 tracks of a few Objects of 32 KiB are published on one session and fetched, all at once, on
another; the relay has nothing at first, then everything. A row of `make bench-peers`, or alone:

    python -m tools.bench_tracks
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import moqt
from moqt.quic.certificates import make_self_signed
from tools import bench

NAMESPACE = (b"bench",)
TRACKS = 1000
OBJECTS = 4


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def session(options: argparse.Namespace) -> moqt.connect:
    quic = moqt.QuicConfig(cafile=options.certs / "cert.pem", max_datagram_size=options.size)
    return moqt.connect(options.url, quic=quic)


async def role_publish(options: argparse.Namespace) -> None:
    """Serve the tracks until told to end."""
    payload = bytes(bench.OBJECT)
    async with session(options) as published:
        for number in range(TRACKS):
            store = published.publish_track(NAMESPACE, name(number))
            for index in range(OBJECTS):
                store.append(0, index, payload)
            store.finish_subgroup(0, 0)
        await published.publish_namespace(NAMESPACE)
        print("ready", flush=True)
        before = bench.cpu()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print(json.dumps({"cpu": bench.cpu() - before}), flush=True)


async def role_read(options: argparse.Namespace) -> None:
    """Fetch all tracks at once, for each line read."""
    loop = asyncio.get_running_loop()
    async with session(options) as subscriber:

        async def fetch(number: int) -> int:
            octets = 0
            async with await subscriber.fetch(NAMESPACE, name(number)) as response:
                async for each in response:
                    octets += len(each.payload)
            return octets

        print("ready", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            before, start = bench.cpu(), time.perf_counter()
            octets = sum(await asyncio.gather(*map(fetch, range(TRACKS))))
            seconds = time.perf_counter() - start
            told = {"octets": octets, "seconds": seconds, "cpu": bench.cpu() - before}
            print(json.dumps(told), flush=True)


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Through the relay with nothing cached, then from its cache. Raises RuntimeError when not
    everything comes."""
    with bench.relay(options) as (relay, url):
        command = [sys.executable, "-m", "tools.bench_tracks", "--url", url]
        command += ["--size", str(options.size), "--certs", str(options.certs), "--role"]
        with bench.running([*command, "publish"]) as publisher:
            publisher.line()
            with bench.running([*command, "read"]) as reader:
                reader.line()
                found = []
                for cached in (False, True):
                    before = relay.cpu()
                    reader.go()
                    run = json.loads(reader.line())
                    if run["octets"] != TRACKS * OBJECTS * bench.OBJECT:
                        raise RuntimeError(f"{run['octets']:,} octets came of {TRACKS} tracks")
                    used = run["cpu"] + relay.cpu() - before
                    if not cached:
                        publisher.go()
                        used += json.loads(publisher.line())["cpu"]
                    figures = {
                        "mb_s": run["octets"] / run["seconds"] / 1e6,
                        "cpu_s_per_gb": used / run["octets"] * 1e9,
                        "relay_rss_mib": relay.resident() / 2**20,
                    }
                    found.append(figures)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1452, help="datagram size")
    parser.add_argument("--role", choices=("publish", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--certs", type=Path, help=argparse.SUPPRESS)
    bench.add_relay_limit(parser)
    options = parser.parse_args()
    if options.role:
        asyncio.run({"publish": role_publish, "read": role_read}[options.role](options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.certs = Path(folder)
        make_self_signed(options.certs)
        for title, figures in zip(("cold", "cached"), measure(options), strict=True):
            print(f"{TRACKS} tracks of {OBJECTS} Objects, {title}: {json.dumps(figures)}")


if __name__ == "__main__":
    main()
