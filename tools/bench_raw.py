"""Raw transport benchmarks on loopback: UDP, stock aioquic, and our endpoint.

Each run uses two processes (receiver, sender) and moves the same payload: objects of 32 KiB,
one unidirectional stream per 4 MiB. Rates are those of the receiver, first to last octet;
CPU is that of both processes while data moved.

    python -m tools.bench_raw                       # all kinds, sizes 1200 1452 8952
    python -m tools.bench_raw --kinds stock,ours --sizes 1452 --repeat 5 --megabytes 256
    python -m tools.bench_raw --kinds ours --sizes 1452 --profile DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.certificates import make_self_signed
from moqt.quic.config import QuicConfig
from moqt.quic.udp.endpoint import connect, serve

OBJECT = 32 << 10
STREAM = 4 << 20
KINDS = ("udp", "stock", "ours")
SIZES = (1200, 1452, 8952)
POOL = 32 << 20
"""Octets the Objects are taken from in turn: a cache is larger than a processor's caches."""
ALPN = "bench"
BUDGET = 256 << 10
ENDS = 1000
"""Empty datagrams by which a sender of UDP says that it is through, until the receiver is gone."""


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def payloads() -> Iterator[memoryview]:
    """Objects without end, from a pool of random octets."""
    pool = memoryview(os.urandom(POOL))
    return itertools.cycle([pool[at : at + OBJECT] for at in range(0, POOL, OBJECT)])


