"""What `make bench-paths` shows of its figures, also of those it could not have."""

from __future__ import annotations

import re
import sys

import pytest

from tools import bench_paths


def test_a_row_shows_figures_ratios_and_what_failed(capsys):
    row = {
        "path": "dsl",
        "kvcs": {"mb_s": 5.0, "first_layer": 0.8, "queue_bdp": 1.25, "late_max_ms": 1.0},
        "raw": {"mb_s": 0.0, "failed": "not done in 20 s"},
        "aiomoqt": {"mb_s": 4.0, "lost_by_host": 7, "late_max_ms": 30.0},
        "filled": 0.8,
    }
    bench_paths.show(row)
    first, *notes = capsys.readouterr().out.splitlines()
    assert re.sub(" +", " ", first) == "dsl 5.0 0.0 4.0 1.25x - 0.80 s - 80% 1.25"
    assert notes[0].strip() == "raw: not done in 20 s"
    assert "aiomoqt: the host was busy: the proxy was up to 30 ms late" in notes[1]
    assert "lost 7 datagrams" in notes[1] and len(notes) == 2


def rows(first: float, again: float | None = 0.3, **others: float) -> list[dict[str, object]]:
    kvcs = {"mb_s": 50.0, "first_layer": first, "queue_bdp": others.get("queue", 1.0)}
    if again is not None:
        kvcs["first_layer_again"] = again
    far: dict[str, object] = {"path": "100 ms", "kvcs": kvcs}
    if "aiomoqt" in others:
        far["aiomoqt"] = {"mb_s": others["aiomoqt"]}
    return [far, {"path": "20 MB/s, 100 ms, 1 %", "kvcs": kvcs, "filled": 0.84}]


def test_of_each_goal_it_is_told_whether_it_is_reached_or_was_not_measured(capsys):
    goals = {
        (goal["path"], goal["goal"]): goal["reached"]
        for goal in bench_paths.reached(rows(0.7, None, aiomoqt=40.0, queue=1.6))
    }
    assert goals["100 ms", "at least 40 MB/s"] is True
    assert goals["100 ms", "at least 1 x aiomoqt"] is True
    assert goals["100 ms", "at most 0.6 s to the first layer"] is False
    assert goals["100 ms", "at most 0.35 s the second time"] is None
    assert goals["20 MB/s, 100 ms, 1 %", "at least 0.85 of the rate"] is False
    assert goals["20 MB/s, 100 ms, 1 %", "at most 1.5 BDP queued"] is False
    assert goals["100 ms, 1 %", "at least 1.3 x aiomoqt"] is None
    bench_paths.show_goals(bench_paths.reached(rows(0.5)))
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "100 ms at most 0.6 s to the first layer reached (0.5)" in shown
    assert "100 ms at least 1 x aiomoqt not measured" in shown
    assert "20 MB/s, 100 ms, 1 % at least 0.85 of the rate NOT REACHED (0.84)" in shown
    assert "4 of 5 that were measured are reached, 10 there are" in shown


def test_a_column_is_the_run_in_the_middle_with_the_medians_of_all():
    runs = [
        {"mb_s": 3.0, "first_layer": 0.1, "failed": "late"},
        {"mb_s": 1.0, "first_layer": None},
        {"mb_s": 2.0, "first_layer": 0.3},
    ]
    assert bench_paths.middle(runs) == {"mb_s": 2.0, "first_layer": pytest.approx(0.2)}


def test_a_figure_that_cannot_be_had_is_told_and_costs_no_other():
    def fails(text: str) -> dict[str, object]:
        raise RuntimeError(text)

    assert bench_paths.attempt(fails, "it ended") == {"mb_s": 0.0, "failed": "it ended"}


def test_aiomoqt_is_taken_from_the_folder_named_and_only_if_it_is_there(tmp_path):
    assert bench_paths.find_aiomoqt(tmp_path) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "moq-pub-server").touch()
    assert bench_paths.find_aiomoqt(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--paths", "moon"], "no such path: moon (there are no delay; 100 ms;"),
        (["--aiomoqt", "/nowhere"], "no aiomoqt in /nowhere"),
        (["--columns", "raw,moon"], "no such column: moon (there are kvcs, raw, aiomoqt)"),
    ],
)
def test_a_wrong_option_is_refused_with_a_reason(wrong, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_paths", *wrong])
    with pytest.raises(SystemExit):
        bench_paths.main()
    assert says in capsys.readouterr().err
