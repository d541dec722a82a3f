"""A KV cache comes over networks: real programs, with `python -m tools.path` between them."""

from __future__ import annotations

import json
import sys
import time

import pytest

from moqt.quic.backend import native
from tests.e2e.support import Process, eventually, make_cache, path_to, relay

HERE = ["python"] if native() is None else ["python", "native"]
"""The backends for packets."""

PHASES = {"bbr": "startup", "cubic": "slow_start", "reno": "slow_start"}
"""What a connection begins with, by its congestion control."""


def test_a_cache_comes_whole_over_a_path_of_every_vice_with_an_address_that_changes(
    cache, tmp_path
):
    vices = "--delay 10ms --jitter 5ms --loss 2% --burst 0.1%x4 --reorder 5% --duplicate 2%"
    with relay(tmp_path) as hub:
        producer = hub.produce(cache)
        with path_to(hub, tmp_path, *vices.split(), "--rebind", "500ms") as network:
            consumer = hub.subscribe(cache, tmp_path / "out", "--timeout", "50")
            hub.reaches(downstream_subscriptions=3)
            time.sleep(0.5)  # its next datagram, an acknowledgment, comes from another address
            producer.say(cache.objects)
            consumer.finish()
        cache.check(tmp_path / "out")
        assert hub.metric("quic_path_changes_total") >= 1
        told = network.json()
        assert told["rebound"] >= 1
        assert told["down"]["forwarded"] > 0


def test_the_bench_of_paths_measures_a_path_and_keeps_its_results(tmp_path):
    command = [sys.executable, "-m", "tools.bench_paths", "--json", "--megabytes", "1"]
    command += ["--paths", "lan", "--seconds", "40", "--keep", str(tmp_path / "results")]
    process = Process(tmp_path, "bench", *command)
    told = json.loads(process.finish(deadline=110).stdout)
    (row,) = told["rows"]
    assert row["path"] == "lan" and "failed" not in row["kvcs"]
    assert row["kvcs"]["mb_s"] > 0 and row["raw"]["mb_s"] > 0
    assert row["kvcs"]["layers"] == 32 and row["kvcs"]["first_layer_again"] > 0
    assert row["kvcs"]["mb_s"] * 1e6 == pytest.approx(row["filled"] * 125e6)
    assert {goal["reached"] for goal in told["goals"]} == {None}  # they are of other paths
    (kept,) = (tmp_path / "results").iterdir()
    assert json.loads(kept.read_text()) == told


def test_four_connections_share_what_a_policer_gives_each_flow(tmp_path):
    cache = make_cache(tmp_path / "cache", layers=32, kv_heads=8, head_dim=64, tokens=64)
    with relay(tmp_path) as hub:
        hub.produce(cache).say(cache.objects)
        with path_to(hub, tmp_path, "--delay", "20ms", "--police", "1MB/s+32KiB:each") as network:
            consumer = hub.subscribe(
                cache, tmp_path / "out", "--timeout", "50", "--connections", "4", "--json"
            )
            told = json.loads(consumer.finish().stdout)
        cache.check(tmp_path / "out")
        assert sum(told["layers_by_connection"]) == 32
        assert min(told["layers_by_connection"]) >= 4
        assert told["publications_tried"] == 1 and told["connections_error"] is None
        octets = network.json()["octets_by_client"]
        assert len(octets) == 4
        # So it takes less than two fifths of the time of one, of which this is the rate.
        assert max(octets) <= 0.4 * sum(octets)


@pytest.mark.parametrize("connections", ["0", "17"])
def test_connections_are_from_one_to_sixteen(connections, cache, hub, tmp_path):
    ended = hub.subscribe(cache, tmp_path / "out", "--connections", connections).finish(2)
    assert "--connections" in ended.stderr


@pytest.mark.parametrize("algorithm", ["bbr", "cubic", "reno"])
def test_each_congestion_control_brings_a_cache_whole_over_a_path_with_losses(
    algorithm, cache, tmp_path
):
    chosen = ("--congestion", algorithm)
    with relay(tmp_path, *chosen) as hub:
        producer = hub.produce(cache)
        producer.say(cache.objects)
        with path_to(hub, tmp_path, "--delay", "10ms", "--loss", "2%"):
            window = ("--session-window", str(1 << 20))
            consumer = hub.subscribe(cache, tmp_path / "out", "--timeout", "50", *chosen, *window)
            eventually(lambda: f'phase="{PHASES[algorithm]}' in hub.metrics(), "the phase shown")
            assert 'sending_waits_seconds_total{waits_for="flow_control"}' in hub.metrics()
            assert hub.metric("quic_receive_window_bytes") > 0
            consumer.finish()
        cache.check(tmp_path / "out")


@pytest.mark.parametrize("backend", HERE)
def test_each_backend_for_packets_brings_a_cache_whole_to_any_other(backend, cache, tmp_path):
    with relay(tmp_path, "--quic-backend", backend) as hub:
        hub.produce(cache).say(cache.objects)
        with path_to(hub, tmp_path, "--delay", "5ms", "--loss", "1%", "--reorder", "2%"):
            for other in HERE:
                out = tmp_path / f"out-{other}"
                hub.subscribe(cache, out, "--timeout", "50", "--quic-backend", other).finish()
                cache.check(out)
        assert f'quic_backend{{backend="{backend}"}} 1.0' in hub.metrics()


def test_a_backend_that_is_not_there_is_said_at_the_start(cache, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCS_QUIC_BACKEND", "rust")
    ended = hub.subscribe(cache, tmp_path / "out").finish(2)
    assert "'rust'" in ended.stderr and "python" in ended.stderr
