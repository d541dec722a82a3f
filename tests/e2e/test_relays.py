"""`kvcs-subscribe --relay`: another relay, when those before have nothing or do not answer."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.support import readable, relay


@pytest.fixture
def cafile(tmp_path):
    return tmp_path / "authorities.pem"


@pytest.mark.parametrize("first", ["gone", "silent", "empty", "dead"])
def test_what_one_relay_has_not_another_one_gives(tmp_path, cache, cafile, first):
    out = tmp_path / "out"
    with relay(tmp_path / "one") as one, relay(tmp_path / "two") as two:
        cafile.write_bytes(one.cafile.read_bytes() + two.cafile.read_bytes())
        two.publish(cache).wait_for("publishing")
        if first == "dead":
            one.peer("announce", *cache.identity()).wait_for("announced")
        if first == "gone":
            one.process.kill()
        if first == "silent":
            one.process.signal(signal.SIGSTOP)
        options = ("--relay", two.url, "--cafile", cafile, "--json")
        result = one.subscribe(cache, out, *options).finish(0).json()
        cache.check(out)
        assert {span["source"] for span in result["sources"]} == {two.url}
        assert (result["relay_error"] is not None) == (first == "gone")
        if first == "silent":
            one.process.signal(signal.SIGCONT)


def test_the_bound_of_the_whole_is_what_recomputing_takes(tmp_path, cache):
    with relay(tmp_path / "one") as one:
        one.peer("announce", *cache.identity()).wait_for("announced")
        failed = one.subscribe(
            cache, tmp_path / "out", "--recompute-within", "1", "--timeout", "60"
        ).finish(1)
        assert "0 of 8 layers came within the 1 s of --recompute-within" in readable(failed)


@pytest.mark.parametrize("listing", ["listing", "probe"])
def test_while_the_relay_above_is_gone_nothing_is_said_not_to_be_found(tmp_path, cache, listing):
    with relay(tmp_path / "far") as far:
        above = ("--upstream", far.url, "--upstream-cafile", far.cafile)
        with relay(tmp_path / "near", *above) as near:
            near.reaches(upstream_sessions=1)
            asking = ("--timeout", "60", "--discovery", listing)
            near.subscribe(cache, tmp_path / "out", *asking, name="before").finish(3)
            far.process.kill()
            # just now it is not noticed yet; then it is
            for name in ("unnoticed", "noticed"):
                consumer = near.subscribe(cache, tmp_path / "out", *asking, name=name)
                consumer.finish(1)
                assert "cannot tell what is published" in readable(consumer)
                near.reaches(upstream_sessions=0)
            assert "an upstream relay cannot be asked" in readable(consumer)


def test_what_a_relay_has_is_found_while_the_one_above_is_gone(tmp_path, cache):
    with relay(tmp_path / "far") as far:
        above = ("--upstream", far.url, "--upstream-cafile", far.cafile)
    with relay(tmp_path / "near", *above) as near:
        near.publish(cache).wait_for("publishing")
        near.subscribe(cache, tmp_path / "out").finish(0)
        cache.check(tmp_path / "out")
