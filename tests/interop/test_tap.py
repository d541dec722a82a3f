"""TAP version 14 as the runner reads it, and as other clients write it."""

from __future__ import annotations

import pytest

from interop.tap import Point, document, header, parse, render


def test_a_run_has_the_version_its_comments_and_its_plan():
    assert header(2, ["client 1", "Relay: moqt://h"]) == (
        "TAP version 14\n# client 1\n# Relay: moqt://h\n1..2"
    )


def test_a_point_carries_its_diagnostics_indented_by_two_as_yaml():
    point = Point("fetch", False, None, {"duration_ms": 7, "expected": 'a "b"', "received": "c"})
    assert render(3, point) == (
        'not ok 3 - fetch\n  ---\n  duration_ms: 7\n  expected: "a \\"b\\""\n  received: "c"\n  ...'
    )


def test_a_skip_is_ok_with_a_directive_and_its_reason_cannot_break_the_line():
    point = Point("fetch", False, "no # room\nhere")
    assert render(1, point) == "ok 1 - fetch # SKIP no No. room here"
    (read,) = parse(document([point]))
    assert read.skip == "no No. room here"
    assert not read.passed and not read.failed


def test_what_is_written_is_read_back():
    points = [
        Point("one", True, None, {"duration_ms": 1, "connection_id": "00ff"}),
        Point("two", False, None, {"message": "line\nline", "count": -1}),
        Point("three", True, "not offered"),
    ]
    assert parse(document(points, ["a comment"])) == points


def test_a_run_of_another_client_is_read():
    text = """  Found: something that is not TAP
TAP version 14
# target: moqt://127.0.0.1:1
1..2
ok 1 - setup-only
  ---
  duration_ms: 17
  sessions:
    client:
      alpn: "moqt-22"
  message: "SETUP: fine"
  ...
# Subtest: second
    ok 1 - inner
not ok 2 - second
"""
    first, second = parse(text)
    assert first.passed and first.diagnostics["message"] == "SETUP: fine"
    assert second.failed and second.name == "second"


def test_points_that_were_promised_and_never_came_are_failures():
    points = parse("TAP version 14\n1..3\nok 1 - a\nBail out! nobody there\n")
    assert [point.failed for point in points] == [False, True, True]
    assert points[2].diagnostics["message"] == "nobody there"


def test_output_without_a_plan_is_no_run():
    with pytest.raises(ValueError, match="no plan"):
        parse("Traceback: something\n")
