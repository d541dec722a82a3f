"""The object storage tier, and what becomes of blocks when several holders have one store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="the extra 's3' is not installed")

import obstore
from obstore.exceptions import PermissionDeniedError
from obstore.store import LocalStore, MemoryStore, S3Store

from kvsp.holder.tiers.circuit import Circuit
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.objects import ObjectTier, object_name
from kvsp.holder.tiers.sharing import Sharing
from kvsp.holder.tiers.tiers import TierUnavailableError
from kvsp.names.uris import uid
from tests.kvsp.holder.support import (
    DISK,
    OCTETS,
    REMOTE,
    Clock,
    World,
    block_id,
    container,
    make_world,
    octets,
)
from tests.kvsp.support_http import BASE
from tests.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server

A, B = BASE, "https://h2.example/kvsp/"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "b", mkdir=True)
    return s3_store(request.getfixturevalue("s3"), tmp_path.name)


def s3_store(server: S3Server, prefix: str) -> S3Store:
    return S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=server.endpoint,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "30s"},
        retry_config={"retry_timeout": timedelta(seconds=30)},
        **CREDENTIALS,
    )


async def world_on(
    store: Any, disk: Path | None = None, blocks: int = 2, holder: str = A, **settings: Any
) -> World:
    tiers: list[Any] = [(ObjectTier(store, holder), None)]
    if disk is not None:
        tiers.insert(0, (DiskTier(disk), blocks * OCTETS))
    world = make_world(tiers, **settings)
    await world.holder.start()
    return world


async def look(world: World) -> None:
    """What a holder does now and then."""
    (medium,) = world.holder.shared
    parts = world.holder.parts
    await Sharing(world.holder.store, medium, parts.adopt, parts.lost, 60).look()
    await world.publisher.step()


def names(store: Any) -> list[str]:
    """The objects that hold blocks."""
    listed = [each["path"] for batch in obstore.list(store) for each in batch]
    return sorted(each for each in listed if each.endswith(".kvb"))


def references(store: Any) -> list[str]:
    """The names of the holders that refer to objects."""
    listed = [each["path"] for batch in obstore.list(store) for each in batch]
    return sorted(each.split(".")[-2] for each in listed if each.endswith(".ref"))


def name_of(number: int) -> str:
    return object_name(block_id(number), hashlib.sha256(octets(container(number))).digest())


def store_other(world: World, number: int, content: int) -> Any:
    """Another holder's own production of a block: other octets under the same key."""
    return world.client.request(
        "PUT",
        f"blocks/{block_id(number).path}",
        octets(container(content)),
        {"content-type": "application/kvsp-block", "if-none-match": "*"},
    )


async def delete(world: World, number: int) -> int:
    status: int = (await world.client.request("DELETE", f"blocks/{block_id(number).path}")).status
    return status


async def test_blocks_live_in_the_object_store_and_survive_a_restart(store: Any) -> None:
    world = await world_on(store)
    assert (await world.put(1)).status == 201
    assert names(store) == [name_of(1)]
    again = await world_on(store)
    assert (await again.get(1)).body == octets(container(1))
    assert (await again.get(1, "?layers=1-2")).body == octets(container(1).select(range(1, 3)))
    assert await delete(again, 1) == 204
    assert names(store) == references(store) == []


async def test_a_full_disk_demotes_to_the_object_store_and_withdraws_nothing(
    store: Any, tmp_path: Path
) -> None:
    world = await world_on(store, tmp_path / "disk")
    for number in range(4):
        assert (await world.put(number)).status == 201
        await world.publisher.step()
    assert world.holder.store.counters.demotions == 2
    assert world.holder.store.used(DISK) == 2 * OCTETS
    assert all(world.index.lists(block_id(number)) for number in range(4))
    record = next(each for each in world.index.records.values() if each.block == block_id(0))
    assert record.residency is not None and record.residency[0].tier == "remote"
    for number in range(4):
        assert (await world.get(number)).body == octets(container(number))
    assert (world.holder.store.read_mbit_per_s(REMOTE) or 0) > 0


async def test_a_block_that_cannot_be_demoted_is_withdrawn_and_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await world_on(MemoryStore(), tmp_path)
    for number in range(2):
        await world.put(number)
    await world.publisher.step()

    async def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr("kvsp.holder.tiers.objects.obstore.put_async", fail)
    assert (await world.put(2)).status == 201
    assert not world.index.lists(block_id(0)) and (await world.get(0)).status == 404
    assert world.holder.store.used(REMOTE) == 0
    assert world.holder.store.counters.evictions == {"disk": 1}


async def test_an_object_that_is_gone_or_cut_short_is_404(store: Any) -> None:
    world = await world_on(store)
    await world.put(1)
    await world.put(2)
    obstore.delete(store, name_of(1))
    obstore.put(store, name_of(2), octets(container(2))[:100])
    for number in (1, 2):
        answer = await world.get(number)
        assert (answer.status, answer.json["reason"]) == (404, "lost")
    assert names(store) == references(store) == []


