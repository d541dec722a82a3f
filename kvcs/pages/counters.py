"""What became of pages, for Prometheus: `kvcs_pages_total`, `kvcs_page_octets_total`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class Doing(StrEnum):
    """What was done with pages."""

    LOOK_UP = "look_up"
    GET = "get"
    PUT = "put"


class Outcome(StrEnum):
    """What became of it."""

    DONE = "done"
    """Found, got whole and verified, or stored (also when it was there already)."""
    MISSED = "missed"
    """The index knows of no holder."""
    LOST = "lost"
    """No holder gave it, or not in time."""
    VERIFICATION = "verification"
    """What a holder gave was not what its record says; it was thrown away."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """The service says no."""
    OPEN = "open"
    """Not tried: the service failed less than `failed_seconds` ago."""
    FULL = "full"
    """Not put: as much was being put as may be (`pending_octets`)."""
    FORM = "form"
    """Not a whole page, or in another form than the others."""
    CLOSED = "closed"
    FAILED = "failed"
    """Something here failed; the log has it."""


class PageCounters(Collector):
    """Pages by what was done and what became of it, and octets; safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: Counter[tuple[Doing, Outcome]] = Counter()
        self._octets: Counter[Doing] = Counter()
        self._registered = False

    def register(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Show them there, once."""
        with self._lock:
            registered, self._registered = self._registered, True
        if not registered:
            registry.register(self)

    def add(self, doing: Doing, outcome: Outcome, pages: int = 1, octets: int = 0) -> int:
        """Count; returns how many pages there were by now of this kind."""
        with self._lock:
            self._octets[doing] += octets
            self._pages[doing, outcome] += pages
            return self._pages[doing, outcome]

    def of(self, doing: Doing) -> dict[str, int]:
        """Pages by outcome."""
        with self._lock:
            return {str(outcome): n for (did, outcome), n in self._pages.items() if did is doing}

    def collect(self) -> Iterable[Metric]:
        """For a registry of prometheus_client."""
        with self._lock:
            counted, moved = dict(self._pages), dict(self._octets)
        pages = CounterMetricFamily(
            "kvcs_pages", "Pages of an engine, by what became of them.", labels=_LABELS
        )
        for (doing, outcome), count in counted.items():
            pages.add_metric([doing, outcome], count)
        octets = CounterMetricFamily(
            "kvcs_page_octets", "Octets of the pages that were got and put.", labels=_LABELS[:1]
        )
        for doing, count in moved.items():
            octets.add_metric([doing], count)
        return (pages, octets)


_LABELS: Final = ("doing", "outcome")
COUNTERS: Final = PageCounters()
"""Those of this process."""
