"""What is done in one turn of an event loop does not grow with what there is."""

from __future__ import annotations

import sys
from itertools import islice
from types import SimpleNamespace

import pytest

from kvcs.keeping.resume_file import key_of
from kvcs.names.codes import Component
from kvcs.names.manifest import Manifest
from kvcs.names.tracks import DataTrack
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.layers import TAKEN_UP_AT_ONCE
from kvcs.retrieving.receivers import TrackState
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Stats
from kvsp.names.identity import block_keys
from moqt.values.names import FullTrackName, Location
from tests.kvcs.support import BLOCK, SCOPE, descriptor, kv, produced, publisher
from tests.kvcs.support_segments import grown

DESCRIBED = descriptor(layers=2)


def steps(work) -> int:
    """How many operations of the interpreter `work` takes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def asked(segments: int) -> int:
    """Operations to choose 16 blocks that holders have, of the last segments."""
    tokens = list(range(segments * BLOCK))
    publication = grown(
        (1,) * segments, kv(DESCRIBED, len(tokens)), tokens, described=DESCRIBED, finish=False
    )
    keys = block_keys(SCOPE, DESCRIBED, tokens)
    assembly = Assembly(
        publication.namespace,
        DESCRIBED,
        keys,
        range(DESCRIBED.layers),
        MemoryDestination(DESCRIBED),
        Stats(),
    )
    *_, manifest = publication.tracks[0].objects()
    assembly.manifest_read(manifest.location, Manifest.parse(manifest.payload))
    assembly.prepare()
    for segment, tracks in enumerate(assembly.segments[:-16]):
        for half, track in enumerate(tracks):
            store = publication.tracks[1 + 2 * segment + half]
            for layer in range(DESCRIBED.layers):
                parts = store.get(Location(layer, 0)).parts
                assembly.object_received(track, Location(layer, 0), parts)
    assert assembly.segment == segments - 16
    chosen = []
    count = steps(lambda: chosen.extend(islice(assembly.from_holders(lambda *_: True), 16)))
    assert [layer for layer, _ in chosen] == [0, 1] * 8
    return count


def test_choosing_what_holders_are_asked_for_takes_the_same_however_many_segments_there_are():
    assert asked(96) <= 1.2 * asked(24)


# --- of a long context ----------------------------------------------------------------------


def begun(blocks: int, *, listed: bool, destination=None) -> SimpleNamespace:
    """The assembly of a publication in one segment, with its last manifest or, if nothing is to be
    `listed`, its first one; all of its manifests, and its data tracks."""
    stats = Stats()
    tokens = list(range(blocks * BLOCK))
    publication = produced(DESCRIBED, tokens, kv(DESCRIBED, len(tokens)), manifest_every=1)
    assembly = Assembly(
        publication.namespace,
        DESCRIBED,
        block_keys(SCOPE, DESCRIBED, tokens),
        range(DESCRIBED.layers),
        destination or MemoryDestination(DESCRIBED),
        stats,
    )
    versions = [Manifest.parse(each.payload) for each in publication.tracks[0].objects()]
    number = len(versions) - 1 if listed else 0
    assembly.manifest_read(Location(number, 0), versions[number])
    assembly.prepare()
    tracks = list(zip(assembly.segments[0], publication.tracks[1:], strict=True))
    return SimpleNamespace(assembly=assembly, versions=versions, tracks=tracks, stats=stats)


def state_of(track: DataTrack) -> TrackState:
    state = TrackState(track, FullTrackName((b"a",), track.name), 0, 1 << 20)
    state.suspects = set(range(DESCRIBED.layers))
    return state


@pytest.mark.parametrize("way", ["nobody brings it", "one after another", "all of it comes"])
def test_what_is_to_be_asked_for_is_found_in_as_many_steps_however_many_blocks_there_are(way):
    def found(blocks: int) -> int:
        made = begun(blocks, listed=True)
        assembly, (track, store) = made.assembly, made.tracks[0]
        for number in (0, blocks // 2):  # some of it is there
            parts = store.get(Location(0, number)).parts
            assembly.object_received(track, Location(0, number), parts)
        state = state_of(track)
        if way == "one after another":
            state.ends = blocks - 1
        elif way == "all of it comes":
            state.subscribed = True
            state.accepted(None)
        last = Location(0, blocks // 2 - 1) if state.ends else Location(1, blocks - 1)
        spans = []
        count = steps(lambda: spans.append(state.uncovered(assembly)))
        assert spans == [None if way == "all of it comes" else (Location(0, 1), last)]
        return count

    assert found(256) <= 1.1 * found(16)


def test_what_is_to_be_asked_for_ends_where_something_is_there_whatever_holders_have_promised():
    made = begun(8, listed=True)
    track, store = made.tracks[0]
    made.assembly.object_received(track, Location(0, 5), store.get(Location(0, 5)).parts)
    made.assembly.promised |= {(0, 1), (0, 7)}
    runs = [made.assembly.missing(track, 0, range(start, 8)) for start in (0, 1, 5, 7)]
    assert runs == [range(1), range(2, 5), range(6, 7), range(0)]
    assert not made.assembly.missing(track, 0, range(1, 2))


@pytest.mark.parametrize("handed_over", [True, False])
def test_what_came_before_it_was_listed_is_compared_in_as_many_steps_however_many_it_is(
    handed_over,
):
    def compared(blocks: int) -> int:
        made = begun(blocks, listed=False)
        assembly, versions, stats = made.assembly, made.versions, made.stats
        for track, store in made.tracks:
            for number in range(blocks - (not handed_over)):
                place = Location(0, number)
                assembly.object_received(track, place, store.get(place).parts)
        assert (len(assembly.ready) == 1) is handed_over
        assert not stats.objects_confirmed
        count = steps(lambda: assembly.manifest_read(Location(9, 0), versions[-1], versions[0]))
        assert stats.objects_confirmed == stats.objects_verified == 2 * (blocks - (not handed_over))
        return count

    assert compared(256) <= 1.1 * compared(16)


class Left(MemoryDestination):
    """Has Objects of an earlier retrieval."""

    publication = None

    def __init__(self, held) -> None:
        super().__init__(DESCRIBED)
        self.held = held

    def take_up(self, origin):
        return self.held

    def note(self, *_) -> None: ...


def test_what_an_earlier_retrieval_left_is_taken_up_a_part_in_each_turn(monkeypatch):
    monkeypatch.setattr("kvcs.retrieving.layers.TAKEN_UP_AT_ONCE", 8)
    assert TAKEN_UP_AT_ONCE <= 4096
    blocks, tracks = 16, [DataTrack(half, "raw", 0) for half in (Component.K, Component.V)]
    *_, last = begun(blocks, listed=True).versions
    held = {
        key_of(track, layer, number): last.expected_digest(track, layer, number)
        for track in tracks
        for layer in range(DESCRIBED.layers)
        for number in range(blocks)
    }
    made = begun(blocks, listed=True, destination=Left(held))
    assembly, stats = made.assembly, made.stats
    asked = []
    session = SimpleNamespace(peer_max_filter_ranges=0, fetch=lambda *a: asked.append(a))
    retrieval = Retrieval(session, assembly, stats)
    before, turns = 0, 0
    while not retrieval.finished:
        assert retrieval.poll(0.0) == (0.0 if assembly.taking_up else None)
        taken = stats.objects_resumed
        assert 0 <= taken - before <= 8 and not asked
        before, turns = taken, turns + 1
        assert turns < 99
    assert before == len(held) and turns >= len(held) // 8
    assert len(assembly.ready) == DESCRIBED.layers


def test_a_publication_of_many_segments_is_withdrawn_one_track_after_the_other() -> None:
    """Not each of them after a look at all the others."""

    def withdrawn(segments: int) -> int:
        tokens = list(range(segments * BLOCK))
        publication = grown(
            (1,) * segments, kv(DESCRIBED, len(tokens)), tokens, described=DESCRIBED
        )
        served = publisher(publication)
        count = steps(lambda: publication.withdraw(served))
        assert not served.tracks and not served.namespaces()
        return count

    assert withdrawn(64) <= 4.4 * withdrawn(16)
