"""Copies of the tree, each with a warm process that runs tests in it, away from the checkout."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "*venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".hypothesis", ".interop", ".import_linter_cache", "*.egg-info", "build", "node_modules",
)  # fmt: skip
STARTING = 120.0
"""Seconds a worker may take to import what third parties wrote."""


class WorkerError(Exception):
    """A worker could not be started or is gone; the text says what it wrote last."""


@dataclass(frozen=True, slots=True)
class Result:
    outcome: str
    """`passed`, `failed`, `hung`, `died`, or `error` when the tests could not be run."""
    failed: str = ""
    """The first test that failed."""
    why: str = ""
    passed: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each test that passed."""
    all_failed: Mapping[str, str] = field(default_factory=dict)


class Copy:
    """One copy of the tree and its worker. One thread at a time uses it."""

    def __init__(self, root: Path, folder: Path) -> None:
        shutil.copytree(root, folder, ignore=NOT_COPIED, symlinks=True)
        self.folder = folder
        env = {**os.environ, "PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._errors = (folder / "worker.txt").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.worker"],
            cwd=folder, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        if self._line(STARTING) != "ready":
            raise WorkerError(self._last_words())

    def run(
        self, tests: Iterable[str], seconds: float, *, keep: bool = False, first: bool = True
    ) -> Result:
        """Runs `tests` for at most `seconds`; with `first`, up to the first failure.

        `keep` writes compiled modules, which later runs begin with: only for unbroken code.
        """
        request = {"tests": list(tests), "seconds": seconds, "keep": keep, "first": first}
        stdin = self._pipe(self._process.stdin)
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None
        line = self._line(seconds + 30)
        if not line:
            raise WorkerError(self._last_words())
        return Result(**json.loads(line))

    @contextlib.contextmanager
    def broken(self, texts: Mapping[str, str]) -> Iterator[None]:
        """While it lasts the files have these texts. Their compiled form is put aside: with the
        same length and second it would be taken for that of the broken text."""
        aside: list[tuple[Path, Path]] = []
        before: list[tuple[Path, bytes, os.stat_result]] = []
        try:
            for name, text in texts.items():
                path = self.folder / name
                before.append((path, path.read_bytes(), path.stat()))
                for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                    hidden = compiled.with_suffix(".aside")
                    compiled.rename(hidden)
                    aside.append((hidden, compiled))
                path.write_text(text, "utf-8")
            yield
        finally:
            for path, octets, stat in before:
                path.write_bytes(octets)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            for hidden, compiled in aside:
                hidden.rename(compiled)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                self._pipe(pipe).close()
        self._errors.close()

    def _line(self, seconds: float) -> str:
        """A line of the worker, or nothing when it is gone or too late; then it is killed."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            return self._pipe(self._process.stdout).readline().strip()
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        self._errors.flush()
        written = (self.folder / "worker.txt").read_text("utf-8", "replace")
        return f"the worker in {self.folder} is gone: {written[-1000:]}"

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


class Copies:
    """`count` copies of the tree at `root`, gone with their processes at the end of `with`."""

    def __init__(self, root: Path, count: int) -> None:
        self._root, self._count = root, count
        self._copies: list[Copy] = []

    def __enter__(self) -> Copies:
        # the copies are ours alone and short-lived; where they stand a reader of the output sees
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        try:
            for number in range(self._count):
                self._copies.append(Copy(self._root, Path(self._folder.name) / str(number)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for copy in self._copies:
            copy.close()
        self._folder.cleanup()

    def each(self, jobs: Iterable[T], do: Callable[[Copy, T], Any]) -> None:
        """Does every job in one of the copies, as many at a time as there are copies.

        Raises what the first job to fail raised, after the others at work are done.
        """
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in self._copies:
            free.put(copy)

        def work(job: T) -> None:
            copy = free.get()
            try:
                do(copy, job)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(self._count) as pool:
            try:
                for done in as_completed([pool.submit(work, job) for job in jobs]):
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)
