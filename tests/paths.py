"""Where tests find the checkout and the golden vectors, from whichever folder they stand in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
