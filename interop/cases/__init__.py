"""The cases. Importing this package fills `interop.case.CASES`, in the order of the imports."""

from __future__ import annotations

# The order is that of a run: what everything else rests on comes first.
from interop.cases import public  # isort: skip
from interop.cases import locations, objects, fetching, namespaces  # isort: skip
from interop.cases import published, tokens, rules  # isort: skip

__all__ = [
    "fetching",
    "locations",
    "namespaces",
    "objects",
    "public",
    "published",
    "rules",
    "tokens",
]
