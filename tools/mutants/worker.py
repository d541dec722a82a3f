"""Runs tests in forks of a warm process: `python -m tools.mutants.worker`, in a copy of the tree.

One line of JSON is asked on standard input, `{"tests": [...], "seconds": s, "keep": bool}`, and one
is answered on standard output: `{"outcome": ..., "failed": ..., "why": ..., "passed": {test: s}}`.
What third parties wrote is imported once; ours in every fork anew, with whatever was broken in it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WARM = (
    "aiohttp",
    "aioquic.asyncio",
    "aioquic.h3.connection",
    "aioquic.quic.connection",
    "cryptography.hazmat.primitives.asymmetric.ec",
    "cryptography.x509",
    "hypothesis.extra.numpy",
    "hypothesis.stateful",
    "ml_dtypes",
    "msgspec",
    "numpy",
    "obstore",
    "prometheus_client",
    "pycose.messages",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "rfc8785",
    "rich.progress",
    "safetensors.numpy",
    "schemathesis",
    "starlette.applications",
    "starlette.routing",
    "typer.testing",
    "uvicorn",
    "uvloop",
    "xdist",
)
OUTPUT = "output.txt"
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:xdist"]


class Watch:
    """A pytest plugin: what passed and how long it took, what failed first and why."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.passed: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """After the tests' own profile is loaded: one sequence of examples, none shrunk or kept."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        parent = settings.get_current_profile_name()
        settings.register_profile(
            "mutants", settings.get_profile(parent), database=None, derandomize=True, phases=phases
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = _plain(report.nodeid)
        if report.failed:
            self.failed.setdefault(test, _reason(report))
            self.passed.pop(test, None)
        elif report.when == "call" and test not in self.failed:
            self.passed[test] = self.passed.get(test, 0.0) + report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, _reason(report))


def _plain(nodeid: str) -> str:
    """Without the parameters, and of a state machine's test the class that the tables name."""
    return nodeid.partition("[")[0].removesuffix("::runTest")


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr))[-600:]


def warm() -> None:
    for name in WARM:
        # an extra that is not installed is one that no test here imports
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run(request: dict[str, Any], answers: int) -> None:
    """In the fork: runs the tests and writes what became of them to `answers`."""
    os.setsid()
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if not request["keep"]:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
    tests = request["tests"]
    watch = Watch()
    first = ["-x"] if request["first"] else []
    code = int(pytest.main([*OPTIONS, *first, *tests], plugins=[watch]))
    strange = sorted(
        f"{name} comes from {found}"
        for name in ("moqt", "kvsp", "kvcs", "relay", "interop", "tests")
        if (found := getattr(sys.modules.get(name), "__file__", None))
        and not Path(found).is_relative_to(Path.cwd())
    )
    outcomes = {0: "passed", 1: "failed"}
    outcome = "error" if strange else outcomes.get(code, "error")
    failed, why = next(iter(watch.failed.items()), ("", ""))
    if outcome == "error":
        why = "; ".join(strange) or why or Path(OUTPUT).read_text("utf-8", "replace")[-600:]
    answer = {
        "outcome": outcome,
        "failed": failed,
        "why": why,
        "passed": watch.passed,
        "all_failed": watch.failed,
    }
    with os.fdopen(answers, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def supervise(request: dict[str, Any]) -> dict[str, Any]:
    """Forks, waits for the answer as long as the request allows, and leaves nothing running."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            run(request, writing)
        finally:
            os._exit(70)
    os.close(writing)
    end = time.monotonic() + request["seconds"]
    octets = b""
    timed_out = False
    while True:
        if not select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
            timed_out = True
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        octets += part
    os.close(reading)
    # the fork leads a group of its own: what its tests started ends with it
    for group in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            group(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if timed_out:
        return {"outcome": "hung", "failed": "", "why": f"no end after {request['seconds']:.0f} s"}
    if not octets:
        return {"outcome": "died", "failed": "", "why": "the process of the tests died"}
    answer: dict[str, Any] = json.loads(octets)
    return answer


def main() -> None:
    # the answers have the real standard output to themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(supervise(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
