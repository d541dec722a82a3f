"""The Index Service over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvsp.http.app import App
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import Entry, StoreError, StoreLimits
from kvsp.index.stored import stored_form
from kvsp.names.identity import Descriptor
from kvsp.names.uris import compat_path, instance_id, replicas_path
from kvsp.principals import Principal
from kvsp.records.records import LookupRequest, LookupResponse
from tests.kvsp.index.support import DESCRIPTOR, H1, II7, NOW, SCOPE, record, request, status
from tests.kvsp.support_http import BASE, Client, Principals, running

RIGHTS = {SCOPE.scope_id.hex(): frozenset({"read", "write"})}
PRINCIPALS = (
    Principal("h1", uris=frozenset({H1}), scopes=RIGHTS),
    Principal("stranger", uris=frozenset({H1})),
    Principal("pc", roles=frozenset({"placement"}), scopes=RIGHTS),
    Principal("operator", roles=frozenset({"operator"})),
)


class Service:
    def __init__(self) -> None:
        self.now = NOW
        self.core = IndexService(SqliteStore(":memory:", StoreLimits(linger_ms=0)))
        self.index = IndexApp(self.core, sweep_s=3600, clock_ms=lambda: self.now)
        self.app = App([self.index], base_uri=BASE, authenticator=Principals(*PRINCIPALS))

    def client(self, name: str = "h1") -> Client:
        return Client(self.app, name)

    async def publish(self, made: Any = None, name: str = "h1") -> Any:
        made = made or record()
        return await self.client(name).request("PUT", made.path, json_body=made.to_dict())


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    async with running(made.app):
        stored = await made.client().request(
            "PUT",
            compat_path(DESCRIPTOR.compat_id),
            DESCRIPTOR.jcs,
            {"content-type": "application/kvsp+json"},
        )
        assert stored.status == 201
        yield made


async def test_a_replica_is_published_refreshed_read_and_withdrawn(service: Service) -> None:
    path = record().path
    assert (await service.publish()).json == {"ttl_ms": 600_000}
    assert [(await service.publish()).status for _ in range(2)] == [200, 200]
    assert (await service.client().get(path)).json == record().to_dict()
    listed = await service.client().get(replicas_path(record().block))
    assert listed.json == {"replicas": [record().to_dict()]}
    assert (await service.client().request("DELETE", path)).status == 204
    again = await service.client().request("DELETE", path)
    assert (again.status, again.problem) == (404, "kvsp-unknown-resource")


@pytest.mark.parametrize("whole", [False, True])
async def test_a_late_put_does_not_resurrect_a_deleted_record(
    service: Service, whole: bool
) -> None:
    """Its body arrives after the DELETE that was sent after it."""
    made = record()
    text = made.to_json()
    delete = "replicas?holder=" + H1 if whole else made.path
    deletions: list[Any] = []
    parse = service.app.bodies.parse

    async def after_the_deletion(*values: Any) -> Any:
        await asyncio.wait(deletions)
        return await parse(*values)

    async def late(name: str) -> int:
        """The status of a PUT, with a DELETE of `name` between its head and its end."""
        deletions.clear()

        def body() -> Iterator[bytes]:
            yield text[:100]
            deletions.append(asyncio.ensure_future(service.client(name).request("DELETE", delete)))
            yield text[100:]

        service.app.bodies.parse = after_the_deletion  # type: ignore[method-assign]
        fields = {"content-type": "application/kvsp+json"}
        return (await service.client().request("PUT", made.path, body(), fields)).status

    assert await late("h1") == 409
    assert (await service.client().get(made.path)).status == 404
    # who may not withdraw it withdraws nothing
    assert await late("stranger") == 201
    assert (await service.client().get(made.path)).status == 200


async def test_a_new_record_is_201(service: Service) -> None:
    assert (await service.publish()).status == 201


async def test_lookup_answers_with_records_and_estimates(service: Service) -> None:
    await service.publish()
    sent = await service.client("pc").request(
        "PUT", f"status/{instance_id(II7)}", json_body=status().to_dict()
    )
    assert sent.status == 200
    answer = await service.client().request("POST", "lookup", json_body=request(2, II7).to_dict())
    assert answer.headers["content-type"] == "application/kvsp+json"
    found = LookupResponse.from_json(answer.body, descriptor=DESCRIPTOR)
    assert found.matched == 1
    assert found.blocks[0].replicas == (record(),)
    assert found.targets is not None
    assert found.targets[0].recompute_us == 381


async def test_a_principal_without_the_scope_is_refused_everywhere(service: Service) -> None:
    await service.publish()
    stranger = service.client("stranger")
    assert (await service.publish(name="stranger")).problem == "kvsp-forbidden"
    body = request().to_dict()
    assert (await stranger.request("POST", "lookup", json_body=body)).problem == "kvsp-forbidden"
    for path in (record().path, replicas_path(record().block)):
        assert (await stranger.get(path)).problem == "kvsp-forbidden"
    assert (await stranger.request("DELETE", record().path)).problem == "kvsp-forbidden"
    explained = await stranger.request("POST", "explain", json_body=body)
    assert (explained.json["matched"], explained.json["reason"]) == (0, "unauthorized")


async def test_everything_of_a_holder_is_withdrawn_at_once(service: Service) -> None:
    await service.publish()
    answer = await service.client().request("DELETE", f"replicas?holder={H1}")
    assert answer.json == {"withdrawn": 1}
    assert (await service.client().request("DELETE", "replicas")).status == 400
    other = await service.client("pc").request("DELETE", f"replicas?holder={H1}")
    assert other.problem == "kvsp-forbidden"


async def test_descriptors_are_read_with_any_credential(service: Service) -> None:
    path = compat_path(DESCRIPTOR.compat_id)
    answer = await service.client("stranger").get(path)
    assert answer.body == DESCRIPTOR.jcs
    wrong = await service.client().request(
        "PUT", compat_path(bytes(32)), DESCRIPTOR.jcs, {"content-type": "application/json"}
    )
    assert (wrong.status, wrong.problem) == (422, "kvsp-compat-mismatch")
    assert (await service.client().get(compat_path(bytes(32)))).status == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "replicas/zz/zz/zz"),
        ("PUT", f"{replicas_path(record().block)}/short"),
        ("GET", "compat/ABCD"),
        ("POST", "lookup"),
        ("PUT", f"status/{instance_id(H1)}"),
    ],
)
async def test_malformed_requests_are_400_with_their_error(
    service: Service, method: str, path: str
) -> None:
    answer = await service.client("pc").request(method, path, json_body={"x": 1})
    assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")
    assert answer.json["error"]


async def test_a_sweep_removes_what_expired_and_takes_the_numbers(service: Service) -> None:
    await service.publish()
    service.core.board.put(status(ttl_ms=10_000_000), NOW)
    await service.index.run(service.index.sweep)
    text = (await service.client("operator").get("/metrics")).body.decode()
    assert "kvsp_index_records 1.0" in text
    assert "kvsp_index_instances_without_replicas 1.0" in text
    ready = await service.client().get("/readyz")
    assert ready.json["status"] == "degraded"
    service.now += 600_000
    await service.index.run(service.index.sweep)
    assert (await service.index.run(service.core.store.counts)).records == 0


async def test_a_store_that_fails_is_503_and_unready_until_it_works_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(service.core.store, "get", fail)
        answer = await service.client().request("POST", "lookup", json_body=request().to_dict())
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert b"away" not in answer.body
    assert (await service.client().get("/readyz")).status == 503
    assert (await service.client().get("/healthz")).status == 200


async def test_the_keys_of_a_scope_are_listed_in_parts(service: Service) -> None:
    for number in range(3):
        await service.publish(record(number))
    path = f"replicas/{DESCRIPTOR.compat_id.hex()}/{SCOPE.scope_id.hex()}"
    shown, after = [], ""
    while after is not None:
        answer = await service.client().get(f"{path}?limit=2" + (after and f"&after={after}"))
        shown += [block["block_key"] for block in answer.json["blocks"]]
        after = answer.json["next"]
    assert shown == sorted(record(number).block_key.hex() for number in range(3))
    assert (await service.client("stranger").get(path)).problem == "kvsp-forbidden"
    for query in (
        "limit=0",
        "limit=x",
        "limit=1&limit=1",
        "after=AB",
        "limit=99999999999999999999",
    ):
        assert (await service.client().get(f"{path}?{query}")).status == 400


async def test_only_who_may_write_some_scope_stores_descriptors(service: Service) -> None:
    answer = await service.client("stranger").request(
        "PUT",
        compat_path(DESCRIPTOR.compat_id),
        DESCRIPTOR.jcs,
        {"content-type": "application/json"},
    )
    assert answer.problem == "kvsp-forbidden"


async def test_a_descriptor_has_a_bounded_size(service: Service) -> None:
    text = DESCRIPTOR.jcs[:-1] + b',"x-filler":"' + bytes(70_000).replace(b"\0", b"a") + b'"}'
    large = Descriptor.parse(text)
    answer = await service.client().request(
        "PUT", compat_path(large.compat_id), text, {"content-type": "application/json"}
    )
    assert (answer.status, answer.problem) == (413, "kvsp-too-large")


async def test_others_have_their_turn_while_many_keys_are_looked_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = service.core.store, list[int]()
    data = stored_form(record(), DESCRIPTOR)
    keys = [number.to_bytes(32) for number in range(3000)]
    block = record().block
    entries = [Entry(block._replace(block_key=key), "r", H1, NOW + 1000, data) for key in keys]
    # a store is for the threads of its service
    await service.index.run(store.put, entries, NOW)
    get, run, handed_in = store.get, service.index.run, threading.Event()

    def noted(scope: bytes, compat: bytes, keys: Any, now_ms: int) -> Any:
        handed_in.wait(30)  # whichever request arrives first: the short one queues up behind it
        asked.append(len(keys))
        return get(scope, compat, keys, now_ms)

    async def running_(call: Any, *values: Any) -> Any:
        if any(isinstance(each, LookupRequest) and len(each.block_keys) == 1 for each in values):
            handed_in.set()
        return await run(call, *values)

    monkeypatch.setattr(store, "get", noted)
    monkeypatch.setattr(service.index, "run", running_)

    async def look_up(*keys: bytes) -> LookupResponse:
        body = LookupRequest(block.scope_id, block.compat_id, keys).to_dict()
        answer = await service.client().request("POST", "lookup", json_body=body)
        return LookupResponse.from_json(answer.body)

    many, one = await asyncio.gather(look_up(*keys), look_up(keys[7]))
    assert (many.matched, one.matched) == (3000, 1)
    assert sorted(asked) == [1, 440, 512, 512, 512, 512, 512]
    assert asked.index(1) <= 1