async def test_damaged_objects_are_removed_at_start_up(store: Any) -> None:
    world = await world_on(store)
    for number in range(4):
        await world.put(number)
    obstore.put(store, name_of(1), b"short")
    obstore.put(store, name_of(2), b"garbage" * 100)
    obstore.put(store, name_of(3), obstore.get(store, name_of(0)).bytes())
    again = await world_on(store)
    assert list(again.holder.store.blocks()) == [block_id(0)]
    assert names(store) == [name_of(0)] and len(references(store)) == 1


# --- several holders -----------------------------------------------------------------


async def test_what_one_holder_stores_never_changes_what_another_serves(store: Any) -> None:
    a, b = [await world_on(store, holder=holder) for holder in (A, B)]
    assert (await a.put(1)).status == 201
    assert (await store_other(b, 1, content=7)).status == 201
    for _ in range(2):
        one, other = await a.get(1), await b.get(1)
        assert (one.body, other.body) == (octets(container(1)), octets(container(7)))
        assert one.headers["repr-digest"] != other.headers["repr-digest"]
        a, b = [await world_on(store, holder=holder) for holder in (A, B)]


async def test_an_object_stays_until_the_last_holder_lets_it_go(store: Any) -> None:
    a, b = [await world_on(store, holder=holder) for holder in (A, B)]
    for world in (a, b):
        assert (await world.put(1)).status == 201
    assert names(store) == [name_of(1)]
    assert references(store) == sorted([uid(A.encode()), uid(B.encode())])
    assert await delete(b, 1) == 204
    assert (await b.get(1)).status == 404
    assert (await a.get(1)).body == octets(container(1))
    assert await delete(a, 1) == 204
    assert names(store) == references(store) == []


async def test_a_holder_publishes_and_serves_what_another_one_stored(store: Any) -> None:
    a, b = [await world_on(store, holder=holder) for holder in (A, B)]
    for number in range(3):
        await a.put(number)
    await look(b)
    assert all(b.index.lists(block_id(number)) for number in range(3))
    assert b.holder.store.counters.adopted == 3
    assert b.holder.store.used(REMOTE) == 3 * OCTETS
    assert await delete(a, 1) == 204
    # a lease at the one holds whatever the other does
    assert (await b.lease(0, 1, 2)).json["leased"] == [
        block_id(number).block_key.hex() for number in range(3)
    ]
    assert (await b.get(1)).body == octets(container(1))


async def test_what_a_holder_let_go_it_does_not_take_over_again(store: Any) -> None:
    a, b = [await world_on(store, holder=holder) for holder in (A, B)]
    for world in (a, b):
        await world.put(1)
    assert await delete(b, 1) == 204
    await look(b)
    assert block_id(1) not in b.holder.store and not b.index.lists(block_id(1))
    assert (await b.put(1)).status == 201
    assert (await b.get(1)).body == octets(container(1))


async def test_what_is_taken_over_fits_the_budget_and_has_nothing_leave(store: Any) -> None:
    a = await world_on(store)
    for number in range(5):
        await a.put(number)
    b = make_world([(ObjectTier(store, B), 3 * OCTETS)])
    await b.holder.start()
    await b.put(9)
    await look(b)
    assert block_id(9) in b.holder.store and len(b.holder.store) == 3
    assert b.holder.store.used(REMOTE) <= 3 * OCTETS
    # making room removes references of this holder, no objects of the other one
    assert (await b.put(10)).status == 201
    for number in range(5):
        assert (await a.get(number)).body == octets(container(number))


async def test_a_block_whose_object_somebody_removed_is_withdrawn(store: Any) -> None:
    a = await world_on(store)
    for number in range(2):
        await a.put(number)
    await a.publisher.step()
    obstore.delete(store, name_of(1))
    await look(a)
    assert not a.index.lists(block_id(1)) and a.index.lists(block_id(0))
    assert (await a.get(1)).json["reason"] == "lost"
    assert len(references(store)) == 1


async def test_a_reference_whose_object_never_came_is_removed(store: Any) -> None:
    world = await world_on(store)
    await world.put(1)
    obstore.delete(store, name_of(1))
    again = await world_on(store)
    assert len(again.holder.store) == 0 and references(store) == []


async def test_a_put_repairs_what_was_found_damaged(store: Any) -> None:
    a, b = [await world_on(store, holder=holder) for holder in (A, B)]
    for world in (a, b):
        await world.put(1)
    whole = bytes(obstore.get(store, name_of(1)).bytes())
    obstore.put(store, name_of(1), bytes([whole[0], whole[1] ^ 1]) + whole[2:])
    doubt = f"blocks/{block_id(1).path}/verification"
    assert (await a.client.request("POST", doubt)).status == 404
    assert (await a.put(1)).status == 201
    for world in (a, b):
        assert (await world.get(1)).body == octets(container(1))


