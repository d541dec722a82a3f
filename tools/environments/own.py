"""A virtual environment of its own, in the versions that were tested.

What is in it is listed by its name beside this file, `NAME.txt`: pip takes these versions for
whatever it installs. With `--newest` it takes what the index has, and the list is written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TORCH = "torch==2.13.0"
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis")


class Environment:
    """One in a folder. What fails raises CalledProcessError: pip has said why."""

    def __init__(self, name: str, folder: Path, *, newest: bool = False) -> None:
        self.folder = folder.absolute()
        self.python = self.folder / "bin" / "python"
        self.versions = Path(__file__).with_name(f"{name}.txt")
        self._newest = newest

    def make(self, install: Callable[[Environment], None]) -> None:
        """Make it, unless it is there as it should be: `install` puts in what it needs."""
        made, wanted = self.folder / "kvcs-environment.txt", self._wanted(install)
        if not self._newest and made.exists() and made.read_text("utf-8") == wanted:
            return
        venv.create(self.folder, with_pip=True, clear=self._newest)
        install(self)
        if self._newest:
            self.versions.write_text(self._installed(), "utf-8")
        made.write_text(self._wanted(install), "utf-8")

    def install(self, *what: str) -> None:
        """What pip calls so, in the versions that were tested."""
        tested = () if self._newest else ("--constraint", str(self.versions))
        self.run("-m", "pip", "install", "--quiet", *tested, *what)

    def install_kvcs(self, *extras: str) -> None:
        """This checkout, with what its tests need."""
        asked = f"[{','.join(extras)}]" if extras else ""
        self.install("--editable", f"{ROOT}{asked}", *TESTS)

    def run(self, *arguments: str) -> str:
        """What its Python prints; it sees nothing but what is in it."""
        command = [self.python, "-I", *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def _wanted(self, install: Callable[[Environment], None]) -> str:
        """What it was made from: when that is other than before, it is made anew."""
        digest = hashlib.sha256(Path(install.__code__.co_filename).read_bytes())
        digest.update(self.versions.read_bytes() if self.versions.exists() else b"")
        return digest.hexdigest()

    def _installed(self) -> str:
        """Every package, without what says where it is from (`+cpu`)."""
        packages = self.run(
            "-m", "pip", "freeze", "--all", "--exclude", "pip", "--exclude-editable"
        )
        return re.sub(r"\+\S+$", "", packages, flags=re.MULTILINE)


def main(name: str, description: str | None, install: Callable[[Environment], None]) -> Environment:
    """What each of them does as a program: make it, tell where it is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="the environment's folder")
    parser.add_argument(
        "--newest", action="store_true", help="in the newest versions, and write down which"
    )
    options = parser.parse_args()
    environment = Environment(name, options.folder, newest=options.newest)
    environment.make(install)
    sys.stdout.write(f"{environment.folder}\n")
    return environment
