"""An engine that puts pages until it has put all, or is killed: settings (a JSON object), names.

Which octets a page has follows from its name, so that whoever gets one can tell that it is whole.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from kvcs.pages.counters import PageCounters
from kvcs.pages.naming import PageForm
from kvcs.pages.settings import PageSettings
from kvcs.pages.store import PageStore
from tests.kvcs.pages.services import FORM

LARGE = replace(FORM, page_tokens=8192)
"""Pages of 786,432 octets."""


def store_of(settings: dict[str, Any], form: PageForm = LARGE) -> PageStore:
    """A store with counters of its own."""
    counters = PageCounters()
    counters.register(CollectorRegistry())
    return PageStore(PageSettings.parse(settings), form, counters)


def page_of(name: str, octets: int) -> bytes:
    """The page of a name, the same in every process."""
    return np.random.default_rng(list(name.encode())).bytes(octets)


def put(store: PageStore, names: list[str]) -> int:
    """How many of the pages of these names are stored now."""
    pages = [page_of(name, store.place.octets) for name in names]
    return store.wait(store.put(names, pages))


def main() -> None:
    """Put them one after the other."""
    store = store_of(json.loads(sys.argv[1]))
    for name in sys.argv[2:]:
        assert put(store, [name]) == 1


if __name__ == "__main__":
    main()
