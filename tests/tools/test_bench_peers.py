"""What the comparison with another stack says of its figures."""

from __future__ import annotations

import pytest

from tools.bench_peers import GOALS, middle, reached, worse

ROW = {"mb_s": 400.0, "cpu_s_per_gb": 4.0, "first_layer_ms": 20.0, "relay_rss_mib": 100.0}


def table(native: dict[str, float], **others: dict[str, float]):
    return {"direct": {"native": native, **others}}


@pytest.mark.parametrize(
    ("theirs", "expected"), [(222.0, True), (223.0, False)], ids=["enough", "too little"]
)
def test_a_goal_beside_the_other_stack_needs_that_many_times_its_rate(theirs, expected) -> None:
    told = reached(table(ROW, aiomoqt={"mb_s": theirs, "cpu_s_per_gb": 7.0}))
    [goal] = [each for each in told if (each["row"], each["goal"][-9:]) == ("direct", "x aiomoqt")]
    assert goal["reached"] is expected and goal["found"] == round(400 / theirs, 3)


@pytest.mark.parametrize(("cpu", "expected"), [(4.3, True), (4.4, False)])
def test_a_goal_of_cost_is_the_most_that_it_may_be(cpu, expected) -> None:
    told = reached(table(ROW | {"cpu_s_per_gb": cpu}))
    assert [each["reached"] for each in told if "cpu" in each["goal"]] == [expected, None, None]


def test_what_was_not_measured_is_no_goal_reached() -> None:
    assert [each["reached"] for each in reached({})] == [None] * len(GOALS)
    beside = [each for each in reached(table(ROW)) if "aiomoqt" in each["goal"]]
    assert [each["reached"] for each in beside] == [None] * 3


def test_figures_worse_than_before_are_named_and_better_ones_are_not() -> None:
    then = table(ROW, aiomoqt={"mb_s": 300.0})
    assert worse(table(dict(ROW), aiomoqt={"mb_s": 1.0}), then, 0.1) == []
    assert worse(table(ROW | {"mb_s": 800.0, "cpu_s_per_gb": 2.0}), then, 0.1) == []
    slow, dear = (
        worse(table(ROW | changed), then, 0.1)
        for changed in ({"mb_s": 350.0}, {"cpu_s_per_gb": 5.0, "relay_rss_mib": 109.0})
    )
    assert slow == ["direct, native: mb_s 350, before 400 (-12%)"]
    assert dear == ["direct, native: cpu_s_per_gb 5, before 4 (+25%)"]
    assert worse(table(ROW | {"mb_s": 350.0}), then, 0.2) == []


def test_several_rounds_count_by_their_median_with_the_spread_told() -> None:
    runs = [ROW | {"mb_s": rate} for rate in (300.0, 400.0, 420.0)]
    assert middle(runs) == ROW | {"mb_s": 400.0, "spread": 0.3}
