"""`python -m tools.bench_slow`: what readers cost a relay that have stopped reading.

One process has `--readers` sessions over loopback sockets, each of which asks for the whole of a
track that the relay has in its cache. Then the application reads nothing of it: credit ends. Or,
with `--frozen`, they read as fast as they can until their process is stopped by a signal: not
even acknowledgments come. Told are the resident octets of the relay, and how many each adds to it.

    python -m tools.bench_slow --readers 1000
    python -m tools.bench_slow --readers 200 --frozen --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import moqt
from moqt.quic.certificates import make_self_signed
from tools.bench import Role, running

NAMESPACE, NAME = (b"bench", b"slow"), b"track"
WHOLE = moqt.LocationFilter.absolute_start(0)
OBJECT, OBJECTS, GROUPS = 32 << 10, 64, 16
"""32 MiB, in groups of 2 MiB."""
SETTLED = 3.0
"""Seconds after which nothing moves any more."""
PATIENCE = 60.0
"""Seconds that a handshake may take: a thousand sessions keep one process busy ..."""
ATTEMPTS = 3
"""... and how often the relay may find that it took too long."""
DIALLING = 4
"""Sessions that are begun at a time."""


async def role_publish(options: argparse.Namespace) -> None:
    """Serve the track until told to end."""
    quic = moqt.QuicConfig(cafile=options.cafile)
    async with moqt.connect(options.url, quic=quic, handler=moqt.Publisher()) as session:
        store = session.publish_track(NAMESPACE, NAME)
        for number in range(GROUPS * OBJECTS):
            group, index = divmod(number, OBJECTS)
            store.append(group, index, number.to_bytes(4, "big") * (OBJECT // 4))
        await session.publish_namespace(NAMESPACE)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def role_read(options: argparse.Namespace) -> None:
    """Sessions, then at each line a FETCH of each: of one reader all is read."""
    quic = moqt.QuicConfig(cafile=options.cafile, handshake_timeout=PATIENCE)
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(DIALLING)

    async def dial() -> moqt.MoqtSession:
        async with places:
            for _ in range(ATTEMPTS):
                with suppress(moqt.ConnectError):
                    return await moqt.connect(options.url, quic=quic, timeout=PATIENCE)
            return await moqt.connect(options.url, quic=quic, timeout=PATIENCE)

    sessions = await asyncio.gather(*(dial() for _ in range(options.readers)))
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)

    async def read(session: moqt.MoqtSession) -> None:
        while True:
            async with await session.fetch(NAMESPACE, NAME, WHOLE) as response:
                async for _ in response:
                    pass
            if options.readers == 1:
                return

    if options.readers == 1 or options.frozen:
        await asyncio.gather(*map(read, sessions))
    else:
        asked = [each.fetch(NAMESPACE, NAME, WHOLE, queue_octets=1) for each in sessions]
        responses = await asyncio.gather(*asked)
        print(f"asked {len(responses)}", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
    print("done", flush=True)


def most(relay: Role, seconds: float) -> int:
    """The most resident octets within so many seconds."""
    until, found = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        found = max(found, relay.resident())
        time.sleep(0.05)
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    make_self_signed(folder)
    relay_command = [Path(sys.executable).parent / "kvcs-relay", "--listen", "127.0.0.1:0"]
    relay_command += ["--cert", folder / "cert.pem", "--key", folder / "key.pem"]
    for name in ("max_connections", "max_connections_per_address"):
        relay_command += ["--limit", f"{name}={options.readers + 100}"]
    with running(relay_command) as relay:
        found = re.search(r"moqt://[^\s,]+", relay.line())
        assert found is not None
        ours = [sys.executable, "-m", "tools.bench_slow", "--url", found.group()]
        ours += ["--cafile", folder / "cert.pem"]
        reading = [*ours, "--role", "read", *(["--frozen"] if options.frozen else [])]
        with running([*ours, "--role", "publish"]) as publisher:
            publisher.line()
            with running([*reading, "--readers", "1"]) as first:  # then the cache has everything
                first.line()
                first.go()
                first.line()
            empty = relay.resident()
            with running([*reading, "--readers", str(options.readers)]) as readers:
                readers.line()
                connected = relay.resident()
                readers.go()
                if options.frozen:
                    time.sleep(SETTLED)
                    readers.popen.send_signal(signal.SIGSTOP)
                else:
                    readers.line()
                stopped = most(relay, SETTLED)
    return {
        "readers": options.readers,
        "relay_octets": empty,
        "octets_a_session": (connected - empty) / options.readers,
        "octets_a_slow_reader": (stopped - empty) / options.readers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=1000, help="sessions (1000)")
    parser.add_argument("--frozen", action="store_true", help="their process is stopped instead")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.add_argument("--role", choices=("publish", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cafile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        asyncio.run({"publish": role_publish, "read": role_read}[options.role](options))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"{found['readers']} readers: {found['octets_a_session'] / 1024:.0f} KiB a session, "
            f"{found['octets_a_slow_reader'] / 1024:.0f} KiB each that has stopped reading; the "
            f"relay alone {found['relay_octets'] / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
