"""The benchmark of raw transports ends with figures, whatever is lost and whoever is late."""

from __future__ import annotations

from argparse import Namespace

from tools import bench_raw


async def test_a_sender_of_udp_whose_receiver_is_gone_ends_with_its_figures():
    nobody = Namespace(port=bench_raw.free_port(), total=1 << 20, size=1452)
    assert (await bench_raw.udp_send(nobody))["cpu"] >= 0


def test_a_run_of_udp_ends_with_its_rate_and_with_what_was_lost():
    measured = bench_raw.measure("udp", 1452, 1, limit=60)
    assert measured["mb_s"] > 0 and 0 <= measured["lost"] < 1
