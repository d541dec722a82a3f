"""Make requirements.lock anew from pyproject.toml: `python -m tools.lock`, or `make lock`.

The lock names one version of every package, with the hashes of its files, for every Python that
pyproject.toml allows; what holds on some of them only has a marker. The extra `torch` is left out:
its packages are large and follow the machine's accelerator.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
HEADER = "# By `make lock`, of requirements with SHA-256 "


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def wanted() -> list[str]:
    """What the lock answers for: the dependencies, and the extras without `torch`."""
    table = project()
    extras = table["optional-dependencies"]
    named = [*table["dependencies"], *extras["redis"], *extras["s3"], *extras["dev"]]
    return [each for each in named if not each.startswith("kvcs[")]


def digest() -> str:
    """Changes when the lock has to be made anew."""
    asked = [project()["requires-python"], *sorted(wanted())]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def main() -> int:
    oldest = project()["requires-python"].removeprefix(">=")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "uv"]
        subprocess.run(pip, check=True)
        command = [python, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--upgrade"]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url"]
        command += ["--python-version", oldest, "--extra", "dev", "pyproject.toml"]
        made = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    LOCK.write_text(f"{HEADER}{digest()}\n{made.stdout}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
