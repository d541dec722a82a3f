"""What full collections look at: not every Object that is cached, and everything now and then."""

from __future__ import annotations

import gc

import pytest

from relay.service.garbage import GROWTH, REQUESTS, SESSIONS, Garbage


@pytest.fixture
def calls(monkeypatch):
    made: list[str] = []
    for name in ("freeze", "unfreeze", "collect"):
        monkeypatch.setattr(gc, name, lambda name=name: made.append(name))
    return made


def test_what_comes_is_left_out_of_collections_whether_or_not_the_cache_grows_by_it(calls) -> None:
    garbage = Garbage()
    for objects in range(0, 10 * GROWTH + 1, GROWTH // 4):
        garbage.tick(objects, 0, 0)
    assert calls == ["collect", "freeze"] * 10


def test_the_remains_of_sessions_are_looked_for_once_in_many(calls) -> None:
    garbage = Garbage()
    for ended in range(2 * SESSIONS + 1):
        garbage.tick(0, ended, 0)
    assert calls == ["unfreeze", "collect", "freeze"] * 2


def test_the_remains_of_requests_are_looked_for_though_no_session_ends(calls) -> None:
    garbage = Garbage()
    for made in range(0, 2 * REQUESTS + 1, REQUESTS // 8):
        garbage.tick(0, 0, made)
    assert calls == ["unfreeze", "collect", "freeze"] * 2


def test_what_was_left_out_is_freed_when_it_is_evicted() -> None:
    class Cached:
        gone = 0

        def __del__(self) -> None:
            Cached.gone += 1

    held = [Cached() for _ in range(3)]
    try:
        Garbage().tick(GROWTH, 0, 0)
        held.clear()
        assert Cached.gone == 3
    finally:
        gc.unfreeze()


def test_what_is_garbage_already_is_not_kept_by_being_left_out() -> None:
    class Request:
        gone = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Request.gone += 1

    gc.disable()
    try:
        Request()
        Garbage().tick(GROWTH, 0, 0)
        gc.collect()
        assert Request.gone == 1
    finally:
        gc.unfreeze()
        gc.enable()
