"""The types of limits and settings that are numbers: what is sensible is said where they stand."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""How many there may be: one at least."""

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number; 0 means something of its own."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""A time, or a rate, that is not 0."""

Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
"""A number that is not negative."""
