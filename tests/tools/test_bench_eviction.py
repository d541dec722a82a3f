"""The trace of conversations, and what a holder that knows the chain keeps of it."""

from __future__ import annotations

from tools.bench_eviction import replay, trace


def test_each_turn_of_a_conversation_sends_all_that_was_said_before() -> None:
    requests = list(trace(500))
    assert list(trace(500)) == requests
    before = {request[:length] for request in requests for length in range(1, len(request))}
    assert sum(request in before for request in requests) > 50
    # system prompts are shared by conversations, the popular ones by many
    firsts = [request[0] for request in requests]
    assert len(set(firsts)) <= 40 and max(map(firsts.count, firsts)) > 50


def test_a_holder_that_knows_the_chain_hits_more_and_visits_few_blocks_for_one() -> None:
    requests = list(trace(1500))
    chained = replay(requests, 1000, chained=True)
    plain = replay(requests, 1000, chained=False)
    assert chained.asked == plain.asked
    assert chained.ratio > plain.ratio
    assert chained.visits_per_block < 12
