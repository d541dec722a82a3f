"""The test clients of the matrix: each runs against a relay and yields test points."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from interop import tap
from interop.browser.chromium import find_browser
from interop.peers import AIOMOQT, Unavailable
from interop.processes import Program, ProgramFailed
from interop.programs import retrieve
from interop.relays import Running
from interop.tap import Point

CLIENT_SECONDS = 240.0
"""What a whole run may take; each case has its own deadline inside the client."""
NAMED_SECONDS = 30.0
NAMED_ONLY = ("fetch", "join")
"""Cases that aiomoqt's client runs only when they are named."""

Client = Callable[[Running, str, Path], list[Point]]
"""(relay, URL scheme, folder for files) to test points."""


def _points(name: str, command: list[str | Path], folder: Path, seconds: float) -> list[Point]:
    """What a test client says; cases it did not come to, and its own failure, are failures."""
    with Program(name, command, folder) as program:
        trouble = ""
        try:
            program.wait(seconds)
        except ProgramFailed as error:
            trouble = str(error)
        try:
            points = tap.parse(program.output)
        except ValueError as error:
            points, trouble = [], trouble or f"{error}; {program.last_words}"
    if trouble:
        points.append(Point(name, False, None, {"message": trouble}))
    return points


def our_client(relay: Running, scheme: str, folder: Path) -> list[Point]:
    command: list[str | Path] = [sys.executable, "-m", "interop.client", "-r", relay.url(scheme)]
    return _points("kvcs-client", [*command, "--tls-disable-verify"], folder, CLIENT_SECONDS)


def aiomoqt_client(relay: Running, scheme: str, folder: Path) -> list[Point]:
    command: list[str | Path] = [AIOMOQT.program("moq-interop-client"), "-r", relay.url(scheme)]
    command += ["--tls-disable-verify", "--draft", "22"]
    points = _points("aiomoqt-client", command, folder, CLIENT_SECONDS)
    for name in NAMED_ONLY:
        points += _points(f"aiomoqt-{name}", [*command, "-t", name], folder, NAMED_SECONDS)
    return points


def kvcs_programs(relay: Running, scheme: str, folder: Path) -> list[Point]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return retrieve(relay.url(scheme), relay.certificate, Path(own))


def chromium(relay: Running, scheme: str, folder: Path) -> list[Point]:
    try:
        find_browser()
    except Unavailable as why:
        return [Point("all", True, str(why))]
    command: list[str | Path] = [sys.executable, "-m", "interop.browser", "-r", relay.url(scheme)]
    command += ["--cert", relay.certificate, "--relay-log", relay.program.log]
    return _points("chromium", command, folder, CLIENT_SECONDS)