# --- what it costs -------------------------------------------------------------------


async def test_a_get_is_one_request_of_the_store(s3: S3Server, tmp_path: Path) -> None:
    store = s3_store(s3, tmp_path.name)
    world = await world_on(store)
    assert s3.requests(tmp_path.name, 1) == {"GET": 1}
    await world.put(1)
    assert s3.requests(tmp_path.name, 2) == {"PUT": 2}
    for query in ("", "?layers=1-2"):
        assert (await world.get(1, query)).status == 200
    # the digest of some of the layers has to be known before they are sent
    assert s3.requests(tmp_path.name, 3) == {"GET": 3}
    assert (await world.get(1, "?layers=1-2")).status == 200
    assert s3.requests(tmp_path.name, 1) == {"GET": 1}


async def test_a_block_that_is_stored_already_is_not_sent_to_the_store_again(
    s3: S3Server, tmp_path: Path
) -> None:
    store = s3_store(s3, tmp_path.name)
    a, b = [make_world([(ObjectTier(store, each, at_once=99), None)]) for each in (A, B)]
    await a.put(1)
    assert s3.requests(tmp_path.name, 3) == {"PUT": 2, "HEAD": 1}
    await b.put(1)
    assert s3.requests(tmp_path.name, 2) == {"PUT": 1, "HEAD": 1}
    assert (await b.get(1)).body == octets(container(1))


# --- a store that does not work ------------------------------------------------------


async def test_a_store_that_fails_is_503_and_tells_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_on(MemoryStore())
    await world.put(1)

    async def fail(*_: Any, **__: Any) -> Any:
        raise OSError("https://bucket.example/?X-Amz-Signature=secret")

    for name in ("get_async", "put_async"):
        monkeypatch.setattr(f"kvsp.holder.tiers.objects.obstore.{name}", fail)
    for answer in (await world.get(1), await world.put(2)):
        assert answer.status == 503 and "retry-after" in answer.headers
        assert b"secret" not in answer.body
    assert world.holder.store.used(REMOTE) == OCTETS


async def test_a_store_that_lets_nobody_in_ends_the_start_and_one_that_is_away_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    await (await world_on(store)).put(1)

    async def failing(error: Exception) -> Any:
        raise error
        yield

    def list_with(error: Exception) -> None:
        monkeypatch.setattr(
            "kvsp.holder.tiers.objects.obstore.list", lambda *_, **__: failing(error)
        )

    list_with(PermissionDeniedError("signature"))
    with pytest.raises(TierUnavailableError, match="PermissionDeniedError"):
        await ObjectTier(store, A).start()
    list_with(OSError("down"))
    world = await world_on(store)
    assert (await world.get(1)).status == 404
    monkeypatch.undo()
    await look(world)
    assert (await world.get(1)).body == octets(container(1))


async def test_a_store_that_is_away_is_asked_now_and_then_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    objects = ObjectTier(MemoryStore(), A, clock=clock)
    world = make_world([(DiskTier(tmp_path), OCTETS), (objects, None)])
    await world.holder.start()
    for number in (1, 2):
        await world.put(number)
    asked = 0

    async def fail(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        raise OSError("no route")

    with monkeypatch.context() as patch:
        patch.setattr("kvsp.holder.tiers.objects.obstore.get_async", fail)
        answers = [await world.get(1) for _ in range(50)]
        assert {answer.status for answer in answers} == {503} and asked == 3
        assert int(answers[-1].headers["retry-after"]) >= 1
        # what other tiers have is served all the same
        assert (await world.get(2)).status == 200
        ready = await world.client.get("/readyz")
        assert (ready.status, ready.json["status"]) == (200, "degraded")
    assert (await world.get(1)).status == 503
    clock.now += 1
    assert (await world.get(1)).body == octets(container(1))
    assert (await world.client.get("/readyz")).json["status"] == "ready"


def test_a_medium_that_does_not_work_is_asked_by_one_at_a_time_and_ever_more_seldom() -> None:
    now = 0.0
    circuit = Circuit(lambda: now)
    for _ in range(2):
        assert not circuit.failed() and circuit.wait_s() == 0
    assert circuit.failed() and circuit.is_open
    waits = []
    for _ in range(8):
        waits.append(circuit.wait_s())
        now += waits[-1]
        assert circuit.wait_s() == 0  # one asks
        assert circuit.wait_s() > 0  # nobody else does meanwhile
        assert not circuit.failed()
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert circuit.worked() and not circuit.is_open
    assert circuit.wait_s() == 0 and not circuit.worked()
