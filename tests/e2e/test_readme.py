"""What README.md, and the pages that go on from it, tell people to type does what they say."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
import shutil
import socket
import subprocess

import numpy as np
import pytest

import moqt
from kvcs.names.errors import NotFound
from kvcs.retrieving.stats import Stats
from kvsp.blocks.kv_files import KvFile, load_descriptor, load_tokens
from kvsp.names.identity import Scope
from tests.e2e.kvsp_support import free_port
from tests.e2e.support import BIN, ROOT, SAMPLE, Process, eventually, interrupt

PAGES = ("README.md", "docs/programs.md", "docs/kvsp.md", "docs/api.md", "docs/performance.md")
TEXT = "\n".join((ROOT / page).read_text() for page in PAGES)
MAKE = {"make demo", "make test"}
"""What CI runs."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [line[2:].partition(" #")[0].strip() for line in lines if line.startswith("$ ")]


@pytest.fixture
def folder(tmp_path):
    """A checkout, as far as the README's commands see it, with the sample copied as it says."""
    shutil.copytree(SAMPLE, tmp_path / "tools" / "data")
    for command in commands():
        if command.startswith("cp "):
            subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def port():
    """The README's port may be taken; another one is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, port, command: str, http_port: int = 0) -> Process:
    command = command.replace(":4443", f":{port}").replace(":8080", f":{http_port}")
    program, *arguments = shlex.split(command.replace(":4444", ":0"))
    where = ROOT if program == "python" else folder  # the tools run from a checkout
    return Process(folder, program, BIN / program, *arguments, cwd=where)


def test_every_command_runs(folder, port):
    seen = set()
    relay = publisher = path = None
    http_port = free_port()
    for command in commands():
        if command.startswith("make "):
            assert command in MAKE
            continue
        program = command.split()[0]
        if program == "cp":
            subprocess.run(shlex.split(command), cwd=folder, check=True)
            continue
        seen.add(program)
        process = start(folder, port, command, http_port)
        if program == "kvsp-server":
            process.wait_for(r"ready http://\S+")
        elif program == "kvcs-relay":
            relay = process
            assert process.wait_for(r"ready on moqt://\S+ ").group()
            assert process.stdout.count("\n") == 1
        elif program == "kvcs-publish":
            publisher = process
            process.wait_for("publishing 160 tokens")
        elif program == "python":
            path = process
            process.wait_for("ready on 127")
        else:
            process.finish(0)
    assert seen == {
        "python",
        "kvcs-keygen",
        "kvcs-relay",
        "kvcs-publish",
        "kvcs-subscribe",
        "kvsp",
        "kvsp-server",
    }
    descriptor = load_descriptor(folder / "compat.json")
    for name in ("received.safetensors", "again.safetensors"):
        with (
            KvFile.open(folder / "cache.safetensors", descriptor) as sent,
            KvFile.open(folder / name, descriptor) as received,
        ):
            for layer in range(descriptor.layers):
                assert received.k(layer).tobytes() == sent.k(layer).tobytes()
                assert received.v(layer).tobytes() == sent.v(layer).tobytes()
    for process in (publisher, path, relay):
        interrupt(process)
        process.finish(0)


def test_every_option_in_its_table_exists():
    rows = re.findall(r"^\| (all|relay|publish|subscribe) \| `(--[a-z-]+)", TEXT, re.MULTILINE)
    assert len(rows) >= 7
    everybody = ("relay", "publish", "subscribe")
    helps = {
        p: subprocess.run([BIN / f"kvcs-{p}", "--help"], capture_output=True, check=True).stdout
        for p in everybody
    }
    for where, option in rows:
        for program in everybody if where == "all" else (where,):
            assert re.search(rf"{option}\b", helps[program].decode()), (program, option)


def run_engines(names, url, scope, descriptor, layers):
    """What one engine needs not compute of another one's prompt, and the layers it has used."""
    tokens, used = list(range(7, 167)), []

    def use(index, k, v):
        for came, sent in zip((k, v), layers[index], strict=True):
            assert came.tobytes() == sent[:144].tobytes()
        used.append(index)

    settings = {"cafile": "tls/cert.pem", "scope_keys": scope, "descriptor": descriptor}
    settings |= {"lookup_timeout": 10.0, "stall": 10.0, "timeout": 30.0}  # of a busy machine
    with names["Client"](url, **settings) as here, names["Client"](url, **settings) as there:
        names["prefill"](here, tokens, iter(layers))
        eventually(lambda: there.directory.longest(tokens), "it is found")
        return names["decode"](there, tokens, use), used