class Meter:
    """Counts octets; notes the clock and the CPU time at the first and the last of them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self.done = asyncio.Event()
        self.first = self.last = 0.0
        self.cpu = 0.0

    def add(self, octets: int) -> None:
        if not self.count:
            self.first = time.perf_counter()
            self.cpu = -cpu()
        self.count += octets
        if self.count >= self.total:
            self.finish()

    def finish(self) -> None:
        self.last = time.perf_counter()
        self.cpu += cpu()
        self.done.set()

    def result(self) -> dict[str, float]:
        return {"octets": self.count, "seconds": self.last - self.first, "cpu": self.cpu}


# ------------------------------------------------------------------------------------- ours


class OurReceiver:
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def connection_established(self, alpn: str) -> None: ...

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.meter.add(len(data))

    def stream_reset(self, stream_id: int, code: int) -> None: ...

    def stop_sending(self, stream_id: int, code: int) -> None: ...

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None: ...

    def connection_closed(self, code: int, reason: str, application: bool) -> None: ...


class OurSender(OurReceiver):
    """Pushes objects while less than the budget is unsent."""

    def __init__(self, transport: AioquicTransport, total: int) -> None:
        super().__init__(Meter(0))
        self.transport = transport
        self.left = total
        self.payloads = payloads()
        self.stream: int | None = None
        self.in_stream = 0
        self.cpu = 0.0
        self.closed = asyncio.Event()

    def ready_to_send(self) -> None:
        transport = self.transport
        while self.left and transport.unsent < BUDGET:
            if self.stream is None:
                self.stream = transport.open_stream(bidirectional=False)
                self.in_stream = 0
                if self.stream is None:
                    return
            self.left -= OBJECT
            self.in_stream += OBJECT
            fin = self.in_stream >= STREAM or not self.left
            transport.send(self.stream, next(self.payloads), fin)
            if fin:
                self.stream = None

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        self.closed.set()


def our_config(options: argparse.Namespace) -> QuicConfig:
    cert, key = make_self_signed(options.certs)
    return QuicConfig(
        alpn=(ALPN,),
        certfile=cert,
        keyfile=key,
        verify=False,
        max_datagram_size=options.size,
    )


async def ours_receive(options: argparse.Namespace) -> dict[str, float]:
    meter = Meter(options.total)
    endpoint = await serve("127.0.0.1", 0, our_config(options), lambda _: OurReceiver(meter))
    print(endpoint.port, flush=True)
    await meter.done.wait()
    await endpoint.close()
    return meter.result()


async def ours_send(options: argparse.Namespace) -> dict[str, float]:
    made: list[OurSender] = []

    def make(transport: AioquicTransport) -> OurSender:
        made.append(OurSender(transport, options.total))
        return made[-1]

    await connect("127.0.0.1", options.port, our_config(options), make)
    started = cpu()
    made[0].transport.wake()
    await made[0].closed.wait()
    return {"cpu": cpu() - started}


# ------------------------------------------------------------------------------------ stock


def stock_configuration(options: argparse.Namespace, *, is_client: bool) -> Any:
    import ssl

    from aioquic.quic.configuration import QuicConfiguration

    configuration = QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        max_datagram_size=options.size,
        verify_mode=ssl.CERT_NONE,
    )
    if not is_client:
        cert, key = make_self_signed(options.certs)
        configuration.load_cert_chain(cert, key)
    return configuration


async def stock_receive(options: argparse.Namespace) -> dict[str, float]:
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.asyncio.server import serve as stock_serve
    from aioquic.quic.events import QuicEvent, StreamDataReceived

    meter = Meter(options.total)

    class Receiver(QuicConnectionProtocol):
        def quic_event_received(self, event: QuicEvent) -> None:
            if isinstance(event, StreamDataReceived):
                meter.add(len(event.data))

    port = free_port()
    server = await stock_serve(
        "127.0.0.1",
        port,
        configuration=stock_configuration(options, is_client=False),
        create_protocol=Receiver,
    )
    print(port, flush=True)
    await meter.done.wait()
    server.close()
    await asyncio.sleep(0.2)
    return meter.result()


async def stock_send(options: argparse.Namespace) -> dict[str, float]:
    from aioquic.asyncio.client import connect as stock_connect
    from aioquic.asyncio.protocol import QuicConnectionProtocol

    objects = payloads()

    class Sender(QuicConnectionProtocol):
        """Keeps the budget buffered in the current stream; refilled as ACKs arrive."""

        left = 0
        stream: int | None = None
        in_stream = 0

        def datagram_received(self, data: bytes | str, addr: Any) -> None:
            super().datagram_received(data, addr)
            self.refill()

        def refill(self) -> None:
            quic = self._quic
            added = False
            while self.left:
                if self.stream is None:
                    self.stream = quic.get_next_available_stream_id(is_unidirectional=True)
                    self.in_stream = 0
                elif len(quic._streams[self.stream].sender._buffer) >= 2 * BUDGET:
                    break
                self.left -= OBJECT
                self.in_stream += OBJECT
                fin = self.in_stream >= STREAM or not self.left
                quic.send_stream_data(self.stream, bytes(next(objects)), fin)
                added = True
                if fin:
                    self.stream = None
            if added:
                self.transmit()

    async with stock_connect(
        "127.0.0.1",
        options.port,
        configuration=stock_configuration(options, is_client=True),
        create_protocol=Sender,
    ) as protocol:
        assert isinstance(protocol, Sender)
        started = cpu()
        protocol.left = options.total
        protocol.refill()
        await protocol.wait_closed()
        return {"cpu": cpu() - started}


# -------------------------------------------------------------------------------------- udp


async def udp_receive(options: argparse.Namespace) -> dict[str, float]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("127.0.0.1", 0))
    print(sock.getsockname()[1], flush=True)
    meter = Meter(options.total)
    while not meter.done.is_set():
        count = sock.recv_into(bytearray(options.size))
        if count:
            meter.add(count)
        else:
            meter.finish()  # the sender is through: the rest was lost
    return meter.result()


async def udp_send(options: argparse.Namespace) -> dict[str, float]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", options.port))
    objects = payloads()
    started = cpu()
    sent = 0
    with contextlib.suppress(ConnectionRefusedError):  # the receiver has all, and is gone
        while sent <= options.total:
            whole = next(objects)
            for at in range(0, OBJECT, options.size):
                sock.send(whole[at : at + options.size])
            sent += OBJECT
    spent = cpu() - started
    with contextlib.suppress(ConnectionRefusedError):
        for _ in range(ENDS):
            sock.send(b"")
            await asyncio.sleep(0.01)
    return {"cpu": spent}


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


ROLES: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, float]]]] = {
    "ours-receive": ours_receive,
    "ours-send": ours_send,
    "stock-receive": stock_receive,
    "stock-send": stock_send,
    "udp-receive": udp_receive,
    "udp-send": udp_send,
}


# --------------------------------------------------------------------------------- the bench


def measure(
    kind: str,
    size: int,
    megabytes: int = 128,
    *,
    profile: str | None = None,
    via: Callable[[int], int] | None = None,
    limit: float = 300.0,
) -> dict[str, Any]:
    """One run: `mb_s`, `cpu_s_per_gb` (both processes), and what was lost (UDP only).

    `via` is given the receiver's port and returns the one to send to. Raises
    subprocess.TimeoutExpired after `limit` seconds.
    """
    total = megabytes * 1_000_000 // OBJECT * OBJECT
    with tempfile.TemporaryDirectory() as folder:
        make_self_signed(folder)
        base = [sys.executable, "-m", "tools.bench_raw", "--size", str(size)]
        base += ["--total", str(total), "--certs", folder]
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parent.parent))

        def start(role: str, *more: str) -> subprocess.Popen[str]:
            command = [*base, "--role", f"{kind}-{role}", *more]
            if profile:
                command += ["--profile", profile]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        receiver = start("receive")
        sender = None
        try:
            assert receiver.stdout is not None
            port = int(receiver.stdout.readline())
            sender = start("send", "--port", str(via(port) if via else port))
            received = json.loads(receiver.communicate(timeout=limit)[0])
            sent = json.loads(sender.communicate(timeout=60)[0])
        finally:
            for process in (receiver, sender):
                if process is not None and process.poll() is None:
                    process.kill()
    octets = received["octets"]
    return {
        "kind": kind,
        "size": size,
        "mb_s": octets / received["seconds"] / 1e6,
        "cpu_s_per_gb": (received["cpu"] + sent["cpu"]) / octets * 1e9,
        "cpu_receive_s_per_gb": received["cpu"] / octets * 1e9,
        "cpu_send_s_per_gb": sent["cpu"] / octets * 1e9,
        "lost": max(0.0, 1 - octets / total),
    }


def median(kind: str, size: int, megabytes: int, repeat: int) -> dict[str, Any]:
    runs = [measure(kind, size, megabytes) for _ in range(repeat)]
    result: dict[str, Any] = {"kind": kind, "size": size, "runs": repeat}
    for name in ("mb_s", "cpu_s_per_gb", "cpu_receive_s_per_gb", "cpu_send_s_per_gb", "lost"):
        result[name] = round(statistics.median(run[name] for run in runs), 3)
    return result


def bench(
    kinds: tuple[str, ...] = KINDS,
    sizes: tuple[int, ...] = SIZES,
    megabytes: int = 128,
    repeat: int = 3,
) -> list[dict[str, Any]]:
    """Every kind at every size: medians of `repeat` runs."""
    return [median(kind, size, megabytes, repeat) for size in sizes for kind in kinds]


def run_role(options: argparse.Namespace) -> None:
    profiler = cProfile.Profile() if options.profile else None
    if profiler:
        profiler.enable()
    result: dict[str, float] = asyncio.run(ROLES[options.role](options))
    if profiler:
        profiler.disable()
        profiler.dump_stats(Path(options.profile) / f"{options.role}.prof")
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", help="a directory for cProfile's output, one run per kind")
    parser.add_argument("--json", action="store_true")
    for name in ("--role", "--certs"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--size", "--total", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_role(options)
        return
    kinds = tuple(options.kinds.split(","))
    sizes = tuple(int(size) for size in options.sizes.split(","))
    if options.profile:
        for kind in kinds:
            print(measure(kind, sizes[0], options.megabytes, profile=options.profile))
        return
    results = bench(kinds, sizes, options.megabytes, options.repeat)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    stock = {r["size"]: r["mb_s"] for r in results if r["kind"] == "stock"}
    print(f"{'size':>6} {'kind':>6} {'MB/s':>8} {'CPU s/GB':>9} {'send':>6} {'recv':>6}  vs stock")
    for r in results:
        ratio = f"{r['mb_s'] / stock[r['size']]:.2f}x" if r["size"] in stock else ""
        lost = f"  lost {r['lost']:.1%}" if r["lost"] else ""
        print(
            f"{r['size']:>6} {r['kind']:>6} {r['mb_s']:>8.1f} {r['cpu_s_per_gb']:>9.2f}"
            f" {r['cpu_send_s_per_gb']:>6.2f} {r['cpu_receive_s_per_gb']:>6.2f}  {ratio}{lost}"
        )


if __name__ == "__main__":
    main()
