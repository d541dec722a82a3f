"""KVSP "Session Checkpoints and Migration": when tokens go out, and that each comes once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.records.records import OutputToken, SessionProgress
from kvsp.records.release import FrontEnd, TokenGate
from tests.kvsp.controller.support import SESSION


def token(index: int, epoch: int = 1) -> OutputToken:
    return OutputToken(SESSION, epoch, index, 1000 + index)


def gate(**changes: bool) -> TokenGate:
    return TokenGate(SESSION, 1, 3, **{"deterministic": False, **changes})


def test_a_token_must_not_be_released_before_a_checkpoint_that_covers_it_is_acknowledged() -> None:
    held = gate()
    assert held.produce(1003) == held.produce(1004) == held.produce(1005) == []
    assert held.acknowledge(SessionProgress(SESSION, 1, 3)) == []
    assert held.acknowledge(SessionProgress(SESSION, 1, 5)) == [token(3), token(4)]
    assert held.acknowledge(SessionProgress(SESSION, 1, 5)) == []
    assert held.acknowledge(SessionProgress(SESSION, 1, 6)) == [token(5)]


def test_tokens_of_a_deterministic_sampler_go_at_once() -> None:
    assert gate(deterministic=True).produce(1003) == [token(3)]


def test_an_acknowledgement_of_another_epoch_releases_nothing() -> None:
    held = gate()
    held.produce(1003)
    assert held.acknowledge(SessionProgress(SESSION, 2, 9)) == []


def test_a_full_gate_asks_for_a_checkpoint_first() -> None:
    held = TokenGate(SESSION, 1, 0, deterministic=False, size=1)
    held.produce(1000)
    assert held.full
    with pytest.raises(RuntimeError):
        held.produce(1001)


def test_front_ends_must_discard_tokens_of_a_lower_epoch_than_one_already_seen() -> None:
    front = FrontEnd(SESSION)
    assert front.receive(token(0)) == [token(0)]
    assert front.receive(token(1, epoch=2)) == [token(1, epoch=2)]
    assert front.receive(token(2)) == []
    assert front.receive(token(2, epoch=2)) == [token(2, epoch=2)]
    assert front.dropped == 1


def test_what_comes_after_a_gap_is_held_back_and_a_lost_token_is_filled_in() -> None:
    front = FrontEnd(SESSION)
    assert front.receive(token(2)) == front.receive(token(1)) == []
    assert [each.index for each in front.fill([1000])] == [0, 1, 2]
    assert front.fill([1000]) == []


def test_a_gap_holds_a_bounded_number_of_tokens() -> None:
    front = FrontEnd(SESSION, size=2)
    for index in (5, 4, 3, 2, 1):
        assert front.receive(token(index)) == []
    assert front.dropped == 3
    assert front.receive(token(0)) == [token(0)]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), max_size=60))
def test_every_index_is_delivered_once_and_in_order(arrivals: list[tuple[int, int]]) -> None:
    front = FrontEnd(SESSION)
    delivered, highest = [], 0
    for index, epoch in arrivals:
        out = front.receive(token(index, epoch))
        assert not out or epoch >= highest
        highest = max(highest, epoch)
        delivered += [each.index for each in out]
    assert delivered == list(range(len(delivered)))
