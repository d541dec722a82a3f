"""Programs at their defaults, on paths that carry little."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.support import eventually, make_cache, relay

NARROW = 1300
FULL = 64
"""Octets that may be left in a packet of data, which is full then."""


class NarrowPath:
    """A path to a relay: it carries datagrams of up to `most` octets, both ways."""

    def __init__(self, url: str, most: int) -> None:
        self.most = most
        self._relay = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._front = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._front.bind(("127.0.0.1", 0))
        self.url = f"moqt://127.0.0.1:{self._front.getsockname()[1]}"
        self._behind: dict[tuple[str, int], socket.socket] = {}
        self._clients: dict[socket.socket, tuple[str, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for each in (self._front, *self._clients):
            each.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for ready in select.select([self._front, *self._clients], [], [], 0.1)[0]:
                data, sender = ready.recvfrom(1 << 16)
                if ready is self._front and sender not in self._behind:
                    socket_of = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    self._behind[sender] = socket_of
                    self._clients[socket_of] = sender
                if len(data) > self.most:
                    continue
                if ready is self._front:
                    self._behind[sender].sendto(data, self._relay)
                else:
                    self._front.sendto(data, self._clients[ready])


@contextmanager
def narrow_path(url: str, most: int = NARROW) -> Iterator[NarrowPath]:
    path = NarrowPath(url, most)
    try:
        yield path
    finally:
        path.close()


@pytest.fixture
def wide_cache(tmp_path):
    """2 MiB, so that the packets of a transfer show."""
    return make_cache(tmp_path / "cache", kv_heads=8, head_dim=128, tokens=64)


@pytest.mark.parametrize(("options", "most"), [((), 16383), (("--mtu", "1452"), 1452)])
def test_one_relay_serves_consumers_behind_a_narrow_path_and_on_loopback(
    options, most, wide_cache, tmp_path
):
    with relay(tmp_path, *options) as hub, narrow_path(hub.url) as narrow:
        hub.publish(wide_cache).wait_for("publishing")
        wide_url, sizes = hub.url, {}
        for name, url in (("wide", wide_url), ("narrow", narrow.url)):
            hub.url = url
            out = tmp_path / name
            result = hub.subscribe(wide_cache, out, "--json", name=name).finish().json()
            wide_cache.check(out)
            sizes[name] = result["packet_octets"]
        assert 1200 < sizes["narrow"] <= NARROW
        assert most - FULL <= sizes["wide"] <= most
        assert "packets of" not in hub.process.stderr  # nothing was lost but probes


def test_a_publisher_behind_a_narrow_path_sends_packets_that_fit(wide_cache, tmp_path):
    with relay(tmp_path) as hub, narrow_path(hub.url) as narrow:
        wide_url = hub.url
        hub.url = narrow.url
        hub.publish(wide_cache).wait_for("publishing")
        hub.url = wide_url
        hub.subscribe(wide_cache, tmp_path / "out", "--json").finish()
        wide_cache.check(tmp_path / "out")
        assert hub.metric("quic_paths_narrowed_total") == 0
        text = hub.metrics()
        sizes = dict(re.findall(r'connections_by_packet_size\{up_to="(\d+)"\} (\S+)', text))
        assert {"1200", "1280", "1452"} <= sizes.keys()
        assert sizes["1452"] == "1.0"  # the publisher's: 1,280 to 1,300


def test_a_path_that_shrinks_in_a_transfer_costs_neither_the_session_nor_an_object(
    wide_cache, tmp_path
):
    with relay(tmp_path) as hub, narrow_path(hub.url, 1 << 16) as path:
        producer = hub.produce(wide_cache)
        hub.url = path.url
        consumer = hub.subscribe(wide_cache, tmp_path / "out", "--json", "--mode", "live")
        hub.reaches(downstream_subscriptions=3)
        producer.say(64)
        eventually(lambda: hub.metric("objects_out_total") >= 128, "half of the Objects")
        path.most = NARROW
        producer.say(64)
        result = consumer.finish().json()
        wide_cache.check(tmp_path / "out")
        assert result["packet_octets"] > 16383 - FULL  # from before
        assert result["recoveries"] == 0
        assert hub.metric("quic_paths_narrowed_total") == 1
        assert "no longer carries packets of 16383 octets" in hub.process.stderr
