"""A long context in small blocks: ten thousand Objects, each listed, each once."""

from __future__ import annotations

from tests.e2e.support import make_cache


def test_a_long_context_in_small_blocks_crosses_a_relay_object_by_object(hub, tmp_path):
    """2,048 tokens of 40 layers in blocks of 16: 10,240 Objects, a manifest of 0.7 MB."""
    cache = make_cache(
        tmp_path / "long", layers=40, kv_heads=1, head_dim=4, block_tokens=16, tokens=2048
    )
    publisher = hub.publish(cache, "--json")
    publisher.wait_for("announced")
    result = hub.subscribe(cache, tmp_path / "out", "--json", "--timeout", "60").finish().json()
    assert result["objects_verified"] == result["objects_confirmed"] == cache.objects == 10_240
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
