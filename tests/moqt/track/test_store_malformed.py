"""Malformed Tracks: each listed condition, with a store and without one; what is remembered."""

from __future__ import annotations

import pytest

from moqt.track.gaps import Gaps
from moqt.track.malformed import MAX_GROUPS, MAX_MALFORMED, MalformedTracks, TrackChecker
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PropertyType, RequestErrorCode
from moqt.values.errors import MalformedTrack, MisuseError, RequestError
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader
from moqt.wire.primitives import encode_key_values
from tests.moqt.deliveries import Recorder, World
from tests.moqt.inside import groups_of
from tests.moqt.peers import NAME

GROUP_GAP, OBJECT_GAP, IMMUTABLE = (
    PropertyType.PRIOR_GROUP_ID_GAP,
    PropertyType.PRIOR_OBJECT_ID_GAP,
    PropertyType.IMMUTABLE_PROPERTIES,
)


def pairs(*items):
    return encode_key_values(tuple(KeyValue(*item) for item in items))


class InStore:
    """Feeds a relay's store."""

    def __init__(self):
        self.store = TrackStore(NAME, authoritative=False)

    def put(self, group, object_id, *, subgroup=0, priority=1, properties=b"", length=1):
        stored = self.store.begin(
            Location(group, object_id),
            subgroup=subgroup,
            priority=priority,
            properties=properties,
            length=length,
        )
        if stored is not None:
            self.store.grow(stored, bytes(length))
            self.store.complete(stored)

    def status(self, group, object_id, status, *, subgroup=0):
        self.store.mark_end(Location(group, object_id), status, subgroup=subgroup)

    def fin(self, group, subgroup, last, *, end_of_group=False, status=ObjectStatus.NORMAL):
        self.store.finish_subgroup(group, subgroup, last=last, end_of_group=end_of_group)

    def track_ends(self, group, object_id):
        self.store.set_end_of_track(Location(group, object_id))


class InChecker:
    """Feeds a subscriber's TrackChecker."""

    def __init__(self):
        self.checker = TrackChecker()

    def put(self, group, object_id, *, subgroup=0, priority=1, properties=b"", length=1):
        self.checker.object(ObjectHeader(group, object_id, subgroup, priority, properties, length))

    def status(self, group, object_id, status, *, subgroup=0):
        self.checker.object(ObjectHeader(group, object_id, subgroup, 1, b"", 0, status))

    def fin(self, group, subgroup, last, *, end_of_group=False, status=ObjectStatus.NORMAL):
        self.checker.finished(
            ObjectHeader(group, last, subgroup, 1, b"", 1, status), end_of_group=end_of_group
        )

    def track_ends(self, group, object_id):
        self.checker.track_ends(Location(group, object_id))


END_GROUP, END_TRACK = ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK

CONTRADICTIONS = {
    "priority differs between objects of one subgroup": lambda at: (
        at.put(0, 0, priority=1),
        at.put(0, 1, priority=2),
    ),
    "an object after the final object of its subgroup": lambda at: (
        at.put(0, 0),
        at.fin(0, 0, 0),
        at.put(0, 1),
    ),
    "a fin before an object that came": lambda at: (at.put(0, 0), at.put(0, 1), at.fin(0, 0, 0)),
    "a subgroup twice with fin and different last objects": lambda at: (
        at.put(0, 0),
        at.put(0, 1),
        at.fin(0, 0, 1),
        at.fin(0, 0, 0),
    ),
    "a subgroup twice with fin, the second time with a later last object": lambda at: (
        at.put(0, 0),
        at.fin(0, 0, 0),
        at.fin(0, 0, 1),
    ),
    "an object beyond the end of its group": lambda at: (
        at.put(0, 0),
        at.status(0, 1, END_GROUP),
        at.put(0, 1, subgroup=1),
    ),
    "an object beyond a group ended by fin": lambda at: (
        at.put(0, 3),
        at.fin(0, 0, 3, end_of_group=True),
        at.put(0, 4, subgroup=1),
    ),
    "an end of group before an object that came": lambda at: (
        at.put(0, 5),
        at.status(0, 5, END_GROUP, subgroup=1),
    ),
    "an object beyond the end of the track": lambda at: (
        at.put(0, 0),
        at.status(1, 0, END_TRACK),
        at.put(1, 0, subgroup=1),
    ),
    "an object beyond the end a fetch told": lambda at: (
        at.put(0, 0),
        at.track_ends(0, 1),
        at.put(0, 1),
    ),
    "an end of track before an object that came": lambda at: (
        at.put(2, 0),
        at.status(1, 0, END_TRACK),
    ),
    "a group gap larger than the group id": lambda at: at.put(
        1, 0, properties=pairs((GROUP_GAP, 2))
    ),
    "an object gap larger than the object id": lambda at: at.put(
        0, 1, properties=pairs((OBJECT_GAP, 2))
    ),
    "a gap twice on one object": lambda at: at.put(
        0, 5, properties=pairs((OBJECT_GAP, 2), (OBJECT_GAP, 2))
    ),
    "a group gap twice on one object": lambda at: at.put(
        5, 0, properties=pairs((GROUP_GAP, 2), (GROUP_GAP, 2))
    ),
    "a gap twice, once inside immutable properties": lambda at: at.put(
        0, 5, properties=pairs((IMMUTABLE, pairs((OBJECT_GAP, 2))), (OBJECT_GAP, 2))
    ),
    "different group gaps inside one group": lambda at: (
        at.put(5, 0, properties=pairs((GROUP_GAP, 2))),
        at.put(5, 1, properties=pairs((GROUP_GAP, 3))),
    ),
    "a group gap over an object that came": lambda at: (
        at.put(3, 0),
        at.put(5, 0, properties=pairs((GROUP_GAP, 2))),
    ),
    "an object gap over an object that came": lambda at: (
        at.put(0, 3),
        at.put(0, 5, properties=pairs((OBJECT_GAP, 2))),
    ),
    "an object inside a declared group gap": lambda at: (
        at.put(5, 0, properties=pairs((GROUP_GAP, 2))),
        at.put(4, 7),
    ),
    "an object inside a declared object gap": lambda at: (
        at.put(0, 5, properties=pairs((OBJECT_GAP, 2))),
        at.put(0, 4, subgroup=1),
    ),
    "immutable properties twice": lambda at: at.put(
        0, 0, properties=pairs((IMMUTABLE, b""), (IMMUTABLE, b""))
    ),
    "immutable properties inside immutable properties": lambda at: at.put(
        0, 0, properties=pairs((IMMUTABLE, pairs((IMMUTABLE, b""))))
    ),
    "immutable properties that cannot be parsed": lambda at: at.put(
        0, 0, properties=pairs((IMMUTABLE, b"\x10"))
    ),
    "a mandatory track property on an object": lambda at: at.put(
        0, 0, properties=pairs((0x4000, 1))
    ),
}


