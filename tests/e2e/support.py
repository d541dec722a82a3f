"""Real processes over loopback: start them, wait for their ready line, stop or kill them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from safetensors.numpy import load_file, save_file

from kvsp.names.identity import Descriptor, Scope
from tests.paths import ROOT

BIN = Path(sys.executable).parent
DEADLINE = 60.0
SAMPLE = ROOT / "tools" / "data"
PEER = (sys.executable, "-m", "tests.e2e.peer")
MIB = 1 << 20


def eventually(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Poll until `condition()` is true."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {deadline:g} s"
        time.sleep(0.02)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child with its output in files, so that it can never block on a full pipe.

    Whatever is running at the end of a test is killed (see conftest.py).
    """

    running: list[Process] = []  # noqa: RUF012

    def __init__(self, directory: Path, name: str, *command: str | Path, **options) -> None:
        self.name = name
        directory.mkdir(exist_ok=True)
        self.out = directory / f"{name}.out"
        self.err = directory / f"{name}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            before = options.pop("preexec_fn", lambda: None)
            self.popen = subprocess.Popen(
                [str(part) for part in command],
                stdout=out,
                stderr=err,
                preexec_fn=lambda: (_die_with_parent(), before()),
                **{"cwd": ROOT, "stdin": subprocess.DEVNULL, **options},
            )
        self.running.append(self)

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    def wait_for(self, pattern: str, deadline: float = DEADLINE) -> re.Match[str]:
        """The first match of `pattern` in its standard output."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            ended = self.popen.poll() is not None  # looked at before its last words are
            if match := re.search(pattern, self.stdout):
                return match
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(
            f"{self.name} (exit {self.popen.poll()}) never said {pattern!r}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )

    def wait(self, deadline: float = DEADLINE) -> int:
        try:
            return self.popen.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.name} did not end within {deadline:g} s\n{self.stderr}"
            ) from None

    def finish(self, expected: int = 0, deadline: float = DEADLINE) -> Process:
        """Wait for the exit code `expected`; shows the output otherwise."""
        code = self.wait(deadline)
        assert code == expected, (
            f"{self.name} exited with {code}, not {expected}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )
        assert "Traceback" not in self.stderr, self.stderr
        return self

    def say(self, line: object) -> None:
        """One line on the standard input of a process started with `stdin=PIPE`."""
        self.popen.stdin.write(f"{line}\n".encode())
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()

    def json(self) -> dict:
        return json.loads(self.stdout.splitlines()[-1])

    def anonymous_memory(self) -> int:
        """Resident octets that no file backs (mapped input files do not count)."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        return int(match.group(1)) * 1024 if match else 0


@dataclasses.dataclass
class Cache:
    """The files of one KV cache and its scope."""

    directory: Path
    descriptor: dict
    tokens: list[int]
    scope: Path
    tensors: dict[str, np.ndarray]

    @property
    def compat(self) -> Path:
        return self.directory / "compat.json"

    @property
    def tokens_file(self) -> Path:
        return self.directory / "tokens.json"

    @property
    def kv(self) -> Path:
        return self.directory / "cache.safetensors"

    @property
    def blocks(self) -> int:
        return len(self.tokens) // self.descriptor["block_tokens"]

    @property
    def objects(self) -> int:
        """Data Objects of a whole publication."""
        return 2 * self.descriptor["layers"] * self.blocks

    def variant(
        self,
        name: str,
        *,
        scope: Path | None = None,
        tokens: list[int] | None = None,
        **members: object,
    ) -> Cache:
        """The identity of another cache: other tokens, another scope, other descriptor members."""
        directory = self.directory / name
        directory.mkdir()
        other = Cache(
            directory,
            {**self.descriptor, **members},
            self.tokens if tokens is None else tokens,
            scope or self.scope,
            {},
        )
        other.compat.write_text(json.dumps(other.descriptor))
        other.tokens_file.write_text(json.dumps(other.tokens))
        return other

    def check(self, out: Path, layers: range | None = None, blocks: int | None = None) -> None:
        """`out` holds exactly these layers and leading blocks, byte for byte.

        Read with the safetensors package, not with our own reader.
        """
        layers = layers or range(self.descriptor["layers"])
        tokens = (blocks or self.blocks) * self.descriptor["block_tokens"]
        received = load_file(out)
        assert received.keys() == {f"layers.{layer}.{part}" for layer in layers for part in "kv"}
        for name, tensor in received.items():
            wanted = self.tensors[name][:tokens]
            assert tensor.shape == wanted.shape, name
            assert tensor.dtype == wanted.dtype, name
            assert tensor.tobytes() == wanted.tobytes(), name

    def identity(self) -> list[str]:
        return [
            "--scope-key-file",
            str(self.scope),
            "--compat",
            str(self.compat),
            "--tokens",
            str(self.tokens_file),
        ]


