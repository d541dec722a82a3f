"""What something costs, in calls of functions: the same on every machine, whatever else it does."""

from __future__ import annotations

import sys

from tests.paths import ROOT

OURS = tuple(f"{ROOT / package}/" for package in ("moqt", "relay"))


def calls(action):
    """Calls of functions of moqt and relay that `action` makes, comprehensions and each step of
    a generator included."""
    made = 0

    def count(frame, event, argument):
        nonlocal made
        made += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return made
