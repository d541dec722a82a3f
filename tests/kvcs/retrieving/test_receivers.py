"""Who is still to bring an Object of a data track, as the receivers note it."""

from __future__ import annotations

from types import SimpleNamespace

from kvcs.names.codes import Component
from kvcs.names.tracks import DataTrack
from kvcs.retrieving.receivers import FetchReceiver, LiveReceiver, TrackState
from kvcs.trust.sealing import TrackOpener, TrackSealer
from kvsp.names.content_keys import ContentKey
from moqt.receiving.receiver import IncomingStream, Via
from moqt.values.codes import ObjectStatus, PropertyType, PublishDoneCode, StreamErrorCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location

TRACK = DataTrack(Component.K, "raw", 0)


class Heard:
    """Whoever made the requests: every Object but those of `bad` is needed and good."""

    def __init__(self, *bad: Location) -> None:
        self.bad = bad
        self.objects: list = []
        self.calls: list = []

    def object_received(self, state, header, parts, *, again=False) -> bool:
        self.objects.append((header.location, b"".join(parts), again))
        return header.location not in self.bad

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def state() -> TrackState:
    return TrackState(TRACK, FullTrackName((b"a",), TRACK.name), 2, 100)


def is_coming(track: TrackState, location: Location) -> bool:
    """Whether somebody is still to bring the Object."""
    layer, number = location
    return not any(number in each for each in track.unasked(layer, number + 1))


def arrive(receiver, location, payload, status=ObjectStatus.NORMAL) -> None:
    """An Object, in two parts."""
    stream = IncomingStream(0, Via.FETCH)
    stream.state = []
    for part in (payload[:1], payload[1:]):
        receiver.object_part(stream, part)
    receiver.object_ended(stream, SimpleNamespace(location=location, status=status))


def test_up_to_the_largest_object_it_is_the_fills_part_and_after_it_the_subscriptions() -> None:
    track = state()
    assert not is_coming(track, Location(2, 0))
    track.subscribed = True
    assert is_coming(track, Location(2, 0))  # nobody has said anything else
    track.accepted(Location(4, 1))
    track.fill_over = True
    assert not is_coming(track, Location(4, 1)) and is_coming(track, Location(4, 2))
    track.brought.add(4)
    assert not is_coming(track, Location(4, 2)) and is_coming(track, Location(5, 0))
    track.lost.add(Location(5, 0))
    assert not is_coming(track, Location(5, 0)) and is_coming(track, Location(5, 1))


def test_sealed_objects_without_a_priority_have_the_one_of_their_track() -> None:
    key, track = ContentKey.generate(), state()
    sealer = TrackSealer(key, track.name)
    sealed = sealer.seal(2, 0, 7, [b"octets"])
    track.opener = TrackOpener((key,), track.name)
    receiver = LiveReceiver(Heard(), track)
    seven = (KeyValue(PropertyType.DEFAULT_PUBLISHER_PRIORITY, 7),)
    receiver.subscribe_accepted(SimpleNamespace(largest=None, properties=seven))
    assert track.opener.open(2, 0, None, sealer.properties, [sealed]) == b"octets"


def test_a_fill_that_has_nothing_to_bring_is_over() -> None:
    for largest, over in ((None, True), (Location(1, 9), True), (Location(2, 0), False)):
        track = state()
        track.accepted(largest)
        assert track.fill_over is over


def test_a_group_whose_stream_was_reset_comes_again_when_it_is_continued() -> None:
    track = state()
    track.subscribed = True
    track.accepted(None)
    track.broken.add(3)
    assert not is_coming(track, Location(3, 0))
    LiveReceiver(Heard(), track).stream_opened(
        IncomingStream(0, Via.SUBSCRIPTION, subgroup=SimpleNamespace(group=3))
    )
    assert is_coming(track, Location(3, 0)) and track.arrivals == 1


def test_a_fetch_is_useful_when_it_brings_an_object_that_is_needed() -> None:
    bad, good = Location(2, 0), Location(2, 1)
    heard, track = Heard(bad), state()
    fetch = FetchReceiver(heard, track, bad, good, again=True)
    arrive(fetch, bad, b"bad")
    assert not fetch.useful
    arrive(fetch, good, b"good")
    assert fetch.useful and track.arrivals == 4
    assert heard.objects == [(bad, b"bad", True), (good, b"good", True)]


def test_a_status_object_is_no_object_of_the_cache() -> None:
    heard, end = Heard(), Location(2, 5)
    fetch = FetchReceiver(heard, state(), Location(2, 0), end, again=False)
    for receiver in (LiveReceiver(heard, state()), fetch):
        arrive(receiver, end, b"", ObjectStatus.END_OF_GROUP)
    assert heard.objects == [] and not fetch.useful


def test_why_a_request_is_over_is_said_in_the_words_of_the_specification() -> None:
    heard, track = Heard(), state()
    live = LiveReceiver(heard, track)
    fetch = FetchReceiver(heard, track, Location(2, 0), Location(3, 0), again=False)
    live.subscription_done(PublishDoneCode.GOING_AWAY, "bye")
    fetch.stream_ended(IncomingStream(0, Via.FETCH), StreamErrorCode.CANCELLED)
    fetch.stream_ended(IncomingStream(0, Via.FETCH), None)
    assert heard.calls == [
        ("live_over", track, "the subscription ended with GOING_AWAY: bye"),
        ("fetch_over", fetch, "the fetch was reset with CANCELLED"),
        ("fetch_over", fetch, "the fetch ended without them"),
    ]
