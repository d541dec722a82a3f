"""Whatever octets a peer sends: a session stays open or ends with a registered code."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.codes import SessionErrorCode
from moqt.messages import LocationFilter, Parameters
from moqt.publisher import Publisher
from moqt.requests import IncomingPublishNamespace
from moqt.session import SessionConfig, SessionState
from moqt.store import TrackStore
from tests.moqt.memory import MemoryTransport, assert_clean
from tests.moqt.test_session_pair import Collector
from tests.moqt.test_session_vectors import VIDEO, Raw

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "moqt-22-vectors.json").read_text())
SEEDS = sorted(
    {
        bytes.fromhex(case["hex"])
        for cases in VECTORS.values()
        if isinstance(cases, list)
        for case in cases
        if "hex" in case
    }
)


class Everything(Publisher):
    """Accepts whatever can be accepted."""

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        request.accept()


class Loose(MemoryTransport):
    """Knows every stream a peer may think of."""

    def __init__(self, is_client):
        super().__init__(is_client)
        self.peer = MemoryTransport(not is_client)
        self.out = Streams(self)
        self.peer.out = self.out

    def send(self, stream_id, data, fin=False):
        super().send(stream_id, data, fin)
        self.out[stream_id].queue.clear()


class Streams(dict):
    def __init__(self, transport):
        self.transport = transport

    def __missing__(self, stream_id):
        other = MemoryTransport(True)
        other.peer = MemoryTransport(False)
        self[stream_id] = stream = other.out[other.open_stream(bidirectional=False)]
        return stream


def session(client: bool) -> tuple[Raw, list[Collector]]:
    publisher = Everything()
    store = TrackStore(VIDEO)
    for group in range(3):
        for object_id in range(3):
            store.append(group, object_id, b"payload")
    publisher.add_track(store)
    config = SessionConfig(max_held_octets=20_000, max_requests=50, max_namespaces=50)
    raw = Raw.__new__(Raw)
    raw.transport = Loose(client)
    from moqt.session import Session

    raw.session = Session(raw.transport, publisher, config)
    raw.transport.handler = raw.session
    raw.session.connection_established("moqt-22")
    raw.uni, raw.bidi = (3, 1) if client else (2, 0)
    raw.session.stream_data(raw.uni, bytes.fromhex("af000000"), False)
    collectors = [Collector() for _ in range(4)]
    fill = Parameters(
        location_filter=LocationFilter.next_object(), fill_parameters=Parameters(group_order=1)
    )
    raw.session.subscribe(VIDEO, collectors[0], fill)
    raw.session.fetch(VIDEO, collectors[1])
    raw.session.subscribe(VIDEO, collectors[2])
    raw.session.subscribe_namespace(
        (b"demo",), on_namespace=lambda *_: None, on_ended=lambda *_: None
    )
    raw.session.publish_namespace((b"demo",), on_ended=lambda *_: None)
    raw.session.track_status(VIDEO)
    return raw, collectors


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
    raw, collectors = session(client)
    it, transport = raw.session, raw.transport
    peer_uni, peer_bidi, ours = (3, 1, 0) if client else (2, 0, 1)
    over: set[tuple[int, str]] = set()
    count = {"new uni": 10, "new request": 10}
    now = 0.0
    for what, where, n, octets, pieces in moves:
        match where:
            case "control":
                stream = raw.uni
            case "request":
                stream = peer_bidi + 4 * n
            case "ours":
                stream = ours + 4 * n
            case "uni":
                stream = peer_uni + 4 * (n + 1)
            case "new uni" | "new request":
                count[where] += 1
                stream = (peer_uni if where == "new uni" else peer_bidi) + 4 * count[where]
        if what == "tick":
            now += n
            it.tick(now)
        elif what == "datagram":
            it.datagram(octets)
        elif what == "stop":
            if stream & 2:
                stream = ours + 2 + 4 * n
            it.stop_sending(stream, n)
        elif (stream, "in") in over or stream in transport.refused:
            continue
        elif what == "reset":
            over.add((stream, "in"))
            it.stream_reset(stream, n)
        else:
            size = max(1, len(octets) // pieces)
            parts = [octets[i : i + size] for i in range(0, len(octets), size)] or [b""]
            for index, part in enumerate(parts):
                fin = what == "fin" and index == len(parts) - 1
                if fin:
                    over.add((stream, "in"))
                if stream not in transport.refused:
                    it.stream_data(stream, part, fin)
        it.ready_to_send()
        assert it.held_octets <= it.config.max_held_octets
        assert len(it._incoming) <= it.config.max_requests + 1
        if it.state is SessionState.CLOSED:
            break
    if it.state is SessionState.CLOSED:
        code, reason = transport.closed
        assert SessionErrorCode(code) is not SessionErrorCode.INTERNAL_ERROR
        assert reason or code == SessionErrorCode.NO_ERROR
    it.close()
    assert_clean(it)
    for collector in collectors[:3]:
        assert collector.failed is not None or collector.done is not None or collector.streams


@settings(max_examples=150)
@given(
    client=st.booleans(),
    pieces=st.lists(st.tuples(st.integers(0, 4), st.booleans(), OCTETS), max_size=12),
)
def test_any_octets_before_setup_are_survived_too(client, pieces):
    transport = Loose(client)
    from moqt.session import Session

    it = Session(transport, Everything(), SessionConfig(max_held_octets=5000))
    transport.handler = it
    for n, uni, octets in pieces[:3]:
        it.stream_data(4 * n + (1 if client else 0) + 2 * uni, octets, False)
    it.connection_established("moqt-22")
    for n, uni, octets in pieces[3:]:
        stream = 4 * n + (1 if client else 0) + 2 * uni
        if stream not in transport.refused:
            it.stream_data(stream, octets, False)
    it.stream_data(0x100 + (3 if client else 2), bytes.fromhex("af000000"), False)
    assert it._early_octets <= 5000
    if it.closed is not None:
        assert SessionErrorCode(transport.closed[0]) in SessionErrorCode
    it.close()
    assert_clean(it)
