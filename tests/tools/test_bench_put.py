"""The bench of PUTs takes its figures from servers that took the blocks."""

from __future__ import annotations

from pathlib import Path

from tools.bench_put import measure


def test_a_holder_and_a_plain_server_are_sent_the_same_blocks(tmp_path: Path) -> None:
    figures = measure(2, 1, tmp_path)
    assert figures["plain_mb_per_s"] > 0 and figures["holder_mb_per_s"] > 0
    assert figures["ratio"] > 0
    assert len(list((tmp_path / "data" / "blocks" / "blocks").rglob("*.kvb"))) == 2
