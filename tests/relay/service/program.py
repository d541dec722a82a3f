"""`kvcs-relay` as a real process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

COMMAND = [sys.executable, "-m", "relay.service.cli"]
READY = re.compile(
    r"kvcs-relay ready on moqt://(\S+) certificate (\S+)(?: metrics (\S+))?"
    r"(?: sha256 (\S+) base64 (\S+))?\n"
)


@contextlib.contextmanager
def running(*arguments, **environment):
    """A relay that is ready: (process, the ready line's match)."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        line = process.stdout.readline()
        match = READY.fullmatch(line)
        assert match, (line, process.poll() is not None and process.stderr.read())
        yield process, match
    finally:
        process.kill()
        process.communicate()


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def check_sentence(result, code, *words):
    """One readable line on stderr, nothing on stdout, no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("kvcs-relay: ")
    for word in words:
        assert word in result.stderr
