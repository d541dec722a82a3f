"""What is held for later costs each octet once, and is let go from whoever holds most."""

from __future__ import annotations

import pytest

from moqt.receiving import data_streams
from moqt.receiving.early import MAX_EARLY, EarlyStreams
from moqt.session import Session, SessionConfig
from moqt.values.errors import SessionError
from moqt.wire.objects import SubgroupHeader
from tests.moqt.loose import Everything, Loose
from tests.moqt.memory import ALPN
from tools.fuzz_base import CODEC


def early():
    return EarlyStreams(Loose(True), 100_000)


def test_what_came_early_is_taken_in_order_by_stream_or_all():
    held = early()
    for n in range(30):
        held.hold(3 + 4 * (n % 3), b"%d." % n, n > 26)
    assert held.head(3, b"now")[:6] == b"0.3.6." and len(held) == 30
    assert held.take(3) == b"".join(b"%d." % n for n in range(0, 30, 3))
    assert held.take(3) == b"" and held.head(3, b"now") == b"now"
    left = held.take_all()
    assert [piece.data for piece in left] == [b"%d." % n for n in range(30) if n % 3]
    assert len(held) == held.octets == 0 and held.take_all() == []


def test_looking_for_the_control_stream_costs_the_same_however_much_waits():
    looked = []

    class Data(bytes):
        def __getitem__(self, key):
            looked.append(key)
            return super().__getitem__(key)

    held = early()
    for n in range(MAX_EARLY):
        held.head(4 * n + 3, b"x")
        held.hold(4 * n + 3, Data(b"x"), False)
    assert len(looked) <= MAX_EARLY
    with pytest.raises(SessionError):
        held.hold(7, b"x", False)


def test_streams_that_are_held_are_let_go_an_eighth_at_a_time_from_who_holds_most(monkeypatch):
    transport = Loose(False)
    config = SessionConfig(max_held_octets=8000)
    session = Session(transport, Everything(), config)
    transport.handler = session
    session.connection_established(ALPN)
    transport.give("data", 2, bytes.fromhex("af000000"))
    looks = []
    heapify = data_streams.heapify
    monkeypatch.setattr(data_streams, "heapify", lambda heap: looks.append(heapify(heap)))
    for n in range(400):  # each for another alias, one alias with many
        alias = 7 if n % 2 else 100 + n
        header = CODEC.encode_subgroup_header(SubgroupHeader(alias, n), properties=False)
        transport.give("data", 4 * n + 6, header + bytes(50))
    streams = session.data_streams
    assert 7000 <= streams.held_octets <= 8000
    dropped = session.counters.streams_dropped
    assert dropped > 200 and len(looks) <= dropped // 10
    of_seven = [s for s in streams.waiting.values() if s.holder == (True, 7)]
    assert len(of_seven) < 20 and len(streams.waiting) - len(of_seven) > 100
    assert session.remembered().octets_held == streams.held_octets
    session.close()
    assert streams.held_octets == 0
