"""One publication while it arrives, without a session."""

from __future__ import annotations

import pytest

from kvcs.names.errors import VerificationFailed
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.stats import Stats
from kvcs.trust.terms import Came
from kvsp.names.identity import block_keys
from moqt.values.names import Location
from tests.kvcs.support import DESCRIPTOR, LAYERS, SCOPE, TOKENS, produced

KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)


def assembly(publication) -> tuple[Assembly, Stats]:
    stats = Stats()
    destination = MemoryDestination(DESCRIPTOR)
    made = Assembly(publication.namespace, DESCRIPTOR, KEYS, range(LAYERS), destination, stats)
    return made, stats


def received(made: Assembly, location: Location, text: bytes) -> None:
    made.manifest_read(location, made.terms.read(location, text, Came(), made.namespace))


def test_an_object_of_the_manifest_track_that_is_not_the_first_of_its_group_is_no_version() -> None:
    publication = produced()
    first, last = (bytes(stored.payload) for stored in publication.tracks[0].objects())
    made, _ = assembly(publication)
    with pytest.raises(VerificationFailed, match="Object 0 of its Group"):
        received(made, Location(0, 1), first)
    made, stats = assembly(publication)
    received(made, Location(0, 0), first)
    received(made, Location(1, 1), last)
    assert made.version == 0 and not made.complete
    assert stats.discarded == {"bad-manifest": 1}
    received(made, Location(1, 0), last)
    assert made.version == 1 and made.complete
