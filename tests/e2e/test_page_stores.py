"""What holders do to an engine's pages, and engines to each other's: never a wrong page, and what
fails at one holder hides nothing of the others."""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import replace

import pytest

from kvcs.pages.counters import Doing
from kvcs.pages.store import PageStore
from tests.e2e.kvsp_support import Server, sharing, start
from tests.e2e.pages_engine import LARGE, page_of, put, store_of
from tests.e2e.support import Process, eventually
from tests.kvcs.pages.services import FORM, settings


def holder_of(folder, index: Server, name: str, **limits) -> Server:
    table = {"disk_mib": 64, "host_mib": 1, "scrub_mib_per_s": 0.0, **limits}
    return Server(folder, name, "holder", shared=True, peers={"index": index.base}, holder=table)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """An index and two holders, in processes of their own."""
    folder = tmp_path_factory.mktemp("services")
    index = Server(folder, "index", "index", shared=True)
    holders = [holder_of(folder, index, name) for name in ("one", "two")]
    start(index, *holders)
    with sharing(index, *holders):
        yield index, *holders


@pytest.fixture
def stores(services, tmp_path):
    """Makes stores of pages, whose counters are their own; they are closed."""
    made = []

    def store(holder: Server | None = None, form=LARGE, **more) -> PageStore:
        index, one, _ = services
        ours = settings(tmp_path / "files", index.base, (holder or one).base, **more)
        made.append(store_of(ours, form))
        return made[-1]

    yield store
    for each in made:
        each.close()


def got(store: PageStore, names: list[str]) -> int:
    """How many come; those are what they should be."""
    pages = [bytearray(store.place.octets) for _ in names]
    count = store.wait(store.get(names, pages))
    for name, page in zip(names[:count], pages, strict=False):
        assert page == page_of(name, store.place.octets), name
    return count


def there(store: PageStore, names: list[str]) -> int:
    return store.wait(store.exists(names))


def found(store: PageStore, names: list[str]) -> None:
    eventually(lambda: there(store, names) == len(names), "the records")


def test_of_an_engine_that_is_killed_while_it_puts_no_page_is_found_in_part(
    stores, services, tmp_path
):
    index, one, _ = services
    store, names = stores(), [f"killed {number}" for number in range(40)]
    ours = json.dumps(settings(tmp_path / "files", index.base, one.base))
    command = (sys.executable, "-m", "tests.e2e.pages_engine", ours, *names)
    engine = Process(tmp_path, "engine", *command)
    eventually(lambda: there(store, names) > 1, "its first pages")
    engine.signal(signal.SIGKILL)
    engine.popen.wait()
    count = there(store, names)
    assert got(store, names[:count]) == count > 1
    assert put(store, names) == 40, "another engine goes on where it ended"
    found(store, names)
    assert got(store, names) == 40


def test_engines_that_put_and_get_the_same_pages_at_once_get_them_whole_or_not_at_all(stores):
    names, every = [f"at once {number}" for number in range(6)], [stores() for _ in range(4)]
    stored, wrong = [], []

    def engine(store: PageStore) -> None:
        stored.append(put(store, names))
        for _ in range(5):
            try:
                got(store, names)
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=engine, args=(each,)) for each in every]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert stored == [6] * 4 and not wrong
    found(every[0], names)
    assert got(every[0], names) == 6


def test_a_holder_that_is_gone_costs_its_pages_and_hides_none_of_the_others(services, tmp_path):
    index, one, _ = services
    lost = holder_of(tmp_path, index, "lost")
    start(lost)
    names = [f"gone {number}" for number in range(4)]
    with sharing(lost):
        made = [
            store_of(settings(tmp_path / "files", index.base, each.base, timeout=5))
            for each in (lost, one)
        ]
        store = made[1]
        assert put(made[0], names[:2]) == 2
        assert put(store, names[2:]) == 2
        found(store, names)
        lost.kill()
        assert got(store, names) == 0, "the first page was there alone"
        assert got(store, names[2:]) == 2
        assert got(store, [*names[2:], *names[:2]]) == 2
        counted = store.counters.of(Doing.GET)
        assert counted["open"] == 2, "it is not asked again for a while"
        assert put(store, names[:2]) == 2, "what was lost is computed, and stored elsewhere"
        found(store, names)
        assert got(store, names) == 4
        assert put(made[0], ["nobody takes it"]) == 0
        assert there(made[0], names) == 4, "the index is asked all the same"
        for each in made:
            each.close()


def test_what_a_holder_has_no_room_for_is_not_stored_and_costs_no_more_than_that(
    services, tmp_path
):
    index, one, _ = services
    small = holder_of(tmp_path, index, "small", disk_mib=1)
    start(small)
    with sharing(small):
        names, form = ["large"], replace(LARGE, page_tokens=2 * LARGE.page_tokens)
        ours = settings(tmp_path / "files", index.base, small.base)
        full = store_of(ours, form)
        elsewhere = store_of(ours | {"holder": one.base}, form)
        assert put(full, names) == 0
        assert put(full, names) == 0
        assert there(full, names) == 0
        assert set(full.counters.of(Doing.PUT)) <= {"refused", "open"}
        assert put(elsewhere, names) == 1
        found(full, names)
        assert got(full, names) == 1, "that it takes nothing keeps nobody from getting"
        for each in (full, elsewhere):
            each.close()


def test_a_holder_that_keeps_few_pages_lets_old_ones_go_and_never_mixes_them_up(services, tmp_path):
    index, _, _ = services
    small = holder_of(tmp_path, index, "few", disk_mib=4)
    start(small)
    with sharing(small):
        ours = settings(tmp_path / "files", index.base, small.base)
        store = store_of(ours)
        names = [f"old {number}" for number in range(12)]
        for name in names:
            assert put(store, [name]) == 1
        found(store, names[-1:])
        assert got(store, names[-1:]) == 1
        assert sum(got(store, [name]) for name in names) < 12
        store.close()


@pytest.mark.parametrize("name", ["", "a" * 100_000, "\u00e9/../?#%00", "\x00"])
def test_a_name_may_be_any_text(stores, name):
    store = stores(form=FORM)
    assert put(store, [name]) == 1
    found(store, [name])
    assert got(store, [name]) == 1
    assert there(store, [name + "b"]) == 0


def test_a_batch_that_a_holder_did_not_take_in_time_can_be_put_again(stores, services):
    _, _, two = services
    store = stores(two, timeout=3.0, uploads=1, failed_seconds=1e-9)
    names = [f"late {number}" for number in range(3)]
    assert put(store, names[:1]) == 1
    found(store, names[:1])
    two.process.signal(signal.SIGSTOP)
    try:
        assert put(store, names) == 0
        assert store.counters.of(Doing.PUT)["timeout"] == 3
    finally:
        two.process.signal(signal.SIGCONT)
    assert put(store, names) == 3
    found(store, names)
    assert got(store, names) == 3
