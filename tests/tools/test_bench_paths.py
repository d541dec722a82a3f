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
    ],
)
def test_a_wrong_option_is_refused_with_a_reason(wrong, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_paths", *wrong])
    with pytest.raises(SystemExit):
        bench_paths.main()
    assert says in capsys.readouterr().err
