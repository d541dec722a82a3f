"""Breaks each rule of the conformance tables on purpose; the tests that the row names must notice.

    python -m tools.mutate                           every row of every table with a list
    python -m tools.mutate --section "Part 1"        some of them; --table, --row likewise
    python -m tools.mutate --changed main            what changes since `main` may have spoiled
    python -m tools.mutate --propose moqt/uri.py::parse_uri --row "A URI names a host"
                                                     breaks to choose from, which of them are caught

The breaks are kept in tools/mutants/*.toml, described in tools/mutants/breaks.py. A row's tests run
first as the code is, then with the break, in a copy of the tree. The exit code is 1 when a break
survived or no longer applies, when a row has none and no reason, or when its tests fail anyway.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.mutants.breaks import Break, ListError, Lists, Stale, read_lists
from tools.mutants.proposals import Proposal, propose
from tools.mutants.rows import Row, TableError, code_files
from tools.mutants.runs import Copies, Copy, WorkerError

FIRST_RUN_SECONDS = 900.0
"""For a batch of the unbroken tests."""
SLACK_SECONDS, TIMES = 30.0, 10
"""A break may make tests slower: it hangs after so many times their own time and this much more."""
BAD = ("survived", "stale", "untried", "failing", "invalid")
WORDS = {
    "caught": "a test failed, as it should",
    "survived": "no test of the row noticed",
    "stale": "the break no longer applies",
    "untried": "no break and no reason why none can be made",
    "failing": "a test of the row fails without the break, or is not run",
    "invalid": "the tests cannot be run with the break",
    "excused": "not done here, or no break can be made",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    row: Row
    verdict: str
    """One of `WORDS`."""
    detail: str = ""
    seconds: float = 0.0


class Progress:
    """One line on standard error, rewritten on a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bad = total, 0, 0
        self._lock = threading.Lock()

    def step(self, verdict: Verdict) -> None:
        with self._lock:
            self._done += 1
            bad = verdict.verdict in BAD
            self._bad += bad
            if bad:
                print(f"\r{verdict.verdict}: {verdict.row}  {verdict.detail}", file=sys.stderr)
            end = "\r" if sys.stderr.isatty() else "\n"
            if sys.stderr.isatty() or self._done % 25 == 0 or self._done == self._total:
                print(f"{self._done}/{self._total}, {self._bad} bad", end=end, file=sys.stderr)


def node(reference: str) -> str:
    """What pytest calls the test that a table calls `file.py::Class.method`."""
    path, colons, name = reference.partition("::")
    return path + colons + name.replace(".", "::")


def belongs(test: str, reference: str) -> bool:
    """Whether a test that ran is the one, or one of the class or module, that a table names."""
    return test == reference or test.startswith(f"{reference}::")


class Trial:
    """Tries breaks in copies of the tree. `passed` has the seconds of each test as the code is."""

    def __init__(self, root: Path, copies: Copies, workers: int) -> None:
        self._root, self._copies, self._workers = root, copies, workers
        self.passed: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def first(self, rows: Iterable[Row]) -> None:
        """Runs the rows' tests without any break; what fails is run once more by itself."""
        files: dict[str, dict[str, None]] = defaultdict(dict)
        for row in rows:
            for test in map(node, row.tests):
                if (self._root / test.partition("::")[0]).is_file():
                    files[test.partition("::")[0]][test] = None
        batches: list[list[str]] = [[] for _ in range(self._workers)]
        for tests in sorted(files.values(), key=len, reverse=True):
            min(batches, key=len).extend(tests)
        self._copies.each([each for each in batches if each], self._run_first)
        again, self.failed = self.failed, {}
        if again:
            self._copies.each([[test] for test in again], self._run_first)

    def _run_first(self, copy: Copy, tests: list[str]) -> None:
        result = copy.run(tests, FIRST_RUN_SECONDS, keep=True, first=False)
        if result.outcome not in ("passed", "failed") and len(tests) > 1:
            # one name that pytest does not find keeps all from running
            for test in tests:
                self._run_first(copy, [test])
            return
        self.passed.update(result.passed)
        self.failed.update(result.all_failed)
        if result.outcome not in ("passed", "failed"):
            self.failed[tests[0]] = result.why

    def unready(self, row: Row) -> str:
        """Why the row's tests show nothing as the code is; empty if they pass."""
        if not row.tests:
            return "no test is named"
        for test in map(node, row.tests):
            if wrong := [name for name in self.failed if belongs(name, test)]:
                return f"{wrong[0]}: {self.failed[wrong[0]]}"
            if not any(belongs(name, test) for name in self.passed):
                return f"{test} did not run (skipped, or no such test)"
        return ""

    def seconds(self, row: Row) -> float:
        tests = [node(each) for each in row.tests]
        own = sum(s for n, s in self.passed.items() if any(belongs(n, each) for each in tests))
        return SLACK_SECONDS + TIMES * own

    def judge(self, copy: Copy, each: Break) -> Verdict:
        row = each.row
        try:
            texts = each.files(copy.folder)
        except Stale as error:
            return Verdict(row, "stale", str(error))
        if why := self.unready(row):
            return Verdict(row, "failing", why)
        begin = time.monotonic()
        with copy.broken(texts):
            result = copy.run(map(node, row.tests), self.seconds(row))
        taken = time.monotonic() - begin
        if result.outcome == "passed":
            return Verdict(row, "survived", shown(each), taken)
        if result.outcome == "error":
            return Verdict(row, "invalid", result.why, taken)
        if result.why.startswith(("NameError", "UnboundLocalError", "ImportError")):
            return Verdict(row, "invalid", f"{result.failed}: {result.why}", taken)
        why = result.why.partition("\n")[0]
        return Verdict(row, "caught", f"{result.failed}: {why}" if result.failed else why, taken)


