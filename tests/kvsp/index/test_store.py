"""Every store of the index keeps the same promises."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import ReplicaStore, StoreError, StoreFull, StoreLimits
from tests.kvsp.index.conftest import MakeStore
from tests.kvsp.index.entries import H1, H2, NOW, entry, key
from tests.kvsp.inside import wait_for_locks
from tests.redis_server import redis_server
from tools.bench_index import bench

COMPAT, SCOPE = entry().block[:2]


def test_a_replica_is_found_under_its_key_until_it_expires(make_store: MakeStore) -> None:
    store = make_store()
    assert store.put([entry(1, ttl_ms=500)], NOW) == [True]
    assert [r.data for r in store.get(SCOPE, COMPAT, [key(1)], NOW + 499)[0]] == [H1.encode()]
    assert store.get(SCOPE, COMPAT, [key(1)], NOW + 500) == [[]]


def test_a_refresh_replaces_the_whole_record_and_is_not_new(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, data=b"old")], NOW)
    assert store.put([entry(1, data=b"new", ttl_ms=20_000)], NOW) == [False]
    assert store.get(SCOPE, COMPAT, [key(1)], NOW) == [[(NOW + 20_000, b"new")]]


def test_a_record_published_again_after_it_expired_is_new(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, ttl_ms=10)], NOW)
    assert store.put([entry(1, ttl_ms=9000)], NOW + 11) == [True]


def test_answers_stand_in_the_order_of_the_keys_asked(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(n, data=b"%d" % n) for n in range(1200)], NOW)
    order = [1199, 5, 700, 5_000_000, 0]
    found = store.get(SCOPE, COMPAT, [key(n) for n in order], NOW)
    assert [[r.data for r in replicas] for replicas in found] == [
        [b"1199"],
        [b"5"],
        [b"700"],
        [],
        [b"0"],
    ]


def test_scopes_and_compatibility_ids_share_nothing(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1), entry(1, scope=7), entry(1, compat=7)], NOW)
    for scope, compat in ((0, 0), (7, 0), (0, 7)):
        block = entry(scope=scope, compat=compat).block
        assert len(store.get(block.scope_id, block.compat_id, [key(1)], NOW)[0]) == 1
    assert store.get(b"\x07" * 16, b"\x07" * 32, [key(1)], NOW) == [[]]


def test_delete_removes_one_replica_and_repeats_harmlessly(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1), entry(1, holder=H2)], NOW)
    assert store.delete(entry(1).block, entry(1).replica_id, NOW)
    assert not store.delete(entry(1).block, entry(1).replica_id, NOW)
    assert [r.data for r in store.get(SCOPE, COMPAT, [key(1)], NOW)[0]] == [H2.encode()]
    assert store.counts().records == 1


def test_everything_of_a_holder_goes_at_once(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(n) for n in range(5000)] + [entry(3, holder=H2), entry(1, scope=7)], NOW)
    assert store.has_replicas(H1, NOW)
    assert store.delete_holder(H1, [SCOPE]) == 5000
    assert store.has_replicas(H1, NOW)  # in the other scope
    assert store.delete_holder(H1, None) == 1
    assert not store.has_replicas(H1, NOW)
    assert store.has_replicas(H2, NOW)
    assert store.counts().records == 1


def test_a_scope_over_its_cap_loses_what_expires_first_and_counts_it(
    make_store: MakeStore,
) -> None:
    store = make_store(records_per_scope=10)
    store.put([entry(n, ttl_ms=1000 + n) for n in range(25)], NOW)
    store.put([entry(1, scope=7)], NOW)
    found = store.get(SCOPE, COMPAT, [key(n) for n in range(25)], NOW)
    assert [bool(replicas) for replicas in found] == [False] * 15 + [True] * 10
    assert store.counts()[:2] == (11, 15)


def test_a_block_over_its_number_of_replicas_loses_what_expires_first(
    make_store: MakeStore,
) -> None:
    store = make_store(replicas_per_block=3)
    holders = [f"https://h{n}.example/" for n in range(5)]
    for n, holder in enumerate(holders):
        store.put([entry(1, holder=holder, ttl_ms=5000 - n)], NOW)
    kept = {r.data.decode() for r in store.get(SCOPE, COMPAT, [key(1)], NOW)[0]}
    assert kept == {holders[0], holders[1], holders[4]}
    assert store.counts()[:2] == (3, 2)


def test_expired_records_are_removed_in_slices_after_they_lingered(make_store: MakeStore) -> None:
    store = make_store(linger_ms=1000)
    store.put([entry(n, ttl_ms=2000) for n in range(100)] + [entry(200, ttl_ms=60_000)], NOW)
    assert store.expire(NOW + 2999, 1000) == 0
    assert store.counts().records == 101
    assert store.expire(NOW + 3000, 60) == 60
    assert store.expire(NOW + 3000, 60) == 40
    assert store.counts() == (1, 0, 100)


def test_traces_show_expired_replicas_and_other_compatibility_ids(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, ttl_ms=5), entry(1, compat=7)], NOW)
    traces = {(compat, trace.expires_ms) for compat, trace in store.traces(SCOPE, key(1))}
    assert traces == {(COMPAT, NOW + 5), (b"\x07" * 32, NOW + 10_000)}
    assert store.traces(b"\x07" * 16, key(1)) == []


def test_descriptors_are_kept_as_stored_up_to_their_number(make_store: MakeStore) -> None:
    store = make_store(descriptors=1)
    assert store.descriptor(COMPAT) is None
    assert store.put_descriptor(COMPAT, b"{}")
    assert not store.put_descriptor(COMPAT, b"{}")
    assert store.descriptor(COMPAT) == b"{}"
    with pytest.raises(StoreFull):
        store.put_descriptor(b"\x07" * 32, b"{}")


def test_a_second_process_sees_the_same_records(make_store: MakeStore) -> None:
    make_store().put([entry(1)], NOW)
    second = make_store()
    assert len(second.get(SCOPE, COMPAT, [key(1)], NOW)[0]) == 1
    assert second.counts().records == 1


def test_the_whole_sqlite_store_is_bounded_at_the_cost_of_the_largest_scope(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "index.db", StoreLimits(records=20))
    store.put([entry(n) for n in range(18)], NOW)
    store.put([entry(n, scope=1) for n in range(8)], NOW)
    assert store.counts()[:2] == (20, 6)
    assert all(store.get(b"\x01" * 16, COMPAT, [key(n) for n in range(8)], NOW))


def test_the_benchmark_of_the_index_measures_what_it_says(tmp_path: Path) -> None:
    result = bench(600, 2, None, tmp_path)
    assert (result["store"], result["records"], result["lookup_keys"]) == ("sqlite", 600, 512)
    assert result["file_mib"] * result["inserts_per_s"] * result["lookup_ms_p50"] > 0


def test_a_killed_process_leaves_a_whole_sqlite_file(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    program = (
        "import os, sys\n"
        "from kvsp.index.sqlite import SqliteStore\n"
        "from tests.kvsp.index.entries import NOW, entry\n"
        "store = SqliteStore(sys.argv[1])\n"
        "store.put([entry(n) for n in range(50)], NOW)\n"
        "store._db.execute('BEGIN IMMEDIATE')\n"
        "store._put(entry(99), NOW)\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == 9
    store = SqliteStore(path)
    assert store.counts().records == 50
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_file_of_another_version_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match=r"index\.db.*can be removed"):
        SqliteStore(path)


def test_a_store_that_fails_says_so_and_keeps_its_counts_right(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "index.db")
    store.put([entry(1)], NOW)
    other = sqlite3.connect(tmp_path / "index.db")
    wait_for_locks(store, 0)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.put([entry(2)], NOW)
    other.rollback()
    assert store.counts().records == 1
    assert store.put([entry(2)], NOW) == [True]


def test_a_server_that_is_away_is_an_error_with_its_reason() -> None:
    redis = pytest.importorskip("kvsp.index.redis", reason="the extra 'redis' is not installed")
    with pytest.raises(StoreError, match="Valkey or Redis"):
        redis.RedisStore("redis://127.0.0.1:1/", timeout_s=0.2)


def all_keys(store: ReplicaStore, limit: int, compat: bytes = COMPAT) -> list[bytes]:
    """Every part of the list of keys, put together."""
    keys: list[bytes] = []
    after: bytes | None = b""
    while after is not None:
        part = store.list_keys(SCOPE, compat, after, limit)
        assert len(part.keys) <= limit
        keys += part.keys
        after = part.next
    return keys


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_keys_are_listed_in_ascending_order_in_parts_of_any_size(
    make_store: MakeStore, limit: int
) -> None:
    store = make_store()
    numbers = [9, 1, 300, 4, 70_000]
    store.put([entry(number, holder=holder) for number in numbers for holder in (H1, H2)], NOW)
    store.put([entry(2, compat=1), entry(4, compat=1), entry(3, scope=1)], NOW)
    candidates = all_keys(store, limit)
    found = store.get(SCOPE, COMPAT, candidates, NOW)
    assert [k for k, replicas in zip(candidates, found, strict=True) if replicas] == [
        key(number) for number in sorted(numbers)
    ]
    assert len(set(candidates)) == len(candidates)


def test_withdrawn_and_expired_keys_leave_the_list(make_store: MakeStore) -> None:
    store = make_store(linger_ms=0)
    store.put([entry(1, ttl_ms=10), entry(2), entry(3, holder=H2), entry(4)], NOW)
    store.delete(entry(2).block, entry(2).replica_id, NOW)
    store.delete_holder(H2, None)
    store.expire(NOW + 10, 100)
    assert all_keys(store, 100) == [key(4)]
    assert all_keys(store, 100, bytes([7]) * 32) in ([], [key(4)])


def test_a_server_that_restarts_empty_is_used_again_without_a_restart_of_the_index(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path) as url:
        from kvsp.index.redis import RedisStore

        store = RedisStore(url, prefix="p")
        store.put([entry(1)], NOW)
    with pytest.raises(StoreError):
        store.get(SCOPE, COMPAT, [key(1)], NOW)
    with redis_server(tmp_path):
        # its scripts are gone, too
        assert store.get(SCOPE, COMPAT, [key(1)], NOW) == [[]]
        assert store.put([entry(1)], NOW) == [True]
        assert store.delete(entry(1).block, entry(1).replica_id, NOW)
        assert store.put([entry(2)], NOW) == [True]
        assert store.delete_holder(H1, None) == 1
        store.close()


def _sqlite(path: Path) -> SqliteStore:
    return SqliteStore(path, StoreLimits())


@pytest.mark.parametrize("size", [100, 5000, 40_000])
def test_a_damaged_file_is_set_aside_and_the_index_starts_empty(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "index.db"
    with closing(_sqlite(path)) as store:
        store.put([entry(number) for number in range(100)], NOW)
    path.write_bytes(b"rotten octets!" * (size // 14))
    with closing(_sqlite(path)) as store:
        assert store.damaged == 1 and store.counts().records == 0
        assert store.put([entry(1)], NOW) == [True]
    assert (tmp_path / "index.db.damaged").read_bytes().startswith(b"rotten")
    assert "starts empty" in caplog.text
    with closing(_sqlite(path)) as store:
        assert store.damaged == 0 and store.counts().records == 1


def test_damage_that_is_found_later_costs_one_request_and_the_records(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with closing(_sqlite(path)) as store:
        store.put([entry(number) for number in range(3000)], NOW)
    octets = bytearray(path.read_bytes())
    for at in range(8192 * 8, len(octets), 8192):  # the pages, not the first ones of the schema
        octets[at : at + 200] = bytes([0x55]) * 200
    path.write_bytes(octets)
    with closing(_sqlite(path)) as store:
        keys = [key(number) for number in range(3000)]
        if not store.damaged:
            with pytest.raises(StoreError, match="started empty"):
                store.get(SCOPE, COMPAT, keys, NOW)
        assert store.damaged == 1
        assert store.get(SCOPE, COMPAT, keys[:1], NOW) == [[]]
        assert store.put([entry(1)], NOW) == [True]
        assert len(store.get(SCOPE, COMPAT, [key(1)], NOW)[0]) == 1
