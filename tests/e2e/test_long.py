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
    for name in ("loop_hold_seconds", "loop_work_seconds"):
        assert ended[name] > 0 and result[name] > 0 and hub.metric(name) > 0
    assert not ended["limits_reached"] and not result["limits_reached"]
    # versions list at most three times what the last one does
    assert cache.objects * 67 < ended["manifest_octets"] < 3 * cache.objects * 67 + 10_000
