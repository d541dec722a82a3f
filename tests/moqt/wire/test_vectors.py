"""Golden vectors: octets two other implementations and an independent decoder agree on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from moqt.track.filters import check_range_filters
from moqt.values.codes import (
    REQUEST_OPENERS,
    AliasType,
    EndOfRange,
    GroupOrder,
    LocationFilterType,
    MessageType,
    ObjectStatus,
    ParameterType,
    RequestErrorCode,
    SessionErrorCode,
)
from moqt.values.errors import RequestError, SessionError
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    FetchOk,
    Goaway,
    KeyValue,
    LocationFilter,
    Message,
    Namespace,
    NamespaceDone,
    Parameters,
    Properties,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from moqt.values.names import Location
from moqt.wire.codec import codec_for
from moqt.wire.draft22.parameters import ANYWHERE, read_parameters, write_parameters
from moqt.wire.draft22.streams import PADDING_STREAM_TYPE
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
from moqt.wire.primitives import (
    Reader,
    decode_key_values,
    encode_key_values,
    encode_location,
    encode_namespace,
)
from moqt.wire.vi64 import decode_vi64, encode_vi64
from tests.moqt.vectors import NEEDS_SESSION
from tests.paths import DATA

CODEC = codec_for("moqt-22")
FILE = DATA / "moqt-22-vectors.json"
DATA = json.loads(FILE.read_text())
VECTORS: list[dict[str, Any]] = DATA["vectors"]
MALFORMED: list[dict[str, Any]] = DATA["malformed"]

NOT_REENCODED = {
    "vi64 37 in 2 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "vi64 0 in 2 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "vi64 0 in 3 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "vi64 0 in 9 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "vi64 1 in 8 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "vi64 5 in 7 bytes (non-minimal, must be accepted)": "our vi64 is always the shortest",
    "SUBSCRIBE with non-minimal vi64 everywhere": "our vi64 is always the shortest",
    "params object property filter": "End delta 100 stands as the two-octet 8064",
}


def by_name(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


# The vectors' fields as values ---------------------------------------------------------


def octets(text: str) -> bytes:
    return text.encode("latin-1")


def namespace(fields: list[str]) -> tuple[bytes, ...]:
    return tuple(map(octets, fields))


def pairs(items: list[dict[str, Any]]) -> Properties:
    return tuple(
        KeyValue(
            item["type"],
            item["value"] if "value" in item else bytes.fromhex(item["value_hex"]),
        )
        for item in items
    )


def token(fields: dict[str, Any]) -> AuthorizationToken:
    value = fields.get("value_hex")
    return AuthorizationToken(
        AliasType(fields["alias_type"]),
        fields.get("alias"),
        fields.get("token_type"),
        None if value is None else bytes.fromhex(value),
    )


def location_filter(value: dict[str, Any]) -> LocationFilter:
    return LocationFilter(LocationFilterType(value["type"]), *value["fields"])


def parameters(items: list[dict[str, Any]]) -> Parameters:
    fields: dict[str, Any] = {}
    for item in items:
        name, value, type_ = item["name"].lower(), item["value"], item["type"]
        if name == "authorization_token":
            name, value = "authorization_tokens", token(value["token"])
            fields[name] = (*fields.get(name, ()), value)
            continue
        if name.endswith("_filter") and name != "location_filter":
            each = RangeFilter(
                ParameterType(type_),
                value.get("set_id", 0),
                value.get("property_type"),
                tuple(map(tuple, value.get("ranges", ()))),
            )
            fields["range_filters"] = (*fields.get("range_filters", ()), each)
            continue
        if name == "location_filter":
            value = location_filter(value)
        elif name == "fill_parameters":
            value = parameters(value["params"])
        elif name == "largest_object":
            value = Location(*value)
        elif name == "track_namespace_prefix":
            value = tuple(map(bytes.fromhex, value))
        fields[name] = value
    return Parameters(**fields)


def message(f: dict[str, Any]) -> Message:
    params = parameters(f.get("params", []))
    props = pairs(f.get("props", []))

    def track(cls: Callable[..., Message]) -> Message:
        return cls(f["request_id"], namespace(f["ns"]), octets(f["name"]), params)

    def prefix(cls: Callable[..., Message]) -> Message:
        return cls(f["request_id"], namespace(f["ns"]), params)

    def redirect() -> Redirect | None:
        if "redirect" not in f:
            return None
        uri, target, name = f["redirect"]
        return Redirect(uri, namespace(target), octets(name))

    build: dict[str, Callable[[], Message]] = {
        "SETUP": lambda: Setup(pairs(f["options"])),
        "GOAWAY": lambda: Goaway(f["uri"], f["timeout"]),
        "SUBSCRIBE": lambda: track(Subscribe),
        "SUBSCRIBE_OK": lambda: SubscribeOk(f["alias"], params, props),
        "REQUEST_UPDATE": lambda: RequestUpdate(f["request_id"], params),
        "REQUEST_OK": lambda: RequestOk(params, props),
        "REQUEST_ERROR": lambda: RequestErrorMessage(
            f["code"], f["retry"], f["reason"], redirect()
        ),
        "PUBLISH": lambda: Publish(
            f["request_id"], namespace(f["ns"]), octets(f["name"]), f["alias"], params, props
        ),
        "PUBLISH_DONE": lambda: PublishDone(f["status"], f["streams"], f["reason"]),
        "PUBLISH_STATE_NOTIFY": lambda: PublishStateNotify(params),
        "FETCH": lambda: track(Fetch),
        "FETCH_OK": lambda: FetchOk(bool(f["end_of_track"]), Location(*f["end"]), params, props),
        "TRACK_STATUS": lambda: track(TrackStatus),
        "PUBLISH_NAMESPACE": lambda: prefix(PublishNamespace),
        "SUBSCRIBE_NAMESPACE": lambda: prefix(SubscribeNamespace),
        "SUBSCRIBE_TRACKS": lambda: prefix(SubscribeTracks),
        "NAMESPACE": lambda: Namespace(namespace(f["suffix"])),
        "NAMESPACE_DONE": lambda: NamespaceDone(namespace(f["suffix"])),
        "PUBLISH_SKIPPED": lambda: PublishSkipped(namespace(f["suffix"]), octets(f["name"])),
    }
    return build[f["msg"]]()


def object_parts(item: dict[str, Any]) -> tuple[bytes, bytes]:
    return encode_key_values(pairs(item.get("props", []))), bytes.fromhex(item.get("payload", ""))


def subgroup_events(f: dict[str, Any]) -> list[Any]:
    flags = int(f["flags"], 16)
    first_id_mode = flags & 0x06 == 0x02
    header = SubgroupHeader(
        f["alias"],
        f["group"],
        None if first_id_mode else f["subgroup"],
        f["priority"],
        bool(flags & 0x08),
        bool(flags & 0x40),
    )
    events: list[Any] = [header]
    for item in f["objects"]:
        properties, payload = object_parts(item)
        status = ObjectStatus(item.get("status", 0))
        events.append(
            ObjectHeader(
                f["group"], item["id"], f["subgroup"], f["priority"], properties, len(payload),
                status,
            )
        )  # fmt: skip
        events += [payload] * bool(payload)
    return events


MARKERS = {
    "non-existent": EndOfRange.NON_EXISTENT,
    "unknown": EndOfRange.UNKNOWN,
    "timed-out": EndOfRange.TIMED_OUT,
}


def fetch_events(f: dict[str, Any]) -> list[Any]:
    events: list[Any] = [FetchHeader(f["request_id"])]
    for item in f["objects"]:
        if "end_of_range" in item:
            events.append(RangeMarker(MARKERS[item["end_of_range"]], Location(*item["raw"])))
            continue
        properties, payload = object_parts(item)
        events.append(
            ObjectHeader(
                item["group"], item["object"], item["subgroup"], item["priority"], properties,
                len(payload),
            )
        )  # fmt: skip
        events += [payload] * bool(payload)
    return events


def datagram(f: dict[str, Any]) -> DatagramObject | PaddingDatagram:
    if "padding" in f:
        return PaddingDatagram(f["padding"])
    properties, payload = object_parts(f)
    return DatagramObject(
        f["alias"],
        f["group"],
        f["object"],
        f["priority"],
        properties,
        bool(int(f["flags"], 16) & 0x02),
        ObjectStatus(f.get("status", 0)),
        payload,
    )


# Decoding and encoding by kind ---------------------------------------------------------


def bounded(read: Callable[[Reader], Any]) -> Callable[[bytes, dict[str, Any]], Any]:
    def decode(data: bytes, _: dict[str, Any]) -> Any:
        reader = Reader(data, "vector")
        value = read(reader)
        reader.finish()
        return value

    return decode


def decode_control(data: bytes, _: dict[str, Any]) -> Any:
    decoder = CODEC.message_decoder()
    (decoded,) = decoder.feed(data)
    assert decoder.buffered == 0
    return decoded


def in_steps(events: list[Any]) -> list[Any]:
    """Objects, all of them whole, as their header and then their payload if there is any."""
    steps: list[Any] = []
    for event in events:
        assert not isinstance(event, ObjectHeader | bytes | memoryview)
        if isinstance(event, WholeObject):
            steps += [event.header, event.payload] if event.payload else [event.header]
        else:
            steps.append(event)
    return steps


def decode_subgroup(data: bytes, _: dict[str, Any]) -> list[Any]:
    decoder = CODEC.subgroup_decoder()
    events = decoder.feed(data)
    assert not decoder.mid_object
    return in_steps(events)


def decode_fetch(data: bytes, fields: dict[str, Any]) -> list[Any]:
    decoder = CODEC.fetch_decoder(GroupOrder(fields.get("group_order", 1)))
    events = decoder.feed(data)
    assert not decoder.mid_object
    return in_steps(events)


def encode_subgroup(events: list[Any], fields: dict[str, Any]) -> bytes:
    flags = int(fields["flags"], 16)
    properties = bool(flags & 0x01)
    explicit = flags & 0x06 == 0x04
    out, previous = b"", None
    for event in events:
        if isinstance(event, SubgroupHeader):
            out += CODEC.encode_subgroup_header(event, properties=properties, explicit=explicit)
        elif isinstance(event, ObjectHeader):
            out += CODEC.encode_subgroup_object(
                previous,
                event.object,
                properties=event.properties,
                with_properties=properties,
                length=event.length,
                status=event.status,
            )
            previous = event.object
        else:
            out += event
    return out


def encode_fetch(events: list[Any], fields: dict[str, Any]) -> bytes:
    encoder = CODEC.fetch_encoder(fields["request_id"], GroupOrder(fields["group_order"]))
    out = encoder.header()
    for event in events[1:]:
        if isinstance(event, ObjectHeader):
            out += encoder.object(event)
        elif isinstance(event, RangeMarker):
            out += encoder.marker(event)
        else:
            out += event
    return out


def decode_padding_stream(data: bytes, _: dict[str, Any]) -> tuple[StreamKind, int]:
    answer = CODEC.data_stream_type(data)
    assert answer is not None
    kind, consumed = answer
    return kind, len(data) - consumed


EXPECTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "vi64": lambda f: (f["value"], f["length"]),
    "location": lambda f: Location(f["group"], f["object"]),
    "track_namespace": lambda f: namespace(f["fields"]),
    "key_value_pairs": lambda f: pairs(f["pairs"]),
    "token": token,
    "parameter_block": lambda f: parameters(f["params"]),
    "control": message,
    "subgroup_stream": subgroup_events,
    "fetch_stream": fetch_events,
    "datagram": datagram,
    "padding_stream": lambda f: (StreamKind.PADDING, f["zeros"]),
}
DECODE: dict[str, Callable[[bytes, dict[str, Any]], Any]] = {
    "vi64": lambda data, _: decode_vi64(data, 0),
    "location": bounded(Reader.location),
    "track_namespace": bounded(Reader.namespace),
    "key_value_pairs": lambda data, _: decode_key_values(data),
    "token": lambda data, _: CODEC.decode_token(data),
    "parameter_block": bounded(lambda reader: read_parameters(reader, ANYWHERE)),
    "control": decode_control,
    "subgroup_stream": decode_subgroup,
    "fetch_stream": decode_fetch,
    "datagram": lambda data, _: CODEC.decode_datagram(data),
    "padding_stream": decode_padding_stream,
}
ENCODE: dict[str, Callable[[Any, dict[str, Any]], bytes]] = {
    "vi64": lambda value, _: encode_vi64(value[0]),
    "location": lambda value, _: encode_location(value),
    "track_namespace": lambda value, _: encode_namespace(value),
    "key_value_pairs": lambda value, _: encode_key_values(value),
    "token": lambda value, _: CODEC.encode_token(value),
    "parameter_block": lambda value, _: write_parameters(value, ANYWHERE, "a test"),
    "control": lambda value, _: CODEC.encode_message(value),
    "subgroup_stream": encode_subgroup,
    "fetch_stream": encode_fetch,
    "datagram": lambda value, f: CODEC.encode_datagram(
        value, explicit_status=value != PaddingDatagram(4) and "status" in f
    ),
    "padding_stream": lambda value, _: PADDING_STREAM_TYPE + bytes(value[1]),
}


@by_name(VECTORS)
def test_a_vector_decodes_to_its_fields(case: dict[str, Any]) -> None:
    kind, fields = case["kind"], case["fields"]
    assert DECODE[kind](bytes.fromhex(case["hex"]), fields) == EXPECTED[kind](fields)


@by_name([case for case in VECTORS if case["name"] not in NOT_REENCODED])
def test_a_vectors_fields_encode_to_its_octets(case: dict[str, Any]) -> None:
    kind, fields = case["kind"], case["fields"]
    assert ENCODE[kind](EXPECTED[kind](fields), fields).hex() == case["hex"]


@by_name([case for case in VECTORS if case["name"] in NOT_REENCODED])
def test_a_longer_form_of_a_vector_encodes_to_a_shorter_one_that_means_the_same(
    case: dict[str, Any],
) -> None:
    kind, fields = case["kind"], case["fields"]
    value = EXPECTED[kind](fields)
    ours = ENCODE[kind](value, fields)
    assert len(ours) < len(bytes.fromhex(case["hex"]))
    if kind != "vi64":
        assert DECODE[kind](ours, fields) == value


# What must be refused ------------------------------------------------------------------


def feed_first(first: frozenset[MessageType]) -> Callable[[bytes], object]:
    return lambda data: CODEC.message_decoder(first).feed(data)


def filters_with(max_ranges: int) -> Callable[[bytes], object]:
    def refuse(data: bytes) -> None:
        (subscribe,) = CODEC.message_decoder().feed(data)
        assert isinstance(subscribe, Subscribe)
        check_range_filters(subscribe.parameters.range_filters, max_ranges)

    return refuse


def update_of_track_status(data: bytes) -> None:
    (update,) = CODEC.message_decoder().feed(data)
    assert isinstance(update, RequestUpdate)
    CODEC.check_request_update(update.parameters, TrackStatus)


def ok_to_publish_namespace(data: bytes) -> None:
    (ok,) = CODEC.message_decoder().feed(data)
    assert isinstance(ok, RequestOk)
    CODEC.check_request_ok(ok, PublishNamespace)


# Refused by the codec when told the little it needs to know.
TOLD = {
    "REQUEST_OK as first message of a bidi stream": feed_first(REQUEST_OPENERS),
    "REQUEST_UPDATE as first message of a bidi stream": feed_first(REQUEST_OPENERS),
    "REQUEST_OK on the control stream": feed_first(frozenset({MessageType.SETUP})),
    "REQUEST_UPDATE on a TRACK_STATUS stream": update_of_track_status,
    "Track Properties in PUBLISH_NAMESPACE_OK": ok_to_publish_namespace,
    "PRIORITY_FILTER above 255": filters_with(16),
    "OBJECT_PROPERTY_FILTER with odd property type": filters_with(16),
    "range filter delta overflow": filters_with(16),
    "same filter type and SetID twice": filters_with(16),
    "range filter without MAX_FILTER_RANGES": filters_with(0),
}


def refuse(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    if case["name"] in TOLD:
        TOLD[case["name"]](data)
    elif case["kind"] == "stream_prefix":
        CODEC.data_stream_type(data)
    elif case["kind"] == "control":
        CODEC.message_decoder().feed(data)
    elif case["kind"] != "stream_event":
        DECODE[case["kind"]](data, case)


@by_name([case for case in MALFORMED if case["name"] not in NEEDS_SESSION])
def test_a_malformed_vector_is_refused_with_the_error_the_draft_names(
    case: dict[str, Any],
) -> None:
    expected = case["expect"]
    if expected["scope"] == "session":
        with pytest.raises(SessionError) as closed:
            refuse(case)
        assert closed.value.code == SessionErrorCode[expected["error"]] == expected["code"]
        assert closed.value.reason
    else:
        with pytest.raises(RequestError) as refused:
            refuse(case)
        assert refused.value.code == RequestErrorCode[expected["error"]] == expected["code"]
        assert refused.value.reason


def test_what_only_a_session_can_refuse_is_exactly_what_the_codec_accepts() -> None:
    accepted = set()
    for case in MALFORMED:
        try:
            refuse(case)
        except (SessionError, RequestError):
            continue
        except AssertionError:  # a FIN cut it, which is not the codec's to punish
            pass
        accepted.add(case["name"])
    assert accepted == set(NEEDS_SESSION)


def test_a_fin_inside_a_message_is_seen_by_what_is_buffered() -> None:
    (case,) = (case for case in MALFORMED if case["name"] == "request stream FIN inside a message")
    decoder = CODEC.message_decoder()
    data = bytes.fromhex(case["hex"])
    assert decoder.feed(data) == []
    assert decoder.buffered == len(data)


def test_a_fin_inside_a_payload_is_seen_by_mid_object() -> None:
    (case,) = (case for case in MALFORMED if case["name"] == "subgroup FIN inside a payload")
    decoder = CODEC.subgroup_decoder()
    decoder.feed(bytes.fromhex(case["hex"]))
    assert decoder.mid_object
