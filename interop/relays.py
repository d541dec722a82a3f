"""The relays of the matrix, each started on a free loopback port with a fresh certificate."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import moqt
from interop.browser.listener import make_short_lived
from interop.peers import AIOMOQT
from interop.processes import LOOPBACK, READY_SECONDS, Program, ProgramFailed, free_port
from moqt.quic.certificates import make_self_signed

OBJECT_OCTETS = 16 << 20
"""What the peer's relay may hold of one stream: more than the largest Object of a case."""


@dataclass(frozen=True, slots=True)
class Running:
    """A relay that answers, and where."""

    port: int
    certificate: Path
    program: Program

    def url(self, scheme: str) -> str:
        return f"{scheme}://{LOOPBACK}:{self.port}"


Starter = Callable[[Path], AbstractContextManager[Running]]


@contextmanager
def our_relay(folder: Path) -> Iterator[Running]:
    """`kvcs-relay`, through the entry that the public runner would start."""
    cert, key = make_short_lived(folder / "kvcs-tls")
    environment = {
        "MOQT_ROLE": "relay",
        "MOQT_HOST": LOOPBACK,
        "MOQT_PORT": "0",
        "MOQT_CERT": str(cert),
        "MOQT_KEY": str(key),
    }
    command = [sys.executable, "-m", "interop.relay_entry"]
    with Program("kvcs-relay", command, folder, environment) as program:
        port = int(program.wait_for(r"ready on \w+://\S+?:(\d+)").group(1))
        yield Running(port, cert, program)


@contextmanager
def aiomoqt_relay(folder: Path) -> Iterator[Running]:
    """aiomoqt's relay, both transports on one port, held to draft-22."""
    cert, key = make_self_signed(folder / "aiomoqt-tls", ["localhost", LOOPBACK])
    port = free_port()
    command: list[str | Path] = [AIOMOQT.program("moq-interop-relay"), "--bind", LOOPBACK]
    command += ["--port", str(port), "--dual", "--draft", "22", "--cert", cert, "--key", key]
    command += ["--stream-ring-cap", str(OBJECT_OCTETS)]
    command += ["--max-inflight-bytes", str(OBJECT_OCTETS // 2)]
    with Program("aiomoqt-relay", command, folder) as program:
        asyncio.run(_answers(port, program))
        yield Running(port, cert, program)


async def _answers(port: int, program: Program) -> None:
    """Wait until a session can be had: the peer says nothing when it is ready."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and program.running:
        try:
            async with moqt.connect(
                f"moqt://{LOOPBACK}:{port}", quic=moqt.QuicConfig(verify=False), timeout=1
            ):
                return
        except moqt.ConnectError:
            await asyncio.sleep(0.05)
    raise ProgramFailed(f"{program.name} is not ready: {program.last_words}")
