"""Data streams and datagrams: round trips, any split, every legal flag, hostile input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.values.codes import MAX_VI64, EndOfRange, GroupOrder, ObjectStatus, SessionErrorCode
from moqt.values.errors import MisuseError, SessionError
from moqt.values.messages import KeyValue
from moqt.values.names import Location
from moqt.wire.codec import codec_for
from moqt.wire.objects import (
    DatagramObject,
    FetchHeader,
    ObjectHeader,
    PaddingDatagram,
    RangeMarker,
    StreamKind,
    SubgroupHeader,
    WholeObject,
)
from moqt.wire.primitives import encode_key_values
from moqt.wire.vi64 import encode_vi64
from tests.paths import DATA

CODEC = codec_for("moqt-22")
VECTORS = json.loads((DATA / "moqt-22-vectors.json").read_text())

vi64 = st.one_of(st.integers(0, 200), st.integers(0, MAX_VI64))
u8 = st.integers(0, 255)
payloads = st.binary(max_size=20)
properties = st.lists(st.tuples(st.integers(0, 40), st.integers(0, MAX_VI64)), max_size=2).map(
    lambda pairs: encode_key_values(tuple(KeyValue(2 * t, v) for t, v in sorted(pairs)))
)
cuts_of = st.lists(st.integers(0), max_size=8)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted(cut % (len(data) + 1) for cut in cuts)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def run(decoder: Any, parts: list[bytes]) -> list[Any]:
    """All events, the parts of each payload joined; whole Objects as header and payload."""
    events: list[Any] = []
    for part in parts:
        for event in decoder.feed(part):
            if isinstance(event, WholeObject):
                events += [event.header, bytes(event.payload)] if event.payload else [event.header]
            elif not isinstance(event, bytes | memoryview):
                events.append(event)
            elif isinstance(events[-1], bytes):
                events[-1] += bytes(event)
            else:
                events.append(bytes(event))
    return events


def sample(kind: str) -> list[bytes]:
    cases = VECTORS["vectors"] + VECTORS["malformed"]
    return [bytes.fromhex(case["hex"]) for case in cases if case["kind"] == kind]


# Classifying a stream ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("octets", "kind"),
    [
        ("af00", StreamKind.CONTROL),
        ("05", StreamKind.FETCH),
        ("8005", StreamKind.FETCH),
        ("f0132b3e28", StreamKind.PADDING),
        ("10", StreamKind.SUBGROUP),
        ("7d", StreamKind.SUBGROUP),
    ],
)
def test_a_unidirectional_stream_is_known_by_its_type(octets: str, kind: StreamKind) -> None:
    data = bytes.fromhex(octets)
    assert all(CODEC.data_stream_type(data[:n]) is None for n in range(len(data)))
    assert CODEC.data_stream_type(data + b"more") == (kind, len(data))


def test_the_subgroup_types_are_exactly_those_with_a_legal_mode() -> None:
    legal = [n for base in (0x10, 0x30, 0x50, 0x70) for n in range(base, base + 16)]
    legal = [n for n in legal if n & 6 != 6]
    found = []
    for number in range(0x200):
        try:
            answer = CODEC.data_stream_type(encode_vi64(number))
        except SessionError as error:
            assert error.code == SessionErrorCode.PROTOCOL_VIOLATION
        else:
            assert answer is not None
            if answer[0] is StreamKind.SUBGROUP:
                found.append(number)
            else:
                assert number == 5
    assert found == legal


# Subgroup streams ----------------------------------------------------------------------


@st.composite
def subgroup_streams(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    with_properties = draw(st.booleans())
    header = SubgroupHeader(
        draw(vi64),
        draw(vi64),
        draw(st.none() | vi64),
        draw(st.none() | u8),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    data = CODEC.encode_subgroup_header(
        header, properties=with_properties, explicit=draw(st.booleans())
    )
    events: list[Any] = [header]
    ids = sorted(draw(st.sets(vi64, max_size=5)))
    subgroup = header.subgroup if header.subgroup is not None or not ids else ids[0]
    previous = None
    for object_id in ids:
        payload = draw(payloads)
        status = draw(st.sampled_from(ObjectStatus)) if not payload else ObjectStatus.NORMAL
        props = draw(properties) if with_properties and not status else b""
        data += CODEC.encode_subgroup_object(
            previous,
            object_id,
            properties=props,
            with_properties=with_properties,
            length=len(payload),
            status=status,
        )
        data += payload
        previous = object_id
        events.append(
            ObjectHeader(
                header.group, object_id, subgroup, header.priority, props, len(payload), status
            )
        )
        events += [payload] * bool(payload)
    return data, events


@given(subgroup_streams(), cuts_of)
def test_a_subgroup_stream_comes_back_however_its_octets_are_split(
    stream: tuple[bytes, list[Any]], cuts: list[int]
) -> None:
    data, events = stream
    decoder = CODEC.subgroup_decoder()
    assert decoder.mid_object
    assert run(decoder, split(data, cuts)) == events
    assert not decoder.mid_object
    assert decoder.buffered == 0


@given(subgroup_streams())
def test_a_subgroup_stream_octet_by_octet_is_mid_object_except_between_objects(
    stream: tuple[bytes, list[Any]],
) -> None:
    data, events = stream
    decoder = CODEC.subgroup_decoder()
    boundaries = 0
    seen: list[Any] = []
    for index in range(len(data)):
        seen += decoder.feed(data[index : index + 1])
        boundaries += not decoder.mid_object
    assert boundaries == sum(not isinstance(event, bytes) for event in events)


def test_the_middle_of_a_payload_is_passed_on_without_a_copy() -> None:
    decoder = CODEC.subgroup_decoder()
    head = CODEC.encode_subgroup_header(SubgroupHeader(1, 2, 0, 128), properties=False)
    head += CODEC.encode_subgroup_object(None, 0, with_properties=False, length=30_000)
    first, middle, last = head + bytes(1000), bytes(20_000), bytes(9_000) + b"\x00\x00\x03"
    *_, part = decoder.feed(first)
    assert isinstance(part, memoryview) and part.obj is first and len(part) == 1000
    assert decoder.feed(middle)[0] is middle
    part, end = decoder.feed(last)
    assert isinstance(part, memoryview) and part.obj is last and len(part) == 9000
    assert end == (ObjectHeader(2, 1, 0, 128, b"", 0, ObjectStatus.END_OF_GROUP), b"")


def test_an_object_that_is_all_there_is_one_event_and_its_payload_no_copy() -> None:
    decoder = CODEC.subgroup_decoder()
    data = b"\x10\x01\x02\x80" + b"\x00\x05hello" + b"\x00\x00\x00" + b"\x00\x05wo"
    header, hello, empty, begun, part = decoder.feed(data)
    assert header == SubgroupHeader(1, 2, 0, 128)
    assert isinstance(hello, WholeObject) and isinstance(hello.payload, memoryview)
    assert hello == (ObjectHeader(2, 0, 0, 128, b"", 5), b"hello") and hello.payload.obj is data
    assert empty == WholeObject(ObjectHeader(2, 1, 0, 128, b"", 0), b"")
    assert begun == ObjectHeader(2, 2, 0, 128, b"", 5) and bytes(part) == b"wo"  # type: ignore[arg-type]
    assert decoder.feed(b"rld") == [b"rld"]


@given(subgroup_streams())
def test_every_object_of_a_stream_that_comes_at_once_is_whole(
    stream: tuple[bytes, list[Any]],
) -> None:
    data, events = stream
    _, *objects = CODEC.subgroup_decoder().feed(data)
    assert [each.header for each in objects if isinstance(each, WholeObject)] == [
        event for event in events if isinstance(event, ObjectHeader)
    ]
    assert all(isinstance(each, WholeObject) for each in objects)


def test_an_object_whose_header_was_cut_is_whole_when_the_rest_comes_at_once() -> None:
    decoder = CODEC.subgroup_decoder()
    decoder.feed(b"\x10\x01\x02\x80\x00")
    assert decoder.feed(b"\x05hello") == [WholeObject(ObjectHeader(2, 0, 0, 128, b"", 5), b"hello")]


def test_a_payload_of_any_announced_length_reserves_nothing() -> None:
    decoder = CODEC.subgroup_decoder()
    header = CODEC.encode_subgroup_object(None, 0, with_properties=False, length=MAX_VI64)
    decoder.feed(b"\x10\x01\x02\x80" + header)
    assert decoder.buffered == 0
    assert decoder.feed(b"some") == [b"some"]
    assert decoder.mid_object


def test_properties_above_the_limit_are_refused_at_their_length() -> None:
    decoder = CODEC.subgroup_decoder(max_properties=100)
    decoder.feed(b"\x11\x01\x02\x80\x00")
    with pytest.raises(SessionError) as error:
        decoder.feed(encode_vi64(101))
    assert error.value.code == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_header_that_is_not_complete_is_all_that_is_held() -> None:
    decoder = CODEC.subgroup_decoder()
    props = encode_key_values((KeyValue(0x9D, bytes(40_000)),))
    head = b"\x11\x01\x02\x80\x00" + encode_vi64(len(props)) + props
    decoder.feed(head)
    assert 40_000 < decoder.buffered <= len(head)
    (event,) = decoder.feed(b"\x05hello\x00")
    assert event == WholeObject(ObjectHeader(2, 0, 0, 128, props, 5), b"hello")
    assert decoder.buffered == 1


@pytest.mark.parametrize("props", [b"\x01\x05abc", b"\x02", b"\x01\xc1\x00\x00"])
def test_object_properties_that_are_no_pairs_are_refused(props: bytes) -> None:
    with pytest.raises(SessionError):
        CODEC.subgroup_decoder().feed(b"\x11\x01\x02\x80\x00" + bytes([len(props)]) + props)


@pytest.mark.parametrize(
    "arguments",
    [
        {"previous_id": 5, "object_id": 5},
        {"previous_id": None, "object_id": MAX_VI64 + 1},
        {"previous_id": None, "object_id": 0, "properties": b"\x02\x01"},
        {"previous_id": None, "object_id": 0, "status": ObjectStatus.END_OF_GROUP},
    ],
)
def test_an_object_that_cannot_stand_there_is_misuse(arguments: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        CODEC.encode_subgroup_object(
            arguments.pop("previous_id"),
            arguments.pop("object_id"),
            **{"with_properties": False, "length": 1, **arguments},
        )


# Fetch streams -------------------------------------------------------------------------


@st.composite
def fetch_entries(draw: st.DrawFn, order: GroupOrder) -> list[Any]:
    """Objects and markers in the order a fetch delivers them."""
    sign = 1 if order is GroupOrder.ASCENDING else -1
    places = draw(st.sets(st.tuples(vi64, vi64), max_size=6))
    entries: list[Any] = []
    for group, object_id in sorted(places, key=lambda place: (sign * place[0], place[1])):
        if draw(st.integers(0, 4)) == 0:
            kind = draw(st.sampled_from(EndOfRange))
            entries.append(RangeMarker(kind, Location(group, object_id)))
            continue
        payload = draw(payloads)
        subgroup = draw(st.one_of(st.none(), st.integers(0, 3), vi64))
        priority = draw(st.one_of(st.just(10), u8))
        entries.append(
            ObjectHeader(group, object_id, subgroup, priority, draw(properties), len(payload))
        )
        entries += [payload] * bool(payload)
    return entries


fetches = st.sampled_from(GroupOrder).flatmap(
    lambda order: st.tuples(st.just(order), fetch_entries(order))
)


def encode_fetch(order: GroupOrder, entries: list[Any]) -> bytes:
    encoder = CODEC.fetch_encoder(6, order)
    write: dict[type, Callable[[Any], bytes]] = {
        ObjectHeader: encoder.object,
        RangeMarker: encoder.marker,
        bytes: bytes,
    }
    return encoder.header() + b"".join(write[type(entry)](entry) for entry in entries)


@given(fetches, cuts_of)
def test_a_fetch_stream_comes_back_however_its_octets_are_split(
    fetch: tuple[GroupOrder, list[Any]], cuts: list[int]
) -> None:
    order, entries = fetch
    decoder = CODEC.fetch_decoder(order)
    events = run(decoder, split(encode_fetch(order, entries), cuts))
    assert events == [FetchHeader(6), *entries]
    assert not decoder.mid_object


@given(fetches, st.data())
def test_every_legal_choice_of_flags_says_the_same(
    fetch: tuple[GroupOrder, list[Any]], data: st.DataObject
) -> None:
    """The table of MOQT "Fetch Streams" written out, choosing among its legal rows at random."""
    order, entries = fetch
    sign = 1 if order is GroupOrder.ASCENDING else -1
    out = b"\x05\x06"
    prior: Location | None = None
    prior_subgroup: int | None = None
    prior_priority: int | None = None
    for entry in entries:
        if isinstance(entry, bytes):
            out += entry
            continue
        if isinstance(entry, RangeMarker):
            out += encode_vi64(entry.kind) + encode_vi64(entry.location.group)
            out += encode_vi64(entry.location.object)
            prior = entry.location
            continue
        flags, group, subgroup, priority, props = 0, b"", b"", b"", b""
        if prior is None:
            flags |= 0x0C
            group, number = encode_vi64(entry.group), encode_vi64(entry.object)
        else:
            if entry.group != prior.group:
                flags |= 0x08
                group = encode_vi64(sign * (entry.group - prior.group) - 1)
            number = b""
            if entry.object != prior.object + 1 or data.draw(st.booleans()):
                flags |= 0x04
                number = encode_vi64(entry.object - (0 if flags & 0x08 else prior.object))
        if entry.subgroup is None:
            flags |= 0x40 | data.draw(st.integers(0, 3))
        else:
            modes = [3]
            modes += [0] * (entry.subgroup == 0)
            if prior_subgroup is not None:
                modes += [1] * (entry.subgroup == prior_subgroup)
                modes += [2] * (entry.subgroup == prior_subgroup + 1)
            mode = data.draw(st.sampled_from(modes))
            flags |= mode
            subgroup = encode_vi64(entry.subgroup) if mode == 3 else b""
            prior_subgroup = entry.subgroup
        if entry.priority != prior_priority or data.draw(st.booleans()):
            assert entry.priority is not None
            flags |= 0x10
            priority = bytes([entry.priority])
        if entry.properties or data.draw(st.booleans()):
            flags |= 0x20
            props = encode_vi64(len(entry.properties)) + entry.properties
        out += encode_vi64(flags) + group + subgroup + number + priority + props
        out += encode_vi64(entry.length)
        prior, prior_priority = entry.location, entry.priority
    assert len(encode_fetch(order, entries)) <= len(out)
    assert run(CODEC.fetch_decoder(order), [out]) == [FetchHeader(6), *entries]


def test_the_group_order_can_be_found_by_request_id_or_set_before_the_second_object() -> None:
    first, second = ObjectHeader(9, 0, 0, 1, b"", 0), ObjectHeader(6, 0, 0, 1, b"", 0)
    data = encode_fetch(GroupOrder.DESCENDING, [first, second])
    asked = {6: GroupOrder.DESCENDING}
    assert run(CODEC.fetch_decoder(asked.__getitem__), [data]) == [FetchHeader(6), first, second]
    decoder = CODEC.fetch_decoder(GroupOrder.ASCENDING)
    assert run(decoder, [data[:2]]) == [FetchHeader(6)]
    decoder.group_order = GroupOrder.DESCENDING
    assert run(decoder, [data[2:]]) == [first, second]


def test_a_prior_subgroup_is_that_of_the_last_object_that_had_one() -> None:
    data = bytes.fromhex("05061f0105000a0040000200")
    *_, after = CODEC.fetch_decoder(GroupOrder.ASCENDING).feed(data)
    assert after == WholeObject(ObjectHeader(1, 2, 6, 10, b"", 0), b"")


@pytest.mark.parametrize(
    "octets",
    [
        "05061fff0000000000000000ffffffffffffffffff000a000200",  # subgroup above MAX
        "05061c01ffffffffffffffffff0a000000",  # prior Object ID is MAX
        "05061c01ffffffffffffffffff0a00040100",  # Object ID one above MAX
        "05065c01000a000100",  # prior subgroup after a datagram only
        "06",
    ],
)
def test_a_fetch_reference_to_what_is_not_there_is_a_violation(octets: str) -> None:
    with pytest.raises(SessionError) as error:
        CODEC.fetch_decoder(GroupOrder.ASCENDING).feed(bytes.fromhex(octets))
    assert error.value.code == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    "header",
    [
        ObjectHeader(1, 0, 0, None, b"", 0),
        ObjectHeader(1, 9, 0, 1, b"", 0, ObjectStatus.END_OF_GROUP),
        ObjectHeader(1, 5, 0, 1, b"", 0),
        ObjectHeader(0, 9, 0, 1, b"", 0),
        ObjectHeader(2, 0, 0, 256, b"", 0),
    ],
)
def test_an_object_that_cannot_stand_next_on_a_fetch_stream_is_misuse(
    header: ObjectHeader,
) -> None:
    encoder = CODEC.fetch_encoder(0, GroupOrder.ASCENDING)
    encoder.object(ObjectHeader(1, 5, 0, 1, b"", 0))
    with pytest.raises(MisuseError):
        encoder.object(header)


# Datagrams -----------------------------------------------------------------------------


@st.composite
def datagrams(draw: st.DrawFn) -> DatagramObject:
    payload = draw(payloads)
    status = draw(st.sampled_from(ObjectStatus)) if not payload else ObjectStatus.NORMAL
    return DatagramObject(
        draw(vi64),
        draw(vi64),
        draw(vi64),
        draw(st.none() | u8),
        b"" if status else draw(properties),
        draw(st.booleans()) and not status,
        status,
        payload,
    )


@given(datagrams())
def test_a_datagram_comes_back(datagram: DatagramObject) -> None:
    assert CODEC.decode_datagram(CODEC.encode_datagram(datagram)) == datagram


@pytest.mark.parametrize(
    "datagram",
    [
        DatagramObject(1, 2, 3, status=ObjectStatus.END_OF_GROUP, payload=b"x"),
        DatagramObject(1, 2, 3, status=ObjectStatus.END_OF_GROUP, properties=b"\x02\x01"),
        DatagramObject(1, 2, 3, status=ObjectStatus.END_OF_GROUP, end_of_group=True),
        DatagramObject(1, 2, 3, priority=256),
    ],
)
def test_a_datagram_that_breaks_a_rule_cannot_be_encoded(datagram: DatagramObject) -> None:
    with pytest.raises(MisuseError):
        CODEC.encode_datagram(datagram)


@pytest.mark.parametrize("octets", ["", "00", "0001", "000102", "00010203", "2001020307", "ff"])
def test_a_datagram_that_ends_inside_its_fields_is_a_violation(octets: str) -> None:
    with pytest.raises(SessionError) as error:
        CODEC.decode_datagram(bytes.fromhex(octets))
    assert error.value.code == SessionErrorCode.PROTOCOL_VIOLATION


# Hostile input -------------------------------------------------------------------------


def hostile(kind: str) -> st.SearchStrategy[bytes]:
    samples = sample(kind)
    return st.one_of(
        st.binary(max_size=60),
        st.tuples(st.sampled_from(samples), st.integers(0), st.binary(max_size=3)).map(
            lambda x: x[0][: x[1] % len(x[0])] + x[2] + x[0][x[1] % len(x[0]) + 1 :]
        ),
        st.tuples(st.sampled_from(samples), st.binary(max_size=40)).map(
            lambda x: x[0][: len(x[0]) // 2] + x[1]
        ),
    )


def survives(decoder: Any, parts: list[bytes]) -> None:
    try:
        run(decoder, parts)
    except SessionError as error:
        assert error.reason
    assert decoder.buffered <= sum(map(len, parts))


@given(hostile("subgroup_stream"), cuts_of)
def test_any_octets_on_a_subgroup_stream_give_events_or_a_session_error(
    data: bytes, cuts: list[int]
) -> None:
    survives(CODEC.subgroup_decoder(), split(data, cuts))


@given(hostile("fetch_stream"), cuts_of, st.sampled_from(GroupOrder))
def test_any_octets_on_a_fetch_stream_give_events_or_a_session_error(
    data: bytes, cuts: list[int], order: GroupOrder
) -> None:
    survives(CODEC.fetch_decoder(order), split(data, cuts))


@given(hostile("datagram"))
def test_any_octets_in_a_datagram_give_an_object_or_a_session_error(data: bytes) -> None:
    try:
        datagram = CODEC.decode_datagram(data)
    except SessionError as error:
        assert error.code == SessionErrorCode.PROTOCOL_VIOLATION
        return
    if isinstance(datagram, PaddingDatagram):
        assert datagram.length < len(data)
    else:
        assert CODEC.decode_datagram(CODEC.encode_datagram(datagram)) == datagram
