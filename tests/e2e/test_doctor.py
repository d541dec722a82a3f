"""`kvcs-doctor` says what keeps a cache from being found and retrieved."""

from __future__ import annotations

import json
import re
import signal
import sys

from tests.e2e.support import BIN, Process, finite_cache, make_cache, relay


def doctor(hub, *options, code: int = 0, url: str | None = None, cafile=True) -> dict[str, list]:
    """What it found, by what it is about: (level, text)."""
    process = Process(
        hub.directory,
        "doctor",
        sys.executable,
        "-m",
        "kvcs.programs.doctor",
        url or hub.url,
        *(("--cafile", hub.cafile) if cafile else ()),
        "--json",
        *options,
    ).finish(code)
    result = process.json()
    assert result["ok"] is (code == 0)
    found: dict[str, list] = {}
    for each in result["checks"]:
        found.setdefault(each["what"].split()[0], []).append((each["level"], each["text"]))
    return found


def test_a_relay_is_examined_alone(tmp_path):
    with relay(tmp_path / "hub") as hub:
        found = doctor(hub)
        assert [level for ((level, _),) in found.values()] == ["ok"] * 4
        assert found["draft"] == [("ok", "moqt-22")]
        assert "127.0.0.1" in found["certificate"][0][1]
        assert "this machine's clock" in found["certificate"][0][1]
        assert int(re.search(r"of (\d+) octets", found["MTU"][0][1])[1]) > 1252


def test_by_its_other_name_it_explains_why_no_longer_prefix_is_served(tmp_path, cache):
    code = (
        "import sys; sys.argv[0] = 'kvcs-explain'; from kvcs.programs.entry import explain as main"
    )
    command = (sys.executable, "-c", f"{code}; main()")
    shorter = make_cache(tmp_path / "shorter", tokens=16, scope=cache.scope)
    with relay(tmp_path / "hub") as hub:
        ask = (*command, hub.url, "--cafile", hub.cafile)
        said = Process(hub.directory, "nothing", *ask).finish(2).stderr
        assert said.startswith("kvcs-explain: give --scope-key-file, --compat and --tokens")
        assert (
            "0 of 8 blocks"
            in Process(hub.directory, "absent", *ask, *cache.identity()).finish(3).stdout
        )
        hub.publish(shorter).wait_for("publishing")
        done = Process(hub.directory, "shorter", *ask, *cache.identity()).finish(0)
        assert "4 of 8 blocks (16 of 32 tokens) can be had" in done.stdout
        assert "exactly the first 5 to 8 blocks" in done.stdout


def test_a_relay_that_is_not_there_or_not_trusted_is_said(tmp_path):
    with relay(tmp_path / "hub") as hub:
        ((level, text),) = doctor(hub, code=1, url="moqt://127.0.0.1:9")["relay"]
        assert level == "failed" and "127.0.0.1:9" in text
        ((level, text),) = doctor(hub, code=1, cafile=False)["relay"]
        assert level == "failed" and "certificate" in text


def test_what_is_published_is_said_and_why_a_longer_prefix_is_not(tmp_path, cache):
    shorter = make_cache(tmp_path / "shorter", tokens=16, scope=cache.scope)
    with relay(tmp_path / "hub") as hub:
        found = doctor(hub, *cache.identity(), code=3)
        assert found["published"][0][1].startswith("0 publications")
        assert "0 of 8 blocks" in found["tokens"][0][1]

        hub.publish(shorter).wait_for("publishing")
        found = doctor(hub, *cache.identity())
        assert "4 of our blocks, complete" in found["publication"][0][1]
        level, text = found["tokens"][0]
        assert level == "warning"
        assert "4 of 8 blocks (16 of 32 tokens) can be had" in text
        assert "exactly the first 5 to 8 blocks" in text

        longer = hub.produce(cache, name="longer")
        found = doctor(hub, *cache.identity())
        assert "8 of our blocks, still in production" in found["publication"][0][1]
        assert found["tokens"][0] == ("ok", "8 of 8 blocks (32 of 32 tokens) can be had")
        longer.signal(signal.SIGSTOP)
        other = cache.variant("model", model="another")
        found = doctor(hub, *other.identity(), code=3)
        assert "2 of 1 other descriptor" in found["published"][0][1]


