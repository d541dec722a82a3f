"""Networks that people know, as paths in both directions: `(up, down)`, up from the client."""

from __future__ import annotations

from tools.path.link import Path

MBIT = 1_000_000 / 8


def _lte(bandwidth: float) -> Path:
    queue = int(0.2 * bandwidth)
    return Path(latency=0.025, jitter=0.02, bandwidth=bandwidth, queue=queue, loss=0.02)


PROFILES: dict[str, tuple[Path, Path]] = {
    # 1 Gbit/s behind one switch
    "lan": (Path(latency=0.00025, bandwidth=1000 * MBIT, queue=512 << 10),) * 2,
    # 50 Mbit/s down and 10 up, 30 ms, and a modem that queues for half a second
    "dsl": (
        Path(latency=0.015, bandwidth=10 * MBIT, queue=int(0.5 * 10 * MBIT)),
        Path(latency=0.015, bandwidth=50 * MBIT, queue=int(0.5 * 50 * MBIT)),
    ),
    # 40 Mbit/s down and 10 up, 50 ms and up to 20 more each way, 2 % loss
    "lte": (_lte(10 * MBIT), _lte(40 * MBIT)),
    # 500 Mbit/s, 150 ms, one datagram in ten thousand lost, a queue of half a round trip
    "transcontinental": (
        Path(latency=0.075, bandwidth=500 * MBIT, queue=int(0.075 * 500 * MBIT), loss=0.0001),
    )
    * 2,
    # 50 Mbit/s down and 5 up, 600 ms, one datagram in a thousand lost
    "satellite": (
        Path(latency=0.3, bandwidth=5 * MBIT, queue=int(0.3 * 5 * MBIT), loss=0.001),
        Path(latency=0.3, bandwidth=50 * MBIT, queue=int(0.3 * 50 * MBIT), loss=0.001),
    ),
}
