"""A server of S3 from the package index, which a test has to itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET = "bucket"
CREDENTIALS = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": "example"}
_REQUEST = re.compile(rf'"(?:\x1b\[\d+m)*([A-Z]+) /{BUCKET}([/?]\S*)')
"""A line of its log, whose requests of some kinds are coloured."""


class S3Server:
    """moto's server, with one bucket. It can stand still."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log
        self._seen = Counter[str]()

    def requests(self, prefix: str, count: int) -> Counter[str]:
        """Those of names with `prefix` since this was asked last, by method: `count`, or more."""
        deadline = time.monotonic() + 30
        while True:  # it answers, and then writes its log
            lines = _REQUEST.findall(self._log.read_text())
            found = [method for method, what in lines if prefix in what][self._seen[prefix] :]
            if len(found) >= count or time.monotonic() > deadline:
                self._seen[prefix] += len(found)
                return Counter(found)
            time.sleep(0.02)

    def stop(self) -> None:
        """From now on it answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("moto_server", path=places)
    if program is None:
        pytest.skip("moto's server is not installed")
    pytest.importorskip("obstore", reason="the extra 's3' is not installed")
    log = folder / "moto.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", "0"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield _with_bucket(process, log)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(20)


def _with_bucket(process: subprocess.Popen[bytes], log: Path) -> S3Server:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            server = S3Server(process, log, int(found[1]))
            request = urllib.request.Request(f"{server.endpoint}/{BUCKET}", b"", method="PUT")
            with urllib.request.urlopen(request, timeout=60):
                return server
        time.sleep(0.05)
    pytest.fail("moto's server does not start")
