"""Whatever octets a peer sends: a session stays open or ends with a registered code."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.session import Session, SessionConfig, SessionState
from moqt.values.codes import SessionErrorCode
from tests.moqt.loose import SETUP, Everything, Lone, Loose
from tests.moqt.memory import assert_clean
from tests.paths import DATA

VECTORS = json.loads((DATA / "moqt-22-vectors.json").read_text())
SEEDS = sorted(
    {
        bytes.fromhex(case["hex"])
        for cases in VECTORS.values()
        if isinstance(cases, list)
        for case in cases
        if "hex" in case
    }
)


@st.composite
def mutated(draw) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        if kind == "set" and data:
            data[where] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[where:]
        elif kind == "insert":
            data[where:where] = draw(st.binary(max_size=4))
        else:
            data += data[where:]
    return bytes(data[:4000])


OCTETS = st.one_of(mutated(), mutated(), st.binary(max_size=60), st.sampled_from(SEEDS))
STREAMS = st.sampled_from(["control", "request", "ours", "uni", "uni", "new request", "new uni"])
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["data"] * 8 + ["fin", "reset", "stop", "datagram", "tick"]),
        STREAMS,
        st.integers(0, 5),
        OCTETS,
        st.integers(1, 7),
    ),
    max_size=25,
)


@settings(max_examples=400)
@given(client=st.booleans(), moves=MOVES)
def test_any_octets_leave_an_open_session_or_one_closed_with_a_registered_code(client, moves):
    lone = Lone(client)
    session, transport = lone.session, lone.transport
    count = {"new uni": 10, "new request": 10}
    now = 0.0
    for what, where, n, octets, pieces in moves:
        match where:
            case "control":
                stream = lone.uni
            case "request":
                stream = lone.bidi + 4 * n
            case "ours":
                stream = lone.ours + 4 * n
            case "uni":
                stream = lone.uni + 4 * (n + 1)
            case "new uni" | "new request":
                count[where] += 1
                stream = (lone.uni if where == "new uni" else lone.bidi) + 4 * count[where]
        if what == "tick":
            now += n
            session.tick(now)
        elif what == "datagram":
            transport.give("datagram", 0, octets)
        elif what == "stop":
            transport.give("stop", lone.ours + 2 + 4 * n if stream & 2 else stream, bytes(n))
        elif what == "reset":
            transport.give("reset", stream, bytes(n))
        else:
            size = max(1, len(octets) // pieces)
            parts = [octets[i : i + size] for i in range(0, len(octets), size)] or [b""]
            for index, part in enumerate(parts):
                last = what == "fin" and index == len(parts) - 1
                transport.give("fin" if last else "data", stream, part)
        session.ready_to_send()
        lone.check()
        if session.state is SessionState.CLOSED:
            break
    lone.end()


@settings(max_examples=150)
@given(
    client=st.booleans(),
    pieces=st.lists(st.tuples(st.integers(0, 4), st.booleans(), OCTETS), max_size=12),
)
def test_any_octets_before_setup_are_survived_too(client, pieces):
    transport = Loose(client)
    it = Session(transport, Everything(), SessionConfig(max_held_octets=5000))
    transport.handler = it
    first = 1 if client else 0
    for n, uni, octets in pieces[:3]:
        transport.give("data", 4 * n + first + 2 * uni, octets)
    it.connection_established("moqt-22")
    for n, uni, octets in pieces[3:]:
        transport.give("data", 4 * n + first + 2 * uni, octets)
    transport.give("data", 0x100 + first + 2, SETUP)
    assert it.remembered().octets_held <= 5000
    if it.closed is not None:
        assert SessionErrorCode(transport.closed[0]) in SessionErrorCode
    it.close()
    assert_clean(it)
