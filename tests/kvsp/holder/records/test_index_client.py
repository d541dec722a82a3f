"""A holder and an index service that speak HTTP to each other."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.responses import Response

from kvsp.client.caller import Caller
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.records.index import (
    IndexRefusedError,
    IndexUnavailableError,
    ManyUnsupportedError,
    NoIndex,
)
from kvsp.holder.records.index_client import HttpIndexClient
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.http.app import App
from kvsp.http.call import Call, json_response, no_content
from kvsp.http.service import Operation, Service
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import StoreLimits
from kvsp.names.errors import KvspError
from kvsp.principals import Principal
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    OCTETS,
    SCOPE,
    WRITER,
    Clock,
    World,
    block_id,
    container,
    make_world,
    octets,
    put_block,
)
from tests.kvsp.support_http import BASE, Client, Principals, caller
from tests.kvsp.support_server import Authority, free_port, serving

H1 = Principal(
    "h1",
    roles=frozenset({"holder"}),
    uris=frozenset({BASE}),
    scopes={SCOPE.hex(): frozenset({"read", "write"})},
)


def index_on(path: Path) -> IndexApp:
    return IndexApp(IndexService(SqliteStore(path, StoreLimits())))


def holder_for(
    url: str, asking: Caller | None = None, *, many: bool = False
) -> tuple[HolderService, RecordPublisher, HttpIndexClient, Clock]:
    clock = Clock()
    index = HttpIndexClient(url, asking or caller("h1"))
    publisher = RecordPublisher(index, holder=BASE, many=index if many else None, clock=clock)
    holder = Holder(
        [(MemoryTier(), 10 * OCTETS)],
        HolderSettings(base_uri=BASE),
        records=publisher,
        clock=clock,
    )
    service = HolderService(holder, publisher, Descriptors(ask=publisher.descriptor))
    return service, publisher, index, clock


def app_of(*services: Service) -> App:
    return App(services, base_uri=BASE, authenticator=Principals(H1, WRITER))


async def store(session: aiohttp.ClientSession, url: str, number: int) -> int:
    async with session.put(
        f"{url}blocks/{block_id(number).path}",
        data=octets(container(number)),
        headers={"content-type": "application/kvsp-block", "if-none-match": "*"},
    ) as answer:
        return answer.status


async def matched(session: aiohttp.ClientSession, url: str, *numbers: int) -> int:
    body = {
        "scope_id": SCOPE.hex(),
        "compat_id": DESCRIPTOR.compat_id.hex(),
        "block_keys": [block_id(number).block_key.hex() for number in numbers],
    }
    async with session.post(url + "lookup", json=body) as answer:
        assert answer.status == 200
        return int((await answer.json(content_type=None))["matched"])


async def test_records_reappear_after_an_index_restarted_empty(tmp_path: Path) -> None:
    headers = {"authorization": "Bearer writer"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with serving(app_of(index_on(tmp_path / "1.db"))) as first:
            port, url = first.port, f"{first.url}/kvsp/"
            compat = url + f"compat/{DESCRIPTOR.compat_id.hex()}"
            json_type = {"content-type": "application/kvsp+json"}
            async with session.put(compat, data=DESCRIPTOR.jcs, headers=json_type) as answer:
                assert answer.status == 201
            service, publisher, index, clock = holder_for(url)
            holder = Client(app_of(service), "writer")
            for number in (0, 1):
                assert (await put_block(holder, number)).status == 201
            await publisher.step()
            assert await matched(session, url, 0, 1, 2) == 2
            assert (await holder.request("DELETE", f"blocks/{block_id(1).path}")).status == 204
            assert await matched(session, url, 0, 1) == 1
        publisher.changed(block_id(0))
        await publisher.step()
        assert publisher.unavailable
        async with serving(app_of(index_on(tmp_path / "2.db")), port=port):
            # the descriptor is lost as well; the holder brings it with its records
            assert await matched(session, url, 0) == 0
            clock.now += 60
            await publisher.step()
            assert await matched(session, url, 0) == 1
            await publisher.drain()
            assert await matched(session, url, 0) == 0
        await index.close()


async def test_many_records_go_kept_and_withdrawn_together_between_a_holder_and_an_index(
    tmp_path: Path,
) -> None:
    numbers = range(6)
    headers = {"authorization": "Bearer writer"}
    index_app = index_on(tmp_path / "1.db")
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        serving(app_of(index_app)) as server,
    ):
        url = f"{server.url}/kvsp/"
        # the index does not know the descriptor: it comes with the records
        service, publisher, index, clock = holder_for(url, many=True)
        given = HolderService(service.holder, publisher, Descriptors([DESCRIPTOR]), None)
        holder = Client(app_of(given), "writer")
        for number in numbers:
            assert (await put_block(holder, number)).status == 201
        for _ in range(2):
            await publisher.step()
        assert await matched(session, url, *numbers) == 6
        counters = index_app.service.counters
        assert (counters["published"], publisher.published, publisher.refusals) == (6, 6, 0)
        clock.now += 0.45 * 600
        await publisher.step()
        assert counters["refreshed"] == 0 and publisher.missing == 0
        assert (await holder.request("DELETE", f"blocks/{block_id(2).path}")).status == 204
        assert await matched(session, url, *numbers) == 2
        await publisher.drain()
        assert await matched(session, url, *numbers) == 0
        assert counters["withdrawn"] == 6
        await index.close()


async def test_an_index_service_that_knows_no_more_than_kvsp_gets_records_one_by_one() -> None:
    """It answers 405 to what is not in the draft."""
    odd = Odd()
    async with serving(app_of(odd)) as server:
        _, publisher, index, _ = holder_for(f"{server.url}/kvsp/", many=True)
        with pytest.raises(ManyUnsupportedError):
            await index.keep(BASE, 1000, ())
        with pytest.raises(ManyUnsupportedError):
            await index.withdraw_all(BASE)
        await index.close()
        assert publisher.pending_withdrawals == 0


async def test_holder_and_index_share_one_port(tmp_path: Path) -> None:
    index = index_on(tmp_path / "index.db")
    index.service.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    port = free_port()
    service, publisher, client, _ = holder_for(f"http://127.0.0.1:{port}/kvsp/")
    headers = {"authorization": "Bearer writer"}
    async with (
        serving(app_of(index, service), port=port) as server,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        url = f"{server.url}/kvsp/"
        assert await store(session, url, 1) == 201
        await publisher.step()
        assert await matched(session, url, 1) == 1
        async with session.get(f"{server.url}/.well-known/kvsp") as answer:
            services = (await answer.json(content_type=None))["services"]
            assert services == {"index": BASE, "holder": BASE}
        async with session.get(url + f"compat/{DESCRIPTOR.compat_id.hex()}") as answer:
            assert await answer.read() == DESCRIPTOR.jcs
    await client.close()


class Odd(Service):
    """An index that answers what it is told to."""

    role = "index"

    def __init__(self) -> None:
        self.answer: Response = no_content()

    def operations(self) -> Sequence[Operation]:
        path = "replicas/{compat}/{scope}/{block_key}/{replica_id}"

        def operation(method: str, path: str) -> Operation:
            return Operation(method=method, path=path, handler=self.handle, summary="odd")

        return (
            operation("PUT", path),
            operation("DELETE", path),
            operation("GET", "compat/{compat}"),
        )

    async def handle(self, call: Call) -> Response:
        return self.answer


async def test_answers_of_an_index_are_judged(tmp_path: Path) -> None:
    odd = Odd()
    world: World = make_world()
    await world.put(1)
    record = world.holder.record(block_id(1), 1000)
    assert record is not None
    redirect = Response(status_code=307, headers={"location": "http://192.0.2.1/"})
    cases: list[tuple[Response, type[Exception]]] = [
        (json_response({"ttl_ms": "soon"}), IndexUnavailableError),
        (Response(b"x" * (2 << 20)), IndexUnavailableError),
        (Response(status_code=503), IndexUnavailableError),
        (Response(status_code=429), IndexUnavailableError),
        (Response(b"{", status_code=403), IndexRefusedError),
        (redirect, IndexUnavailableError),
    ]
    async with serving(app_of(odd)) as server:
        client = HttpIndexClient(f"{server.url}/kvsp/", caller("h1"))
        for odd.answer, kind in cases:
            with pytest.raises(kind):
                await client.publish(record)
        odd.answer = Response(status_code=404)
        await client.withdraw(record.path)
        assert await client.descriptor(bytes(32)) is None
        for odd.answer in (Response(DESCRIPTOR.jcs), Response(b"{}")):
            with pytest.raises(IndexUnavailableError):
                await client.descriptor(bytes(32))
        odd.answer = Response(DESCRIPTOR.jcs)
        assert await client.descriptor(DESCRIPTOR.compat_id) == DESCRIPTOR
        odd.answer = Response(status_code=403)
        with pytest.raises(IndexRefusedError, match="status 403"):
            await client.withdraw(record.path)
        stranger = HttpIndexClient(f"{server.url}/kvsp/", caller())
        with pytest.raises(IndexRefusedError, match="401"):
            await stranger.publish(record)
    with pytest.raises(IndexUnavailableError):
        await client.publish(record)
    await client.close()
    await stranger.close()


async def test_a_holder_that_cannot_ask_its_index_says_why_once_and_tells_clients_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "authority"
    folder.mkdir()
    certificate, key = Authority(folder).server()

    def said() -> list[str]:
        messages = [each.getMessage() for each in caplog.records if each.name == "kvsp.holder"]
        caplog.clear()
        return messages

    async with serving(
        app_of(index_on(tmp_path / "1.db")), certificate=certificate, key=key
    ) as server:
        shown: list[Callable[[], str]] = [lambda: "nobody"]
        tls = ssl.create_default_context()
        asking = caller(lambda _: shown[0](), tls)
        service, _, index, _ = holder_for(f"{server.url}/kvsp/", asking)
        holder = Client(app_of(service), "writer")

        for _ in range(3):
            answer = await put_block(holder, 1)
            assert answer.status == 503
            assert "the index service could not be reached" in answer.json["detail"]
            assert "certificate" not in answer.json["detail"], "no internals"
        (why,) = said()
        assert why.startswith(f"the index service cannot be asked for descriptors: {server.url}")
        assert "its certificate is not trusted" in why and "does cafile name" in why
        tls.load_verify_locations(str(folder / "ca.pem"))
        assert "the index service refused" in (await put_block(holder, 1)).json["detail"]
        assert "status 401" in said()[0], "another reason is said"
        shown[0] = lambda: "h1"
        assert (await put_block(holder, 1)).problem == "kvsp-compat-unknown"
        assert said() == []
    for _ in range(2):
        assert (await put_block(holder, 1)).status == 503
    assert len(said()) == 1, "said again after it went"
    shown[0] = _no_token
    assert (await put_block(holder, 1)).status == 503
    assert "there is no token to show it: the file is gone" in said()[0]
    await index.close()


def _no_token() -> str:
    raise KvspError("the file is gone")


async def test_a_holder_without_an_index_serves_all_the_same() -> None:
    records = NoIndex()
    holder = Holder([(MemoryTier(), 10 * OCTETS)], HolderSettings(base_uri=BASE), records=records)
    service: Any = HolderService(holder, records, Descriptors([DESCRIPTOR]))
    client = Client(app_of(service), "writer")
    await service.start()
    assert (await put_block(client, 1)).status == 201
    answer = await client.get(f"blocks/{block_id(1).path}")
    assert answer.status == 200 and "max-age=600" in answer.headers["cache-control"]
    await service.drain()
    await service.stop()
