"""MOQT "MOQT URI Scheme": moqt:// is native QUIC, https:// is WebTransport."""

from __future__ import annotations

import pytest

from moqt.uri import for_transport, parse_uri
from moqt.values.errors import MisuseError


@pytest.mark.parametrize("scheme, webtransport", [("moqt", False), ("https", True)])
def test_the_scheme_chooses_the_transport_and_the_port_is_443_by_default(
    scheme: str, webtransport: bool
) -> None:
    uri = parse_uri(f"{scheme}://relay.example/live?x=1#kvcs:abc")
    assert uri == ("relay.example", 443, "/live?x=1", "relay.example", "kvcs:abc", webtransport)
    assert parse_uri(f"{scheme}://[::1]:4443").port == 4443


@pytest.mark.parametrize(
    "text, words",
    [
        ("http://relay.example", "must begin with moqt:// or https://"),
        ("https:///path", "names no host"),
        ("moqt://user@host", "no user name"),
        ("https://host/a b", "percent-encode"),
        ("moqt://host:99999", "is not a URI"),
    ],
)
def test_what_is_no_uri_of_an_endpoint_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        parse_uri(text)


def test_only_the_schemes_of_the_two_transports_are_exchanged():
    assert for_transport("https://a.example/x", webtransport=False) == "moqt://a.example/x"
    assert for_transport("moqt://a.example/x", webtransport=True) == "https://a.example/x"
    for uri in ("", "wss://a.example/x", "/x"):
        assert for_transport(uri, webtransport=True) == uri
