"""What a store knows of its Track Properties (MOQT "MOQT Properties")."""

from __future__ import annotations

from moqt.track.store import TrackStore
from moqt.values.codes import PropertyType
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName
from moqt.wire.primitives import encode_key_values

DURATION = PropertyType.MAX_CACHE_DURATION


def test_max_cache_duration_is_what_the_last_properties_say_in_seconds():
    store = TrackStore(FullTrackName((b"demo",), b"video"))
    assert store.max_cache_duration is None
    store.set_properties((KeyValue(DURATION, 1500),))
    assert store.max_cache_duration == 1.5
    store.set_properties(())
    assert store.max_cache_duration is None


def test_max_cache_duration_counts_among_the_immutable_properties():
    nested = encode_key_values((KeyValue(DURATION, 2000),))
    properties = (KeyValue(PropertyType.IMMUTABLE_PROPERTIES, nested),)
    assert TrackStore(FullTrackName((b"demo",), b"video"), properties).max_cache_duration == 2.0
