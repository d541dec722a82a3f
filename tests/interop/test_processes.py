"""A program that the harness starts is ended with all that it started."""

from __future__ import annotations

import os
import time

import pytest

from interop.processes import Program


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here to look into")
@pytest.mark.parametrize("leader", ["wait", "exit 0"], ids=["ended with it", "outlived it"])
def test_what_a_program_started_ends_when_the_harness_leaves_it(leader, tmp_path):
    script = f"sleep 600 & echo child $!; {leader}"
    with Program("wrapper", ["/bin/sh", "-c", script], tmp_path) as program:
        child = int(program.wait_for(r"child (\d+)").group(1))
        if leader == "exit 0":
            assert program.wait(10) == 0
        assert is_running(child)
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_what_a_program_says_and_ends_with_between_two_looks_is_read(tmp_path, monkeypatch):
    def slow_look(program):
        words = (tmp_path / "hasty.out").read_text()
        program.wait(10)
        return words

    monkeypatch.setattr(Program, "output", property(slow_look))
    with Program("hasty", ["/bin/sh", "-c", "sleep 0.2; echo ready"], tmp_path) as program:
        assert program.wait_for("ready")
