"""An environment of its own with LMCache and SGLang, as far as their interfaces go on a CPU:
`make test-engines` runs in it.

Neither is made for machines without a GPU, and each asks for a torch of its own with much around
it. Their base classes, configurations, keys and memory objects need little of that: both come
without their dependencies, and what importing these parts asks for beside them. pip is right to
complain of the rest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
ENGINES = ("lmcache==0.5.6", "sglang==0.5.23")
FOR_THEIR_INTERFACES = (
    *("numpy<2.5", "numba", "sortedcontainers", "aiofile", "aiofiles", "py-cpuinfo", "psutil"),
    *("msgpack", "pyzmq", "pyyaml", "safetensors", "transformers>=5", "requests", "setuptools<81"),
    *("orjson", "pybase64", "triton", "pillow", "tqdm", "ipython", "pydantic", "python-dateutil<3"),
)
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis")


def main() -> None:
    """Make the environment, or what of it is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the environment's folder")
    folder = parser.parse_args().folder.absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    made = folder / "kvcs-engines.txt"
    if not made.exists():
        _pip(python, TORCH, *FOR_THEIR_INTERFACES)
        _pip(python, "--no-deps", *ENGINES)
        _pip(python, "--editable", str(ROOT), *TESTS)
        freeze = [python, "-m", "pip", "freeze"]
        made.write_text(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
    sys.stdout.write(f"{folder}\n")


def _pip(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)


if __name__ == "__main__":
    main()
