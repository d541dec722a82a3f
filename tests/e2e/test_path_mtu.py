"""Programs at their defaults, on paths that carry little."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.support import make_cache, relay

NARROW = 1300


@contextmanager
def narrow_path(url: str, most: int = NARROW) -> Iterator[str]:
    """The URL of a path to the relay at `url` that carries `most` octets of UDP payload."""
    port = int(url.rpartition(":")[2])
    front = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    front.bind(("127.0.0.1", 0))
    behind: dict[tuple[str, int], socket.socket] = {}
    clients: dict[socket.socket, tuple[str, int]] = {}
    stop = threading.Event()

    def forward() -> None:
        while not stop.is_set():
            for ready in select.select([front, *clients], [], [], 0.1)[0]:
                if ready is front:
                    data, client = front.recvfrom(1 << 16)
                    if client not in behind:
                        behind[client] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                        behind[client].connect(("127.0.0.1", port))
                        clients[behind[client]] = client
                    if len(data) <= most:
                        behind[client].send(data)
                else:
                    data = ready.recv(1 << 16)
                    if len(data) <= most:
                        front.sendto(data, clients[ready])

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield f"moqt://127.0.0.1:{front.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        for each in (front, *clients):
            each.close()


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
        for name, url in (("wide", wide_url), ("narrow", narrow)):
            hub.url = url
            out = tmp_path / name
            result = hub.subscribe(wide_cache, out, "--json", name=name).finish().json()
            wide_cache.check(out)
            sizes[name] = result["packet_octets"]
        assert 1200 < sizes["narrow"] <= NARROW
        assert sizes["wide"] == most
        assert "packets of" not in hub.process.stderr  # nothing was lost but probes


def test_a_publisher_behind_a_narrow_path_sends_packets_that_fit(wide_cache, tmp_path):
    with relay(tmp_path) as hub, narrow_path(hub.url) as narrow:
        wide_url = hub.url
        hub.url = narrow
        hub.publish(wide_cache).wait_for("publishing")
        hub.url = wide_url
        hub.subscribe(wide_cache, tmp_path / "out", "--json").finish()
        wide_cache.check(tmp_path / "out")
        assert hub.metric("quic_paths_narrowed_total") == 0
        text = hub.metrics()
        sizes = dict(re.findall(r'connections_by_packet_octets\{up_to="(\d+)"\} (\S+)', text))
        assert {"1200", "1280", "1452"} <= sizes.keys()
        assert sizes["1452"] == "1.0"  # the publisher's: 1,280 to 1,300
