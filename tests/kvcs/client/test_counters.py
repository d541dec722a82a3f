"""What a client says of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvcs.client.counters import Counters, Dropped, Ended


def test_every_count_has_its_label_and_every_gauge_its_value():
    counters = Counters(lambda: {"kept_octets": ("Octets kept.", 7.0)})
    assert counters.add("loads", Ended.STALLED) == 1
    assert counters.add("loads", Ended.STALLED) == 2
    counters.add("dropped", Dropped.BUDGET)
    assert counters.of("loads") == {"stalled": 2}
    registry = CollectorRegistry()
    registry.register(counters)
    text = generate_latest(registry).decode()
    assert 'kvcs_client_loads_total{outcome="stalled"} 2.0' in text
    assert 'kvcs_client_dropped_total{reason="budget"} 1.0' in text
    assert "kvcs_client_kept_octets 7.0" in text
