"""Each example runs as its docstring says, and shows what it is to show."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(
    path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)
LAYERS = 30
"""Of the sample that `make demo` uses, too."""


def run(name: str) -> list[str]:
    """The lines that the example prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_cache_is_consumed_while_it_is_published():
    lines = run("publish_and_consume")
    assert [line for line in lines if "is there" in line] == [
        f"layer {number} is there" for number in range(LAYERS)
    ]
    assert [line for line in lines if "has come" in line] == [
        f"layer {number} has come: k (160, 3, 64), v (160, 3, 64)" for number in range(LAYERS)
    ]
    assert lines[-1] == "600 Objects, each verified"


def test_a_track_is_watched_from_its_past_to_its_end():
    lines = run("watch_a_track")
    assert lines[:2] == ["(0, 0) frame 0 by FILL", "(0, 1) frame 1 by FILL"]
    assert lines[2:] == [
        *(f"(0, {number}) frame {number} by SUBSCRIPTION" for number in range(2, 5)),
        "(0, 5) END_OF_TRACK by SUBSCRIPTION",
    ]


def test_a_relay_in_memory_serves_from_its_cache_what_has_no_publisher_any_more():
    assert run("relay_in_memory") == [
        "first: (0, 0) hello by SUBSCRIPTION",
        "withdrawn: session closed (NO_ERROR)",
        "second: (0, 0) hello by FETCH",
        "the relay holds 5 octets",
    ]


def test_a_consumer_without_a_relay_takes_all_from_a_holder():
    lines = run("fall_back_to_http")
    layers = [line for line in lines if line.startswith("layer ")]
    assert layers == [f"layer {number}: k and v (160, 3, 64)" for number in range(LAYERS)]
    source = (
        r"\{'blocks': \[0, 9\], 'layers': \[0, 29\], 'source': 'http://127\.0\.0\.1:\d+/kvsp/'\}"
    )
    assert re.fullmatch(source, lines[-1])


def test_the_wire_shows_octets_and_what_they_mean():
    lines = run("look_at_the_wire")
    octets = "03 00 17 00 02 04 64 65 6d 6f 04 6c 69 76 65 05 76 69 64 65 6f 02 20 07 01 05"
    assert lines[0] == f"{'SUBSCRIBE':<18}  26 octets  {octets}"
    assert "   payload b'hello'" in lines
    assert lines[-1].startswith("a malformed message closes the session: PROTOCOL_VIOLATION")


def test_an_engine_uses_the_first_layers_while_others_are_computed():
    lines = run("an_engine")
    used = [
        re.fullmatch(r"layer (\d+) is used: k \(160, 3, 64\), while (\d+) .*", line)
        for line in lines[:-1]
    ]
    assert [int(each[1]) for each in used] == list(range(LAYERS))
    assert int(used[0][2]) < LAYERS
    assert lines[-1] == "160 of 163 tokens were not computed"


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_says_how_to_run_it_and_is_listed(name: str):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"`make install`: .venv/bin/python -m examples.{name}\n" in text
    assert f"| `examples.{name}` |" in (EXAMPLES / "README.md").read_text()
    assert f'run("{name}")' in (ROOT / "tests/examples/test_examples.py").read_text()


def test_what_is_listed_exists():
    listed = re.findall(r"^\| `examples\.(\w+)`", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == PROGRAMS
