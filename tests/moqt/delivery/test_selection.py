"""What a subscription lets through of what is published (MOQT "Subscriptions"), without streams."""

from __future__ import annotations

import pytest

from moqt.delivery import Selection
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, ParameterType
from moqt.values.messages import RangeFilter
from moqt.values.names import MAX_LOCATION, FullTrackName, Location
from tests.moqt.deliveries import World
from tests.moqt.inside import listeners

NAME = FullTrackName((b"live",), b"video")


def selection(store, start=(0, 0), end=MAX_LOCATION, *, filters=(), paused=False, unfiltered=False):
    made = Selection(
        store,
        start=Location(*start),
        end=Location(*end),
        filters=filters,
        group_order=GroupOrder.ASCENDING,
        paused=paused,
        unfiltered=unfiltered,
    )
    made.begin()
    return made


def withheld(selected, group=0, objects=range(6), subgroup=0):
    return [o for o in objects if selected.withholds(Location(group, o), subgroup)]


def test_what_is_there_when_it_begins_or_is_resumed_is_withheld():
    store = TrackStore(NAME)
    for object_id in range(2):
        store.append(0, object_id, b"x")
    selected = selection(store)
    for object_id in range(2, 4):
        store.append(0, object_id, b"x")
    assert withheld(selected) == [0, 1]
    selected.from_now_on()
    assert withheld(selected) == [0, 1, 2, 3]
    assert selected.last_old(store.groups[0].subgroups[0]) == -1, "nothing new comes after them"
    store.append(0, 4, b"x")
    assert selected.last_old(store.groups[0].subgroups[0]) == 3


def test_an_object_that_comes_late_below_the_largest_is_not_old():
    store = TrackStore(NAME)
    store.append(0, 3, b"x")
    selected = selection(store)
    store.append(0, 1, b"x")
    assert withheld(selected, objects=(1, 3)) == [3]


def test_a_wider_range_keeps_back_what_the_narrow_one_did_and_lets_through_what_comes_then():
    store = TrackStore(NAME)
    selected = selection(store, (0, 2), (0, 3))
    for object_id in range(5):
        store.append(0, object_id, b"x")
    assert withheld(selected) == [0, 1]
    selected.set_range(Location(0, 0), MAX_LOCATION)
    assert withheld(selected) == [0, 1, 4]
    store.append(0, 5, b"x")
    assert not selected.withholds(Location(0, 5), 0)
    assert not selected.withholds(Location(0, 4), 1), "it was another Subgroup's"


def test_what_was_kept_back_is_forgotten_with_its_group():
    store = TrackStore(NAME, authoritative=False)
    selected = selection(store, (0, 0), (0, 0))
    for group in range(3):
        stored = store.begin(Location(group, 1), subgroup=0, priority=1, properties=b"", length=0)
        store.complete(stored)
        store.finish_subgroup(group, 0)
    selected.set_range(Location(0, 0), MAX_LOCATION)
    assert selected.remembered == 3
    store.evict(store.get(Location(1, 1)))
    assert selected.trim() == {1}
    assert selected.remembered == 2 and selected.trim() == set()


@pytest.mark.parametrize(("unfiltered", "owed"), [(True, [2, 3]), (False, [0, 1, 2, 3])])
def test_a_start_that_was_asked_for_is_owed_and_one_that_was_not_only_from_then_on(
    unfiltered, owed
):
    store = TrackStore(NAME)
    for object_id in range(2):
        store.append(0, object_id, b"x")
    selected = selection(store, unfiltered=unfiltered)
    assert [o for o in range(4) if selected.is_owed(Location(0, o))] == owed
    assert selected.owes(store.groups[0].subgroups[0], -1, 1) is (0 in owed)


def test_a_datagram_is_selected_unless_paused_out_of_range_old_or_filtered():
    store = TrackStore(NAME)
    old = store.append(0, 0, b"x", subgroup=None)
    odd = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, 1), (3, 9)))
    selected = selection(store, (0, 0), (0, 3), filters=(odd,))
    new = [store.append(0, object_id, b"x", subgroup=None) for object_id in range(1, 5)]
    assert [o.location.object for o in (old, *new) if selected.selects_datagram(o)] == [1, 3]
    selected.paused = True
    assert not any(map(selected.selects_datagram, new))


def test_a_subscription_that_ends_while_a_datagram_is_told_to_the_listeners_does_not_send_it():
    class Ender:
        def store_changed(self, log):
            pass

        def datagram_stored(self, stored):
            delivery.cancel()

    store = TrackStore(NAME)
    store.add_listener(Ender())
    world = World(store)
    _, delivery = listeners(store)
    store.append(0, 0, b"x", subgroup=None)
    world.run()
    assert not world.got.objects
    assert world.pair.server.scheduler.counters.datagrams_sent == 0
