"""Both programs as processes over UDP, against a peer in this process instead of a relay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys

import pytest

from kvcs.names.namespace import PublicationNamespace
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.destinations import FileDestination
from kvsp.blocks.kv_files import KvFile, KvFileWriter
from kvsp.cli.common import ExitCode
from kvsp.names.identity import Scope
from moqt.publisher import Publisher
from moqt.quic.certificates import make_self_signed
from moqt.quic.config import QuicConfig
from moqt.server import serve
from moqt.session import SessionHandler
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from tests.kvcs.support import (
    BLOCK,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    altered,
    corrupted,
    kv,
    produced,
    publisher,
    same,
)

CACHE = kv()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def files(tmp_path):
    SCOPE.save(tmp_path / "scope.json")
    (tmp_path / "compat.json").write_bytes(DESCRIPTOR.jcs)
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    with KvFileWriter(tmp_path / "kv.safetensors", DESCRIPTOR, tokens=len(TOKENS)) as out:
        for layer, (k, v) in enumerate(CACHE):
            out.k(layer)[:] = k
            out.v(layer)[:] = v
        out.commit()
    return tmp_path


class Registry(SessionHandler):
    """Takes announcements, as a relay would."""

    def __init__(self, refuse=None):
        self.refuse = refuse
        self.announced: asyncio.Queue = asyncio.Queue()

    def publish_namespace_received(self, request):
        if self.refuse is not None:
            request.reject(self.refuse, "no")
            return
        request.accept()
        self.announced.put_nowait((request.session, request.namespace))


class Passing(Registry):
    """Does not take the first announcement: it goes away, or has no room."""

    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def publish_namespace_received(self, request):
        fail, self.fail = self.fail, None
        if fail is None:
            super().publish_namespace_received(request)
        else:
            fail(request)


@contextlib.asynccontextmanager
async def listening(handler, certificate, port=0):
    cert, key = certificate
    sessions = []
    server = await serve(
        "127.0.0.1",
        port,
        quic=QuicConfig(certfile=cert, keyfile=key),
        handler=handler,
        on_session=sessions.append,
    )
    server.accepted = sessions
    async with server:
        yield server


async def start(program, files, certificate, port, *more):
    names = ["--scope-key-file", "scope.json", "--compat", "compat.json", "--tokens"]
    names += ["tokens.json", "--cafile", str(certificate[0]), "--timeout", "10"]
    names += ["--kv", "kv.safetensors"] if program == "publish" else ["--out", "out.safetensors"]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"kvcs.programs.{program}",
        f"moqt://127.0.0.1:{port}",
        *names,
        *more,
        cwd=files,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def started(*arguments):
    process = await start(*arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def finished(process, code):
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == code, err.decode()
    assert b"Traceback" not in err
    return out.decode(), err.decode()


def check_file(path, layers=range(LAYERS), tokens=20):
    with KvFile.open(path, DESCRIPTOR, layers=layers) as file:
        assert file.tokens == tokens
        for layer in layers:
            assert same(file.k(layer), CACHE[layer][0][:tokens])
            assert same(file.v(layer), CACHE[layer][1][:tokens])


async def test_subscribe_writes_the_cache_and_says_what_it_did(files, certificate):
    async with listening(publisher(produced(cache=CACHE)), certificate) as server:
        process = await start("subscribe", files, certificate, server.port)
        out, err = await finished(process, ExitCode.DONE)
        assert err == ""
        assert out.startswith("20 tokens (5 blocks, layers 0-5), ")
        assert "60 Objects verified" in out
        assert "first usable layer after" in out
        check_file(files / "out.safetensors")


async def test_subscribe_takes_layers_and_blocks_and_prints_json(files, certificate):
    async with listening(publisher(produced(cache=CACHE)), certificate) as server:
        more = ("--layers", "2-4", "--blocks", "3", "--json", "--mode", "live")
        process = await start("subscribe", files, certificate, server.port, *more)
        out, _ = await finished(process, ExitCode.DONE)
        result = json.loads(out)
        assert result["ok"] is True
        assert (result["tokens"], result["blocks"], result["layers"]) == (3 * BLOCK, 3, 3)
        assert (result["first_layer"], result["last_layer"]) == (2, 4)
        assert result["objects_verified"] == result["objects_confirmed"] == 18
        assert result["duplicates"] == 0
        assert result["mode"] == "live"
        check_file(files / "out.safetensors", range(2, 5), 3 * BLOCK)


async def test_subscribe_that_fails_says_why_with_its_code_and_leaves_no_file(files, certificate):
    bad = publisher(publication := produced(cache=CACHE))
    wrong = altered(publication.tracks[1], corrupted((1, 1)))
    bad.tracks[wrong.name] = wrong
    lost = publisher(half := Publication(SCOPE, DESCRIPTOR, TOKENS))
    half.put_layer(0, *CACHE[0])
    half.abandon("out of memory")
    refusing = Publisher()
    refusing.subscribe_namespace_received = lambda request: request.reject(
        RequestErrorCode.UNAUTHORIZED, "not yours"
    )
    other_scope = publisher(produced(scope=Scope(bytes(32))))
    sentences = []
    before = sorted(p.name for p in files.iterdir())
    for handler, code in (
        (Publisher(), ExitCode.NOT_FOUND),
        (other_scope, ExitCode.NOT_FOUND),
        (refusing, ExitCode.NOT_AUTHORIZED),
        (bad, ExitCode.VERIFICATION_FAILED),
        (lost, ExitCode.FAILED),
    ):
        async with listening(handler, certificate) as server:
            process = await start("subscribe", files, certificate, server.port)
            out, err = await finished(process, code)
            assert out == ""
            assert err.count("\n") == 1
            sentences.append(err)
        assert sorted(p.name for p in files.iterdir()) == before
    assert sentences[0] == sentences[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_subscribe_that_is_stopped_leaves_no_file(number, files, certificate):
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publication.put_layer(0, *CACHE[0])
    before = sorted(p.name for p in files.iterdir())
    async with (
        listening(publisher(publication), certificate) as server,
        started("subscribe", files, certificate, server.port) as process,
    ):
        async with asyncio.timeout(20):
            while len(list(files.iterdir())) == len(before):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        process.send_signal(number)
        await finished(process, 128 + number)
    assert sorted(p.name for p in files.iterdir()) == before


@pytest.mark.parametrize("mode", ["live", "auto"])
async def test_publish_announces_serves_and_exits_when_idle(mode, files, certificate):
    registry = Registry()
    more = ("--live-delay", "20", "--exit-after-idle", "0.3", "--json")
    async with (
        listening(registry, certificate) as server,
        started("publish", files, certificate, server.port, *more) as process,
    ):
        session, fields = await asyncio.wait_for(registry.announced.get(), 20)
        (accepted,) = [s for s in server.accepted if s.session is session]
        with FileDestination(files / "got", DESCRIPTOR) as destination:
            consumer = Consumer(
                accepted,
                SCOPE,
                DESCRIPTOR,
                TOKENS,
                publications=[PublicationNamespace.from_fields(fields)],
                destination=destination,
                mode=mode,
                timeout=20,
            )
            await consumer.retrieve()
            destination.commit()
        assert consumer.stats.duplicates == 0
        check_file(files / "got")
        out, err = await finished(process, ExitCode.DONE)
        assert err == ""
        (line,) = out.splitlines()
        announced = json.loads(line)
        assert (announced["tokens"], announced["blocks"], announced["layers"]) == (20, 5, LAYERS)
        assert PublicationNamespace.from_text(announced["namespace"]).fields == fields


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_publish_ends_well_when_it_is_told_to(number, files, certificate):
    registry = Registry()
    async with (
        listening(registry, certificate) as server,
        started("publish", files, certificate, server.port) as process,
    ):
        await asyncio.wait_for(registry.announced.get(), 20)
        line = (await process.stdout.readline()).decode()
        assert line.startswith("publishing 20 tokens (5 blocks, 6 layers), namespace ")
        process.send_signal(number)
        out, err = await finished(process, ExitCode.DONE)
        assert out == err == ""


async def test_publish_that_is_not_authorized_says_so(files, certificate):
    registry = Registry(refuse=RequestErrorCode.UNAUTHORIZED)
    async with listening(registry, certificate) as server:
        process = await start("publish", files, certificate, server.port)
        out, err = await finished(process, ExitCode.NOT_AUTHORIZED)
        assert out == ""
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "fail",
    [
        lambda request: request.session.close(SessionErrorCode.NO_ERROR, "restarting"),
        lambda request: request.reject(RequestErrorCode.EXCESSIVE_LOAD, "full", retry_after_ms=1),
    ],
)
async def test_publish_tries_again_when_its_first_announcement_is_cut_off(fail, files, certificate):
    registry = Passing(fail)
    async with (
        listening(registry, certificate) as server,
        started("publish", files, certificate, server.port) as process,
    ):
        await asyncio.wait_for(registry.announced.get(), 20)
        line = (await process.stdout.readline()).decode()
        assert line.startswith("publishing 20 tokens")
        process.terminate()
        _, err = await finished(process, ExitCode.DONE)
        assert "trying again in" in err


@pytest.mark.parametrize(
    "fail",
    [
        lambda request: request.session.close(SessionErrorCode.PROTOCOL_VIOLATION, "no"),
        lambda request: request.reject(RequestErrorCode.NOT_SUPPORTED, "no"),
    ],
)
async def test_publish_ends_when_its_first_announcement_is_refused(fail, files, certificate):
    registry = Passing(fail)
    async with listening(registry, certificate) as server:
        process = await start("publish", files, certificate, server.port)
        _, err = await finished(process, ExitCode.FAILED)
        assert "trying again" not in err and registry.announced.empty()


async def test_publish_announces_the_same_publication_again_when_the_session_is_lost(
    files, certificate
):
    registry = Registry()
    async with (
        listening(registry, certificate) as server,
        started("publish", files, certificate, server.port) as process,
    ):
        namespaces = set()
        for turn in range(3):
            session, fields = await asyncio.wait_for(registry.announced.get(), 20)
            namespaces.add(fields)
            if turn == 0:  # it says once that it is announced
                assert await asyncio.wait_for(process.stdout.readline(), 20)
            session.close(SessionErrorCode.NO_ERROR, "restarting")
        assert len(namespaces) == 1
        process.terminate()
        out, err = await finished(process, ExitCode.DONE)
        assert out == ""
        first, second = map(float, re.findall(r"trying again in ([\d.]+) s", err)[:2])
        assert second > first > 0.3
