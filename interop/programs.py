"""`kvcs-publish` and `kvcs-subscribe` through a relay: a real KV cache, compared byte for byte."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

from safetensors.numpy import load_file

from interop.processes import Program, ProgramFailed
from interop.tap import Point, Scalar
from kvsp.names.identity import Scope

DATA = Path(__file__).resolve().parent.parent / "tools" / "data"
CACHE = DATA / "smollm2-survey.safetensors"
LIVE_DELAY_MS = 30
SECONDS = 60


def retrieve(url: str, certificate: Path, folder: Path) -> list[Point]:
    """Retrieve while the cache is produced, then again when it is complete."""
    scope = folder / "scope.json"
    Scope.generate().save(scope)
    common: list[str | Path] = [url, "--cafile", certificate, "--scope-key-file", scope]
    common += ["--compat", DATA / "smollm2-survey.compat.json"]
    common += ["--tokens", DATA / "smollm2-survey.tokens.json"]
    module = [sys.executable, "-m", "kvcs.programs.publish"]
    options: list[str | Path] = ["--kv", CACHE, "--live-delay", str(LIVE_DELAY_MS)]
    with Program("kvcs-publish", [*module, *common, *options], folder) as publisher:
        try:
            publisher.wait_for("publishing")
        except ProgramFailed as error:
            return [
                Point(name, False, None, {"message": str(error)})
                for name in ("kvcs-live", "kvcs-completed")
            ]
        return [_subscribe(name, common, folder) for name in ("kvcs-live", "kvcs-completed")]


def _subscribe(name: str, common: list[str | Path], folder: Path) -> Point:
    out = folder / f"{name}.safetensors"
    command = [sys.executable, "-m", "kvcs.programs.subscribe", *common, "--out", out]
    began = monotonic()
    with Program(name, [*command, "--timeout", str(SECONDS)], folder) as subscriber:
        try:
            status = subscriber.wait(2 * SECONDS)
            why = f"exit status {status}: {subscriber.last_words}" if status else _difference(out)
        except ProgramFailed as error:
            why = str(error)
    took: dict[str, Scalar] = {"duration_ms": round((monotonic() - began) * 1000)}
    return Point(name, not why, None, {**took, "message": why} if why else took)


def _difference(received: Path) -> str:
    """How `received` differs from the original; empty when every tensor has its very octets."""
    original, copy = load_file(CACHE), load_file(received)
    if original.keys() != copy.keys():
        return f"{len(copy)} tensors instead of {len(original)}"
    wrong = [
        name
        for name, tensor in original.items()
        if tensor.dtype != copy[name].dtype or tensor.tobytes() != copy[name].tobytes()
    ]
    return f"{len(wrong)} tensors differ, the first is {wrong[0]}" if wrong else ""
