"""What became of publications, look-ups and loads, for Prometheus and for people."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Dropped(StrEnum):
    """Why a publication is not, or no longer, offered."""

    BUDGET = "budget"
    """`keep_octets` or `keep_publications` left no room for it."""
    EVICTED = "evicted"
    """It was asked for longest ago, and another one needed the room."""
    EXPIRED = "expired"
    """Nobody asked for it, or nothing was put, for `keep_seconds`."""
    PENDING = "pending"
    """Layers were handed over faster than they could be hashed (`pending_octets`)."""
    ABORTED = "aborted"
    """The application did so."""
    FAILED = "failed"
    """It cannot be published as it is: the error says why."""


class Ended(StrEnum):
    """How a load ended."""

    LOADED = "loaded"
    STALLED = "stalled"
    VERIFICATION = "verification"
    LOST = "lost"
    """Its publisher or relay was lost."""
    TIMEOUT = "timeout"
    SHORT = "short"
    """The publication has fewer blocks than were asked for."""
    REFUSED = "refused"
    """The relay refuses it to us, or `most_loads` leaves no room."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Something here failed: the application's callback, for example."""


class Looked(StrEnum):
    """What a look-up found."""

    HIT = "hit"
    MISS = "miss"
    SHORT = "short"
    """The prompt fills no block that could be used: one token is always left to compute."""


_TOTALS: Final = {
    "offered": "Publications announced for the first time, by relay.",
    "dropped": "Publications that are not, or no longer, offered, by reason.",
    "loads": "Loads that ended, by outcome.",
    "lookups": "Look-ups, by outcome.",
    "octets_loaded": "Octets of verified sections that loads brought.",
    "silent": "Relays that did not answer in time, and are not asked for a while.",
}
_LABELS: Final = {
    "offered": "relay",
    "dropped": "reason",
    "loads": "outcome",
    "lookups": "outcome",
    "octets_loaded": "relay",
    "silent": "relay",
}


class Counters(Collector):
    """Counts by name and label; `registry.register(client.counters)` shows them as
    `kvcs_client_…`, beside gauges of what is kept."""

    def __init__(self, gauges: Callable[[], dict[str, tuple[str, float]]] = dict) -> None:
        """`gauges` gives, by name, a sentence and the value that it has now."""
        self._lock = threading.Lock()
        self._gauges = gauges
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _TOTALS}

    def add(self, name: str, label: str, count: int = 1) -> int:
        """Count it; returns how many there are now."""
        with self._lock:
            self._counts[name][label] += count
            return self._counts[name][label]

    def of(self, name: str) -> dict[str, int]:
        """The counts of one name, by label."""
        with self._lock:
            return dict(self._counts[name])

    def collect(self) -> Iterable[Metric]:
        """The metrics, for a registry of prometheus_client."""
        for name, sentence in _TOTALS.items():
            family = CounterMetricFamily(f"kvcs_client_{name}", sentence, labels=[_LABELS[name]])
            for label, count in self.of(name).items():
                family.add_metric([label], count)
            yield family
        for name, (sentence, value) in self._gauges().items():
            yield GaugeMetricFamily(f"kvcs_client_{name}", sentence, value)
