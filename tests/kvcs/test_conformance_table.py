"""`docs/kvcs-conformance.md` says nothing of code or tests that are not there, and leaves out no
sentence of the draft that has a keyword."""

from __future__ import annotations

from collections import Counter

from tests.conformance import faults, rows

KEYWORDS = {
    ("Track Names", "MAY"): 1,
    ("Groups", "MUST"): 2,
    ("Objects", "SHOULD"): 1,
    ("Object Payload", "MUST"): 6,
    ("Manifest Track", "MUST"): 2,
    ("Manifest Track", "SHOULD"): 2,
    ("Publisher Behavior", "MUST"): 1,
    ("Publisher Behavior", "MUST NOT"): 2,
    ("Publisher Behavior", "SHOULD"): 1,
    ("Verification and Recovery", "MUST NOT"): 1,
    ("Verification and Recovery", "SHOULD"): 1,
    ("Relay Considerations", "MUST"): 1,
    ("Operational Considerations", "SHOULD"): 3,
    ("Security Considerations", "MUST"): 5,
    ("Security Considerations", "MUST NOT"): 1,
    ("Security Considerations", "SHOULD"): 1,
}
"""The keywords of the draft (BCP 14) by section; of a sentence that asks for several things, one
for each."""


def test_every_row_has_a_state_and_names_code_and_tests_that_are_there() -> None:
    assert len(rows("kvcs-conformance")) > 100
    assert not faults("kvcs-conformance")


def test_every_keyword_of_the_draft_has_its_row() -> None:
    found = Counter((row.section, row.mark) for row in rows("kvcs-conformance"))
    keywords = {"MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY"}
    assert {each: n for each, n in found.items() if each[1] in keywords} == KEYWORDS
