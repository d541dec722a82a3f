"""CATS metrics of instances, by the rules of gaps 16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvsp.names.codes import InstanceState
from kvsp.records.cats import cached_entries, metrics
from kvsp.records.estimates import Demand, Found
from kvsp.records.records import Link, Residency
from tests.kvsp.controller.support import H1, KEYS, A, replica, status

FOUND = Found([[replica(0, A)], [replica(1)]], layers=32, block_tokens=16)


def values(*args: Any, **kw: Any) -> dict[str, Any]:
    return {each["metric_type"]: each["value"] for each in metrics(*args, **kw)}


def test_an_instances_scores_go_from_0_to_10_rounded_half_up() -> None:
    made = status(running=18, queued=3, batch_size=32, kv_utilization=0.71)
    shown = values(made)
    assert shown["compute_norm"] == 7  # 10 x (1 - 21/64) = 6.7
    assert shown["communication_norm"] == 10
    assert shown["service_norm"] == 3
    assert shown["norm_fi"] == 6  # 0.4 x 7 + 0.2 x 10 + 0.4 x 3
    poor = status(running=99, batch_size=32, kv_utilization=1.0, links=(Link(H1, 25_000, 1),))
    shown = values(poor)
    assert [shown[name] for name in ("compute_norm", "communication_norm", "norm_fi")] == [0, 3, 1]
    assert values(status(batch_size=0, links=()))["compute_norm"] == 0


def test_an_instance_that_is_not_active_scores_0_as_a_whole() -> None:
    assert values(status(state=InstanceState.DRAINING))["norm_fi"] == 0


def test_a_raw_metric_says_its_type_unit_and_source() -> None:
    shown = {each["metric_type"]: each for each in metrics(status(), cached=(2, 4096))}
    assert shown["kv_cached_octets"] == {
        "metric_type": "kv_cached_octets",
        "level": "L0",
        "format": "int",
        "length": 8,
        "unit": "byte",
        "source": ["directly measured"],
        "statistics": "cur",
        "value": 4096,
    }
    assert shown["kv_utilization"]["format_std"] == "ieee_754"
    assert "kv_cached_octets" not in values(status())


def test_metrics_for_keys_tell_what_is_there_and_what_it_saves() -> None:
    shown = values(status(), demand=Demand(48, FOUND))
    assert (shown["kv_matched_blocks"], shown["kv_matched_tokens"]) == (1, 16)
    assert (shown["kv_fetch_delay"], shown["kv_recompute_delay"]) == (96, 1143)
    assert shown["service_norm"] == 6  # cost 477 of 1143
    blind = values(status(prefill_tokens_per_s=0, links=()), demand=Demand(None, FOUND))
    assert "kv_fetch_delay" not in blind
    assert blind["service_norm"] == 0


def test_entries_are_the_leading_blocks_at_the_instance_with_their_retrieval_time() -> None:
    slow = replace(replica(1, A), residency=(Residency("host", range(32), 400_000),))
    found = Found([[replica(0), replica(0, A)], [slow], [replica(2)], [replica(3, A)]], 32, 16)
    entries = [entry.to_dict() for entry in cached_entries(A, found)]
    assert entries == [
        {"block_key": KEYS[0].hex(), "size": 2_097_152, "retrieval_us": 0},
        {"block_key": KEYS[1].hex(), "size": 2_097_152, "retrieval_us": 42},
    ]