async def test_its_python_code_runs(folder, port, monkeypatch):
    produce_and_consume, in_an_engine, in_chunks, watching = blocks("python")
    for command in commands():
        if command.startswith("kvcs-keygen"):
            start(folder, port, command).finish(0)
        elif command.startswith("kvcs-relay"):
            start(folder, port, command).wait_for("ready")
    monkeypatch.chdir(folder)
    url = f"moqt://127.0.0.1:{port}"
    names: dict = {}
    exec(compile(produce_and_consume, "README.md", "exec"), names)
    exec(compile(in_an_engine, "README.md", "exec"), names)
    exec(compile(in_chunks, "docs/api.md", "exec"), names)
    exec(compile(watching, "docs/api.md", "exec"), names)
    identity = (
        Scope.load("scope.json"),
        load_descriptor("compat.json"),
        load_tokens("tokens.json"),
    )
    descriptor = identity[1]
    with KvFile.open("cache.safetensors", descriptor) as cache:
        layers = [(cache.k(n), cache.v(n)) for n in range(descriptor.layers)]
    async with asyncio.timeout(30):
        producing = asyncio.create_task(names["produce"](url, *identity, iter(layers)))
        printed = io.StringIO()
        while True:
            try:
                with contextlib.redirect_stdout(printed):
                    stats = await names["consume"](url, *identity)
                break
            except NotFound:  # not announced yet
                assert not producing.done()
        assert isinstance(stats, Stats)
        assert stats.layers == descriptor.layers
        shape = (160, descriptor.kv_heads, descriptor.head_dim)
        assert printed.getvalue().splitlines() == [
            f"{n} {shape} {np.dtype(descriptor.dtype)}" for n in range(descriptor.layers)
        ]
        producing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await producing

        printed = io.StringIO()
        others = [token + 1 for token in identity[2]]
        chunks = [others[at : at + 40] for at in range(0, 160, 40)]

        def compute(first, end):
            for k, v in layers:
                yield k[first:end], v[first:end]

        cafile = "tls/cert.pem"
        async with moqt.connect(url, cafile=cafile) as ours, moqt.connect(url, cafile=cafile) as to:
            await names["produce_in_chunks"](ours, *identity[:2], chunks, compute)
            with contextlib.redirect_stdout(printed):
                await names["follow"](to, *identity[:2], others)
        assert printed.getvalue().splitlines() == [
            f"{segment} {n} {first} {tokens}"
            for segment, (first, tokens) in enumerate([(0, 32), (32, 48), (80, 32), (112, 48)])
            for n in range(descriptor.layers)
        ]

        reached = await asyncio.to_thread(run_engines, names, url, *identity[:2], layers)
        assert reached == (144, list(range(descriptor.layers)))

        printed, shown = io.StringIO(), asyncio.Event()

        async def frames():
            yield b"first"
            shown.set()
            while not printed.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            yield b"second"

        showing = asyncio.create_task(names["show"](url, frames()))
        await shown.wait()
        with contextlib.redirect_stdout(printed):
            await names["watch"](url)
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        lines = printed.getvalue().splitlines()
        assert [line.split()[-2] for line in lines[:2]] == ["5", "6"], lines  # their lengths
