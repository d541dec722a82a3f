"""The peers: independent implementations, each installed into an environment of its own.

`python -m interop.peers` installs them below .interop/ in the checkout, through the
machine's own pip configuration. A peer that cannot be had is reported, never passed over.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".interop"
INSTALL_SECONDS = 600
PYTHON_VARIABLE = "INTEROP_PYTHON"
"""Names an interpreter for the peers, when none of the usual places has a new enough one."""


class Unavailable(Exception):
    """A peer cannot run here; the message is the reason to report."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A pinned package with the programs it brings."""

    package: str
    version: str
    python: tuple[int, int]
    """The oldest Python it runs on."""

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / f"{self.package}-{self.version}"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name


AIOMOQT = Peer("aiomoqt", "0.13.3", (3, 12))


def interpreters() -> Iterator[Path]:
    """Pythons on this machine: the one named, this one, those on PATH, pyenv's versions."""
    if named := os.environ.get(PYTHON_VARIABLE):
        yield Path(named)
    yield Path(sys.executable)
    for minor in range(15, 11, -1):
        if found := shutil.which(f"python3.{minor}"):
            yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    if pyenv.is_dir():
        for version in sorted(pyenv.iterdir(), key=_version, reverse=True):
            yield version / "bin" / "python3"


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.name)))


def find_python(oldest: tuple[int, int]) -> Path:
    """An interpreter that is new enough and can make environments.

    Raises Unavailable; a pyenv shim that stands for no version does not count.
    """
    check = f"import sys, ssl, venv, ensurepip; sys.exit(sys.version_info < {oldest!r})"
    for candidate in interpreters():
        try:
            done = subprocess.run([candidate, "-c", check], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return candidate
    wanted = ".".join(map(str, oldest))
    raise Unavailable(f"no Python {wanted} or newer here; name one in {PYTHON_VARIABLE}")


def install(peer: Peer) -> Peer:
    """Make the peer's environment, unless it is there. Raises Unavailable with the reason."""
    stamp = peer.folder / ".installed"
    if stamp.exists():
        return peer
    python = find_python(peer.python)
    if peer.folder.exists():  # half made
        shutil.rmtree(peer.folder)
    _run([python, "-m", "venv", peer.folder], f"cannot make an environment with {python.name}")
    pip: list[str | Path] = [peer.program("python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", f"{peer.package}=={peer.version}"]
    _run(pip, f"cannot install {peer.package}")
    stamp.touch()
    return peer


def _run(command: list[str | Path], failed: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{failed}: {type(error).__name__}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(f"{failed}: {lines[-1]}")


def main() -> int:
    """Install every peer; exit status 1 when one is not to be had."""
    try:
        install(AIOMOQT)
    except Unavailable as why:
        print(f"{AIOMOQT.package} {AIOMOQT.version}: {why}", file=sys.stderr)
        return 1
    print(f"{AIOMOQT.package} {AIOMOQT.version} in {AIOMOQT.folder.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
