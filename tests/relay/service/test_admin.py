"""The admin listener: what operators and their programs ask a relay over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

import moqt
from moqt.quic.certificates import make_self_signed
from moqt.values.names import namespace_of, printable_namespace
from relay.config import RelayConfig
from relay.scopes import Scopes
from relay.service import admin
from relay.service.admin import MAX_CONNECTIONS, Admin
from relay.service.told import answers
from tests.relay.service.program import check_sentence, run, running
from tests.relay.star import everything, publish

TOKEN = "admin-token-of-the-tests-0123456789"


def asked(url, token=None, *, data=None, host=None, accept=None):
    """(status, body) of a request."""
    request = urllib.request.Request(url, data)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    if host is not None:
        request.add_header("Host", host)
    if accept is not None:
        request.add_header("Accept", accept)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def ask(listener, path, token=None, **how):
    return await asyncio.to_thread(asked, f"http://127.0.0.1:{listener.port}{path}", token, **how)


class Listening:
    """An Admin of a relay that serves nobody."""

    def __init__(self, host="127.0.0.1", upstreams=(), **how):
        told = answers.OwnAnswers(Scopes(RelayConfig()), CollectorRegistry(), upstreams)
        self.listener = Admin(told, **how)
        self.host = host

    async def __aenter__(self):
        await self.listener.start(self.host, 0)
        self.listener.not_ready = None
        return self.listener

    async def __aexit__(self, *_):
        await self.listener.close()


def token_file(tmp_path):
    path = tmp_path / "admin.token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_what_a_relay_holds_is_listed_and_purged(tmp_path):
    async def scenario(url, cafile, base):
        async with moqt.connect(url, cafile=cafile) as publisher:
            store = publisher.publish_track((b"demo", b"a.b"), b"video")
            await publisher.publish_namespace((b"demo", b"a.b"))
            publish(store, 0, 0, 20_000)
            store.finish_subgroup(0, 0)
            store.finish(moqt.PublishDoneCode.TRACK_ENDED)
            async with moqt.connect(url, cafile=cafile) as subscriber:
                fetched = await subscriber.fetch((b"demo", b"a.b"), b"video")
                assert {o.location: bytes(o.payload) async for o in fetched} == {
                    moqt.Location(0, 0): everything(1, size=20_000)[moqt.Location(0, 0)]
                }

                def look(path):
                    status, body = asked(base + path, TOKEN)
                    assert status == 200, body
                    return json.loads(body)

                (track,) = (await asyncio.to_thread(look, "/tracks.json"))["tracks"]
                assert track["track"] == "demo-a.2eb--video"
                assert (track["scope"], track["octets"], track["groups"]) == ("/", 20_000, 1)
                (grid,) = (await asyncio.to_thread(look, "/publications.json"))["publications"]
                assert (grid["namespace"], grid["scope"], grid["tracks"]) == ("demo-a.2eb", "/", 1)
                (row,) = grid["rows"]
                assert (row["track"], row["memory"], row["ended"]) == (
                    "video",
                    [[0, 0, 0, 0]],
                    True,
                )
                page = await asyncio.to_thread(look, "/publications.json?after=1")
                assert page == {"publications": [], "of": 1, "after": 1}
                sessions = (await asyncio.to_thread(look, "/sessions.json"))["sessions"]
                assert len(sessions) == 2
                assert all(each["peer"].startswith("127.0.0.1:") for each in sessions)
                none = await asyncio.to_thread(look, "/tracks.json?namespace=other")
                assert none == {"tracks": [], "of": 0, "after": 0}
        await asyncio.sleep(1.2)  # both have left
        return await asyncio.to_thread(
            asked, base + "/purge?namespace=demo", TOKEN, data=b""
        ), await asyncio.to_thread(asked, base + "/tracks.json", TOKEN)

    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c"),
        *("--admin", "127.0.0.1:0", "--admin-token-file", token_file(tmp_path)),
        *("--limit", "linger=0"),
    ) as (_, ready):
        base = ready[3].removesuffix("/metrics")
        purged, left = asyncio.run(scenario(f"moqt://{ready[1]}/", ready[2], base))
    assert purged == (200, json.dumps({"tracks": 1, "octets": 20_000, "in_use": 0}))
    assert json.loads(left[1])["tracks"] == []


def test_a_relay_that_drains_is_not_ready(tmp_path):
    async def scenario(url, cafile, base, process):
        async with moqt.connect(url, cafile=cafile):
            assert await asyncio.to_thread(asked, base + "/readyz") == (200, "ready\n")
            process.send_signal(signal.SIGTERM)
            for _ in range(100):
                answer = await asyncio.to_thread(asked, base + "/readyz")
                if answer[0] != 200:
                    return answer
                await asyncio.sleep(0.05)

    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c", "--admin", "127.0.0.1:0")
    ) as (process, ready):
        base = ready[3].removesuffix("/metrics")
        answer = asyncio.run(scenario(f"moqt://{ready[1]}/", ready[2], base, process))
    assert answer == (503, "the relay is draining\n")


async def test_a_relay_whose_upstream_is_gone_is_not_ready():
    above = answers.Upstream("moqt://above.example", lambda: None)
    async with Listening(upstreams=[above]) as listener:
        status, text = await ask(listener, "/readyz")
        assert (status, text) == (
            503,
            "no upstream relay is connected (moqt://above.example)\n",
        )
        assert await ask(listener, "/healthz") == (200, "ok\n")
        told = json.loads((await ask(listener, "/upstreams.json"))[1])
        assert told == {
            "upstreams": [
                {
                    "url": "moqt://above.example",
                    "connected": False,
                    "peer": None,
                    "leaving": False,
                }
            ]
        }


@pytest.mark.parametrize("path", ["/tracks.json", "/sessions.json", "/upstreams.json"])
async def test_what_tells_of_tenants_is_told_on_loopback_or_by_token(path):
    async with Listening() as listener:
        assert (await ask(listener, path))[0] == 200
        # a page in a browser that was led here
        status, text = await ask(listener, path, host="evil.example")
        assert (status, "--admin-token-file" in text) == (403, True)
    async with Listening("0.0.0.0") as listener:
        assert (await ask(listener, path))[0] == 403
        assert (await ask(listener, "/metrics"))[0] == 200
    async with Listening(token=TOKEN.encode()) as listener:
        assert (await ask(listener, path))[0] == 401
        assert (await ask(listener, path, "another" + TOKEN))[0] == 401
        assert (await ask(listener, path, TOKEN))[0] == 200
        assert (await ask(listener, "/readyz"))[0] == 200


async def test_nothing_is_purged_without_a_token():
    async with Listening() as listener:
        status, text = await ask(listener, "/purge?namespace=demo", data=b"")
        assert (status, "--admin-token-file" in text) == (403, True)
    async with Listening(token=TOKEN.encode()) as listener:
        assert (await ask(listener, "/purge?namespace=demo", data=b""))[0] == 401
        assert (await ask(listener, "/purge", TOKEN, data=b""))[0] == 400
        assert (await ask(listener, "/purge?namespace=demo", TOKEN))[0] == 405  # GET


@pytest.mark.parametrize(
    "query", ["?limit=x", "?limit=-1", "?after=1e3", "?namespace=demo.", "?namespace=%C3%A4"]
)
async def test_a_question_that_cannot_be_meant_is_refused_with_a_sentence(query):
    async with Listening() as listener:
        status, text = await ask(listener, "/tracks.json" + query)
        assert status == 400 and text.endswith("\n") and len(text) > 20


@pytest.mark.parametrize("host", ["a:b:c", "a:99999999", "127.0.0.1:x", "\xff"])
async def test_a_host_that_nobody_has_is_refused_without_a_word_in_the_log(host, caplog):
    async with Listening() as listener:
        assert (await ask(listener, "/tracks.json", host=host))[0] in (400, 403)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["zz", "1.0.0.x", ""])
async def test_metrics_are_told_in_whatever_version_is_asked_for(version):
    async with Listening() as listener:
        accept = f"application/openmetrics-text; version={version}"
        assert (await ask(listener, "/metrics", accept=accept))[0] == 200


async def test_connections_beyond_the_bound_are_closed_and_idle_ones_end(monkeypatch):
    monkeypatch.setattr(admin, "CONNECTION_SECONDS", 0.5)
    async with Listening() as listener:
        held = [
            await asyncio.open_connection("127.0.0.1", listener.port)
            for _ in range(MAX_CONNECTIONS)
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        for reader, writer in held:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert (await ask(listener, "/healthz"))[0] == 200


async def test_what_is_no_http_is_refused_without_a_word_in_the_log(caplog):
    async with Listening() as listener:
        for octets in (b"GET", b"\x00\xff" * 50, b"GET / HTTP/9.9 x", b"GET /" + b"a" * 20_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(octets + b"\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.read(100), 10)
            writer.close()
    assert caplog.records == []


@pytest.mark.parametrize("namespace", [(), (b"demo",), (b"a-b", b".", b"\xff\x00"), (b"kv", b"x")])
def test_a_namespace_is_read_as_it_is_shown(namespace):
    assert namespace_of(printable_namespace(namespace)) == namespace


def test_sighup_ends_no_relay_and_loads_a_new_certificate(tmp_path):
    cert, key = make_self_signed(tmp_path / "one")
    new = make_self_signed(tmp_path / "two")
    with running("--listen", "127.0.0.1:0", "--cert", cert, "--key", key) as (process, ready):

        async def connects(cafile):
            try:
                async with moqt.connect(f"moqt://{ready[1]}/", cafile=cafile):
                    return True
            except moqt.MoqtError:
                return False

        assert asyncio.run(connects(cert)) and not asyncio.run(connects(new[0]))
        key.write_bytes(new[1].read_bytes())
        old = cert.read_bytes()
        cert.write_bytes(new[0].read_bytes())
        process.send_signal(signal.SIGHUP)
        for _ in range(100):
            if asyncio.run(connects(new[0])):
                break
            time.sleep(0.1)
        else:
            pytest.fail("the new certificate was not taken up")
        assert old != cert.read_bytes() and process.poll() is None


def test_a_supervisor_is_told_when_the_relay_serves_and_when_it_leaves(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(20)
        with running(
            *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c"),
            NOTIFY_SOCKET=str(tmp_path / "notify"),
        ) as (process, _):
            assert supervisor.recv(100) == b"READY=1"
            process.send_signal(signal.SIGHUP)
            told = dict(each.split(b"=") for each in supervisor.recv(100).split(b"\n"))
            assert told[b"RELOADING"] == b"1"
            assert 0 < int(told[b"MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            assert supervisor.recv(100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert supervisor.recv(100) == b"STOPPING=1"
            assert process.wait(20) == 0


def test_a_private_key_that_others_can_read_is_refused(tmp_path):
    cert, key = make_self_signed(tmp_path)
    key.chmod(0o640)
    result = run("--listen", "127.0.0.1:0", "--cert", cert, "--key", key)
    check_sentence(result, 2, "key.pem", "chmod 600")


async def test_a_relay_does_not_wait_at_its_end_for_who_does_not_read_what_was_asked_for():
    registry = CollectorRegistry()
    Gauge("large", "more than the sockets hold " * 1_000_000, registry=registry)
    listener = Admin(answers.OwnAnswers(Scopes(RelayConfig()), registry))
    await listener.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", listener.port)) as asking:
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.to_thread(asking.recv, 12)) == b"HTTP/1.1 200"
        async with asyncio.timeout(20):
            await listener.close()
