"""An Object all of which is there is one event, and splitting octets changes nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.receiving.receiver import ObjectReceiver, Receiver
from moqt.values.codes import GroupOrder, ObjectStatus, RequestErrorCode
from moqt.values.names import Location
from moqt.wire.objects import DatagramObject, ObjectHeader, SubgroupHeader
from tests.moqt.memory import assert_clean
from tests.moqt.peers import Collector
from tests.moqt.raw import CODEC, VIDEO, Client, fetch_stream, subgroup

STEPS = ("object_begun", "object_part", "object_ended")


class Events(Receiver):
    """Writes down what it is told; takes whole Objects when `takes`."""

    def __init__(self, takes=True):
        self.takes = takes
        self.told = []

    def object_arrived(self, stream, header, payload):
        if self.takes:
            self.told.append(("object_arrived", header.location, bytes(payload)))
        return self.takes

    def object_begun(self, stream, header):
        self.told.append(("object_begun", header.location))

    def object_part(self, stream, part):
        self.told.append(("object_part", bytes(part)))

    def object_ended(self, stream, header):
        self.told.append(("object_ended", header.location))


def accepted(receiver):
    client = Client()
    client.subscribe(collector=receiver)
    client.accept(receiver)
    return client


def test_a_whole_object_is_told_once_and_one_that_grows_in_steps():
    events = Events()
    client = accepted(events)
    octets = subgroup(7, 0, b"abc", b"", b"defg")
    stream = client.send_uni(octets[:-1])
    client.session.stream_data(stream, octets[-1:], False)
    assert events.told == [
        ("object_arrived", Location(0, 0), b"abc"),
        ("object_arrived", Location(0, 1), b""),
        ("object_begun", Location(0, 2)),
        ("object_part", b"def"),
        ("object_part", b"g"),
        ("object_ended", Location(0, 2)),
    ]


def test_who_does_not_take_a_whole_object_is_told_of_it_in_steps():
    events = Events(takes=False)
    client = accepted(events)
    client.send_uni(subgroup(7, 0, b"abc", b""))
    assert events.told == [
        ("object_begun", Location(0, 0)),
        ("object_part", b"abc"),
        ("object_ended", Location(0, 0)),
        ("object_begun", Location(0, 1)),
        ("object_ended", Location(0, 1)),
    ]


def test_objects_of_fetch_streams_and_datagrams_arrive_whole_too():
    events = Events()
    client = accepted(events)
    client.session.datagram(CODEC.encode_datagram(DatagramObject(7, 3, 1, payload=b"x")))
    fetched = Events()
    fetched.request = client.session.fetch(VIDEO, fetched)
    client.send_uni(fetch_stream(fetched.request.request_id, (0, 0), (0, 1)))
    assert [each[:2] for each in events.told] == [("object_arrived", Location(3, 1))]
    assert [each[:2] for each in fetched.told] == [
        ("object_arrived", Location(0, 0)),
        ("object_arrived", Location(0, 1)),
    ]


@pytest.mark.parametrize("way", ["stream", "datagram"])
@pytest.mark.parametrize("what", ["cancel", "close"])
def test_nothing_follows_a_whole_object_in_which_the_request_was_given_up(what, way):
    class Quitter(Events):
        def object_arrived(self, stream, header, payload):
            super().object_arrived(stream, header, payload)
            if what == "cancel":
                self.request.cancel()
            else:
                client.session.close()
            return self.takes

    for takes in (True, False):
        quitter = Quitter(takes)
        client = accepted(quitter)
        if way == "stream":
            client.send_uni(subgroup(7, 0, b"abc", b"def"), fin=True)
        else:
            client.session.datagram(CODEC.encode_datagram(DatagramObject(7, 0, 0, payload=b"abc")))
        # it was asked before it gave up: what it does not take begins, and no more
        assert quitter.told == (
            [("object_arrived", Location(0, 0), b"abc")]
            if takes
            else [("object_begun", Location(0, 0))]
        )
        assert_clean(client.session)


def test_a_whole_object_that_contradicts_another_makes_the_track_malformed():
    collector = Collector()
    client = accepted(collector)
    end = DatagramObject(7, 0, 1, status=ObjectStatus.END_OF_GROUP)
    client.session.datagram(CODEC.encode_datagram(end))
    client.send_uni(subgroup(7, 0, b"abc", b"beyond the end"))
    assert collector.locations == [(0, 0)]
    assert collector.failed.code == RequestErrorCode.MALFORMED_TRACK
    assert_clean(client.session)


def test_a_whole_object_that_is_too_large_is_not_handed_over():
    too_large = []

    class Small(Collector):
        max_object_octets = 3

        def object_too_large(self, stream, header):
            too_large.append(header.location)

    collector = Small()
    client = accepted(collector)
    client.send_uni(subgroup(7, 0, b"abcd", b"abc"))
    assert collector.locations == [(0, 1)] and too_large == [(0, 0)]


@pytest.mark.parametrize("mixed_in", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_an_object_receiver_with_a_step_of_its_own_is_told_of_every_object_in_steps(step, mixed_in):
    seen = []

    class Watching(Collector):
        pass

    def watch(self, stream, what):
        seen.append(step)
        return getattr(ObjectReceiver, step)(self, stream, what)

    if mixed_in:
        Stepwise = type("Stepwise", (type("Mixin", (), {step: watch}), Watching), {})
    else:
        Stepwise = type("Stepwise", (Watching,), {step: watch})
    Heir = type("Heir", (Stepwise,), {})
    collector = Heir()
    client = accepted(collector)
    client.send_uni(subgroup(7, 0, b"abc", b"def"))
    assert seen == [step, step]
    assert [bytes(each.payload) for each in collector.objects] == [b"abc", b"def"]


@st.composite
def objects(draw):
    """Of one Subgroup, in order: (Object ID, payload, status)."""
    ids = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=6)))
    found = [(each, draw(st.binary(max_size=40)), ObjectStatus.NORMAL) for each in ids]
    if draw(st.booleans()):
        found.append((ids[-1] + 1, b"", ObjectStatus.END_OF_GROUP))
    return found


def pieces(octets, cuts):
    ends = sorted({cut % (len(octets) + 1) for cut in cuts})
    return [octets[a:b] for a, b in zip([0, *ends], [*ends, len(octets)], strict=True)]


def received(client, collector, octets, cuts):
    stream = client.send_uni(b"")
    for piece in pieces(octets, cuts):
        client.session.stream_data(stream, piece, False)
    client.session.stream_data(stream, b"", True)
    assert collector.failed is None
    return [
        (each.location, each.subgroup, each.priority, each.status, bytes(each.payload))
        for each in collector.objects
    ]


@given(objects(), st.lists(st.integers(0), max_size=12))
def test_a_subgroup_stream_brings_the_same_objects_however_its_octets_are_split(found, cuts):
    octets = CODEC.encode_subgroup_header(SubgroupHeader(7, 4, 0, 9), properties=True)
    previous = None
    for object_id, payload, status in found:
        octets += CODEC.encode_subgroup_object(
            previous, object_id, with_properties=True, length=len(payload), status=status
        )
        octets += payload
        previous = object_id
    collector = Collector()
    client = accepted(collector)
    assert received(client, collector, octets, cuts) == [
        (Location(4, object_id), 0, 9, status, payload) for object_id, payload, status in found
    ]


@given(objects(), st.lists(st.integers(0), max_size=12))
def test_a_fetch_stream_brings_the_same_objects_however_its_octets_are_split(found, cuts):
    collector = Collector()
    client = Client()
    collector.request = client.session.fetch(VIDEO, collector)
    encoder = CODEC.fetch_encoder(collector.request.request_id, GroupOrder.ASCENDING)
    octets = encoder.header()
    found = [each for each in found if not each[2]]
    for object_id, payload, _ in found:
        octets += encoder.object(ObjectHeader(4, object_id, 0, 9, b"", len(payload))) + payload
    assert received(client, collector, octets, cuts) == [
        (Location(4, object_id), 0, 9, ObjectStatus.NORMAL, payload)
        for object_id, payload, _ in found
    ]
