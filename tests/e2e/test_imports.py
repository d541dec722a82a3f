"""What programs import: nothing that takes long and that this use of them has no need of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import SAMPLE
from tests.paths import ROOT

SCRIPTS = {
    "kvcs-relay": "relay.service.entry:main",
    "kvcs-publish": "kvcs.programs.entry:publish",
    "kvcs-subscribe": "kvcs.programs.entry:subscribe",
    "kvcs-doctor": "kvcs.programs.entry:doctor",
    "kvsp": "kvsp.cli.entry:main",
}
HTTP3 = {"pylsqpack", "moqt.quic.webtransport"}
CERTIFICATES = {"service_identity"}
BARS = {"rich.progress", "rich.live"}


def imported(program: str, *arguments: str | Path) -> set[str]:
    """The modules there are when such a process ends."""
    module, function = SCRIPTS[program].split(":")
    script = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: print('imported', *sys.modules, file=sys.stderr))\n"
        f"from {module} import {function} as main\n"
        f"sys.argv[0] = {program!r}\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = re.search(r"^imported (.*)$", done.stderr, re.M)
    assert said is not None, done.stderr
    names = set(said[1].split())
    assert module in names
    return names


@pytest.mark.parametrize("program", ["kvcs-relay", "kvcs-publish", "kvcs-subscribe", "kvcs-doctor"])
def test_help_is_shown_without_what_speaks_http3_or_judges_certificates(program: str):
    assert not imported(program, "--help") & (HTTP3 | CERTIFICATES | BARS)


@pytest.mark.parametrize("program", sorted(SCRIPTS))
def test_wrong_usage_is_said_without_what_draws_bars(program: str):
    assert not imported(program, "--no-such-option") & BARS


def test_a_retrieval_for_machines_imports_neither_http3_nor_what_draws_bars(tmp_path: Path):
    scope = tmp_path / "scope.json"
    subprocess.run(
        [sys.executable, "-c", "from kvcs.programs.entry import keygen; keygen()", "scope", scope],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )
    names = imported(
        "kvcs-subscribe", "moqt://127.0.0.1:9", "--scope-key-file", scope,
        "--compat", SAMPLE / "smollm2-survey.compat.json",
        "--tokens", SAMPLE / "smollm2-survey.tokens.json",
        "--out", tmp_path / "out", "--timeout", "1", "--json",
    )  # fmt: skip
    assert "moqt.quic.udp.endpoint" in names
    assert not names & (HTTP3 | BARS | {"rich.console"})
