"""KVSP "Placement Inputs" and "Prefetch Directives" at the placement controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import Done, ReadPrefetch, Refused, SendPrefetch, Unreachable
from kvsp.controller.core.placement import LowestCost
from kvsp.controller.core.requests import PlaceRequest
from kvsp.records.estimates import Candidate, Choice, Demand, Found
from kvsp.records.problems import Problem
from kvsp.records.records import Link, PrefetchDirective, Residency
from tests.kvsp.controller.support import (
    COMPAT,
    H1,
    KEYS,
    NOW,
    SCOPE,
    SESSION,
    A,
    B,
    C,
    Desk,
    replica,
    status,
)

REQUEST = PlaceRequest(SCOPE, COMPAT, KEYS[:3], tokens=48, request_ref="r-1")
FOUND = Found([[replica(0)], [replica(1)]], layers=32, block_tokens=16)


def choose(*statuses: Any, found: Found = FOUND, tokens: int | None = 48, **kw: Any) -> Any:
    candidates = [Candidate(made, made.mean_service_us or 2e6) for made in statuses]
    return LowestCost(**kw).choose(Demand(tokens, found), candidates)


def test_the_cost_is_waiting_plus_the_cheaper_of_fetching_and_recomputing() -> None:
    # fetch 180, recompute of 16 unmatched tokens 381, of all 48 tokens 1143
    assert choose(status()) == Choice(A, 561, 180, True)
    assert choose(status(queued=2, mean_service_us=1000.0)).cost_us == 2561
    slow = status(links=(Link(H1, 100, 12),))
    assert choose(slow) == Choice(A, 1143, 335557, False)


def test_the_request_goes_to_the_instance_with_the_lowest_cost() -> None:
    busy = status(A, queued=1)
    assert choose(busy, status(B)).instance == B
    assert choose(status(B), status(C, kv_utilization=0.4)).instance == C
    assert choose(status(C), status(B)).instance == B  # the lower URI


def test_what_cannot_be_computed_counts_as_infinite() -> None:
    mute = status(A, prefill_tokens_per_s=0, links=())
    assert choose(mute, status(B)).instance == B
    assert choose(mute) == Choice(A, None, None, False)
    assert choose(mute, max_cost_us=10**9) is None


def test_without_a_known_geometry_nothing_is_fetched() -> None:
    assert choose(status(), found=Found([[replica(0)]])) == Choice(A, 1143, None, False)


def place(desk: Desk, request: PlaceRequest = REQUEST, found: Found = FOUND) -> Any:
    return desk.do(desk.core.place, request, found, desk.now)


def test_a_placed_request_sends_a_directive_with_the_blocks_to_load() -> None:
    desk = Desk()
    desk.status()
    placed = place(desk)
    (sent,) = desk.take(SendPrefetch)
    directive = PrefetchDirective.from_json(sent.directive)
    assert (placed.instance, placed.cost_us, placed.matched) == (A, 561, 2)
    assert (sent.instance, directive.directive) == (A, placed.directive)
    assert [(block.block_key, block.sources) for block in directive.blocks] == [
        (KEYS[0], (H1,)),
        (KEYS[1], (H1,)),
    ]
    assert (directive.request_ref, directive.layer_order) == ("r-1", "ascending")


def test_blocks_the_instance_holds_are_in_no_directive() -> None:
    desk = Desk()
    desk.status()
    half = replace(replica(1, A), residency=(Residency("device", range(16)),))
    place(desk, found=Found([[replica(0), replica(0, A)], [replica(1), half]], 32, 16))
    (sent,) = desk.take(SendPrefetch)
    assert [block["block_key"] for block in sent.directive["blocks"]] == [KEYS[1].hex()]
    placed = place(desk, found=Found([[replica(0, A)]], 32, 16))
    assert placed.directive is None


def test_sources_are_listed_best_first() -> None:
    desk = Desk()
    h2 = "https://h0.example/kvsp/"
    desk.status(links=(Link(H1, 200_000, 12), Link(h2, 1000, 1500)))
    place(desk, found=Found([[replica(0, h2), replica(0)]], 32, 16))
    (sent,) = desk.take(SendPrefetch)
    assert sent.directive["blocks"][0]["sources"] == [H1, h2]


def test_no_directive_when_recomputing_is_cheaper_or_none_is_wanted() -> None:
    desk = Desk()
    desk.status(links=(Link(H1, 100, 12),))
    assert place(desk).directive is None
    desk.status()
    assert place(desk, replace(REQUEST, prefetch=False)).directive is None
    assert desk.take(SendPrefetch) == []


def test_directives_per_instance_are_bounded_and_finished_ones_make_room() -> None:
    desk = Desk(directives_per_instance=1)
    desk.status()
    assert place(desk).directive is not None
    assert place(desk).directive is None
    (sent,) = desk.take(SendPrefetch)
    desk.report(sent, Refused("kvsp-not-active"))
    assert place(desk).directive is not None
    assert len(desk.core.directives) == 1


def test_a_directive_is_asked_after_its_deadline_how_far_it_came() -> None:
    desk = Desk(prefetch_deadline_ms=50)
    desk.status()
    place(desk)
    (sent,) = desk.take(SendPrefetch)
    desk.report(sent, Done())
    desk.pass_time(200, A)
    (read,) = desk.take(ReadPrefetch)
    desk.report(read, Done({"state": "partial", "loaded": []}))
    assert desk.core.ledger.counters["directives_partial"] == 1
    assert len(desk.core.directives) == 0


@pytest.mark.parametrize("answer", [None, Unreachable(), Done({"state": "new"})])
def test_a_directive_nobody_answers_for_is_forgotten(answer: Any) -> None:
    desk = Desk(prefetch_deadline_ms=50, command_ms=500)
    desk.status()
    place(desk)
    (sent,) = desk.take(SendPrefetch)
    desk.report(sent, Done())
    desk.pass_time(200, A)
    (read,) = desk.take(ReadPrefetch)
    if answer is not None:
        desk.report(read, answer)
    desk.pass_time(600, A)
    assert len(desk.core.directives) == desk.core.ledger.outstanding == 0
    assert desk.core.ledger.counters["directives_unanswered"] == 1


def test_directives_of_a_failed_instance_are_forgotten() -> None:
    desk = Desk(prefetch_deadline_ms=60_000)
    desk.status()
    place(desk)
    desk.pass_time(3000)
    assert len(desk.core.directives) == 0


def test_a_named_session_is_assigned_where_it_was_placed() -> None:
    desk = Desk()
    desk.status()
    placed = place(desk, replace(REQUEST, session=SESSION))
    assert placed.epoch == 1
    assert desk.core.sessions.get(SESSION).instance == A
    # the answer got lost and the question comes again: what the first one began is fenced
    assert place(desk, replace(REQUEST, session=SESSION)).epoch == 2
    desk.checkpoint(epoch=2)
    with pytest.raises(Problem, match="under way"):
        place(desk, replace(REQUEST, session=SESSION))


def test_a_long_prompt_is_estimated_for_the_least_loaded_instances_only() -> None:
    desk = Desk(estimates=4)
    for uri, queued in ((A, 9), (B, 0), (C, 1)):
        desk.status(uri, queued=queued, links=() if uri != A else status().links)
    seen: list[int] = []
    policy = desk.core.policy

    class Watched:
        def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
            seen.append(len(candidates))
            return policy.choose(demand, candidates)

    desk.core.policy = Watched()
    assert place(desk).instance == B
    assert seen == [2]
    assert desk.core.ledger.counters["placements_narrowed"] == 1


def test_any_policy_can_take_the_place_of_the_drafts() -> None:
    class Last:
        def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
            return Choice(candidates[-1].status.instance, None, None, False)

    core = Controller(policy=Last())
    for uri in (A, B):
        core.take_status(status(uri), NOW)
    assert core.place(REQUEST, Found(), NOW).instance == B


def test_the_service_time_of_ended_sessions_is_observed() -> None:
    desk = Desk()
    desk.status()
    desk.checkpoint()
    desk.pass_time(1000, A)
    desk.do(desk.core.end_session, SESSION, desk.now)
    (candidate,) = desk.core.instances.candidates(COMPAT)
    assert candidate.mean_service_us == 1_000_000
