"""Records that live as long as their holder is kept alive: in stores, service and over HTTP."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsp.http.app import App
from kvsp.index.app import IndexApp
from kvsp.index.arrivals import Arrivals
from kvsp.index.redis import SCOPE_KEPT_MS, RedisStore
from kvsp.index.service import IndexLimits, IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import KEPT_MS, Entry, StoreError, StoreLimits
from kvsp.names.uris import compat_path
from kvsp.principals import Principal
from kvsp.records.records import KeptAnswer, LookupResponse, ReplicaRecord
from tests.kvsp.index.conftest import MakeStore
from tests.kvsp.index.entries import H1, H2, NOW, entry, key
from tests.kvsp.index.support import DESCRIPTOR, HOLDER, principal, record, request
from tests.kvsp.index.support import H1 as HOLDER_URI
from tests.kvsp.index.support import H2 as OTHER_URI
from tests.kvsp.inside import commands_of, fail_once, trace_statements
from tests.kvsp.support_http import BASE, Client, Principals, running
from tools.bench_index import bench_kept

COMPAT, SCOPE_ID = bytes(32), bytes(16)


def kept(number: int, holder: str = H1, **more: Any) -> Entry:
    return replace(entry(number, holder=holder, **more), expires_ms=KEPT_MS)


def found(store: Any, now_ms: int, *numbers: int) -> list[int]:
    """How many replicas of each key are found."""
    keys = [key(number) for number in numbers]
    return [len(each) for each in store.get(SCOPE_ID, COMPAT, keys, now_ms)]


def test_kept_records_are_found_as_long_as_their_holder_lives(make_store: MakeStore) -> None:
    store = make_store()
    store.put([kept(1), kept(2), kept(3, H2), entry(4)], NOW)
    assert found(store, NOW, 1, 2, 3, 4) == [0, 0, 0, 1]
    assert store.keep_alive(H1, NOW + 1000, NOW) == 2
    assert found(store, NOW, 1, 2, 3, 4) == [1, 1, 0, 1]
    ((replica,),) = store.get(SCOPE_ID, COMPAT, [key(1)], NOW)
    assert replica.expires_ms == NOW + 1000
    assert found(store, NOW + 1000, 1, 2) == [0, 0]
    # one request brings all of them back, whenever it comes
    assert store.keep_alive(H1, NOW + 5000, NOW + 2000) == 2
    assert found(store, NOW + 2000, 1, 2) == [1, 1]
    assert store.has_replicas(H1, NOW + 2000) and not store.has_replicas(H2, NOW)
    assert store.keep_alive("https://h3.example/", NOW, NOW) == 0


def test_what_is_kept_is_counted_through_every_change(make_store: MakeStore) -> None:
    store = make_store()

    def count(holder: str) -> int:
        return store.keep_alive(holder, NOW + 1000, NOW)

    assert list(store.put([kept(1), kept(2)], NOW)) == [True, True]
    assert (count(H1), store.counts().records) == (2, 2)
    # the holder is alive now: to put one again is a refresh
    assert list(store.put([kept(1)], NOW)) == [False]
    # the same replica with a TTL of its own is kept no more, and the other way round
    store.put([entry(1)], NOW)
    assert count(H1) == 1 and found(store, NOW, 1, 2) == [1, 1]
    store.put([kept(1)], NOW)
    assert count(H1) == 2
    assert store.delete(kept(1).block, kept(1).replica_id, NOW)
    assert count(H1) == 1
    store.put([kept(5, scope=1), kept(6, H2)], NOW)
    assert (count(H1), count(H2)) == (2, 1)
    assert store.delete_holder(H1, [SCOPE_ID]) == 1
    assert count(H1) == 1
    assert store.delete_holder(H1, None) == 1
    assert (count(H1), count(H2), store.counts().records) == (0, 1, 1)


def test_what_nobody_keeps_alive_is_removed_after_it_lingered(make_store: MakeStore) -> None:
    store = make_store(linger_ms=100)
    store.put([kept(number) for number in range(5)] + [kept(7, H2)], NOW)
    store.keep_alive(H1, NOW + 1000, NOW)
    store.keep_alive(H2, NOW + 9000, NOW)
    assert store.expire(NOW + 1099, 100) == 0
    ((_, replica),) = store.traces(SCOPE_ID, key(1))
    assert replica.expires_ms == NOW + 1000
    assert store.expire(NOW + 1100, 3) == 3
    assert store.expire(NOW + 1100, 3) == 2
    assert store.counts().records == 1 and store.counts().expired == 5
    assert found(store, NOW + 1100, 7) == [1]


def test_what_was_never_kept_alive_is_removed_too(
    make_store: MakeStore,
) -> None:
    """As of a holder whose first records came when the index process was killed."""
    make_store(linger_ms=100).put([kept(1), kept(2, H2)], NOW)
    store = make_store(linger_ms=100)
    store.keep_alive(H2, NOW + 9000, NOW)
    assert store.expire(NOW + 200, 100) == 1
    assert store.counts().records == 1 and found(store, NOW + 200, 1, 2) == [0, 1]


def test_a_transaction_that_fails_counts_nothing(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "index.db")) as store:
        store.put([kept(1)], NOW)
        broken = replace(kept(3), data=object())  # type: ignore[arg-type]
        with pytest.raises(Exception, match="type 'object' is not supported"):
            store.put([kept(2), entry(4), broken], NOW)
        assert (store.counts().records, store.keep_alive(H1, NOW + 1, NOW)) == (1, 1)


def test_a_commit_that_fails_files_nothing_counts_nothing_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    with closing(SqliteStore(tmp_path / "index.db", StoreLimits(linger_ms=0))) as store:
        store.put([kept(1)], NOW)
        store.keep_alive(H1, NOW + 1000, NOW)

        def same() -> None:
            assert (store.counts(), found(store, NOW, 1, 2)) == (before, [1, 0])

        before = store.counts()
        fail_once(store, "COMMIT")
        with pytest.raises(StoreError, match="full"):
            store.put([kept(2), kept(3, H2)], NOW)
        same()
        for call in (
            lambda: store.delete(kept(1).block, kept(1).replica_id, NOW),
            lambda: store.delete_holder(H1, None),
            lambda: store.expire(NOW + 2000, 100),
            lambda: store.keep_alive(H1, NOW + 9000, NOW),
        ):
            fail_once(store, "COMMIT")
            with pytest.raises(StoreError, match="full"):
                call()
            same()
        assert list(store.put([kept(2), kept(3, H2)], NOW)) == [True, True]
        assert store.keep_alive(H2, NOW + 500, NOW) == 1
        assert store.expire(NOW + 1500, 100) == 3
        assert store.counts().records == 0
    with closing(SqliteStore(tmp_path / "index.db")) as again:
        assert again.counts().records == 0


def test_of_records_that_are_kept_the_last_blocks_of_prompts_go_first(
    make_store: MakeStore,
) -> None:
    store = make_store(records_per_scope=16)
    store.put([replace(kept(number), position=number) for number in range(17)], NOW)
    store.keep_alive(H1, NOW + 1000, NOW)
    assert found(store, NOW, *range(17)) == [1] * 16 + [0]
    assert store.counts().evicted == 1
    # those that end by themselves do so first
    store.put([entry(100), replace(kept(50), position=2)], NOW)
    assert found(store, NOW, 100, 50, 14, 15) == [0, 1, 1, 0]


def expiring(path: Path, scopes: int) -> int:
    """Statements of a sweep and of the counts, with records in so many scopes."""
    with closing(SqliteStore(path / f"{scopes}.db", StoreLimits(linger_ms=0))) as store:
        store.put([entry(1, scope=each % 256, compat=each // 256) for each in range(scopes)], NOW)
        store.put([kept(2)], NOW)
        store.keep_alive(H1, NOW + 90_000, NOW)
        statements = trace_statements(store)
        store.expire(NOW + 1, 100)
        assert store.counts().records == scopes + 1
        assert store.expire(NOW + 20_000, 7) == 7
        return len(statements)


def test_a_sweep_visits_no_scope_in_which_nothing_has_ended(tmp_path: Path) -> None:
    assert expiring(tmp_path, 8) == expiring(tmp_path, 256)


def test_what_is_asked_of_redis_for_one_holder_visits_no_scope_of_others(
    redis_url: str, tmp_path: Path
) -> None:
    asked = []
    for others in (4, 200):
        store = RedisStore(redis_url, prefix=f"{tmp_path.name}{others}")
        with closing(store):
            store.put([kept(1, H2, scope=each) for each in range(others)], NOW)
            store.put([kept(1, scope=1), kept(1, scope=2)], NOW)
            before = commands_of(store)
            assert store.keep_alive(H1, NOW + 1000, NOW) == 2
            assert store.has_replicas(H1, NOW)
            assert store.delete_holder(H1, None) == 2
            asked.append(commands_of(store) - before)
            assert store.keep_alive(H2, NOW + 1000, NOW) == others
    assert asked[0] == asked[1]


def test_a_scope_that_a_holder_left_long_ago_is_not_looked_at_for_it_any_more(
    redis_url: str, tmp_path: Path
) -> None:
    with closing(RedisStore(redis_url, prefix=tmp_path.name)) as store:
        store.put([kept(1, scope=each) for each in range(40)], NOW)
        for each in range(39):
            assert store.delete(kept(1, scope=each).block, kept(1).replica_id, NOW)
        later = NOW + SCOPE_KEPT_MS
        assert store.keep_alive(H1, later + 60_000, later) == 1
        before = commands_of(store)
        assert store.keep_alive(H1, later + 60_000, later) == 1
        assert commands_of(store) - before < 10
        # one that it comes back to is
        store.put([kept(2, scope=3)], later)
        assert store.keep_alive(H1, later + 60_000, later) == 2


def test_a_sweep_of_redis_takes_a_part_of_very_many_scopes_and_counts_them_all_in_the_end(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsp.index.redis.SCOPES_PER_PASS", 16)
    with closing(RedisStore(redis_url, prefix=tmp_path.name)) as store:
        for each in range(250):
            store.put([entry(1, scope=each), entry(2, scope=each, ttl_ms=90_000)], NOW)
        removed, sweeps = 0, 0
        while removed < 250:
            before = commands_of(store)
            removed += store.expire(NOW + 80_000, 1000)
            assert commands_of(store) - before < 20 * 64
            sweeps += 1
        assert sweeps > 2
        for _ in range(sweeps):
            store.expire(NOW + 80_000, 1000)
        assert store.counts().records == 250


def test_what_is_kept_is_kept_over_a_restart_of_the_index(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "index.db")) as store:
        store.put([kept(1), kept(2), entry(3)], NOW)
        store.keep_alive(H1, NOW + 1000, NOW)
    with closing(SqliteStore(tmp_path / "index.db")) as store:
        assert found(store, NOW, 1, 2, 3) == [1, 1, 1]
        assert store.keep_alive(H1, NOW + 2000, NOW) == 2


def test_a_file_of_an_older_version_keeps_its_descriptors_and_is_filled_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "index.db"
    with closing(SqliteStore(path)) as store:
        store.put_descriptor(COMPAT, b"{}")
        store.put([entry(1)], NOW)
    with closing(sqlite3.connect(path)) as old:
        old.execute("ALTER TABLE holders DROP COLUMN alive_ms")
        old.execute("PRAGMA user_version = 1")
        old.commit()
    with closing(SqliteStore(path)) as store:
        assert store.descriptor(COMPAT) == b"{}" and store.counts().records == 0
        store.put([kept(1)], NOW)
        assert store.keep_alive(H1, NOW + 1, NOW) == 1


# --- withdrawn by another process ----------------------------------------------------


@pytest.fixture
def two(redis_url: str, tmp_path: Path) -> Iterator[tuple[RedisStore, RedisStore]]:
    """The stores of two index processes."""
    made = [RedisStore(redis_url, StoreLimits(), prefix=tmp_path.name) for _ in range(2)]
    yield made[0], made[1]
    for store in made:
        store.close()


def test_a_record_that_another_process_withdrew_while_it_arrived_does_not_come_to_stay(
    two: tuple[RedisStore, RedisStore],
) -> None:
    here, there = two
    here.put([entry(1)], NOW)
    assert there.delete(entry(1).block, entry(1).replica_id, NOW)
    # its head came ten seconds ago, before the DELETE
    assert list(here.put([entry(1), entry(2)], NOW, 10_000)) == [None, True]
    assert found(here, NOW, 1, 2) == [0, 1]
    # also one that was not there when it was withdrawn
    assert not there.delete(entry(5).block, entry(5).replica_id, NOW)
    assert list(here.put([entry(5)], NOW, 10_000)) == [None]


def test_a_record_that_is_published_after_it_was_withdrawn_is_there(
    two: tuple[RedisStore, RedisStore],
) -> None:
    here, there = two
    there.delete(entry(1).block, entry(1).replica_id, NOW)
    there.delete_holder(H1, [SCOPE_ID])

    time.sleep(0.01)  # the server counts in milliseconds
    assert list(here.put([entry(1)], NOW, 0)) == [True]


def test_what_another_process_withdrew_of_a_whole_holder_does_not_come_to_stay(
    two: tuple[RedisStore, RedisStore],
) -> None:
    here, there = two
    here.put([entry(1), entry(2, holder=H2)], NOW)
    assert there.delete_holder(H1, None) == 1
    assert list(here.put([entry(3), entry(4, holder=H2)], NOW, 10_000)) == [None, True]


# --- the service ---------------------------------------------------------------------

NOW_MS = 1_900_000_000_000


@pytest.mark.parametrize("kept_with_holder", [False, True])
async def test_a_record_is_as_old_as_it_is_when_it_is_filed_and_not_when_it_came(
    kept_with_holder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a thread, or is read there, can be overtaken by a DELETE meanwhile."""
    now, ages = [0.0], list[int]()
    monkeypatch.setattr("kvsp.index.app.Arrivals", lambda: Arrivals(lambda: now[0]))
    served = Served()
    core, put = served.core, served.core.store.put
    core.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)

    def noting(entries: Any, now_ms: int, age_ms: int = 0) -> Any:
        ages.append(age_ms)
        return put(entries, now_ms, age_ms)

    def slow(compat_id: bytes) -> Any:
        now[0] += 0.5
        return DESCRIPTOR

    monkeypatch.setattr(core.store, "put", noting)
    monkeypatch.setattr(core, "descriptor", slow)
    async with running(served.app):
        if kept_with_holder:
            await served.keep(record())
        else:
            tree = record().to_dict()
            answer = await served.client().request("PUT", record().path, json_body=tree)
            assert answer.status == 201
    assert ages == [500]


