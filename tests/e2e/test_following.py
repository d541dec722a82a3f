"""Publications that grow, followed through a relay: each program a process."""

from __future__ import annotations

import json

import pytest

from tests.e2e.support import eventually, make_cache, readable


def events(process) -> list[dict]:
    """What a consumer has said of whole segments so far."""
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    return [line for line in lines if line.get("event") == "segment"]


def test_chunks_are_followed_as_they_are_produced_and_from_the_cache_when_all_is_over(
    cache, hub, tmp_path
):
    """32 tokens in chunks of 12 are three segments: of 3, 3 and 2 blocks."""
    publisher = hub.publish(cache, "--chunk-tokens", "12", "--live-delay", "200")
    publisher.wait_for(r"publishing 32 tokens \(8 blocks, 8 layers, 3 chunks\)")
    live = hub.subscribe(cache, tmp_path / "live", "--follow", "--json", name="live").finish(0)
    cache.check(tmp_path / "live")
    assert [each["tokens"] for each in events(live)] == [12, 24, 32]
    result = live.json()
    assert (result["segments"], result["objects_verified"]) == (3, cache.objects)
    assert not result["duplicates"]
    eventually(lambda: hub.metric("cache_objects") >= cache.objects, "everything cached")
    publisher.signal(15)
    publisher.finish(0)
    after = hub.subscribe(cache, tmp_path / "after", "--follow", name="after").finish(0)
    cache.check(tmp_path / "after")
    assert "32 tokens (8 blocks in 3 segments, layers 0-7)" in after.stdout


def test_the_file_is_a_whole_one_at_any_time_while_a_publication_grows(cache, hub, tmp_path):
    publisher = hub.grow(cache, "--segments", "3,3,2")
    publisher.say(8)
    out = tmp_path / "out"
    consumer = hub.subscribe(cache, out, "--follow", "--json")
    eventually(lambda: events(consumer), "a whole segment")
    cache.check(out, blocks=3)
    publisher.say(7)
    publisher.wait_for(r"produced \(7, 0\) of segment 1")
    cache.check(out, blocks=3)
    publisher.say(1)
    eventually(lambda: len(events(consumer)) == 2, "another one")
    cache.check(out, blocks=6)
    publisher.say(8)
    assert consumer.finish(0).json()["mode"] == "live"
    cache.check(out)


@pytest.mark.parametrize("follow", [["--follow"], []], ids=["follow", "once"])
def test_what_was_whole_is_written_when_the_publisher_is_killed_and_the_exit_code_says_so(
    follow, cache, hub, tmp_path
):
    publisher = hub.grow(cache, "--segments", "3,3,2", "--idle", "2")
    publisher.say(8 + 3)
    publisher.wait_for(r"produced \(3, 0\) of segment 1")
    out = tmp_path / "out"
    consumer = hub.subscribe(cache, out, "--json", *follow)
    # the manifest, and K and V of the segment that is not whole
    hub.reaches(downstream_subscriptions=3)
    publisher.kill()
    failed = consumer.finish(1, deadline=40)
    assert f"; the first 12 tokens are whole and in {out}" in failed.stderr
    assert failed.json()["whole_blocks"] == 3 and not failed.json()["ok"]
    cache.check(out, blocks=3)


def test_chunks_that_cannot_be_segments_are_refused_before_anything_is_sent(tmp_path, hub):
    cache = make_cache(tmp_path / "many", layers=1, tokens=4100)
    few = hub.publish(cache, "--chunk-tokens", "3", name="few").finish(2)
    assert "a chunk fills at least one block of 4 tokens" in readable(few, "kvcs-publish")
    many = hub.publish(cache, "--chunk-tokens", "4", name="many").finish(2)
    assert "1025 chunks, and a publication has at most 1024 segments: give 5 or more" in readable(
        many, "kvcs-publish"
    )
    assert hub.metric("namespaces") == 0


def test_who_joins_in_the_middle_of_each_segment_gets_the_same(cache, hub, tmp_path):
    publisher = hub.grow(cache, "--segments", "3,3,2")
    joined = []
    for segment in range(3):
        publisher.say(5)
        publisher.wait_for(rf"produced \(5, 0\) of segment {segment}")
        out = tmp_path / f"joined-{segment}"
        joined.append((out, hub.subscribe(cache, out, "--follow", "--json", name=out.name)))
        hub.reaches(sessions=2 + segment)
        publisher.say(3)
    for out, consumer in joined:
        result = consumer.finish(0).json()
        cache.check(out)
        assert (result["objects_verified"], result["duplicates"]) == (cache.objects, 0)
