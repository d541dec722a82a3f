"""A transfer is tried when it is faster than computing, or when nobody knows."""

from __future__ import annotations

from kvcs.vllm.gate import FORGOTTEN_AFTER, CostGate


def gate(*, prefill: float, transfer: float) -> CostGate:
    made = CostGate(octets_per_token=1000)
    made.computed(1000, 1000 / prefill)
    made.loaded(10_000_000, 10_000_000 / transfer, now=0.0)
    return made


def test_a_transfer_pays_when_prefill_times_octets_stays_below_the_transfer_rate() -> None:
    assert gate(prefill=999, transfer=1_000_000).refuses(5000, 1.0) is None
    slower = gate(prefill=1001, transfer=1_000_000).refuses(5000, 1.0)
    assert slower is not None and "5.000 s to load and 4.995 s to compute" in slower


def test_what_was_never_measured_is_tried() -> None:
    fresh = CostGate(1000)
    assert fresh.refuses(5000, 0.0) is None
    fresh.computed(1000, 0.001)
    assert fresh.refuses(5000, 0.0) is None
    assert fresh.seconds_to_compute(5000) == 0.005 and fresh.seconds_to_load(5000, 0.0) is None


def test_a_closed_gate_is_tried_again_after_a_while() -> None:
    closed = gate(prefill=1_000_000, transfer=1000)
    assert closed.refuses(5000, FORGOTTEN_AFTER - 1) is not None
    assert closed.refuses(5000, FORGOTTEN_AFTER + 1) is None


def test_a_step_that_decodes_says_nothing_of_the_rate_of_prefill() -> None:
    made = CostGate(1000)
    made.computed(8, 1.0)
    made.computed(1000, 0.0)
    assert made.prefill is None


def test_a_rate_follows_what_is_measured_and_one_odd_step_does_not_upset_it() -> None:
    made = gate(prefill=1000, transfer=1000)
    made.computed(1000, 100.0)
    assert made.prefill is not None and 500 < made.prefill < 1000