class Served:
    def __init__(self, **limits: Any) -> None:
        self.now = NOW_MS
        limits = {"http_loopback": False, **limits}
        self.core = IndexService(SqliteStore(":memory:"), limits=IndexLimits(**limits))
        self.index = IndexApp(self.core, sweep_s=3600, clock_ms=lambda: self.now)
        everybody = {
            "h1": replace(HOLDER, name="h1"),
            "h2": replace(principal(OTHER_URI), name="h2"),
            "reader": replace(principal(HOLDER_URI, rights="read"), name="reader"),
            "operator": Principal("operator", roles=frozenset({"operator"})),
        }
        self.app = App([self.index], base_uri=BASE, authenticator=Principals(*everybody.values()))

    def client(self, name: str = "h1") -> Client:
        return Client(self.app, name)

    async def keep(self, *records: ReplicaRecord, name: str = "h1", **changes: Any) -> Any:
        body = {
            "holder": HOLDER_URI,
            "ttl_ms": 600_000,
            "records": [each.to_dict() for each in records],
        }
        return await self.client(name).request("POST", "replicas", json_body=body | changes)

    async def matched(self, count: int) -> int:
        answer = await self.client().request("POST", "lookup", json_body=request(count).to_dict())
        return LookupResponse.from_json(answer.body, descriptor=DESCRIPTOR).matched


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Served]:
    made = Served(**limits)
    async with running(made.app):
        stored = await made.client().request(
            "PUT",
            compat_path(DESCRIPTOR.compat_id),
            DESCRIPTOR.jcs,
            {"content-type": "application/kvsp+json"},
        )
        assert stored.status == 201
        yield made


