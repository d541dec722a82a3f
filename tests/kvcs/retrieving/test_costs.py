"""What it costs to ask holders does not grow with the number of segments."""

from __future__ import annotations

import sys
from itertools import islice

from kvcs.names.manifest import Manifest
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.stats import Stats
from kvsp.names.identity import block_keys
from moqt.values.names import Location
from tests.kvcs.support import BLOCK, SCOPE, descriptor, kv
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
