"""A long context in small blocks: tens of thousands of Objects, each listed, each once."""

from __future__ import annotations

from tests.e2e.support import make_cache


def test_a_long_context_in_small_blocks_crosses_a_relay_object_by_object(hub, tmp_path):
    """4,096 tokens of 80 layers in blocks of 16: 40,960 Objects, a manifest of 2.7 MB."""
    cache = make_cache(
        tmp_path / "long", layers=80, kv_heads=1, head_dim=4, block_tokens=16, tokens=4096
    )
    publisher = hub.publish(cache, "--json")
    publisher.wait_for("announced")
    result = hub.subscribe(cache, tmp_path / "out", "--json", "--timeout", "60").finish().json()
    assert result["objects_verified"] == result["objects_confirmed"] == cache.objects == 40_960
    assert result["duplicates"] == 0 and result["discarded"] == {}
    cache.check(tmp_path / "out")
    publisher.signal(15)
    ended = publisher.finish().json()
    assert ended["event"] == "ended"
    for hold in (
        ended["loop_hold_seconds"],
        result["loop_hold_seconds"],
        hub.metric("loop_hold_seconds"),
    ):
        assert hold > 0