async def test_many_records_are_published_at_once_and_kept_alive_by_a_request_of_none() -> None:
    async with served() as made:
        answer = KeptAnswer.from_json((await made.keep(record(0), record(1))).body)
        assert (answer.ttl_ms, answer.records) == (600_000, 2)
        assert answer.results == ({"created": True}, {"created": True})
        assert await made.matched(5) == 2
        found = await made.client().get(record(0).path)
        assert found.json == record(0).to_dict()
        made.now += 500_000
        again = KeptAnswer.from_json((await made.keep()).body)
        assert (again.records, again.results) == (2, ())
        made.now += 500_000
        assert await made.matched(5) == 2
        assert (await made.client().get(record(0).path)).json["ttl_ms"] == 100_000
        made.now += 100_000
        assert await made.matched(5) == 0


async def test_each_of_many_records_has_its_own_result() -> None:
    async with served() as made:
        elsewhere = replace(record(1), holder=OTHER_URI)
        unknown = replace(record(2), compat_id=bytes(32))
        wrong = replace(record(3), digest=bytes(32))
        answer = await made.keep(record(0), elsewhere, unknown, wrong, record(4))
        results = answer.json["results"]
        assert [each.get("problem") for each in results] == [
            None,
            "kvsp-invalid-request",
            "kvsp-compat-unknown",
            "kvsp-digest-mismatch",
            None,
        ]
        assert answer.json["records"] == 2 and all("detail" in each for each in results[1:4])


