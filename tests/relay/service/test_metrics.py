"""The relay's numbers as Prometheus scrapes them."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import generate_latest

from moqt.delivery.scheduler import DeliveryCounters
from moqt.values.codes import RequestErrorCode
from moqt.values.config import SessionCounters
from relay.config import Counters, RelayConfig
from relay.scopes import Scopes
from relay.service.metrics import COUNTERS, DELIVERIES, SESSIONS, RelayMetrics
from tests.moqt.memory import Pair
from tests.relay.star import Star


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
    assert {each.name for each in fields(Counters)} - {"refused"} <= set(COUNTERS)
    assert {each.name for each in fields(DeliveryCounters)} <= set(DELIVERIES)
    assert {f"session_{each.name}" for each in fields(SessionCounters)} == set(SESSIONS)


def test_refusals_are_counted_by_their_reason():
    star = Star()
    star.relay = Scopes()
    metrics = RelayMetrics(star.relay)
    assert star.fetch(star.connect()).failed.code == RequestErrorCode.DOES_NOT_EXIST
    metrics.update()
    text = generate_latest(metrics.registry).decode()
    assert 'kvcs_relay_requests_refused_total{reason="DOES_NOT_EXIST"} 1.0' in text


def test_hits_and_misses_are_objects_both():
    scopes = Scopes(RelayConfig())
    metrics = RelayMetrics(scopes)
    scopes.counters.objects_in, scopes.cache.misses, scopes.cache.hits = 8, 1, 16
    metrics.update()
    text = generate_latest(metrics.registry).decode()
    for line in ("hits_total 16.0", "misses_total 8.0", "ranges_missed_total 1.0"):
        assert f"kvcs_relay_cache_{line}" in text
