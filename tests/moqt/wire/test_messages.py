"""Control messages: round trips, any split of the octets, early refusal, hostile input."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.track.filters import check_range_filters
from moqt.values.codes import (
    MAX_VI64,
    AliasType,
    MessageType,
    RequestErrorCode,
    SessionErrorCode,
)
from moqt.values.errors import MisuseError, RequestError, SessionError
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    Goaway,
    KeyValue,
    LocationFilter,
    Parameters,
    Publish,
    PublishDone,
    PublishNamespace,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
)
from moqt.values.names import Location
from moqt.wire.codec import codec_for, codecs
from moqt.wire.primitives import decode_key_values, encode_key_values
from moqt.wire.vi64 import Truncated, decode_vi64, encode_vi64
from tests.moqt.wire.strategies import IN_FILL, MESSAGES, RANGE_FILTERS, M, P, key_values, u8, vi64
from tests.paths import DATA

CODEC = codec_for("moqt-22")
VECTORS = json.loads((DATA / "moqt-22-vectors.json").read_text())
CONTROL = [
    bytes.fromhex(case["hex"])
    for case in VECTORS["vectors"] + VECTORS["malformed"]
    if case["kind"] == "control"
]


# Values --------------------------------------------------------------------------------


IN_FILL |= frozenset(RANGE_FILTERS[:-1])


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted(cut % (len(data) + 1) for cut in cuts)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


# vi64 ----------------------------------------------------------------------------------


@given(vi64)
def test_a_vi64_has_the_shortest_form_and_comes_back(value: int) -> None:
    octets = encode_vi64(value)
    assert decode_vi64(octets, 0) == (value, len(octets))
    assert len(octets) == next(n for n in range(1, 10) if value < 1 << (64 if n == 9 else 7 * n))


@given(vi64, st.integers(1, 9))
def test_a_vi64_cut_short_says_how_many_octets_it_needs(value: int, cut: int) -> None:
    octets = encode_vi64(value)
    with pytest.raises(Truncated) as truncated:
        decode_vi64(octets[: len(octets) - min(cut, len(octets))], 0)
    assert truncated.value.need == (len(octets) if cut < len(octets) else 1)


@pytest.mark.parametrize("value", [-1, MAX_VI64 + 1])
def test_a_value_outside_64_bits_has_no_vi64(value: int) -> None:
    with pytest.raises(MisuseError):
        encode_vi64(value)


# Key-Value-Pairs -----------------------------------------------------------------------


@given(key_values)
def test_key_value_pairs_come_back(pairs: tuple[KeyValue, ...]) -> None:
    assert decode_key_values(encode_key_values(pairs)) == pairs


@pytest.mark.parametrize(
    "pairs",
    [
        (KeyValue(4, 1), KeyValue(2, 1)),
        (KeyValue(4, b"octets under an even type"),),
        (KeyValue(5, 1),),
        (KeyValue(5, bytes(65536)),),
        (KeyValue(MAX_VI64 + 2, b""),),
    ],
)
def test_pairs_that_cannot_be_written_are_misuse(pairs: tuple[KeyValue, ...]) -> None:
    with pytest.raises(MisuseError):
        encode_key_values(pairs)


def test_a_pairs_value_may_have_65535_octets_and_no_more() -> None:
    length = b"\xc0\xff\xff"
    assert decode_vi64(length, 0)[0] == 65535
    assert decode_key_values(b"\x05" + length + bytes(65535)) == (KeyValue(5, bytes(65535)),)
    with pytest.raises(SessionError, match="value of 65536 octets"):
        decode_key_values(b"\x05\xc1\x00\x00" + bytes(65536))


@pytest.mark.parametrize("pair", [KeyValue(0x0E, 256), KeyValue(0x22, 0), KeyValue(0x30, 2)])
def test_a_known_track_property_with_an_illegal_value_is_a_violation_also_inside_immutable(
    pair: KeyValue,
) -> None:
    for properties in ((pair,), (KeyValue(0x0B, encode_key_values((pair,))),)):
        octets = encode_key_values(properties)
        body = b"\x07\x00" + octets
        with pytest.raises(SessionError) as error:
            CODEC.message_decoder().feed(b"\x04" + len(body).to_bytes(2, "big") + body)
        assert error.value.code == SessionErrorCode.PROTOCOL_VIOLATION
        with pytest.raises(MisuseError):
            CODEC.encode_message(SubscribeOk(7, properties=properties))


def test_immutable_properties_that_cannot_be_parsed_do_not_end_the_session() -> None:
    message = SubscribeOk(7, properties=(KeyValue(0x0B, b"\x01\x7f"),))
    assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]


# SETUP ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (KeyValue(0x01, b"live"), SessionErrorCode.MALFORMED_PATH),
        (KeyValue(0x01, b"/a b"), SessionErrorCode.MALFORMED_PATH),
        (KeyValue(0x01, b"/%4"), SessionErrorCode.MALFORMED_PATH),
        (KeyValue(0x05, b""), SessionErrorCode.MALFORMED_AUTHORITY),
        (KeyValue(0x05, b":443"), SessionErrorCode.MALFORMED_AUTHORITY),
        (KeyValue(0x05, b"host:port"), SessionErrorCode.MALFORMED_AUTHORITY),
        (KeyValue(0x05, b"host/path"), SessionErrorCode.MALFORMED_AUTHORITY),
        (KeyValue(0x03, b"\x07"), SessionErrorCode.KEY_VALUE_FORMATTING_ERROR),
        (KeyValue(0x07, b"\xff"), SessionErrorCode.KEY_VALUE_FORMATTING_ERROR),
    ],
)
def test_a_setup_option_with_a_bad_value_closes_with_its_own_code(
    option: KeyValue, code: SessionErrorCode
) -> None:
    body = encode_key_values((option,))
    with pytest.raises(SessionError) as error:
        CODEC.message_decoder().feed(b"\xaf\x00" + len(body).to_bytes(2, "big") + body)
    assert error.value.code == code
    with pytest.raises(MisuseError):
        CODEC.encode_message(Setup((option,)))


@pytest.mark.parametrize(
    "option",
    [
        KeyValue(0x01, b""),
        KeyValue(0x01, b"?only=query"),
        KeyValue(0x01, b"//a/%2F;x@y:z?q=/?"),
        KeyValue(0x05, b"[2001:db8::1]:4443"),
        KeyValue(0x05, b"relay.example"),
        KeyValue(0x05, b"user@relay.example:"),
    ],
)
def test_a_setup_option_of_legal_syntax_is_taken(option: KeyValue) -> None:
    message = Setup((option,))
    assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]


def test_unknown_setup_options_and_tokens_may_be_repeated() -> None:
    token = CODEC.encode_token(AuthorizationToken(AliasType.USE_VALUE, None, 0, b"x"))
    message = Setup((*[KeyValue(0x03, token)] * 2, *[KeyValue(0x9D, b"")] * 2))
    assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]


# Messages ------------------------------------------------------------------------------


@given(st.lists(MESSAGES, max_size=4), st.lists(st.integers(0), max_size=6))
def test_messages_come_back_however_their_octets_are_split(
    messages: list[Any], cuts: list[int]
) -> None:
    data = b"".join(map(CODEC.encode_message, messages))
    decoder = CODEC.message_decoder()
    decoded = [message for part in split(data, cuts) for message in decoder.feed(part)]
    assert decoded == messages
    assert decoder.buffered == 0


@given(MESSAGES)
def test_a_message_octet_by_octet_comes_with_its_last_octet(message: Any) -> None:
    data = CODEC.encode_message(message)
    decoder = CODEC.message_decoder()
    for index, octet in enumerate(data[:-1]):
        assert decoder.feed(bytes([octet])) == []
        assert decoder.buffered == index + 1
    assert decoder.feed(data[-1:]) == [message]


@given(
    st.one_of(
        st.binary(max_size=60),
        st.tuples(st.sampled_from(CONTROL), st.integers(0), u8).map(
            lambda x: x[0][: x[1] % len(x[0])] + bytes([x[2]]) + x[0][x[1] % len(x[0]) + 1 :]
        ),
        st.tuples(st.sampled_from(sorted(MessageType)), st.binary(max_size=60)).map(
            lambda x: encode_vi64(x[0]) + len(x[1]).to_bytes(2, "big") + x[1]
        ),
    ),
    st.lists(st.integers(0), max_size=3),
)
def test_any_octets_give_valid_messages_or_a_session_error(data: bytes, cuts: list[int]) -> None:
    decoder = CODEC.message_decoder()
    try:
        messages = [message for part in split(data, cuts) for message in decoder.feed(part)]
    except SessionError:
        return
    assert decoder.buffered <= len(data)
    for message in messages:
        parameters = getattr(message, "parameters", Parameters())
        try:
            check_range_filters(parameters.range_filters, 1000)
            fill = parameters.fill_parameters or Parameters()
            check_range_filters(fill.range_filters, 1000)
        except RequestError:
            continue
        assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]


def test_an_unknown_type_is_refused_at_its_last_octet() -> None:
    decoder = CODEC.message_decoder()
    assert decoder.feed(b"\xbf") == []
    with pytest.raises(SessionError):
        decoder.feed(b"\x00")


@pytest.mark.parametrize("form", [b"\x80\x10", b"\xc0\x00\x10", b"\xff" + bytes(7) + b"\x10"])
def test_a_message_type_is_known_by_its_value_in_every_form(form: bytes) -> None:
    octets = CODEC.encode_message(Goaway())
    assert octets[0] == 0x10
    assert CODEC.message_decoder().feed(form + octets[1:]) == [Goaway()]


def test_a_type_that_may_not_open_the_stream_is_refused_before_its_body() -> None:
    with pytest.raises(SessionError):
        CODEC.message_decoder(frozenset({MessageType.SETUP})).feed(b"\x10")


def test_the_restriction_on_the_first_message_does_not_hold_for_the_second() -> None:
    decoder = CODEC.message_decoder(frozenset({MessageType.SETUP}))
    goaway = Goaway()
    data = CODEC.encode_message(Setup()) + CODEC.encode_message(goaway)
    assert decoder.feed(data) == [Setup(), goaway]


def test_no_more_than_one_message_is_buffered() -> None:
    largest = CODEC.encode_message(Setup((KeyValue(0x9D, bytes(65500)),)))
    decoder = CODEC.message_decoder()
    assert len(decoder.feed(largest * 3 + largest[:-1])) == 3
    assert decoder.buffered == len(largest) - 1


def test_a_message_above_65535_octets_is_misuse() -> None:
    pairs = (KeyValue(0x9D, bytes(65535)),)
    with pytest.raises(MisuseError):
        CODEC.encode_message(Setup(pairs))


def test_a_reason_too_long_is_cut_at_a_character() -> None:
    (message,) = CODEC.message_decoder().feed(
        CODEC.encode_message(RequestErrorMessage(1, reason="x" + "é" * 600))
    )
    assert message == RequestErrorMessage(1, reason="x" + "é" * 511)


def test_a_reason_that_is_not_utf8_is_shown_as_far_as_it_goes() -> None:
    assert CODEC.message_decoder().feed(b"\x0b\x00\x05\x02\x00\x02a\xff") == [
        PublishDone(2, 0, "a\ufffd")
    ]


@pytest.mark.parametrize(
    "message",
    [
        RequestErrorMessage(int(RequestErrorCode.REDIRECT)),
        RequestErrorMessage(1, redirect=Redirect("", (), b"")),
        Subscribe(0, (b"",), b"x"),
        Subscribe(0, (b"x",) * 33, b""),
        Subscribe(0, (b"x",), bytes(4096)),
        Subscribe(0, (), b"", Parameters(forward=2)),
        Subscribe(0, (), b"", Parameters(expires=1)),
        Subscribe(0, (), b"", Parameters(fill_parameters=Parameters(forward=1))),
        Subscribe(0, (), b"", Parameters(location_filter=LocationFilter.groups(5, 4))),
        Subscribe(
            0, (), b"", Parameters(range_filters=(RangeFilter(P.OBJECTID_FILTER, 0, 2, ((1, 2),)),))
        ),
        Subscribe(
            0,
            (),
            b"",
            Parameters(range_filters=(RangeFilter(P.OBJECTID_FILTER, 256, None, ((1, 2),)),)),
        ),
        Subscribe(
            0,
            (),
            b"",
            Parameters(
                range_filters=(RangeFilter(P.OBJECTID_FILTER, 0, None, ((1, None), (2, 3))),)
            ),
        ),
        Subscribe(
            0,
            (),
            b"",
            Parameters(range_filters=(RangeFilter(P.OBJECTID_FILTER, 0, None, ((2, 1),)),)),
        ),
        Subscribe(
            0,
            (),
            b"",
            Parameters(location_filter=LocationFilter.groups(2, MAX_VI64 + 1)),
        ),
        Goaway("x" * 8193),
        Goaway("\ud800"),
    ],
)
def test_a_message_that_breaks_a_rule_cannot_be_encoded(message: Any) -> None:
    with pytest.raises(MisuseError):
        CODEC.encode_message(message)


# Parameters by the request they belong to ----------------------------------------------

FULL = Parameters(
    object_delivery_timeout=1,
    authorization_tokens=(AuthorizationToken(AliasType.USE_ALIAS, 1),),
    subgroup_delivery_timeout=1,
    forward=1,
    subscriber_priority=1,
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters(),
    range_filters=tuple(RangeFilter(type_) for type_ in RANGE_FILTERS),
    new_group_request=1,
    track_namespace_prefix=(b"x",),
)
OF_SUBSCRIPTION = {
    "object_delivery_timeout",
    "authorization_tokens",
    "subgroup_delivery_timeout",
    "forward",
    "subscriber_priority",
    "location_filter",
    "fill_parameters",
    "new_group_request",
}
UPDATABLE = {
    Subscribe: OF_SUBSCRIPTION,
    Publish: OF_SUBSCRIPTION,
    Fetch: {"authorization_tokens", "subscriber_priority"},
    PublishNamespace: {"authorization_tokens"},
    SubscribeNamespace: {"authorization_tokens", "track_namespace_prefix"},
    SubscribeTracks: {"authorization_tokens", "forward", "track_namespace_prefix"},
}


@pytest.mark.parametrize("request_type", UPDATABLE, ids=lambda cls: cls.TYPE.name)
def test_a_request_update_carries_only_what_its_request_can_change(request_type: Any) -> None:
    for field in fields(FULL):
        if field.name == "range_filters":
            continue
        one = replace(Parameters(), **{field.name: getattr(FULL, field.name)})
        if one == Parameters() or field.name in UPDATABLE[request_type]:
            CODEC.check_request_update(one, request_type)
        else:
            with pytest.raises(SessionError):
                CODEC.check_request_update(one, request_type.TYPE)


def test_range_filters_of_objects_update_subscriptions_and_of_tracks_subscribe_tracks() -> None:
    for filter_ in FULL.range_filters:
        one = Parameters(range_filters=(filter_,))
        of_tracks = filter_.type is P.TRACK_PROPERTY_FILTER
        for request_type in UPDATABLE:
            takes = (
                (request_type is SubscribeTracks)
                if of_tracks
                else (request_type in (Subscribe, Publish))
            )
            if takes:
                CODEC.check_request_update(one, request_type)
            else:
                with pytest.raises(SessionError):
                    CODEC.check_request_update(one, request_type)


EXPIRES, LARGEST = Parameters(expires=1), Parameters(largest_object=Location(1, 2))


@pytest.mark.parametrize(
    ("request_type", "expires", "largest", "properties"),
    [
        (M.PUBLISH, True, False, False),
        (M.REQUEST_UPDATE, True, True, False),
        (M.TRACK_STATUS, False, True, True),
        (M.PUBLISH_NAMESPACE, True, False, False),
        (M.SUBSCRIBE_NAMESPACE, True, False, False),
        (M.SUBSCRIBE_TRACKS, True, False, False),
        (M.SUBSCRIBE, False, False, False),
        (M.FETCH, False, False, False),
    ],
)
def test_a_request_ok_carries_only_what_its_request_is_answered_with(
    request_type: MessageType, expires: bool, largest: bool, properties: bool
) -> None:
    for message, legal in (
        (RequestOk(EXPIRES), expires),
        (RequestOk(LARGEST), largest),
        (RequestOk(properties=(KeyValue(2, 1),)), properties),
    ):
        if legal:
            CODEC.check_request_ok(message, request_type)
        else:
            with pytest.raises(SessionError):
                CODEC.check_request_ok(message, request_type)


@pytest.mark.parametrize(
    "block",
    [
        "012300",  # FILL_PARAMETERS of Length 0: no count
        "0123020000",  # octets after the fill's parameters
        "01260100",  # a SetID and no Range
        "01260101",
        "012802000a",  # a property type and no Range
    ],
)
def test_a_length_prefixed_value_that_its_content_does_not_fill_is_a_violation(block: str) -> None:
    body = bytes.fromhex("000000" + block)
    with pytest.raises(SessionError) as error:
        CODEC.message_decoder().feed(b"\x03" + len(body).to_bytes(2, "big") + body)
    assert error.value.code == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    "token",
    [
        AuthorizationToken(AliasType.DELETE),
        AuthorizationToken(AliasType.USE_ALIAS, 1, 2),
        AuthorizationToken(AliasType.REGISTER, 1, 2),
        AuthorizationToken(AliasType.USE_VALUE, 1, 2, b""),
    ],
)
def test_a_token_with_the_wrong_fields_cannot_be_encoded(token: AuthorizationToken) -> None:
    with pytest.raises(MisuseError):
        CODEC.encode_token(token)


@given(st.binary(max_size=30))
def test_any_octets_are_a_token_or_a_key_value_formatting_error(data: bytes) -> None:
    try:
        token = CODEC.decode_token(data)
    except SessionError as error:
        assert error.code == SessionErrorCode.KEY_VALUE_FORMATTING_ERROR
    else:
        assert CODEC.decode_token(CODEC.encode_token(token)) == token


def test_a_draft_not_spoken_here_has_no_codec() -> None:
    assert tuple(codecs()) == ("moqt-22",)
    with pytest.raises(MisuseError, match="moqt-21"):
        codec_for("moqt-21")