async def test_only_the_holder_keeps_its_records_alive_and_only_in_scopes_it_may_write() -> None:
    async with served() as made:
        assert (await made.keep(record(0), name="h2")).problem == "kvsp-forbidden"
        refused = (await made.keep(record(0), name="reader")).json
        assert refused["records"] == 0
        assert refused["results"][0]["problem"] == "kvsp-forbidden"


async def test_a_ttl_is_cut_to_the_most_and_so_is_the_number_of_records() -> None:
    async with served(max_ttl_ms=1000, records=2) as made:
        assert (await made.keep(record(0))).json["ttl_ms"] == 1000
        over = await made.keep(record(0), record(1), record(2))
        assert (over.status, over.json["limit"]) == (413, 2)


async def test_all_records_of_a_holder_end_by_one_request() -> None:
    async with served() as made:
        await made.keep(*(record(number) for number in range(5)))
        answer = await made.client().request("DELETE", f"replicas?holder={HOLDER_URI}")
        assert answer.json == {"withdrawn": 5}
        assert await made.matched(5) == 0
        assert (await made.keep()).json["records"] == 0


@pytest.mark.parametrize("whole", [False, True])
async def test_records_that_are_withdrawn_while_they_arrive_do_not_come_to_stay(
    whole: bool,
) -> None:
    async with served() as made:
        delete = f"replicas?holder={HOLDER_URI}" if whole else record(1).path
        parse, deletions = made.app.bodies.parse, []

        async def after_the_deletion(*values: Any) -> Any:
            deletions.append(await made.client().request("DELETE", delete))
            return await parse(*values)

        made.app.bodies.parse = after_the_deletion  # type: ignore[method-assign]
        answer = await made.keep(record(0), record(1))
        late = ["detail" in each for each in answer.json["results"]]
        assert late == ([True, True] if whole else [False, True])
        assert answer.json["records"] == late.count(False)


