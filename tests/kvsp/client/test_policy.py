"""What follows a refusal: one table over every problem type."""

from __future__ import annotations

import json

import pytest

from kvsp.client.errors import (
    ConflictError,
    NotAuthorizedError,
    NotFoundError,
    ProblemDetails,
    QuotaError,
    RequestRefusedError,
    UnavailableError,
    refusal,
)
from kvsp.client.policy import COURSES, Course, course
from kvsp.records.problems import PROBLEMS, TYPE_PREFIX, ProblemName

MEDIA = "application/problem+json"


def test_every_problem_type_has_a_course():
    assert set(COURSES) == set(ProblemName)


@pytest.mark.parametrize(
    ("status", "name", "wait", "expected"),
    [
        (400, "kvsp-invalid-request", None, Course.FINAL),
        (403, "kvsp-forbidden", 1, Course.FINAL),
        (404, "kvsp-unknown-resource", None, Course.NEXT),
        (404, "kvsp-layers-unavailable", None, Course.NEXT),
        (429, "kvsp-lease-quota", 2, Course.WAIT),
        (429, "kvsp-lease-quota", None, Course.FINAL),
        (507, "kvsp-storage-full", 2, Course.WAIT),
        (503, None, 2, Course.WAIT),
        (503, None, None, Course.RETRY),
        (500, None, None, Course.RETRY),
        (401, None, None, Course.FINAL),
        (418, "x-unheard-of", None, Course.FINAL),
    ],
)
def test_a_problem_is_judged_by_the_part_of_its_type_after_the_hash(status, name, wait, expected):
    body = json.dumps({"type": f"https://other.example/#{name}"} if name else {}).encode()
    problem = ProblemDetails.read(status, body, MEDIA, None if wait is None else str(wait))
    assert course(problem) is expected


@pytest.mark.parametrize(
    ("status", "name", "kind"),
    [
        (404, "kvsp-unknown-resource", NotFoundError),
        (401, None, NotAuthorizedError),
        (403, "kvsp-forbidden", NotAuthorizedError),
        (412, "kvsp-block-exists", ConflictError),
        (429, "kvsp-lease-quota", QuotaError),
        (429, None, UnavailableError),
        (507, "kvsp-storage-full", UnavailableError),
        (422, "kvsp-compat-mismatch", RequestRefusedError),
    ],
)
def test_a_refusal_is_a_typed_exception_that_carries_the_problem(status, name, kind):
    error = refusal("https://h/", ProblemDetails(status, name, "why"))
    assert type(error) is kind and error.problem.status == status
    assert "why" in str(error) and (name or str(status)) in str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"type": 7}', b"\xff", b'{"detail": {}}'])
def test_a_malformed_problem_counts_as_its_status_alone(body):
    problem = ProblemDetails.read(500, body, MEDIA, "soon")
    assert (problem.status, problem.type, problem.retry_after) == (500, None, None)


def test_the_detail_of_a_peer_is_one_short_line_without_control_characters():
    text = json.dumps({"detail": "\x1b[31mred\nline\x07" + "x" * 9999}).encode()
    detail = ProblemDetails.read(500, text, MEDIA, None).detail
    assert detail.isprintable() and len(detail) <= 500


def test_statuses_of_the_table_agree_with_the_exceptions():
    for name, kind in PROBLEMS.items():
        error = refusal("https://h/", ProblemDetails(kind.status, str(name)))
        assert error.problem.name is name
        assert TYPE_PREFIX not in str(error)
