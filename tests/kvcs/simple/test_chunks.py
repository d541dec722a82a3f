"""Groups are chunks of tokens: what arrives, in any order, and where it ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcs.names.errors import VerificationFailed
from kvcs.simple.chunks import Chunks
from kvcs.simple.names import Compression
from moqt.values.codes import ObjectStatus
from moqt.values.names import Location
from tests.kvcs.simple.support import CHUNK, FP16, VECTORS, payloads, values

OBJECTS = payloads(Compression.FP16)
ENDS = [
    (ObjectStatus.END_OF_GROUP, Location(*each)) for each in VECTORS["ends"]["end_of_group"]
] + [(ObjectStatus.END_OF_TRACK, Location(*VECTORS["ends"]["end_of_track"]))]


def chunks(max_tokens: int = 100) -> Chunks:
    return Chunks(FP16, Compression.FP16, chunk_tokens=CHUNK, max_tokens=max_tokens)


def of(made: Chunks) -> bytes:
    """All that was handed over, as the payloads have it."""
    parts = [held.decode(FP16, Compression.FP16) for held in made.ready]
    k = np.concatenate([part.k for part in parts], axis=1)
    v = np.concatenate([part.v for part in parts], axis=1)
    assert [part.first_token for part in parts] == [0, CHUNK]
    return np.stack((k, v), axis=1).transpose(2, 0, 1, 3, 4).tobytes()


def test_the_ends_of_groups_and_track_tell_how_many_tokens_there_are() -> None:
    made = chunks()
    for location, payload in OBJECTS.items():
        made.object_received(Location(*location), payload)
    assert len(made.ready) == 1 and made.total is None and not made.whole
    for status, location in ENDS:
        made.ended(status, location)
    assert made.total == made.tokens == 3 and made.whole
    assert of(made) == values().tobytes()


def test_the_end_of_a_fetched_track_tells_it_too() -> None:
    made = chunks()
    for location, payload in OBJECTS.items():
        made.object_received(Location(*location), payload)
    made.fetched_to_the_end()
    assert made.whole and of(made) == values().tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_arrival_and_repetition_make_no_difference(seed: int) -> None:
    steps = [*OBJECTS.items(), *OBJECTS.items(), *ENDS]
    random.Random(seed).shuffle(steps)
    made = chunks()
    for first, second in steps:
        if isinstance(first, ObjectStatus):
            made.ended(first, second)
        else:
            made.object_received(Location(*first), second)
    assert made.whole and made.received == 3 and not made.behind
    assert of(made) == values().tobytes()


def test_what_is_missing_before_something_later_is_known() -> None:
    made = chunks()
    assert not made.behind and made.first_missing == (0, 0)
    made.object_received(Location(0, 0), OBJECTS[0, 0])
    assert not made.behind and made.first_missing == (0, 1)
    made.object_received(Location(1, 0), OBJECTS[1, 0])
    assert made.behind and made.first_missing == (0, 1)
    made.object_received(Location(0, 1), OBJECTS[0, 1])
    assert made.first_missing == (1, 1)
    made.ended(*ENDS[-1])
    assert made.behind


@pytest.mark.parametrize(
    "wrong",
    [
        lambda made: made.object_received(Location(0, CHUNK), OBJECTS[0, 0]),
        lambda made: made.object_received(Location(50, 0), OBJECTS[0, 0]),
        lambda made: made.object_received(Location(0, 1), OBJECTS[0, 1][:-1]),
        lambda made: made.object_received(Location(0, 1), OBJECTS[0, 1] + b"x"),
        lambda made: made.ended(ObjectStatus.END_OF_GROUP, Location(1, 0)),
        lambda made: made.ended(ObjectStatus.END_OF_TRACK, Location(1, 0)),
        lambda made: made.fetched_to_the_end(),
    ],
)
def test_what_cannot_be_a_track_of_this_geometry_is_refused(wrong) -> None:
    made = chunks()
    made.object_received(Location(1, 0), OBJECTS[1, 0])
    with pytest.raises(VerificationFailed):
        wrong(made)


def test_only_the_last_group_may_be_short() -> None:
    made = chunks()
    made.object_received(Location(0, 0), OBJECTS[0, 0])
    made.ended(ObjectStatus.END_OF_GROUP, Location(0, 1))
    assert not made.ready
    with pytest.raises(VerificationFailed, match="chunk 0 is not full and not the last one"):
        made.ended(ObjectStatus.END_OF_TRACK, Location(2, 0))


def test_an_object_beyond_an_end_is_refused_whichever_comes_first() -> None:
    for end in ENDS[1:]:
        made = chunks()
        made.ended(*end)
        with pytest.raises(VerificationFailed, match="beyond the end"):
            made.object_received(
                Location(1, 1) if end is ENDS[1] else Location(2, 0), OBJECTS[1, 0]
            )


def test_no_more_tokens_are_taken_than_were_allowed(caplog) -> None:
    made = chunks(max_tokens=3)
    made.object_received(Location(1, 0), OBJECTS[1, 0])
    with pytest.raises(VerificationFailed, match=r"more than 3 tokens.* --max-tokens"):
        made.object_received(Location(1, 1), OBJECTS[1, 0])
        assert "a cache is refused that has more than 3 tokens" in caplog.messages
