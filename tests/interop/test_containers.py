"""The runner's relay contract, and Dockerfiles that fit the checkout (no engine builds them)."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from interop.relay_entry import UnsupportedRole, relay_options

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "interop" / "docker").glob("Dockerfile.*"))
KNOWN = {"FROM", "WORKDIR", "COPY", "RUN", "EXPOSE", "ENV", "ENTRYPOINT"}


def instructions(path):
    """(instruction, rest) of each line; continuations joined, comments left out."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_defaults_are_the_runners():
    assert relay_options({}) == [
        "--listen",
        "0.0.0.0:4443",
        "--cert",
        "/certs/cert.pem",
        "--key",
        "/certs/priv.key",
    ]


def test_the_runners_variables_become_options():
    options = relay_options(
        {
            "MOQT_ROLE": "relay",
            "MOQT_PORT": "5000",
            "MOQT_CERT": "/c",
            "MOQT_KEY": "/k",
            "MOQT_MLOG_DIR": "/mlog",
        }
    )
    assert shlex.join(options) == ("--listen 0.0.0.0:5000 --cert /c --key /k --qlog-dir /mlog")


def test_another_role_is_not_supported():
    with pytest.raises(UnsupportedRole, match="'client'"):
        relay_options({"MOQT_ROLE": "client"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_is_there_and_starts_a_module_that_is_there(path):
    steps = instructions(path)
    assert {step for step, _ in steps} <= KNOWN
    assert steps[0][0] == "FROM"
    copied = set()
    for step, rest in steps:
        if step == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
            copied.update(sources)
    (entry,) = [json.loads(rest) for step, rest in steps if step == "ENTRYPOINT"]
    assert entry[:2] == ["python", "-m"]
    assert importlib.util.find_spec(entry[2]) is not None
    assert entry[2].partition(".")[0] in copied


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_holds_every_package_that_the_project_installs(path):
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^include = \[(.*)\]$", project, re.MULTILINE)
    packages = {name.rstrip("*") for name in re.findall(r'"([^"]+)"', listed.group(1))}
    copied = {word for step, rest in instructions(path) if step == "COPY" for word in rest.split()}
    assert packages <= copied
    assert {"README.md", "LICENSE"} <= copied, "the build of the package reads both"
    runs = [rest for step, rest in instructions(path) if step == "RUN"]
    assert runs == ["pip install --no-cache-dir --editable ."], "nothing else from the network"
