"""What engine threads see of a load."""

from __future__ import annotations

import threading

import pytest

from kvcs.client.counters import Ended
from kvcs.client.loading import CacheLost, Load
from kvcs.names.errors import MisuseError
from kvcs.retrieving.layers import Layer
from tests.kvcs.support import BLOCK, DESCRIPTOR, kv, same

CACHE = kv()


def loading(blocks=range(5), on_block=None, stopped=lambda _: None):
    return Load(DESCRIPTOR, blocks, on_block, stopped, 10.0)


def give(load, layer, blocks=range(5), segment=0):
    """Layer `layer` of one segment, as the client's thread gives it."""
    rows = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
    if not segment:
        arrays = load.arrays(layer, 5 * BLOCK)
        for array, tensor in zip(arrays, CACHE[layer], strict=True):
            array[:] = tensor
    k, v = (tensor[rows] for tensor in CACHE[layer])
    load.came(Layer(layer, k, v, b"", segment, blocks.start * BLOCK), load.blocks.start)


def test_a_layer_is_there_when_its_last_segment_is():
    load = loading()
    give(load, 0, range(3))
    assert not load.wait_layer(0, 0.0)
    give(load, 0, range(3, 5), segment=1)
    assert load.wait_layer(0, 0.0) and not load.wait_layer(1, 0.0)


def test_a_wait_ends_when_the_layer_comes_and_when_the_load_fails():
    load, seen = loading(), []
    threads = [
        threading.Thread(target=lambda n=n: seen.append((n, load.wait_layer(n, 30.0))))
        for n in (0, 1)
    ]
    for thread in threads:
        thread.start()
    give(load, 0)
    threads[0].join(30)
    load.end(Ended.STALLED, CacheLost("nothing came", range(5)), range(0))
    threads[1].join(30)
    assert seen == [(0, True), (1, False)]
    assert not load.wait_layer(0, 0.0), "what failed is not to be used, not even its first layers"


def test_the_rows_of_a_layer_are_those_of_the_blocks_asked_for():
    load = loading(range(2, 4))
    give(load, 0)
    for came, tensor in zip(load.layer(0), CACHE[0], strict=True):
        assert same(came, tensor[2 * BLOCK : 4 * BLOCK])
    with pytest.raises(MisuseError, match="not there"):
        load.layer(1)


def test_a_callback_is_given_blocks_and_nothing_is_kept():
    given = []
    load = loading(range(1, 3), lambda layer, block, k, v: given.append((layer, block, k, v)))
    give(load, 0)
    assert [each[:2] for each in given] == [(0, block) for block in range(1, 5)]
    for _, block, k, _ in given:
        assert same(k, CACHE[0][0][block * BLOCK : (block + 1) * BLOCK])
    with pytest.raises(MisuseError, match="on_block"):
        load.layer(0)


def test_after_cancel_the_callback_is_not_called_again():
    given, stopped = [], []

    def on_block(layer, block, k, v):
        given.append(block)
        if block == 2:
            load.cancel()

    load = loading(on_block=on_block, stopped=stopped.append)
    give(load, 0)
    assert given == [0, 1, 2]
    assert stopped == [load]
    load.cancel()
    assert stopped == [load]
    assert load.outcome is Ended.CANCELLED and load.lost == range(5)


def test_an_end_is_the_only_one():
    load = loading()
    assert load.end(Ended.LOADED, None, range(5))
    assert not load.end(Ended.STALLED, CacheLost("late", range(5)), range(0))
    load.cancel()
    assert load.finished and load.error is None and not load.lost


def test_a_failure_says_what_and_which_blocks():
    load = loading(range(1, 5), lambda *_: None)
    assert "10 s" in str(load.failure())
    load.end(Ended.LOST, CacheLost("gone", range(1, 5)), range(1, 3))
    assert str(load.failure()) == "gone" and load.failure().lost == range(3, 5)


def test_of_a_load_that_failed_nothing_is_there_when_nobody_was_given_it():
    load = loading(range(1, 5))
    give(load, 0, range(1, 3))
    load.end(Ended.LOST, CacheLost("gone", range(1, 5)), range(1, 3))
    with pytest.raises(CacheLost):
        load.layer(0)
    assert load.lost == range(1, 5)
