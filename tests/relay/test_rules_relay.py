"""Rules of MOQT "Relays" that no other test states by itself."""

from __future__ import annotations

from moqt.values.codes import RequestErrorCode
from moqt.values.messages import KeyValue
from tests.relay.star import JOIN, Star, track


def test_an_unknown_mandatory_property_of_a_track_refuses_who_waits_downstream():
    star = Star()
    star.publisher(track(1, properties=(KeyValue(0x4000, 1),)))
    pair, subscribed = star.subscriber(JOIN)
    fetched = star.fetch(pair)
    assert subscribed.failed.code == RequestErrorCode.UNSUPPORTED_EXTENSION
    assert fetched.failed.code == RequestErrorCode.UNSUPPORTED_EXTENSION


def test_a_fetch_that_nobody_can_serve_is_answered_does_not_exist():
    star = Star()
    assert star.fetch(star.connect()).failed.code == RequestErrorCode.DOES_NOT_EXIST
