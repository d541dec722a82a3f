"""The relay's numbers as Prometheus scrapes them."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import generate_latest

from moqt.delivery.scheduler import DeliveryCounters
from moqt.values.config import SessionCounters
from relay.config import Counters, RelayConfig
from relay.scopes import Scopes
from relay.service.metrics import COUNTERS, DELIVERIES, SESSIONS, RelayMetrics
from tests.moqt.memory import Pair


def test_what_sessions_remember_of_their_peers_is_shown_table_by_table():
    scopes = Scopes(RelayConfig())
    metrics = RelayMetrics(scopes)
    pair = Pair(server=scopes)
    pair.client.subscribe_namespace(
        (b"demo",), on_namespace=lambda *_: None, on_ended=lambda error: None
    )
    pair.run()
    metrics.update()
    text = generate_latest(metrics.registry).decode()
    assert 'kvcs_relay_remembered{table="requests_incoming"} 1.0' in text
    assert 'kvcs_relay_remembered{table="octets_held"} 0.0' in text
    pair.client.close()
    pair.run()
    metrics.update()
    assert 'table="requests_incoming"} 0.0' in generate_latest(metrics.registry).decode()


def test_every_counter_has_its_sentence():
    assert {each.name for each in fields(Counters)} <= set(COUNTERS)
    assert {each.name for each in fields(DeliveryCounters)} <= set(DELIVERIES)
    assert {f"session_{each.name}" for each in fields(SessionCounters)} == set(SESSIONS)
