"""The C extension under sanitizers, and a difference that is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moqt.quic.packets.protection import PythonKeys
from tests.paths import ROOT
from tools import fuzz_native
from tools.fuzz_native import build, compare


def can_build(folder: Path) -> bool:
    try:
        build(folder / "_packets.abi3.so", *fuzz_native.SANITIZERS)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def test_under_the_sanitizers_the_extension_does_what_python_does(tmp_path: Path) -> None:
    if not can_build(tmp_path):
        pytest.skip("no compiler with sanitizers, or no headers of OpenSSL or Python")
    command = [sys.executable, "-m", "tools.fuzz_native", "--minutes", "0.05", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "no difference" in done.stdout


@pytest.mark.parametrize("way", ["seal", "open"])
def test_a_backend_that_does_otherwise_is_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = object()
    kept = fuzz_native.keys_of

    class Other(PythonKeys):
        def seal(self, *given: Any) -> list[bytes]:
            packets = super().seal(*given)
            return packets[:-1] if way == "seal" else packets

        def open(self, *given: Any) -> Any:
            index, runs = super().open(*given)
            return (index, runs[:-1]) if way == "open" else (index, runs)

    def keys_of(context: Any, module: Any, *, sealing: bool) -> Any:
        return Other(context) if module is native else kept(context, None, sealing=sealing)

    monkeypatch.setattr(fuzz_native, "keys_of", keys_of)
    with pytest.raises(AssertionError, match="otherwise"):
        for seed in range(20):
            compare(seed, native)
