"""A store of pages answers in time, with less where something fails, and never by an exception."""

from __future__ import annotations

import logging
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcs.pages.counters import Doing, Outcome, PageCounters
from kvcs.pages.settings import PagesError, PageSettings
from kvcs.pages.store import PageStore
from tests.kvcs.pages.services import FORM, settings

NOBODY = "http://127.0.0.1:9/kvsp/"
"""Nobody listens on the port `discard`."""


@pytest.fixture
def made(tmp_path):
    """Makes stores on services that are not there, and closes them."""
    stores = []

    def make(**more) -> PageStore:
        counters = PageCounters()
        counters.register(CollectorRegistry())
        ours = PageSettings.parse(settings(tmp_path, NOBODY, **more))
        stores.append(PageStore(ours, FORM, counters))
        return stores[-1]

    yield make
    for each in stores:
        each.close()


def test_services_that_are_not_there_are_asked_once_and_told_of_once(made, caplog) -> None:
    store = made()
    page = bytearray(store.place.octets)
    with caplog.at_level(logging.WARNING, "kvcs.pages"):
        for _ in range(5):
            assert store.wait(store.exists(["a", "b"])) == 0
            assert store.wait(store.get(["a"], [page])) == 0
            assert store.wait(store.put(["a"], [page])) == 0
    assert store.counters.of(Doing.LOOK_UP) == {"unreachable": 2, "open": 8}
    assert store.counters.of(Doing.GET) == {"open": 5}
    assert store.counters.of(Doing.PUT) == {"open": 5}, "they would never be found"
    (said,) = (each.getMessage() for each in caplog.records)
    assert f"{NOBODY} is not asked for 30 s: " in said


def test_a_service_is_asked_again_when_its_time_is_over(made) -> None:
    store = made(failed_seconds=1e-9)
    for _ in range(3):
        assert store.wait(store.exists(["a"])) == 0
    assert store.counters.of(Doing.LOOK_UP) == {"unreachable": 3}


def test_what_is_put_beyond_the_budget_is_dropped_and_told_once(made, caplog) -> None:
    store = made(pending_octets=1000)
    page = bytes(store.place.octets)
    with caplog.at_level(logging.WARNING, "kvcs.pages"):
        for _ in range(3):
            assert store.wait(store.put(["a", "b"], [page, page])) == 0
    assert store.counters.of(Doing.PUT) == {"full": 6}
    said = [each.getMessage() for each in caplog.records]
    assert said == ["pages are not stored: 0 octets are being put already (pending_octets)"]
    assert store.wait(store.put(["a"], [page])) == 0, "one has room, and nobody to take it"
    assert store.counters.of(Doing.PUT)["unreachable"] == 1


def test_room_is_given_back_when_a_put_is_over(made) -> None:
    store = made(pending_octets=800)
    page = bytes(store.place.octets)
    for _ in range(4):
        assert store.wait(store.put(["a"], [page])) == 0
    assert "full" not in store.counters.of(Doing.PUT)


def test_what_is_no_page_is_not_put(made) -> None:
    store = made()
    assert store.wait(store.put(["a"], [bytes(7)])) == 0
    assert store.counters.of(Doing.PUT) == {"form": 1}


def test_a_closed_store_answers_and_says_so(made) -> None:
    store = made()
    store.close()
    assert store.wait(store.exists(["a"])) == 0
    assert store.wait(store.put(["a"], [bytes(store.place.octets)])) == 0
    assert store.counters.of(Doing.LOOK_UP) == {"closed": 1}
    assert store.counters.of(Doing.PUT) == {"closed": 1}


def test_an_answer_cannot_be_cancelled_by_who_gives_up_waiting(made) -> None:
    store = made()
    answer = store.exists(["a"])
    assert not answer.cancel()
    assert store.wait(answer) == 0


def test_many_threads_get_their_answers(made) -> None:
    store, answers = made(), []
    threads = [
        threading.Thread(target=lambda: answers.append(store.wait(store.exists(["a"]))))
        for _ in range(20)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert answers == [0] * 20
    assert sum(store.counters.of(Doing.LOOK_UP).values()) == 20


@pytest.mark.parametrize(
    "more, said",
    [
        ({"scope_key_file": "nowhere.json"}, "nowhere.json: "),
        ({"descriptor": "nowhere.json"}, "nowhere.json: "),
        ({"holder": "ftp://holder/"}, "a base URI starts with https://"),
        ({"http_loopback": False}, "http is for loopback hosts"),
        ({"token_file": "nowhere.token"}, "nowhere.token: "),
    ],
)
def test_what_is_wrong_with_a_file_or_a_uri_is_said_at_the_start(made, more, said: str) -> None:
    with pytest.raises(PagesError) as error:
        made(**more)
    assert said in str(error.value)


def test_the_counters_are_shown_as_metrics() -> None:
    counters, registry = PageCounters(), CollectorRegistry()
    counters.register(registry)
    counters.register(registry)
    assert counters.add(Doing.GET, Outcome.DONE, 3, 300) == 3
    text = generate_latest(registry).decode()
    assert 'kvcs_pages_total{doing="get",outcome="done"} 3.0' in text
    assert 'kvcs_page_octets_total{doing="get"} 300.0' in text