@pytest.mark.parametrize("feed", [InStore, InChecker])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_track_is_malformed_that_has(case, feed):
    with pytest.raises(MalformedTrack):
        CONTRADICTIONS[case](feed())


@pytest.mark.parametrize(
    "again",
    [
        {"length": 2},
        {"subgroup": 1},
        {"subgroup": None},
        {"priority": 2},
        {"properties": pairs((IMMUTABLE, b"\x10\x02"))},
    ],
)
def test_an_object_that_comes_again_must_be_the_same(again):
    at = InStore()
    at.put(0, 0, properties=pairs((IMMUTABLE, b"\x10\x01")))
    at.put(0, 0, properties=pairs((0x0A, 1), (IMMUTABLE, b"\x10\x01")))  # mutable ones may differ
    with pytest.raises(MalformedTrack):
        at.put(0, 0, **{"properties": pairs((IMMUTABLE, b"\x10\x01")), **again})


@pytest.mark.parametrize("feed", [InStore, InChecker])
def test_what_does_not_contradict_itself_is_taken(feed):
    at = feed()
    at.put(2, 0)
    at.put(1, 7, subgroup=7)
    at.put(5, 3, properties=pairs((GROUP_GAP, 2), (OBJECT_GAP, 3)))
    at.put(5, 4, properties=pairs((GROUP_GAP, 2)))
    at.put(5, 5)
    at.put(5, 6, subgroup=None)
    at.status(5, 7, END_GROUP)
    at.fin(5, 0, 5)
    at.fin(5, 0, 5)  # the same Subgroup from another publisher
    at.put(1, 8, subgroup=7)
    at.status(6, 0, END_TRACK)
    at.track_ends(6, 0)


def test_a_status_and_the_end_of_group_bit_say_the_same():
    for feed in (InStore, InChecker):
        at = feed()
        at.put(0, 0)
        at.status(0, 1, END_GROUP)
        at.fin(0, 0, 1, status=END_GROUP)
        at.fin(0, 0, 0, end_of_group=True)


def test_a_refused_end_leaves_the_store_as_it_was():
    store = TrackStore(NAME)
    store.append(0, 5, b"x")
    with pytest.raises(MalformedTrack):
        store.mark_end(Location(0, 5), END_GROUP)
    assert store.groups[0].end is None and store.groups[0].ids == [5]


def test_a_publisher_is_told_of_gaps_that_cannot_be():
    store = TrackStore(NAME)
    store.append(0, 3, b"x")
    with pytest.raises(MalformedTrack):
        store.append(0, 5, b"x", gaps=Gaps(objects=2))
    with pytest.raises(MisuseError):
        store.append(0, 7, b"x", properties=pairs((OBJECT_GAP, 1)), gaps=Gaps(objects=1))


def test_a_checker_remembers_a_bounded_number_of_groups():
    at = InChecker()
    for group in range(3 * MAX_GROUPS):
        at.put(group, 0)
    assert len(groups_of(at.checker)) == MAX_GROUPS


# -- what a subscriber does --------------------------------------------------------------


def test_a_subscriber_cancels_every_request_of_a_malformed_track_and_remembers_it():
    world = World()
    other = Recorder()
    world.pair.client.subscribe(NAME, other, world.request.message_sent.parameters)
    world.store.append(0, 0, b"x", properties=pairs((0x4001, b"?")))
    world.run()
    assert world.got.failed.code == other.failed.code == RequestErrorCode.MALFORMED_TRACK
    assert world.pair.client.closed is None
    client = world.pair.client
    for ask in (client.subscribe, client.fetch):
        with pytest.raises(RequestError) as refused:
            ask(NAME, Recorder())
        assert refused.value.code == RequestErrorCode.MALFORMED_TRACK
        assert refused.value.retry_after_ms
    client.tick(client.now + 61)
    client.subscribe(NAME, Recorder())
    assert len(client.malformed) == 0


def test_a_bounded_number_of_malformed_tracks_is_remembered():
    tracks = MalformedTracks()
    names = [FullTrackName((b"n",), b"%d" % n) for n in range(2 * MAX_MALFORMED)]
    for name in names:
        tracks.add(name, "bad", 0.0)
    assert len(tracks) == MAX_MALFORMED
    tracks.refuse(names[0], 1.0)
    with pytest.raises(RequestError):
        tracks.refuse(names[-1], 1.0)
