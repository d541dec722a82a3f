"""KVSP "Services and URIs": base URIs, identifiers and paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.names import uris
from kvsp.names.errors import DecodeError
from kvsp.names.uris import BlockId
from tests.kvsp.support_vectors import name_of

BLOCK = BlockId(bytes(range(32)), bytes(range(16)), bytes(range(32, 64)))


@pytest.mark.parametrize(
    "uri",
    [
        "https://h1.example/kvsp/",
        "https://h1.example/",
        "https://h1.example:8443/a/b/",
        "https://192.0.2.1/",
        "https://[2001:db8::1]/",
        "https://[2001:db8::1]:8443/x/",
        "https://localhost/",
        "https://h1.example/a%20b/",
    ],
)
def test_a_base_uri_is_taken_as_it_is(uri: str) -> None:
    assert uris.check_base_uri(uri) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https:",
        "https://",
        "https:///kvsp/",
        "//h1.example/",
        "/kvsp/",
        "http://h1.example/",
        "ftp://h1.example/",
        "HTTPS://h1.example/",
        "https://H1.example/",
        "https://h1.example",
        "https://h1.example/kvsp",
        "https://h1.example:443/",
        "https://h1.example:/",
        "https://h1.example:0/",
        "https://h1.example:65536/",
        "https://h1.example:x/",
        "https://user@h1.example/",
        "https://user:secret@h1.example/",
        "https://@h1.example/",
        "https://h1.example/?",
        "https://h1.example/?a/",
        "https://h1.example/#/",
        "https://h1.example/../",
        "https://h1.example/a/./",
        "https://h1.example/a b/",
        "https://h1.example/\t/",
        "https://h1.example/\n",
        "https://h1.example\\/",
        "https://bücher.example/",
        "https://[2001:DB8::1]/",
        "https://[::1/",
        "https://[h1]/",
        "https://[192.0.2.1]/",
        "https://[fe80::1%25eth0]/",
        "https://h1.example/" + "a" * 2048 + "/",
    ],
)
def test_what_is_no_base_uri_is_refused(uri: str) -> None:
    assert name_of(uris.check_base_uri, uri) == "bad-uri"
    assert name_of(uris.check_base_uri, uri, http_loopback=True) == "bad-uri"
    assert name_of(uris.check_source_uri, uri) == "bad-uri"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_http_is_allowed_on_loopback_when_the_operator_says_so(host: str) -> None:
    uri = f"http://{host}:8080/"
    assert uris.check_base_uri(uri, http_loopback=True) == uri
    assert name_of(uris.check_base_uri, uri) == "bad-uri"
    assert name_of(uris.check_base_uri, f"http://{host}:80/", http_loopback=True) == "bad-uri"


@pytest.mark.parametrize("host", ["128.0.0.1", "localhost.example", "127.0.0.1.example", "[::2]"])
def test_http_is_not_allowed_where_it_leaves_the_machine(host: str) -> None:
    assert name_of(uris.check_base_uri, f"http://{host}/", http_loopback=True) == "bad-uri"


def test_a_refused_uri_does_not_tell_the_password_it_holds() -> None:
    with pytest.raises(DecodeError) as caught:
        uris.check_base_uri("https://user:secret@h1.example/")
    assert "secret" not in str(caught.value)


def test_a_moqt_holder_is_an_endpoint_without_fragment() -> None:
    for uri in ("moqt://relay.example/", "moqt://relay.example:4433/path?x=1", "moqt://[::1]/"):
        assert uris.check_holder_uri(uri) == uri
    for uri in ("moqt:", "moqt://", "moqt:///x", "moqt://relay.example/#x", "moqt://a@b/"):
        assert name_of(uris.check_holder_uri, uri) == "bad-uri"


@given(st.text(max_size=40) | st.text("htps:/.[]#?@%:0", max_size=20).map("https:".__add__))
def test_no_text_crashes_the_checks(text: str) -> None:
    for check in (uris.check_source_uri, uris.check_holder_uri, uris.check_uuid, uris.check_uid):
        try:
            assert check(text).lower() == text.lower()
        except DecodeError as error:
            assert error.detail


@given(st.text("AQgw-_=", max_size=8))
def test_no_text_crashes_the_namespace_reader(text: str) -> None:
    assert name_of(uris.namespace_fields, text) in (
        "bad-base64url",
        "truncated",
        "trailing-octets",
        "bad-namespace",
    )


def test_paths_of_blocks_and_replicas_are_read_back() -> None:
    path = uris.block_path(BLOCK)
    assert path == f"blocks/{BLOCK.compat_id.hex()}/{BLOCK.scope_id.hex()}/{BLOCK.block_key.hex()}"
    assert uris.parse_block_id(*path.split("/")[1:]) == BLOCK
    replica = uris.replica_id("https://h1.example/", 1)
    assert uris.replica_path(BLOCK, replica) == f"{uris.replicas_path(BLOCK)}/{replica}"
    assert uris.parse_compat_id(BLOCK.compat_id.hex()) == BLOCK.compat_id
    assert uris.compat_path(BLOCK.compat_id) == f"compat/{BLOCK.compat_id.hex()}"


def test_an_identifier_of_a_path_is_lower_case_hexadecimal_of_its_length() -> None:
    parts = BLOCK.path.split("/")
    for index in range(3):
        for bad in (parts[index].upper(), parts[index][2:], "zz" * 32, ""):
            wrong = [*parts]
            wrong[index] = bad
            assert name_of(uris.parse_block_id, *wrong) == "bad-hex"


def test_a_uid_has_22_characters_and_no_spare_bits() -> None:
    assert uris.check_uid(uris.uid(b"x")) == uris.uid(b"x")
    for bad in ("", "A" * 21, "A" * 21 + "B", "A" * 23, "A" * 21 + "="):
        assert name_of(uris.check_uid, bad) == "bad-base64url"


def test_other_resources_are_named_by_their_identifier() -> None:
    uuid = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
    assert uris.check_uuid(uuid.upper()) == uuid
    assert uris.session_path(uuid) == f"sessions/{uuid}"
    assert uris.checkpoint_path(uuid) == f"sessions/{uuid}/checkpoint"
    assert uris.resume_path(uuid) == f"sessions/{uuid}/resume"
    assert uris.lease_path(uuid) == f"leases/{uuid}"
    assert uris.directive_path(uuid) == f"prefetch/{uuid}"
    uri = "https://ii7.example/kvsp/"
    assert uris.instance_path(uri) == f"instances/{uris.instance_id(uri)}"
