"""What a relay keeps in files outlives the relay and the publisher; who pushes leaves at once."""

from __future__ import annotations

import json
import sys
from urllib.request import Request, urlopen

import pytest

from tests.e2e.support import BIN, Process, eventually, make_cache, relay
from tools.faulty_disk import VARIABLE

TRACKS = 3
"""Of a publication: manifest, K and V."""


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "disk"


def restarted(first, directory, disk, *options):
    """Another relay with the same files, after the first one was killed."""
    first.process.kill()
    return relay(directory, "--cache-dir", disk, *options)


def test_a_publication_is_found_and_retrieved_after_relay_and_publisher_were_killed(
    cache, tmp_path, disk
):
    with relay(tmp_path, "--cache-dir", disk, "--cache-disk", "1GiB") as first:
        publisher = first.publish(cache)
        publisher.wait_for("publishing")
        first.subscribe(cache, tmp_path / "out").finish(0)
        first.reaches(disk_tracks=TRACKS)
        publisher.kill()
        with restarted(first, tmp_path / "again", disk) as again:
            assert again.metric("disk_tracks") == TRACKS
            again.subscribe(cache, tmp_path / "out2").finish(0)
            cache.check(tmp_path / "out2")
            assert again.metric("disk_hits_total") >= cache.objects
            assert again.metric("in_bytes_total") == 0


def test_a_pushed_publication_outlives_its_publisher_and_a_crash_of_the_relay(
    cache, tmp_path, disk
):
    with relay(tmp_path, "--cache-dir", disk) as first:
        pushed = first.publish(cache, "--push", "--json", name="push").finish(0).json()
        assert pushed["event"] == "stored" and pushed["blocks"] == cache.blocks
        assert pushed["stored"] == "disk" and "why_memory" not in pushed
        assert len(list(disk.glob("*.track"))) == TRACKS
        with restarted(first, tmp_path / "again", disk) as again:
            result = again.subscribe(cache, tmp_path / "out", "--json").finish(0).json()
            assert result["objects_verified"] == cache.objects
            cache.check(tmp_path / "out")


def test_a_pushed_publication_is_kept_in_memory_by_a_relay_without_files(cache, hub, tmp_path):
    pushed = hub.publish(cache, "--push", name="push").finish(0)
    said = "stored in the relay's memory alone (the relay has no disk tier)"
    assert pushed.stdout.startswith(said)
    hub.subscribe(cache, tmp_path / "out").finish(0)
    cache.check(tmp_path / "out")


def test_who_pushes_more_than_the_relay_has_room_for_is_told_so(tmp_path):
    cache = make_cache(tmp_path / "large", layers=32, tokens=256, head_dim=64)
    with relay(tmp_path, "--cache-memory", "200KiB") as small:
        pushed = small.publish(cache, "--push", name="push").finish(1)
        assert "not stored: the relay has no room for" in pushed.stderr


def test_a_push_says_that_it_is_in_memory_alone_when_the_disk_is_full(cache, tmp_path, disk):
    state = tmp_path / "disk-state"
    state.write_text("full")
    faulty = ("env", f"{VARIABLE}={state}", sys.executable, "-m", "tools.faulty_disk")
    with relay(tmp_path, "--cache-dir", disk, program=faulty) as full:
        pushed = full.publish(cache, "--push", "--json", name="push").finish(0).json()
        assert pushed["stored"] == "memory" and "disk" in pushed["why_memory"]
        refused = full.publish(cache, "--push", "--durable", name="durable").finish(1)
        assert "not stored durably: the relay has all of it in memory, and 0 of 3" in refused.stderr


def test_who_demands_that_it_is_durable_and_does_not_push_is_told_so(cache, hub):
    assert "give --push, too" in hub.publish(cache, "--durable", name="durable").finish(2).stderr


def test_a_folder_that_another_relay_has_is_refused_in_a_sentence(tmp_path, disk):
    with relay(tmp_path, "--cache-dir", disk):
        other = Process(
            tmp_path,
            "other",
            BIN / "kvcs-relay",
            "--listen",
            "127.0.0.1:0",
            "--self-signed",
            tmp_path / "tls",
            "--cache-dir",
            disk,
        ).finish(1)
        assert "is in use by another relay" in other.stderr


def test_damaged_files_stop_no_start_and_are_fetched_anew(cache, tmp_path, disk):
    with relay(tmp_path, "--cache-dir", disk) as first:
        first.publish(cache, "--push", name="push").finish(0)
        first.process.kill()
    for file in disk.glob("*.track"):
        octets = bytearray(file.read_bytes())
        octets[len(octets) // 3] ^= 0xFF
        file.write_bytes(octets)
    with relay(tmp_path / "again", "--cache-dir", disk) as again:
        alone = again.subscribe(cache, tmp_path / "none", "--timeout", "5", name="alone")
        assert alone.wait() in (1, 3) and not (tmp_path / "none").exists()
        assert again.metric("disk_files_bad_total") >= 1
        publisher = again.publish(cache)
        publisher.wait_for("publishing")
        again.subscribe(cache, tmp_path / "out").finish(0)
        cache.check(tmp_path / "out")


def test_what_is_on_the_disk_is_listed_and_purged_by_the_admin_listener(cache, tmp_path, disk):
    token = tmp_path / "admin.token"
    token.write_text("admin-of-the-relay-0123456789")
    token.chmod(0o600)
    with relay(tmp_path, "--cache-dir", disk, "--admin-token-file", token) as first:
        first.publish(cache, "--push", name="push").finish(0)
        first.process.kill()
    with relay(tmp_path / "again", "--cache-dir", disk, "--admin-token-file", token) as again:
        listed = asked(again, "tracks.json", token)["tracks"]
        assert len(listed) == TRACKS and all(each["disk_octets"] > 0 for each in listed)
        namespace = listed[0]["track"].partition("--")[0]
        purged = asked(again, f"purge?namespace={namespace}", token, "POST")
        assert purged["tracks"] == TRACKS
        eventually(lambda: not list(disk.glob("*.track")), "the files are gone")


def asked(running, path, token, method="GET"):
    request = Request(
        running.metrics_url.replace("metrics", path),
        method=method,
        headers={"Authorization": f"Bearer {token.read_text()}"},
    )
    with urlopen(request, timeout=5) as answer:
        return json.load(answer)
