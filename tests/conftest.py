"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import settings

# A slow machine is not a failure: speed is measured by `make bench`, never asserted here.
settings.register_profile("kvcs", deadline=None, print_blob=True)
settings.load_profile("kvcs")
