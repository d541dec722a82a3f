"""What need not be trusted: relays, and members of the scope who are no producers."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.e2e.support import BIN, Process, make_cache, readable


def keygen(*arguments: object) -> str:
    """The standard output of `kvcs-keygen`, which succeeds."""
    command = [BIN / "kvcs-keygen", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def signed(tmp_path):
    """The private key of a producer, and the list it stands in."""
    key, producers = tmp_path / "producer.json", tmp_path / "producers.json"
    keygen("producer", key, "--producers", producers)
    return key, producers


def sealed_scope(path: Path, *options: str) -> Path:
    keygen("scope", path, "--content-key", *options)
    return path


def published(hub, cache, *options, name="publish") -> Process:
    process = hub.publish(cache, *options, name=name)
    process.wait_for("publishing")
    return process


# --- signed manifests -------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256"])
def test_what_an_accepted_producer_has_signed_is_taken(algorithm, cache, hub, tmp_path):
    key, producers = tmp_path / "key.json", tmp_path / "producers.json"
    keygen("producer", key, "--alg", algorithm, "--producers", producers)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    published(hub, cache, "--sign-key", key)
    at = ["--producers", producers, "--json"]
    result = hub.subscribe(cache, tmp_path / "out", *at, name="first").finish(0).json()
    cache.check(tmp_path / "out")
    assert result["objects_confirmed"] == result["objects_verified"] == cache.objects
    # who requires nobody takes it too
    hub.subscribe(cache, tmp_path / "anybody", "--require-listed", name="anybody").finish(0)
    cache.check(tmp_path / "anybody")


def test_who_signed_it_must_be_accepted(cache, hub, signed, tmp_path):
    other, others = tmp_path / "other.json", tmp_path / "others.json"
    keygen("producer", other, "--producers", others)
    published(hub, cache, "--sign-key", signed[0])
    failed = hub.subscribe(cache, tmp_path / "out", "--producers", others).finish(5)
    assert "is none of the producers that are accepted" in readable(failed)
    assert not (tmp_path / "out").exists()


def test_a_publication_that_is_not_signed_is_never_taken_instead(cache, hub, signed, tmp_path):
    published(hub, cache)
    failed = hub.subscribe(cache, tmp_path / "out", "--producers", signed[1]).finish(5)
    assert "it is not signed" in readable(failed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--sign-key", "--producers"])
def test_a_file_that_is_not_what_it_should_be_is_wrong_usage(option, cache, hub, signed, tmp_path):
    key, producers = signed
    wrong = {"--sign-key": producers, "--producers": key}[option]
    wrong.chmod(0o600)
    if option == "--sign-key":
        failed = hub.publish(cache, option, wrong, name="wrong").finish(2)
    else:
        failed = hub.subscribe(cache, tmp_path / "out", option, wrong, name="wrong").finish(2)
    secret = json.loads(key.read_text())["d"]
    assert wrong.name in failed.stderr and secret not in failed.stderr


# --- sealed Objects ---------------------------------------------------------------------


def memory_holds(process: Process, *needles: bytes) -> list[bool]:
    """Which of the strings stand anywhere in the memory of a process."""
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text().splitlines()
    found = [False] * len(needles)
    with Path(f"/proc/{process.popen.pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            if not re.match(r"[0-9a-f]+-[0-9a-f]+ rw", line):
                continue
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            try:
                memory.seek(start)
                octets = memory.read(end - start)
            except (OSError, ValueError):
                continue
            for index, needle in enumerate(needles):
                found[index] |= needle in octets
    return found


@pytest.mark.parametrize("sealed", [False, True])
def test_a_relay_holds_nothing_of_a_sealed_cache_that_it_could_read(sealed, cache, hub, tmp_path):
    if sealed:
        cache.scope = sealed_scope(tmp_path / "sealed.json")
    published(hub, cache)
    hub.subscribe(cache, tmp_path / "out").finish(0)
    cache.check(tmp_path / "out")
    needles = [
        cache.tensors["layers.0.k"].tobytes()[:128],
        cache.tensors["layers.7.v"].tobytes()[-128:],
        b'"block_keys_sha256"',
    ]
    # in clear all of it is there, so that the search is known to find it
    assert memory_holds(hub.process, *needles) == [not sealed] * 3


@pytest.mark.parametrize(
    "suite", ["aes-128-gcm", "aes-256-gcm", "aes-128-ctr-hmac-80", "aes-128-ctr-hmac-64"]
)
def test_what_is_sealed_is_opened_in_every_suite_and_mode(suite, cache, hub, signed, tmp_path):
    cache.scope = sealed_scope(tmp_path / "sealed.json", "--cipher-suite", suite)
    published(hub, cache, "--sign-key", signed[0])
    for mode in ("fetch", "live"):
        out = tmp_path / mode
        at = ["--mode", mode, "--producers", signed[1], "--json"]
        result = hub.subscribe(cache, out, *at, name=mode).finish(0).json()
        cache.check(out)
        assert result["discarded"] == {} and result["recoveries"] == 0


def test_a_sealed_cache_is_nothing_to_who_has_no_content_key(cache, hub, tmp_path):
    plain = cache.scope
    cache.scope = tmp_path / "sealed.json"
    cache.scope.touch(0o600)
    tree = json.loads(plain.read_text())
    key = {"key_id": 0, "cipher_suite": 4, "key": "5a" * 32}
    cache.scope.write_text(json.dumps({**tree, "content_keys": [key]}))
    published(hub, cache)
    without = cache.variant("without", scope=plain)
    failed = hub.subscribe(without, tmp_path / "out", name="without").finish(4)
    assert "sealed with content key 0, and the scope file has no content keys" in readable(failed)
    wrong = tmp_path / "wrong.json"
    wrong.touch(0o600)
    wrong.write_text(json.dumps({**tree, "content_keys": [{**key, "key": "5b" * 32}]}))
    other = cache.variant("other", scope=wrong)
    failed = hub.subscribe(other, tmp_path / "out", name="other").finish(5)
    assert "auth-failed" in readable(failed) and "5a5a" not in failed.stderr
    assert not (tmp_path / "out").exists()


def test_a_cache_in_clear_is_not_taken_where_caches_are_sealed(cache, hub, tmp_path):
    tree = json.loads(cache.scope.read_text())
    published(hub, cache)
    scope = tmp_path / "sealed.json"
    scope.touch(0o600)
    scope.write_text(json.dumps(tree))
    keygen("rotate", scope)
    failed = hub.subscribe(cache.variant("sealed", scope=scope), tmp_path / "out").finish(5)
    assert "only what is sealed is taken" in readable(failed)
    assert not (tmp_path / "out").exists()


def test_after_a_rotation_what_was_sealed_before_is_read_and_the_rest_needs_the_new_key(
    cache, hub, tmp_path
):
    cache.scope = sealed_scope(tmp_path / "sealed.json")
    before = tmp_path / "before.json"
    shutil.copy2(cache.scope, before)
    published(hub, cache, name="old")
    assert keygen("rotate", cache.scope) == str(1 << 32)
    assert stat.S_IMODE(cache.scope.stat().st_mode) == 0o600
    hub.subscribe(cache, tmp_path / "old-out", name="reads-old").finish(0)
    cache.check(tmp_path / "old-out")
    fresh = make_cache(tmp_path / "fresh", seed=9, scope=cache.scope)
    published(hub, fresh, name="new")
    hub.subscribe(fresh, tmp_path / "new-out", name="reads-new").finish(0)
    fresh.check(tmp_path / "new-out")
    left = fresh.variant("left-behind", scope=before)
    failed = hub.subscribe(left, tmp_path / "out", name="left-behind").finish(4)
    assert f"content key {1 << 32}, and the scope file has 0" in readable(failed)


def test_what_would_stand_in_clear_at_a_holder_is_not_put_there(cache, hub, tmp_path):
    cache.scope = sealed_scope(tmp_path / "sealed.json")
    put = ["put", "http://127.0.0.1:1/kvsp/", "--http-loopback", *cache.identity()]
    refused = Process(tmp_path, "put", BIN / "kvsp", *put, "--kv", cache.kv).finish(2)
    assert "here they would stand in clear" in refused.stderr.replace("\n", " ")