def make_cache(
    directory: Path,
    *,
    layers: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_tokens: int = 4,
    tokens: int = 32,
    dtype: str = "fp16",
    seed: int = 1,
    scope: Path | None = None,
) -> Cache:
    """A small cache with random content; a fresh scope key unless one is given."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    descriptor = {
        "model": "synthetic",
        "model_digest": "sha-256:" + "11" * 32,
        "tokenizer_digest": "sha-256:" + "22" * 32,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_dtype": dtype,
        "positional": "rope",
        "block_tokens": block_tokens,
        "layout": "kvsp-layout-1",
    }
    ids = [int(t) for t in rng.integers(0, 50_000, tokens)]
    element = Descriptor.parse(json.dumps(descriptor)).dtype
    width = np.dtype(element).itemsize
    tensors = {}
    for layer in range(layers):
        for kind in "kv":
            raw = rng.integers(0, 256, tokens * kv_heads * head_dim * width, dtype=np.uint8)
            tensors[f"layers.{layer}.{kind}"] = raw.view(element).reshape(
                tokens, kv_heads, head_dim
            )
    if scope is None:
        scope = directory / "scope.json"
        Scope.generate().save(scope)
    cache = Cache(directory, descriptor, ids, scope, tensors)
    cache.compat.write_text(json.dumps(descriptor))
    cache.tokens_file.write_text(json.dumps(ids))
    save_file(tensors, cache.kv)
    return cache


def finite_cache(directory: Path) -> Cache:
    """A cache of numbers: x-q8 holds no others."""
    cache = make_cache(directory)
    random = np.random.default_rng(4)
    for name, tensor in cache.tensors.items():
        cache.tensors[name] = random.normal(size=tensor.shape).astype(tensor.dtype)
    save_file(cache.tensors, cache.kv)
    return cache


@contextlib.contextmanager
def relay(
    directory: Path,
    *options: str | Path,
    program: tuple[str | Path, ...] = (BIN / "kvcs-relay",),
    self_signed: bool = True,
) -> Iterator[Relay]:
    process = Process(
        directory,
        "relay",
        *program,
        "--listen",
        "127.0.0.1:0",
        *(("--self-signed", directory / "tls") if self_signed else ()),
        "--metrics",
        "127.0.0.1:0",
        *options,
    )
    running = Relay(process, directory)
    try:
        running.ready()
        yield running
    finally:
        process.kill()


class Relay:
    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.url = ""
        self.metrics_url = ""
        self.cafile = directory / "tls" / "cert.pem"

    def ready(self) -> None:
        line = self.process.wait_for(r"moqt://\S+:\d+.*\n").group()
        self.url = re.search(r"moqt://\S+:\d+", line).group()
        self.metrics_url = re.search(r"http://\S+", line).group()

    def metric(self, name: str) -> float:
        """The value of kvcs_relay_<name>, taken after this call began.

        The relay takes its numbers every half second; what it shows may be older.
        """
        taken = self._shown("metrics_updates_total")
        eventually(lambda: self._shown("metrics_updates_total") > taken, "fresh metrics")
        return self._shown(name)

    def _shown(self, name: str) -> float:
        text = self.metrics()
        match = re.search(rf"^kvcs_relay_{name} (\S+)$", text, re.MULTILINE)
        assert match, f"no metric {name} in\n{text}"
        return float(match.group(1))

    def metrics(self) -> str:
        with urlopen(self.metrics_url, timeout=5) as answer:
            return answer.read().decode()

    def reaches(self, deadline: float = DEADLINE, **values: float) -> None:
        """Wait until each metric has its value."""
        for name, value in values.items():
            eventually(lambda n=name, v=value: self._shown(n) == v, f"{name} {value:g}", deadline)

    def peer(self, what: str, *options: object, name: str | None = None, **popen) -> Process:
        """A program of tests/e2e/peer.py that connects to this relay."""
        return Process(
            self.directory,
            name or what,
            *PEER,
            what,
            self.url,
            "--cafile",
            self.cafile,
            *map(str, options),
            **popen,
        )

    def grow(self, cache: Cache, *options: object, name: str = "producer") -> Process:
        """A publisher of segments that produces as many layers as it is told: `.say(3)`."""
        return self.produce(cache, *options, name=name, what="grow")

    def produce(
        self, cache: Cache, *options: object, name: str = "producer", what: str = "publish"
    ) -> Process:
        """A publisher that produces as many blocks as it is told: `.say(3)`."""
        process = self.peer(
            what,
            *cache.identity(),
            "--kv",
            cache.kv,
            *options,
            name=name,
            stdin=subprocess.PIPE,
        )
        process.wait_for("announced")
        return process

    def publish(self, cache: Cache, *options: str, name: str = "publish", kv=None) -> Process:
        return Process(
            self.directory,
            name,
            BIN / "kvcs-publish",
            self.url,
            "--cafile",
            self.cafile,
            *cache.identity(),
            "--kv",
            kv or cache.kv,
            *options,
        )

    def subscribe(
        self, cache: Cache, out: Path, *options: str, name: str = "subscribe", **popen
    ) -> Process:
        return Process(
            self.directory,
            name,
            BIN / "kvcs-subscribe",
            self.url,
            "--cafile",
            self.cafile,
            *cache.identity(),
            "--out",
            out,
            *options,
            **popen,
        )


@contextlib.contextmanager
def path_to(hub: Relay, directory: Path, *options: str) -> Iterator[Process]:
    """From here on, whoever uses `hub` does it through a network; its statistics at the end."""
    to = hub.url.removeprefix("moqt://")
    command = [sys.executable, "-m", "tools.path", "--listen", "127.0.0.1:0", "--to", to, "--json"]
    process = Process(directory, "path", *command, *options)
    hub.url = "moqt://" + process.wait_for(r"ready on (\S+:\d+)\n")[1]
    yield process
    process.popen.terminate()
    process.finish()


def interrupt(process: Process) -> None:
    process.signal(signal.SIGINT)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def readable(process: Process, program: str = "kvcs-subscribe", *, logged: int = 0) -> str:
    """The one sentence that a program ended with, after what it `logged`."""
    *log, line = process.stderr.splitlines()
    assert len(log) == logged
    assert line.startswith(f"{program}: ")
    assert len(line) < 300
    return line
