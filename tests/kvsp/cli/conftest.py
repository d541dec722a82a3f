"""A deployment in a thread of its own, and the input files of the commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner

from kvsp.blocks.kv_files import KvFileWriter
from kvsp.cli.program import app
from tests.kvsp.client.support import (
    DESCRIPTOR,
    TOKENS,
    Fake,
    container,
    problem,
    serving,
    world,
)

SECRET = bytes(range(32)).hex()
"""The key of the scope of `support`."""

SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"


class Deployment:
    """Runs coroutines in the thread of the servers."""

    def __init__(self, loop, made, control, fake):
        self._loop = loop
        self.world = made
        self.index = made.client.index
        self.holder = made.uris[0]
        self.control = control
        self.requests = fake.requests

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


def control_answer(request):
    """An instance and a placement controller that answer the least there is to say."""
    path = request.url.path
    if path.endswith("/prefetch"):
        return Response(status_code=202)
    if "/prefetch/" in path:
        name = path.rpartition("/")[2]
        state = {"directive": name, "state": "complete", "loaded": ["ab" * 32]}
        return JSONResponse(state | {"failed": [], "remaining_ms": 1})
    if path.endswith("/instances"):
        return JSONResponse({"instances": []})
    if path.endswith(SESSION):
        return (
            Response(status_code=204) if request.method == "DELETE" else JSONResponse({"epoch": 1})
        )
    return problem(404, "kvsp-unknown-resource")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    ready, end, made = threading.Event(), [], []

    async def main():
        stop = asyncio.Event()
        fake = Fake(control_answer)
        async with contextlib.AsyncExitStack() as stack:
            one = await stack.enter_async_context(world(tmp_path_factory.mktemp("index")))
            control = await stack.enter_async_context(serving(fake.app))
            loop = asyncio.get_running_loop()
            made.append(Deployment(loop, one, control, fake))
            end.append(lambda: loop.call_soon_threadsafe(stop.set))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield made[0]
    finally:
        end[0]()
        thread.join(20)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The input files, all of them good, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scope.json").write_text(json.dumps({"scope_key": SECRET}))
    (tmp_path / "token").write_text("client\n")
    for name in ("scope.json", "token"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "compat.json").write_bytes(DESCRIPTOR.jcs)
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    with KvFileWriter(tmp_path / "kv.safetensors", DESCRIPTOR, tokens=18) as out:
        for layer in range(DESCRIPTOR.layers):
            for part, tensor in enumerate((out.k(layer), out.v(layer))):
                for number in range(4):
                    raw = np.frombuffer(container(number).sections[layer][part], np.uint8)
                    rows = tensor[4 * number : 4 * number + 4]
                    rows[:] = raw.view(DESCRIPTOR.dtype).reshape(rows.shape)
        out.commit()
    return tmp_path


@pytest.fixture
def kvsp():
    """Runs the program in this process."""

    def run(*arguments, stdin=None):
        done = CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)
        assert SECRET not in done.output + str(done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run