def shown(each: Break) -> str:
    return "; ".join(f"{e.file}: {e.old.strip()!r} -> {e.new.strip()!r}" for e in each.edits)


def try_all(root: Path, lists: Lists, rows: list[Row], workers: int) -> list[Verdict]:
    """A verdict for every break of `rows`, and for every row without one, in the table's order."""
    verdicts: dict[int, Verdict] = {}
    jobs: list[tuple[int, Break]] = []
    for row in rows:
        breaks = lists.of(row)
        for each in breaks:
            number = len(verdicts) + len(jobs)
            if each.none:
                verdicts[number] = Verdict(row, "excused", each.none)
            else:
                jobs.append((number, each))
        if not breaks:
            what = Verdict(row, "excused", row.reason) if row.reason else Verdict(row, "untried")
            verdicts[len(verdicts) + len(jobs)] = what
    if jobs:
        progress = Progress(len(jobs))
        with Copies(root, workers) as copies:
            trial = Trial(root, copies, workers)
            trial.first({id(each.row): each.row for _, each in jobs}.values())

            def judge(copy: Copy, job: tuple[int, Break]) -> None:
                verdicts[job[0]] = trial.judge(copy, job[1])
                progress.step(verdicts[job[0]])

            copies.each(jobs, judge)
    return [verdicts[number] for number in sorted(verdicts)]


def try_proposals(root: Path, rows: list[Row], found: list[Proposal], workers: int) -> None:
    """Prints which tests of `rows` notice each proposal, as entries of a list."""
    tests = dict.fromkeys(test for row in rows for test in row.tests)
    row = Row("", ("",), "", (), tuple(tests), "implemented")
    lock = threading.Lock()
    with Copies(root, workers) as copies:
        trial = Trial(root, copies, workers)
        trial.first([row])

        def judge(copy: Copy, proposal: Proposal) -> None:
            verdict = trial.judge(copy, Break(row, (proposal.edit,)))
            with lock:
                print(proposal.entry(f"{verdict.verdict}: {verdict.detail.splitlines()[0]}"))

        copies.each(found, judge)


def changed(root: Path, since: str, lists: Lists, rows: list[Row]) -> list[Row]:
    """The rows whose code, tests or breaks are not what they were at the commit `since`."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    files = {*git("diff", "--name-only", since).split("\n")}
    files |= {*git("ls-files", "--others", "--exclude-standard").split("\n")}
    added = git("diff", since, "--", "docs", "tools/mutants")
    lines = "\n".join(line[1:] for line in added.splitlines() if line.startswith("+"))

    def touched(row: Row) -> bool:
        mine = {path for path, _ in code_files(root, row)}
        mine |= {test.partition("::")[0] for test in row.tests}
        edits = [edit for each in lists.of(row) for edit in each.edits]
        mine |= {edit.file for edit in edits}
        return bool(mine & files) or row.rule[:40] in lines or any(e.new in lines for e in edits)

    return [row for row in rows if touched(row)]


def summary(verdicts: list[Verdict], wrong: list[str]) -> str:
    counts = Counter(each.verdict for each in verdicts)
    lines = [""]
    for word in BAD:
        lines += [f"{word}: {v.row}\n    {v.detail}" for v in verdicts if v.verdict == word]
    lines += [f"of no row: {each}" for each in wrong]
    tried = counts["caught"] + counts["survived"]
    lines.append(f"{len(verdicts)} breaks and rows, {tried} tried")
    lines += [f"  {counts[word]:4} {word:9} {text}" for word, text in WORDS.items()]
    lines += [f"  {len(wrong):4} entries that belong to no row"] if wrong else []
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.mutate", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the tree")
    parser.add_argument(
        "--list", type=Path, nargs="*", help="lists; all of tools/mutants if absent"
    )
    parser.add_argument("--table", default="", help="a part of the table's path")
    parser.add_argument("--section", action="append", help="a part of a heading; may be repeated")
    parser.add_argument("--row", action="append", help="a part of a rule; may be repeated")
    parser.add_argument("--changed", metavar="COMMIT", help="only what changed since")
    parser.add_argument("--workers", type=int, default=2, help="copies of the tree at work")
    parser.add_argument("--json", type=Path, help="write all verdicts here")
    parser.add_argument(
        "--propose", metavar="FILE::NAME", help="list breaks of a name and try them"
    )
    parser.add_argument("--untried", action="store_true", help="list the rows without a break")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    root = args.root.resolve()
    try:
        lists = read_lists(root, args.list)
    except (ListError, TableError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [
        row
        for row in lists.rows
        if args.table in row.place
        and (not args.section or any(s in h for s in args.section for h in row.sections))
        and (not args.row or any(text in row.rule for text in args.row))
    ]
    if not rows:
        print("no row is chosen", file=sys.stderr)
        return 1
    try:
        if args.propose:
            try_proposals(root, rows, propose(root, args.propose), args.workers)
            return 0
        if args.changed:
            rows = changed(root, args.changed, lists, rows)
        if args.untried:
            print("\n".join(str(r) for r in rows if not lists.of(r) and not r.reason))
            return 0
        verdicts = try_all(root, lists, rows, args.workers)
    except (WorkerError, LookupError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        found = [asdict(each) for each in verdicts]
        args.json.write_text(json.dumps({"verdicts": found, "wrong": lists.wrong}, indent=1) + "\n")
    print(summary(verdicts, lists.wrong))
    return int(bool(lists.wrong) or any(each.verdict in BAD for each in verdicts))


if __name__ == "__main__":
    sys.exit(main())
