"""Chromium without a window: where it is, which one it is, and how it is started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from interop.peers import Unavailable
from interop.processes import Program

VARIABLE = "INTEROP_BROWSER"
"""Names the browser, when it is not on PATH under one of `NAMES`."""
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    # Root, as in a container, can have no sandbox; the page is ours and only loopback is visited.
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VERSION_SECONDS = 30.0


def find_browser() -> Path:
    """The browser's program. Raises Unavailable with what to do."""
    if named := os.environ.get(VARIABLE):
        if found := shutil.which(named):
            return Path(found)
        raise Unavailable(f"{VARIABLE} names {named!r}, which is no program here")
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    raise Unavailable(
        f"no Chromium here: install chromium-headless-shell, or name one in {VARIABLE}"
    )


def browser_version(browser: Path) -> str:
    """What the browser says its version is. Raises Unavailable when it does not run."""
    try:
        done = subprocess.run(
            [browser, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{browser.name} does not run: {type(error).__name__}") from None
    if done.returncode:
        raise Unavailable(f"{browser.name} does not run: exit {done.returncode}")
    return done.stdout.strip().split()[-1]


def start(browser: Path, url: str, folder: Path, *options: str) -> Program:
    """The browser at `url`, with a new profile in `folder`; leaving `with` ends it."""
    profile = folder / "profile"
    command: list[str | Path] = [browser, *OPTIONS, *options, f"--user-data-dir={profile}", url]
    return Program("browser", command, folder)
