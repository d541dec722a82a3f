"""`kvcs-subscribe --resume` goes on from what was verified, whatever ended the process."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.support import eventually, make_cache, readable, relay


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_retrieval_goes_on_after_its_process_ended(tmp_path, number):
    cache = make_cache(tmp_path / "cache")
    out = tmp_path / "received" / "out"
    out.parent.mkdir()
    with relay(tmp_path / "hub") as hub:
        producer = hub.produce(cache)
        producer.say(cache.blocks * 3)
        consumer = hub.subscribe(cache, out, "--resume", name="first")
        log = out.with_name("out.resume-log")
        wanted = 2 * cache.blocks * 3

        def noted() -> bool:
            assert consumer.popen.poll() is None, consumer.stderr
            return log.exists() and len(log.read_bytes().partition(b"\n")[2]) >= 77 * wanted

        eventually(noted, "all that was produced is noted")
        consumer.signal(number)
        assert consumer.wait() == (-number if number == signal.SIGKILL else 128 + number)
        assert not out.exists()

        producer.say(cache.objects)
        again = hub.subscribe(cache, out, "--resume", "--json", name="second").finish(0)
        result = again.json()
        assert result["objects_resumed"] == wanted
        assert result["objects_verified"] == cache.objects - wanted
        assert result["duplicates"] == 0 and result["discarded"] == {}
        assert {"blocks": [0, cache.blocks - 1], "layers": [0, 2], "source": "resumed"} in (
            result["sources"]
        )
        cache.check(out)
        assert os.listdir(out.parent) == ["out"]


def test_a_file_of_another_publication_is_a_miss_that_is_said(tmp_path):
    cache = make_cache(tmp_path / "cache")
    out = tmp_path / "out"
    with relay(tmp_path / "hub") as hub:
        first = hub.produce(cache)
        first.say(cache.blocks)
        consumer = hub.subscribe(cache, out, "--resume", "--timeout", "2", name="first")
        assert consumer.wait() == 1
        first.kill()
        hub.publish(cache).wait_for("publishing")
        again = hub.subscribe(cache, out, "--resume", name="second").finish(0)
        assert "out.resume: it is of publication" in readable(again)
        cache.check(out)
        assert not out.with_name("out.resume").exists()
