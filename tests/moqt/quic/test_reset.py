"""Stateless resets (RFC 9000 section 10.3)."""

from __future__ import annotations

import logging
import os
import stat

import pytest

from moqt.private_files import PrivateFileError
from moqt.quic.packets.reset import MAX_RESET, MIN_RESET, Resets, is_reset, load_key

KEY, CID = bytes(range(32)), b"8 octets"


def packet(length: int) -> bytes:
    """A 1-RTT packet of so many octets."""
    return (b"\x41" + CID).ljust(length, b"\0")


def answer(resets: Resets, data: bytes, origin: str = "192.0.2.1", now: float = 0.0):
    return resets.answer(data, CID, origin, now)


def test_a_token_is_that_of_its_connection_id_and_of_the_key_whoever_makes_it():
    token = Resets(KEY, 1).token(CID)
    assert len(token) == 16
    assert token == Resets(KEY, 9).token(CID)
    assert token not in (Resets(KEY, 1).token(b"another!"), Resets(bytes(32), 1).token(CID))


@pytest.mark.parametrize("length", [22, 28, 43, 60, 1200])
def test_a_reset_looks_like_a_short_packet_is_shorter_than_what_it_answers_and_ends_with_the_token(
    length,
):
    resets = Resets(KEY, 100)
    one, other = answer(resets, packet(length)), answer(resets, packet(length))
    assert MIN_RESET <= len(one) <= min(length - 1, MAX_RESET)
    assert one[0] & 0xC0 == 0x40
    assert is_reset(one, resets.token(CID)) and not is_reset(one, resets.token(b"another!"))
    assert not is_reset(one, b""), "a peer that gave no token sends no reset"
    assert one[1:-16] != other[1:-16], "nothing else in it can be foreseen"


@pytest.mark.parametrize("data", [packet(21), b"\xc1" + packet(1200)[1:], b"\x01" + packet(60)[1:]])
def test_what_is_too_short_or_no_1_rtt_packet_is_not_answered(data):
    assert answer(Resets(KEY, 100), data) is None


def test_resets_end_when_two_that_know_nothing_send_them_to_each_other():
    resets, data, count = Resets(KEY, 1000), packet(1200), 0
    while (data := answer(resets, data)) is not None:
        count += 1
    assert count <= MAX_RESET - MIN_RESET + 1


def test_who_asks_for_more_than_may_be_sent_in_a_second_gets_none_and_takes_few_from_others(caplog):
    resets = Resets(KEY, 3)
    flood = [answer(resets, packet(60)) for _ in range(100)]
    assert sum(each is not None for each in flood) == 3
    others = [answer(resets, packet(60), f"192.0.2.{n}") for n in range(2, 66)]
    assert sum(each is not None for each in others) > 50
    assert answer(resets, packet(60), now=1.0) is not None
    assert [r.levelno for r in caplog.records if "(max_resets)" in r.getMessage()] == [
        logging.WARNING
    ]
    assert answer(Resets(KEY, 0), packet(60)) is None


def test_a_key_is_made_once_for_its_owner_only(tmp_path):
    path = tmp_path / "reset.key"
    key = load_key(path)
    assert len(key) == 32 and load_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        load_key(path)
    path.chmod(0o600)
    path.write_bytes(key[:-1])
    with pytest.raises(ValueError, match="has 32 octets"):
        load_key(path)


def test_a_key_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            load_key(tmp_path / "reset.key")
    assert not list(tmp_path.iterdir())
    assert len(load_key(tmp_path / "reset.key")) == 32


def test_of_two_processes_that_make_the_key_at_once_both_use_the_same(tmp_path, monkeypatch):
    path, link, made = tmp_path / "reset.key", os.link, []

    def slower(temporary, target):
        monkeypatch.setattr(os, "link", link)
        made.append(load_key(path))
        link(temporary, target)

    monkeypatch.setattr(os, "link", slower)
    assert [load_key(path)] == made
    assert [each.name for each in tmp_path.iterdir()] == ["reset.key"]


def test_a_pipe_in_the_place_of_a_key_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "reset.key", 0o600)
    with pytest.raises(PrivateFileError, match="not a regular file"):
        load_key(tmp_path / "reset.key")
