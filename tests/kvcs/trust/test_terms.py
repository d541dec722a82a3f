"""What a consumer asks of a manifest, whatever track it came in."""

from __future__ import annotations

import itertools

import pytest

from kvcs.names.codes import ManifestTrack
from kvcs.trust.cose import sign
from kvcs.trust.producers import ProducerKey, Producers
from kvcs.trust.sealing import TrackSealer
from kvcs.trust.terms import ANY, Came, Terms
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError
from moqt.values.names import FullTrackName, Location
from tests.kvcs.support import produced

PUBLICATION = produced()
TEXT = bytes(PUBLICATION.tracks[0].get(Location(1, 0)).payload)
AT = Location(1, 0)
KEY = ProducerKey.generate()
SIGNED = b"".join(sign([TEXT], KEY))
CONTENT_KEY = ContentKey.generate()
PLAIN, COSE = ManifestTrack


def sealed(payload: bytes, track: ManifestTrack) -> tuple[bytes, Came]:
    name = FullTrackName(PUBLICATION.namespace.fields, track.encode())
    sealer = TrackSealer(CONTENT_KEY, name)
    return sealer.seal(*AT, 0, [payload]), Came(track, 0, sealer.properties)


@pytest.mark.parametrize(
    ("terms", "payload", "came", "fault"),
    [
        (ANY, TEXT, Came(PLAIN), None),
        (ANY, SIGNED, Came(COSE), None),
        (ANY, *sealed(TEXT, PLAIN), "unknown-key-id"),
        (Terms(producers=Producers([KEY.public])), SIGNED, Came(COSE), None),
        (Terms(producers=Producers([KEY.public])), TEXT, Came(PLAIN), "unknown-producer"),
        (Terms(producers=Producers([KEY.public])), TEXT, Came(COSE), "bad-cose"),
        (Terms((CONTENT_KEY,)), *sealed(TEXT, PLAIN), None),
        (Terms((CONTENT_KEY,)), *sealed(SIGNED, COSE), None),
        (Terms((CONTENT_KEY,)), TEXT, Came(PLAIN), "no-key-id"),
        (Terms((CONTENT_KEY,)), SIGNED, Came(COSE), "no-key-id"),
        (Terms((CONTENT_KEY,), Producers([KEY.public])), *sealed(SIGNED, COSE), None),
        (
            Terms((CONTENT_KEY,), Producers([KEY.public])),
            *sealed(TEXT, PLAIN),
            "unknown-producer",
        ),
    ],
    ids=itertools.count(),  # not the payloads, which no two processes have alike
)
def test_nothing_is_taken_that_is_less_than_it_asks_for(terms, payload, came, fault) -> None:
    if fault is None:
        assert terms.manifest(AT, payload, came, PUBLICATION.namespace).segments[0].complete
        return
    with pytest.raises(DecodeError) as caught:
        terms.manifest(AT, payload, came, PUBLICATION.namespace)
    assert caught.value.name == fault
