"""An event loop in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcs.client.loop import LoopThread
from kvcs.names.errors import MisuseError


async def nothing() -> None:
    pass


def test_what_is_called_soon_is_called_in_order_and_on_one_thread():
    thread, seen, done = LoopThread("test"), [], threading.Event()
    for number in range(5):
        thread.soon(lambda n=number: seen.append((n, threading.current_thread().name)))
    thread.soon(done.set)
    assert done.wait(10)
    assert seen == [(number, "test") for number in range(5)]
    thread.stop(nothing, 10)


def test_a_coroutine_has_a_result_for_other_threads():
    async def answer() -> int:
        return 42

    thread = LoopThread("test")
    assert thread.begin(answer()).result(10) == 42
    thread.stop(nothing, 10)


def test_its_end_runs_the_last_work_and_cancels_the_rest_and_is_told():
    thread, last = LoopThread("test"), []

    async def ending() -> None:
        last.append(True)

    forever = thread.begin(asyncio.sleep(3600))
    thread.stop(ending, 10)
    thread.stop(ending, 10)
    assert last == [True]
    assert forever.cancelled()
    assert not any(each.name == "test" and each.is_alive() for each in threading.enumerate())
    with pytest.raises(MisuseError, match="closed"):
        thread.soon(print)
    with pytest.raises(MisuseError, match="closed"):
        thread.begin(nothing())


@pytest.mark.parametrize("call", ["soon", "begin"])
def test_an_end_between_the_check_and_the_call_is_told_as_well(call, monkeypatch):
    thread = LoopThread("test")
    thread.stop(nothing, 10)
    monkeypatch.setattr(thread, "check", lambda: None)
    with pytest.raises(MisuseError, match="closed"):
        thread.soon(print) if call == "soon" else thread.begin(nothing())
