"""What is measured beside kvcs says what it does not do, and what is not there has no row."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tools import bench_stores, stores_roles
from tools.bench_stores import ROWS, RUNS, NotHereError, figures, measure, redis_server, show


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    return argparse.Namespace(environment=tmp_path, repeat=3, octets=10**9)


def test_every_row_says_whether_what_comes_is_encrypted_and_verified() -> None:
    assert set(ROWS) == set(RUNS) == {"kvcs", "nixl", "redis"}
    assert ROWS["kvcs"][1] == "TLS 1.3, every Object verified"
    for other in ("nixl", "redis"):
        assert ROWS[other][1].startswith("in the clear, nothing verified")


def test_medians_are_shown_and_what_is_not_there_with_its_reason(
    options, monkeypatch, capsys
) -> None:
    speeds = {name: iter([3.0, 1.0, 2.0]) for name in RUNS}

    def run(name):
        def once(options, python):
            if name == "redis":
                raise NotHereError("no server is installed")
            return {"mb_s": next(speeds[name]), "cpu_s_per_gb": 1.0}

        return once

    monkeypatch.setattr(bench_stores, "RUNS", {name: run(name) for name in RUNS})
    monkeypatch.setattr(bench_stores.Environment, "make", lambda self, install: None)
    found = measure(options)
    assert set(found["rows"]) == {"kvcs", "nixl"}
    assert all(row["mb_s"] == 2.0 for row in found["rows"].values())
    show(found)
    shown = capsys.readouterr().out
    assert "in the clear" in shown and "not measured: no server is installed" in shown


def test_without_an_environment_the_row_of_kvcs_is_there(options, monkeypatch) -> None:
    def fail(self, install):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(bench_stores.Environment, "make", fail)
    monkeypatch.setitem(RUNS, "kvcs", lambda *_: {"mb_s": 1.0, "cpu_s_per_gb": 1.0})
    found = measure(options)
    assert set(found["rows"]) == {"kvcs"}
    assert set(found["missing"]) == {"nixl", "redis"}


def test_other_octets_than_were_sent_are_no_figure() -> None:
    with pytest.raises(RuntimeError, match="other octets came"):
        figures({"failed": "other octets came than were sent"}, 0.0)
    assert figures({"octets": 10**9, "seconds": 2.0, "cpu": 3.0, "failed": ""}, 1.0) == {
        "mb_s": 500.0,
        "cpu_s_per_gb": 4.0,
    }


def test_the_pieces_are_all_octets_once() -> None:
    assert stores_roles.pieces(100, 70, 32) == [(100, 32, 0), (132, 32, 0), (164, 6, 0)]
    assert len(set(stores_roles.contents(1 << 16))) > 200


@pytest.mark.skipif(
    not (shutil.which("valkey-server") or shutil.which("redis-server")),
    reason="neither valkey-server nor redis-server is installed",
)
def test_what_is_put_into_a_real_redis_comes_out_whole(tmp_path) -> None:
    pytest.importorskip("redis", reason="the extra 'redis' is not installed")
    size = ("--octets", "1000000", "--object", "32768")
    with redis_server(tmp_path) as (port, _):
        give, take = (
            subprocess.Popen(
                [sys.executable, "-m", "tools.stores_roles", role, *size, "--port", str(port)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for role in ("redis-give", "redis-take")
        )
        assert give.communicate(timeout=60)[0].startswith("ready")
        out, _ = take.communicate("\n", timeout=60)
    assert '"octets": 1000000' in out and '"failed": ""' in out
