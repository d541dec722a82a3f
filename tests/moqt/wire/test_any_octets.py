"""Whatever comes, the smaller readers give a value or the one error they promise.

Messages, data streams and datagrams have theirs beside their own tests; KVCS payloads,
manifests and namespaces in tests/kvcs; whole sessions in `test_session_fuzz`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.log.describe import describe, line, without_secrets
from moqt.uri import parse_uri
from moqt.values.codes import SetupOptionType
from moqt.values.errors import MisuseError, SessionError
from moqt.values.messages import KeyValue, Setup
from moqt.wire.codec import codec_for
from moqt.wire.primitives import (
    Reader,
    decode_key_values,
    encode_key_values,
    encode_location,
    encode_namespace,
)
from tests.moqt.memory import ALPN
from tests.moqt.wire.strategies import MESSAGES

CODEC = codec_for(ALPN)
SETUP_TYPE = CODEC.encode_message(Setup())[:-2]


@given(st.text(max_size=60) | st.text("moqtshttps:/@?#[]%.-0123456789abc", max_size=60))
def test_any_text_is_a_uri_or_refused_with_a_reason(text: str) -> None:
    for uri in (text, f"moqt://{text}", f"https://{text}"):
        try:
            parsed = parse_uri(uri)
        except MisuseError as error:
            assert str(error)
        else:
            assert parsed.host and 0 < parsed.port < 65536
            assert parsed.path.isascii() and parsed.authority.isascii()


@given(st.binary(max_size=80))
def test_any_octets_are_a_namespace_a_location_and_pairs_or_a_session_error(octets: bytes) -> None:
    for read, write in (
        (lambda: Reader(octets, "octets").namespace(), encode_namespace),
        (lambda: Reader(octets, "octets").location(), encode_location),
        (lambda: decode_key_values(octets), encode_key_values),
    ):
        try:
            value: Any = read()
        except SessionError as error:
            assert error.reason
            continue
        again: Any = write(value)
        assert len(again) <= len(octets)


@given(st.binary(max_size=80), st.lists(st.integers(0, 90), max_size=5))
def test_any_octets_are_setup_options_or_a_session_error(body: bytes, cuts: list[int]) -> None:
    data = SETUP_TYPE + len(body).to_bytes(2, "big") + body
    decoder = CODEC.message_decoder()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    messages: list[Any] = []
    try:
        for start, stop in pairwise(edges):
            messages += decoder.feed(data[start:stop])
    except SessionError as error:
        assert error.reason
        return
    (setup,) = messages
    assert isinstance(setup, Setup)
    assert CODEC.message_decoder().feed(CODEC.encode_message(setup)) == [setup]


@given(MESSAGES)
def test_every_message_can_be_logged_and_a_line_is_a_line(message: Any) -> None:
    json.dumps(describe(message))
    assert line(message).isprintable()


@given(st.binary(min_size=1, max_size=40))
def test_no_octets_of_an_option_that_may_hold_a_secret_are_logged(secret: bytes) -> None:
    marked = b"<begin>" + secret + b"<end>"
    setup = Setup(
        (
            KeyValue(SetupOptionType.PATH, b"/public?" + marked),
            KeyValue(SetupOptionType.AUTHORIZATION_TOKEN, marked),
            KeyValue(0x4001, marked),
        )
    )
    shown = json.dumps(describe(setup)) + line(setup)
    assert "/public?..." in shown
    assert "begin" not in shown and "end" not in shown and marked.hex() not in shown


@pytest.mark.parametrize("uri", ["?", "#", "@", "//", "a@b@c", "//@?#"])
def test_odd_uris_are_shown_without_an_exception(uri: str) -> None:
    assert "@" not in without_secrets(f"moqt://{uri}")
