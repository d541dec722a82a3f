"""Programs the harness starts: output in files, a deadline on every wait, always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

READY_SECONDS = 30.0
LEAVE_SECONDS = 5.0
LOOPBACK = "127.0.0.1"


class ProgramFailed(Exception):
    """A program did not do what the harness needs; the message says which and why."""


def free_port() -> int:
    """A UDP port nobody has at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


class Program:
    """A running process; leaving `with` ends it, and whatever it started and left behind."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._out, self.log = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self.log.open("wb") as err:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(environment or {})},
                process_group=0,  # with what it starts: a browser is begun by a shell script
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The end of its standard error, for a message."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no word on standard error"

    def wait_for(self, pattern: str, seconds: float = READY_SECONDS) -> re.Match[str]:
        """The first match in its standard output. Raises ProgramFailed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = not self.running  # looked at first: its last words come before its end
            if match := re.search(pattern, self.output):
                return match
            if ended:
                break
            time.sleep(0.02)
        raise ProgramFailed(f"{self.name} is not ready: {self.last_words}")

    def wait(self, seconds: float) -> int:
        """Its exit status. Raises ProgramFailed when it does not end in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"{self.name} did not end within {seconds:g} s") from None

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
