"""The relay's numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relay.core import Relay

GAUGES = {
    "sessions": "Established sessions.",
    "namespaces": "Published namespaces, each publisher counted.",
    "tracks": "Tracks known, cached ones included.",
    "pending_requests": "Requests waiting for a publisher.",
    "upstream_subscriptions": "Established subscriptions to publishers.",
    "upstream_fetches": "FETCHes running at publishers.",
    "downstream_subscriptions": "Established subscriptions of subscribers.",
    "downstream_fetches": "FETCHes being served.",
    "cache_octets": "Payload octets cached.",
    "cache_billed_octets": "Octets billed to the cache's budget, bookkeeping included.",
    "cache_budget_octets": "The cache's budget.",
    "cache_objects": "Whole Objects cached.",
}
COUNTERS = {
    "sessions": "Sessions established.",
    "requests_refused": "Requests answered with REQUEST_ERROR by the relay.",
    "malformed_tracks": "Tracks given up because their Objects contradict each other.",
    "upstream_subscriptions": "SUBSCRIBEs sent to publishers.",
    "upstream_fetches": "FETCHes sent to publishers.",
    "upstream_timeouts": "Requests publishers did not answer in time.",
    "downstream_subscriptions": "SUBSCRIBEs accepted.",
    "downstream_fetches": "FETCHes accepted.",
    "objects_in": "Objects stored.",
    "octets_in": "Payload octets stored.",
    "objects_out": "Objects whose sending began.",
    "octets_out": "Their payload octets.",
    "cache_hits": "Objects sent from memory.",
    "cache_misses": "Ranges asked for upstream.",
    "cache_evictions": "Objects evicted for want of memory.",
    "cache_expirations": "Objects dropped because of MAX_CACHE_DURATION.",
    "cache_stores_rejected": "Objects not stored because growing ones left no room.",
}
PREFIX = "kvcs_relay_"


class RelayMetrics(Collector):
    """Copies the relay's numbers when told to, and shows the last copy when scraped.

    A scrape comes from another thread, which must not look into tables that change.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.registry = CollectorRegistry()
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self.update()
        self.registry.register(self)

    def update(self) -> None:
        """Take the relay's numbers of now. Call it from the thread that runs the relay."""
        relay = self.relay
        cache, counters = relay.cache, relay.counters
        self._gauges = {
            "sessions": len(relay.sessions),
            "namespaces": relay.publications,
            "tracks": len(relay.tracks),
            "pending_requests": len(relay.pending),
            "upstream_subscriptions": relay.upstream_subscriptions,
            "upstream_fetches": relay.upstream_fetches,
            "downstream_subscriptions": relay.downstream_subscriptions,
            "downstream_fetches": relay.downstream_fetches,
            "cache_octets": cache.octets,
            "cache_billed_octets": cache.billed,
            "cache_budget_octets": cache.budget,
            "cache_objects": cache.objects,
        }
        self._counters = {
            name: getattr(cache, name.removeprefix("cache_"))
            if name.startswith("cache_")
            else getattr(counters, name)
            for name in COUNTERS
        }

    def collect(self) -> Iterable[Metric]:
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], value=value)
        for name, value in self._counters.items():
            yield CounterMetricFamily(PREFIX + name, COUNTERS[name], value=value)