async def test_what_is_remembered_of_withdrawals_is_what_open_requests_may_have_missed() -> None:
    arrivals = Arrivals(lambda: 0.0)
    who = principal(HOLDER_URI)
    block = record(0).block
    arrivals.withdrawn(who, HOLDER_URI)
    assert len(arrivals) == 0  # nothing is under way
    with arrivals.one() as first:
        arrivals.withdrawn(who, (block, "a"))
        with arrivals.one() as second:
            arrivals.withdrawn(who, (block, "b"))
            for _ in range(3):
                arrivals.withdrawn(who, (block, "b"))
            assert first.is_late(block, "a", HOLDER_URI)
            assert not second.is_late(block, "a", HOLDER_URI)
            assert second.is_late(block, "b", HOLDER_URI)
            assert not second.is_late(block, "b", OTHER_URI)
        assert len(arrivals) == 2
    assert len(arrivals) == 0


async def test_the_measurement_of_kept_records_keeps_them(tmp_path: Path) -> None:
    result = await bench_kept(600, 2, tmp_path)
    assert (result["kept_records"], result["holders"]) == (600, 100)
    assert result["core_share_percent"] * result["published_per_cpu_s"] > 0


async def test_a_sweep_does_not_mistake_kept_records_for_expired_ones() -> None:
    async with served() as made:
        await made.keep(record(0))
        made.now += 500_000
        await made.keep()
        await made.index.run(made.index.sweep)
        assert await made.matched(1) == 1
        made.now += 600_000 + 60_000
        await made.index.run(made.index.sweep)
        assert made.core.store.counts().records == 0