def test_a_sealed_scope_is_examined_as_its_members_see_it(tmp_path):
    scope = tmp_path / "scope.json"
    arguments = ("scope", scope, "--content-key")
    Process(tmp_path, "keygen", BIN / "kvcs-keygen", *arguments).finish()
    sealed = make_cache(tmp_path / "sealed", scope=scope)
    with relay(tmp_path / "hub") as hub:
        hub.publish(sealed).wait_for("publishing")
        found = doctor(hub, *sealed.identity())
        assert "8 of our blocks, complete" in found["publication"][0][1]

        tree = json.loads(scope.read_text())
        sealed.scope.write_text(json.dumps({"scope_key": tree["scope_key"]}))
        ((level, text),) = doctor(hub, *sealed.identity(), code=4)["publication"]
        assert level == "failed" and "sealed with content key 0" in text


def test_encodings_and_who_has_signed_are_said_and_whether_it_can_be_read(tmp_path):
    cache = make_cache(tmp_path / "cache")
    key, producers = tmp_path / "key.json", tmp_path / "producers.json"
    for name in (key, tmp_path / "other.json"):
        listed = producers if name == key else tmp_path / "others.json"
        arguments = ("producer", name, "--producers", listed)
        Process(tmp_path, "keygen", BIN / "kvcs-keygen", *arguments).finish()
    kid = json.loads(key.read_text())["kid"]
    with relay(tmp_path / "hub") as hub:
        offered = ("--codec", "raw", "--codec", "kv.x-zstd", "--sign-key", key)
        hub.publish(cache, *offered).wait_for("publishing")
        at = cache.identity()
        text = doctor(hub, *at)["publication"][0][1]
        assert text.endswith(
            f"in raw, kv.x-zstd; signed by {kid}, not verified (--producers FILE); in clear; "
            "it can be read here"
        )
        text = doctor(hub, *at, "--producers", producers)["publication"][0][1]
        assert f"signed by {kid}; in clear; it can be read here" in text
        others = ("--producers", tmp_path / "others.json")
        ((level, text),) = doctor(hub, *at, *others, code=5)["publication"]
        assert level == "failed" and f"signed by {kid}" in text
        assert "none of the producers" in text and text.endswith("it cannot be read here")


def test_one_that_is_only_lossy_is_said_to_be_unreadable_without_leave(tmp_path):
    cache = finite_cache(tmp_path / "cache")
    with relay(tmp_path / "hub") as hub:
        hub.publish(cache, "--codec", "x-q8").wait_for("publishing")
        ((level, text),) = doctor(hub, *cache.identity(), code=1)["publication"]
        assert level == "failed" and "is offered only as x-q8 (lossy)" in text
        assert text.endswith("not signed; in clear; it cannot be read here")


def test_one_that_is_only_announced_is_named(tmp_path, cache):
    with relay(tmp_path / "hub") as hub:
        hub.peer("announce", *cache.identity()).wait_for("announced")
        found = doctor(hub, *cache.identity(), code=1)
        level, text = found["publication"][0]
        assert level == "failed" and "8 blocks" in text


def test_one_of_which_the_manifest_is_there_and_objects_are_not_is_said_to_be_missing_them(
    tmp_path, cache
):
    with relay(tmp_path / "hub") as hub:
        publisher = hub.publish(cache)
        publisher.wait_for("publishing")
        hub.subscribe(cache, tmp_path / "part", "--layers", "3-4").finish(0)
        publisher.signal(signal.SIGSTOP)
        ((level, text),) = doctor(hub, *cache.identity(), code=1)["publication"]
        assert level == "failed" and "8 of our blocks by its manifest" in text
        assert "k.raw.s0 layer 0 block 0" in text and "v.raw.s0 layer 7 block 7" in text


def test_a_token_that_is_missing_is_said(tmp_path, cache):
    auth = tmp_path / "principals.json"
    arguments = ("token", tmp_path / "token", "--every-scope", "--principals", auth)
    Process(tmp_path, "keygen", BIN / "kvcs-keygen", *arguments).finish()
    with relay(tmp_path / "hub", "--auth", auth) as hub:
        found = doctor(hub, *cache.identity(), code=4)
        ((level, text),) = found["authorization"]
        assert level == "failed" and "--token-file" in text
        doctor(hub, *cache.identity(), "--token-file", tmp_path / "token", code=3)
