"""`make demo`: a real KV cache crosses a caching relay, twice.

Starts a relay with a self-signed certificate and a publisher that produces the bundled
cache layer by layer, retrieves it live, kills the publisher, retrieves it again from the
relay's cache, and compares both results with the original, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

BIN = Path(sys.executable).parent
DATA = Path(__file__).resolve().parent / "data"
CACHE = DATA / "smollm2-survey.safetensors"
COMPAT = DATA / "smollm2-survey.compat.json"
IDENTITY = ["--compat", COMPAT]
IDENTITY += ["--tokens", DATA / "smollm2-survey.tokens.json"]
LIVE_DELAY_MS = 100
WIDTH = 56
DEADLINE = 30.0


class DemoFailed(Exception):
    """What did not go as it should, in one sentence."""


class Child:
    """A process of the demo, its output in files."""

    def __init__(self, folder: Path, name: str, program: str, *arguments: object) -> None:
        self.name = name
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        command = [str(BIN / program), *map(str, arguments)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(command, stdout=out, stderr=err)

    def wait_for(self, pattern: str) -> str:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            ended = self.popen.poll() is not None  # looked at before its last words are
            if match := re.search(pattern, self.out.read_text()):
                return match.group()
            if ended:
                break
            time.sleep(0.02)
        raise DemoFailed(f"{self.name} did not start: {self.err.read_text().strip()}")

    def result(self) -> dict[str, Any]:
        code = self.popen.wait(DEADLINE)
        if code:
            raise DemoFailed(f"{self.name} ended with {code}: {self.err.read_text().strip()}")
        answer: dict[str, Any] = json.loads(self.out.read_text().splitlines()[-1])
        return answer

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Stage:
    """The folder and the processes of a demo, which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def start(self, program: str, *arguments: object) -> Child:
        child = Child(self.folder, f"{len(self.children)}-{program}", program, *arguments)
        self.children.append(child)
        return child

    def relay(self, console: Console) -> list[object]:
        """Start a relay; its URL and certificate, as the other programs take them."""
        listening = "--listen", "127.0.0.1:0"
        relay = self.start("kvcs-relay", *listening, "--self-signed", self.folder / "tls")
        url = relay.wait_for(r"moqt://[^\s,]+:\d+")
        console.print(f"relay      {url}")
        return [url, "--cafile", self.folder / "tls" / "cert.pem"]

    def scope(self) -> list[object]:
        """Make a scope; the option that names it."""
        file = self.folder / "scope.json"
        self.start("kvcs-keygen", "scope", file).popen.wait(DEADLINE)
        return ["--scope-key-file", file]


def perform(name: str, run: Callable[[Console, Stage], None]) -> int:
    """Run a demo in a folder of its own; the exit code."""
    console = Console(width=130 if not sys.stdout.isatty() else None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            stage = Stage(Path(folder))
            try:
                run(console, stage)
            finally:
                for child in stage.children:
                    child.kill()
    except DemoFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def tensors_digest(file: Path) -> str:
    """SHA-256 over name, element type, shape and octets of every tensor, by name.

    A safetensors file may carry metadata besides, which is no part of a KV cache.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def waterfall(console: Console, title: str, seconds: list[float]) -> None:
    """One bar per layer: from the request to the moment the layer was usable."""
    span = max(seconds)
    console.print(f"\n[bold]{title}[/]  0 {'':{WIDTH - 8}} {span * 1000:.0f} ms")
    for layer, at in enumerate(seconds):
        filled = max(1, round(at / span * WIDTH)) if span else 1
        bar = "·" * (filled - 1) + "█"
        console.print(f"  layer {layer:>2} {bar:<{WIDTH}} {at * 1000:6.0f} ms", highlight=False)


def run(console: Console, stage: Stage) -> None:
    scope = stage.scope()
    common = [*stage.relay(console), *scope, *IDENTITY]
    publisher = stage.start("kvcs-publish", *common, "--kv", CACHE, "--live-delay", LIVE_DELAY_MS)
    publisher.wait_for("publishing")
    console.print(f"publisher  producing {CACHE.name}, a layer every {LIVE_DELAY_MS} ms")
    rows: list[tuple[str, dict[str, Any], str]] = []
    original = tensors_digest(CACHE)
    for number, how in enumerate(("live, publisher producing", "from cache, publisher killed"), 1):
        if number == 2:
            publisher.kill()
            console.print("publisher  killed (SIGKILL)")
        out = stage.folder / f"received-{number}.safetensors"
        consumer = stage.start(
            "kvcs-subscribe", *common, "--out", out, "--json", "--timeout", DEADLINE
        )
        result = consumer.result()
        rows.append((how, result, tensors_digest(out)))
        console.print(f"consumer {number} {how}: {result['tokens']} tokens")
    for how, result, _ in rows:
        waterfall(console, how, result["layer_seconds"])
    table = Table(title="What crossed the relay")
    for heading in ("", "tokens", "layers", "Objects verified", "MB", "MB/s", "first layer", "all"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("equal to the original")
    for how, result, digest in rows:
        table.add_row(
            how,
            str(result["tokens"]),
            str(result["layers"]),
            str(result["objects_verified"]),
            f"{result['octets'] / 1e6:.1f}",
            f"{result['octets'] / result['seconds'] / 1e6:.1f}",
            f"{result['first_layer_seconds'] * 1000:.0f} ms",
            f"{result['seconds'] * 1000:.0f} ms",
            "byte for byte" if digest == original else "NO",
        )
    console.print()
    console.print(table)
    console.print(f"SHA-256 of the tensors, original: {original}")
    for how, _, digest in rows:
        console.print(f"{how}: {digest}", highlight=False)
    if any(digest != original for _, _, digest in rows):
        raise DemoFailed("what was received differs from the original")


if __name__ == "__main__":
    sys.exit(perform("demo", run))
