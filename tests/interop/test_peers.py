"""A peer that cannot be had is reported as skipped, with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interop import peers, run
from interop.outcomes import Outcome, judge


def test_an_interpreter_that_is_new_enough_is_found():
    assert peers.find_python((3, 11)).name.startswith("python")


def test_no_interpreter_that_is_new_enough_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(peers, "interpreters", lambda: iter([Path(sys.executable)]))
    with pytest.raises(peers.Unavailable, match=r"no Python 9\.1 or newer.*INTEROP_PYTHON"):
        peers.find_python((9, 1))


def test_an_interpreter_that_does_not_run_is_passed_over(monkeypatch, tmp_path):
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    candidates = [tmp_path / "missing", broken, Path(sys.executable)]
    monkeypatch.setattr(peers, "interpreters", lambda: iter(candidates))
    assert peers.find_python((3, 11)) == Path(sys.executable)


def test_a_peer_that_cannot_be_installed_skips_its_combinations_and_no_other(monkeypatch):
    def refuse(peer):
        raise peers.Unavailable("there is no such interpreter")

    monkeypatch.setattr(run, "install", refuse)
    combination = run.Combination("aiomoqt", "kvcs", "quic")
    (done,) = run.run_matrix([combination], {})
    (result,) = done.results
    assert result.outcome is Outcome.SKIP
    assert result.note == "there is no such interpreter"
    assert not done.counts[Outcome.PASS]
    assert not run.Combination("kvcs", "kvcs", "quic").needs_peer


def test_a_relay_that_does_not_start_is_a_failure(monkeypatch, tmp_path):
    def broken(folder):
        raise run.ProgramFailed("kvcs-relay is not ready: no certificate")

    monkeypatch.setitem(run.RELAYS, "kvcs", broken)
    points = run.perform(run.Combination("kvcs", "kvcs", "quic"), None)
    (result,) = judge(points, "kvcs", "kvcs", {})
    assert result.outcome is Outcome.FAIL and "no certificate" in result.note


def test_every_combination_has_its_client_relay_and_scheme():
    for each in run.MATRIX:
        assert each.client in run.CLIENTS
        assert each.relay in run.RELAYS
        assert each.transport in run.SCHEMES
    assert len(set(run.MATRIX)) == len(run.MATRIX)
