"""The server: TLS, client certificates, limits on heads, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization

from kvsp.http.app import App
from kvsp.http.auth import Credentials, LoopbackOnly, PrincipalsFile
from kvsp.http.limits import HttpLimits
from kvsp.http.server import (
    CannotStartError,
    Server,
    ServerSettings,
    ServerSettingsError,
    run,
)
from kvsp.http.service import Operation, Service
from kvsp.names.errors import KvspError as ServiceError
from kvsp.principals import Principal, principal_entry
from kvsp.service.settings import ListenTable
from tests.kvsp.inside import socket_of
from tests.kvsp.support_server import Authority, Who, serving
from tests.paths import ROOT

URI = "https://ii7.example/kvsp/"


def make(authenticator: object = None, **limits: object) -> App:
    return App(
        [Who()],
        base_uri="https://is.example/kvsp/",
        authenticator=authenticator or LoopbackOnly(),  # type: ignore[arg-type]
        limits=HttpLimits(**limits),  # type: ignore[arg-type]
    )


async def raw(server: Server, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in parts:
        writer.write(part)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_client_certificate_is_the_principal_of_its_uri_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    principals = tmp_path / "principals"
    entry = principal_entry(Principal("ii7", uris=frozenset({URI})))
    principals.write_text(json.dumps({"principals": [entry]}))
    certificate, key = authority.server()
    app = make(PrincipalsFile(principals))
    tls = {"certificate": certificate, "key": key, "client_ca": authority.path}
    async with serving(app, **tls) as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/kvsp/who"
        async with session.get(url, ssl=authority.client(URI)) as answer:
            assert (answer.status, await answer.json(content_type=None)) == (200, "ii7")
        async with session.get(url, ssl=authority.client("https://x.example/")) as answer:
            assert answer.status == 401
        anonymous = ssl.create_default_context(cafile=str(authority.path))
        async with session.get(url, ssl=anonymous) as answer:
            assert answer.status == 401
        old = ssl.create_default_context(cafile=str(authority.path))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url, ssl=old)


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 9000, b"y" * 9000],
        [b"GET /" + b"a" * 9000],
        [b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % each for each in range(2000))],
    ],
)
async def test_a_header_section_without_end_is_431(parts: list[bytes]) -> None:
    async with serving(make(header_octets=8192)) as server:
        answer = await raw(server, *parts)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"application/problem+json" in answer


async def test_a_header_section_that_does_not_arrive_is_408() -> None:
    async with serving(make(head_s=0.05)) as server:
        assert (await raw(server)).startswith(b"HTTP/1.1 408 ")
        assert (await raw(server, b"GET / HT")).startswith(b"HTTP/1.1 408 ")


async def test_what_is_no_http_is_400_with_problem_details() -> None:
    async with serving(make()) as server:
        answer = await raw(server, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == 400


async def test_a_connection_serves_many_requests() -> None:
    request = b"GET /kvsp/who HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /kvsp/who HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(make(head_s=5)) as server:
        answer = await raw(server, request, request, last)
    assert answer.count(b'"loopback"') == 3


async def test_connections_over_the_limit_are_503_with_retry_after() -> None:
    async with serving(make(connections=1, head_s=5)) as server:
        reader, first = await asyncio.open_connection("127.0.0.1", server.port)
        first.write(
            b"POST /kvsp/wait HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 2\r\n\r\n"
        )
        await server.app.services[0].waiting.wait()  # type: ignore[attr-defined]
        answer = await raw(server)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        first.write(b"{}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        first.close()


async def test_at_the_limit_the_connection_that_asked_for_nothing_longest_is_closed() -> None:
    last = b"GET /kvsp/who HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(make(connections=2, head_s=30)) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        assert (await raw(server, last)).startswith(b"HTTP/1.1 200 ")
        assert (await idle[0][0].readline()).startswith(b"HTTP/1.1 503 ")
        assert b'"loopback"' in await raw(server, last)
        for _, writer in idle:
            writer.close()


async def test_a_body_does_not_count_as_a_header_section() -> None:
    body = b"x" * 100_000
    head = b"POST /kvsp/never HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    last = b"GET /kvsp/who HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(make(header_octets=8192)) as server:
        answer = await raw(server, head + body, head + body, last)
    assert answer.count(b"HTTP/1.1 200 ") == 3


async def test_the_rest_of_a_body_nobody_reads_is_dropped_for_a_while_only() -> None:
    head = b"POST /kvsp/never HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    async with serving(make(head_s=0.05)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"x" * 1000)
        answer = await reader.readuntil(b"no need to read")
        assert answer.startswith(b"HTTP/1.1 200 ")
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionResetError):
                while await reader.read(100):
                    pass
                raise ConnectionResetError
        writer.close()


def test_the_server_refuses_to_be_open_to_all_unless_told_so(tmp_path: Path) -> None:
    principals = tmp_path / "principals"
    principals.write_text('{"principals": []}')
    certificate, key = Authority(tmp_path).server()
    tls = {"certificate": certificate, "key": key}
    known = PrincipalsFile(principals)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ServerSettingsError, match="principals"):
            Server(make(), ServerSettings(host=host, **tls))
        with pytest.raises(ServerSettingsError, match="TLS"):
            Server(make(known), ServerSettings(host=host))
    with pytest.raises(ServerSettingsError, match="key"):
        Server(make(), ServerSettings(certificate=certificate))
    with pytest.raises(ServerSettingsError, match="TLS"):
        Server(make(), ServerSettings(client_ca=certificate))
    for app, settings in (
        (make(), ServerSettings(host="0.0.0.0", insecure=True)),
        (make(known), ServerSettings(host="0.0.0.0", **tls)),
        (make(), ServerSettings(host="127.0.0.1")),
    ):
        socket_of(Server(app, settings)).close()


def test_a_port_in_use_is_a_clear_error() -> None:
    first = Server(make(), ServerSettings())
    socket_of(first).listen()
    with pytest.raises(CannotStartError, match=f"port {first.port}: .*; stop what listens"):
        Server(make(), ServerSettings(port=first.port))
    socket_of(first).close()


@pytest.mark.parametrize(
    ("wrong", "content", "said"),
    [
        ("certificate", None, "No such file"),
        ("key", None, "No such file"),
        ("client_ca", None, "No such file"),
        ("certificate", "nonsense", "not a file of PEM certificates"),
        ("client_ca", "nonsense", "not a file of PEM certificates"),
        ("key", "nonsense", "not a private key in PEM without a password"),
        ("key", "certificate", "not a private key in PEM without a password"),
        ("key", "locked", "not a private key in PEM without a password"),
        ("key", "other", "not the key of the certificate"),
    ],
)
def test_a_file_for_tls_that_cannot_be_used_is_named_in_one_sentence(
    tmp_path: Path, wrong: str, content: str | None, said: str
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.server()
    files = {"certificate": certificate, "key": key, "client_ca": authority.path}
    other = authority.issue("other")[1].read_bytes()
    password = serialization.BestAvailableEncryption(b"secret")
    locked = serialization.load_pem_private_key(other, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password
    )
    path = files[wrong] = tmp_path / "wrong.pem"
    contents = {"certificate": certificate.read_bytes(), "other": other, "locked": locked}
    if content is not None:
        path.write_bytes(contents.get(content, content.encode()))
    with pytest.raises(ServerSettingsError) as caught:
        Server(make(), ServerSettings(**files))
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_refusal_says_to_set_exists() -> None:
    known = {each.name for each in fields(ListenTable)}
    for app, settings in (
        (make(), ServerSettings(host="0.0.0.0")),
        (make(EveryoneIsKnown()), ServerSettings(host="0.0.0.0")),
    ):
        with pytest.raises(ServerSettingsError) as caught:
            Server(app, settings)
        assert "under [listen]" in str(caught.value) and "--" not in str(caught.value)
        assert {name for name in ("principals", "insecure") if name in str(caught.value)} <= known


class EveryoneIsKnown:
    def authenticate(self, credentials: Credentials) -> Principal:
        return Principal("anybody")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ServiceError("its folder is taken"), "its folder is taken"),
        (PermissionError(13, "Permission denied", "/data/blocks"), "/data/blocks: Permission"),
    ],
)
def test_a_service_that_cannot_start_is_one_sentence_and_what_started_is_stopped(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = []

    class First(Who):
        async def stop(self) -> None:
            stopped.append(self.role)

    class Second(Service):
        role = "holder"

        async def start(self) -> None:
            raise error

        def operations(self) -> Sequence[Operation]:
            return ()

    services = [First(), Second()]
    app = App(services, base_uri="https://is.example/kvsp/", authenticator=LoopbackOnly())
    with pytest.raises(CannotStartError, match=said):
        run(app, ServerSettings())
    assert stopped == ["index"] and "Traceback" not in caplog.text


PROGRAM = """
from kvsp.http.app import App
from kvsp.http.server import ServerSettings, run
from kvsp.http.auth import LoopbackOnly
from tests.kvsp.support_server import Who

class Draining(Who):
    async def drain(self):
        print("drained", flush=True)

    async def stop(self):
        print("stopped", flush=True)

run(
    App([Draining()], base_uri="https://is.example/kvsp/", authenticator=LoopbackOnly()),
    ServerSettings(),
)
"""


def test_a_signal_drains_and_ends_the_server_well() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:")
        assert "roles=index" in ready
        os.kill(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (rest.split(), process.returncode) == (["drained", "stopped"], 0)
