"""Digests of model weights, kept by name, size and time of change: some GB take minutes to hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvsp.files import write_durably
from kvsp.names.identity import model_digest

MOST: Final = 256
"""Digests kept; the oldest go first."""
SETTLED_SECONDS: Final = 2.0
"""A file that was changed more recently may change again and show the same time: its digest is not
kept."""


def cache_file() -> Path:
    """Where they are kept: `$XDG_CACHE_HOME/kvcs/digests.json`, in `~/.cache` by default."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "kvcs" / "digests.json"


def weights_digest(files: Mapping[str, Path], kept: Path | None) -> str:
    """`model_digest` of `files`, from the file `kept` when it has that of the same files, and kept
    there otherwise; None keeps nothing. Raises as `model_digest`."""
    if kept is None:
        return model_digest(files)
    states = {name: path.stat() for name, path in files.items()}
    facts = [
        [name, str(files[name].resolve()), state.st_size, state.st_mtime_ns]
        for name, state in sorted(states.items())
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    known = _read(kept)
    if key in known:
        return known[key]
    settled = time.time() - SETTLED_SECONDS
    digest = model_digest(files)
    after = {name: path.stat() for name, path in files.items()}
    same = all(
        (states[name].st_size, states[name].st_mtime_ns) == (now.st_size, now.st_mtime_ns)
        and now.st_mtime < settled
        for name, now in after.items()
    )
    if same:
        known[key] = digest
        _write(kept, dict(list(known.items())[-MOST:]))
    return digest


def _read(path: Path) -> dict[str, str]:
    """What is kept; nothing when the file is not there, or is not what was written."""
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(tree, dict):
        return {}
    return {key: each for key, each in tree.items() if isinstance(each, str)}


def _write(path: Path, known: Mapping[str, str]) -> None:
    """Keep them, whole or not at all; a folder that cannot be written costs the time again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(known).encode())
