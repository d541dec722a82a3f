"""The tests of the packages on other Pythons, or with the lowest versions that are allowed.

`python -m tools.pythons` runs them on each Python of the classifiers that is here, and says which
are not; `--first` stops after the first of those named; `--e2e` adds the tests with processes;
`--brief` leaves out what simulates hours of networks or reads our own sources, the same on any.
`--lowest` takes the lowest version of each direct dependency, on this Python, instead of the lock.
Environments are made in `.pythons` and kept while what they are made from stays the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.lock import LOCK, ROOT, project, wanted

FOLDER = ROOT / ".pythons"
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
ALIKE = ("tests/tools", "tests/moqt/quic/congestion", "tests/moqt/quic/test_random_paths.py")
"""Tests that `--brief` leaves out."""


def versions() -> list[str]:
    """The Pythons that the project says it runs on, such as "3.11"."""
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))
    return sorted(named, key=lambda version: int(version.partition(".")[2]))


def candidates(version: str) -> Iterator[Path]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield Path(sys.executable)
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True)


def find(version: str) -> Path | None:
    """An interpreter of this version that can make environments."""
    check = "import sys, ssl, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates(version):
        try:
            done = subprocess.run([candidate, "-c", check], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.stdout.decode().strip() == version:
            return candidate
    return None


def lowest() -> list[str]:
    """The lower bound of every direct dependency, as a constraint."""
    pinned = []
    for each in wanted():
        match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)(?:,.*)?", each)
        if match is None:
            raise ValueError(f"pyproject.toml: {each!r} has no lower bound, as name>=version")
        pinned.append(f"{match[1]}=={match[2]}")
    return pinned


def environment(name: str, python: Path, constraints: list[str] | None) -> Path:
    """The interpreter of a fresh environment, from the lock unless there are constraints."""
    folder = FOLDER / name
    made = folder / "bin" / "python"
    source = "\n".join(constraints) if constraints is not None else LOCK.read_text("utf-8")
    stamp, state = folder / ".installed", hashlib.sha256(source.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return made
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    if constraints is None:
        subprocess.run([made, *PIP, "--require-hashes", "--requirement", LOCK], check=True)
        own = ["--no-deps", "--no-build-isolation", "--editable", "."]
    else:
        (folder / "constraints.txt").write_text(source)
        own = ["--constraint", str(folder / "constraints.txt"), "--editable", ".[dev]"]
    subprocess.run([made, *PIP, *own], check=True, cwd=ROOT)
    stamp.write_text(state)
    return made


def run(
    name: str, python: Path, constraints: list[str] | None, *, e2e: bool, brief: bool = False
) -> bool:
    """Make the environment and run the tests in it; prints a line that sums up."""
    began = time.monotonic()
    try:
        made = environment(name, python, constraints)
    except subprocess.CalledProcessError as error:
        print(f"{name}: no environment: {error}", flush=True)
        return False
    # the programs that tests start are those of the same environment
    ours = {**os.environ, "PATH": f"{made.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(made), "-m", "pytest", "-p", "no:cacheprovider", "-n"]
    without = [f"--ignore={each}" for each in ("tests/e2e", *(ALIKE if brief else ()))]
    rounds = [["auto", *without, "tests"], *([["2", "tests/e2e"]] if e2e else [])]
    codes = [subprocess.run([*command, *each], cwd=ROOT, env=ours).returncode for each in rounds]
    said = "failed" if any(codes) else "passed"
    print(f"{name}: {said} in {time.monotonic() - began:.0f} s ({python})", flush=True)
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="such as 3.13; all of the classifiers if none")
    parser.add_argument("--first", action="store_true", help="only the first that is here")
    parser.add_argument("--e2e", action="store_true", help="the tests with processes too")
    parser.add_argument("--brief", action="store_true", help="without what is the same on any")
    parser.add_argument("--lowest", action="store_true", help="the lowest direct versions")
    options = parser.parse_args()
    if options.lowest:
        return not run("lowest", Path(sys.executable), lowest(), e2e=options.e2e)
    absent, results = [], []
    for version in options.versions or versions():
        python = find(version)
        if python is None:
            absent.append(version)
            continue
        results.append(run(version, python, None, e2e=options.e2e, brief=options.brief))
        if options.first:
            break
    if absent:
        print(f"not run, for there is no such Python here: {', '.join(absent)}", flush=True)
    if not results:
        print("no other Python was tried", flush=True)
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
