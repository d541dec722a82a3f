"""Tokens and chains of relays, with the programs as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import BIN, Cache, Process, make_cache, relay


@pytest.fixture
def tokens(cache: Cache, tmp_path: Path):
    """Token files for the scope of `cache`, and the file of principals."""
    other = make_cache(tmp_path / "other", seed=2)
    made = {
        "writer": ["--scope-key-file", cache.scope],
        "reader": ["--scope-key-file", cache.scope, "--read-only"],
        "stranger": ["--scope-key-file", other.scope],
    }
    paths = {name: tmp_path / f"{name}.token" for name in made}
    for name, options in made.items():
        Process(
            tmp_path,
            f"keygen-{name}",
            BIN / "kvcs-keygen",
            "token",
            paths[name],
            *("--principals", tmp_path / "principals.json"),
            *options,
        ).finish(0)
    paths["principals"] = tmp_path / "principals.json"
    return paths


def test_a_relay_that_wants_tokens_refuses_with_exit_code_4_and_serves_who_shows_one(
    cache: Cache, tokens, tmp_path: Path
):
    with relay(tmp_path, "--auth", tokens["principals"]) as hub:
        publisher = hub.publish(cache, "--token-file", tokens["writer"])
        publisher.wait_for("publishing")
        refused = {
            "publish-none": hub.publish(cache, name="publish-none"),
            "publish-reader": hub.publish(
                cache, "--token-file", tokens["reader"], name="publish-reader"
            ),
            "subscribe-none": hub.subscribe(cache, tmp_path / "a", name="subscribe-none"),
            "subscribe-stranger": hub.subscribe(
                cache,
                tmp_path / "b",
                *("--token-file", tokens["stranger"]),
                name="subscribe-stranger",
            ),
        }
        with_token = {"publish-reader", "subscribe-stranger"}
        for name, process in refused.items():
            process.finish(4)
            assert "UNAUTHORIZED" in process.stderr or "not authorized" in process.stderr.lower()
            shown = "the token shown is that of" if name in with_token else "see --token-file"
            assert shown in process.stderr
        consumer = hub.subscribe(cache, tmp_path / "out", "--token-file", tokens["reader"])
        consumer.finish(0)
        cache.check(tmp_path / "out")
        secrets = [tokens[each].read_text().strip() for each in ("writer", "reader", "stranger")]
        for process in Process.running:
            text = process.stdout + process.stderr
            assert not any(secret in text for secret in secrets), process.name
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_what_is_pushed_needs_rights_and_so_does_what_the_disk_has_of_it_later(
    cache: Cache, tokens, tmp_path: Path
):
    disk = ("--cache-dir", tmp_path / "disk")
    with relay(tmp_path, "--auth", tokens["principals"], *disk) as hub:
        reader = hub.publish(cache, "--push", "--token-file", tokens["reader"], name="push-reader")
        reader.finish(4)
        assert "UNAUTHORIZED" in reader.stderr
        hub.publish(cache, "--push", "--token-file", tokens["writer"], name="push").finish(0)
        hub.process.kill()
    with relay(tmp_path / "again", "--auth", tokens["principals"], *disk) as again:
        stranger = ("--token-file", tokens["stranger"])
        again.subscribe(cache, tmp_path / "a", *stranger, name="stranger").finish(4)
        again.subscribe(cache, tmp_path / "out", "--token-file", tokens["reader"]).finish(0)
        cache.check(tmp_path / "out")


def test_a_cache_crosses_two_relays_and_stays_in_the_nearer_one(cache: Cache, tmp_path: Path):
    with relay(tmp_path / "far") as far:
        options = ("--upstream", far.url, "--upstream-cafile", far.cafile, "--announce-upstream")
        with relay(tmp_path / "near", *options) as near:
            far.reaches(sessions=1)
            publisher = far.publish(cache)
            publisher.wait_for("publishing")
            near.subscribe(cache, tmp_path / "one", name="one").finish(0)
            cache.check(tmp_path / "one")
            sent = far.metric("objects_out_total")
            near.subscribe(cache, tmp_path / "two", name="two").finish(0)
            cache.check(tmp_path / "two")
            assert far.metric("objects_out_total") == sent, "the second one came from the cache"
            other = make_cache(tmp_path / "other", seed=3)
            near.publish(other, name="near-publish").wait_for("publishing")
            far.subscribe(other, tmp_path / "three", name="three").finish(0)
            other.check(tmp_path / "three")


@pytest.mark.parametrize("role", [True, False])
def test_a_relay_is_believed_to_be_one_by_the_role_of_its_token(
    cache: Cache, tokens, tmp_path: Path, role: bool
):
    token = tmp_path / "edge.token"
    options = ("--every-scope", "--read-only", *(("--role", "relay") if role else ()))
    made = ("token", token, "--principals", tokens["principals"], *options)
    Process(tmp_path, "keygen-edge", BIN / "kvcs-keygen", *made).finish(0)
    with relay(tmp_path / "far", "--auth", tokens["principals"]) as far:
        above = ("--upstream", far.url, "--upstream-cafile", far.cafile)
        with relay(tmp_path / "near", *above, "--upstream-token-file", token) as near:
            near.reaches(upstream_sessions=1)
            near.subscribe(cache, tmp_path / "out").finish(3)
            assert (far.metric("claims_ignored_total") == 0) == role
            assert ("says as a relay is ignored" in far.process.stderr) != role


def test_a_relay_started_before_its_upstream_finds_it_later(cache: Cache, tmp_path: Path):
    with relay(tmp_path / "far") as first:
        address, cafile = first.url.removeprefix("moqt://"), first.cafile
    options = ("--upstream", f"moqt://{address}", "--upstream-cafile", cafile)
    with relay(tmp_path / "near", *options) as near:
        with relay(tmp_path / "far", "--listen", address) as far:
            far.reaches(sessions=1)
            publisher = far.publish(cache)
            publisher.wait_for("publishing")
            near.subscribe(cache, tmp_path / "out").finish(0)
            cache.check(tmp_path / "out")
        # Without upstream, what is cached is served.
        near.subscribe(cache, tmp_path / "later", name="later").finish(0)
        cache.check(tmp_path / "later")
