"""What of the settings of upstream relays and of a mesh cannot be meant."""

from __future__ import annotations

import pytest

from moqt.quic.config import QuicConfig
from moqt.values.config import SessionConfig
from relay.service.checks import Usage, mesh_of, upstreams_of

HERE = ("10.0.0.7", 4443)
ABOVE = "moqt://above.example:4443/site"


def upstreams(*urls, **options):
    defaults = {"cafile": None, "token_file": None, "announce": False}
    return upstreams_of(
        urls, HERE, **{**defaults, **options}, quic=QuicConfig(), session=SessionConfig()
    )


def mesh(url, host="10.0.0.7", **options):
    names = ("reached_as", "password_file", "directory_cafile", "cafile", "token_file")
    return mesh_of(
        url,
        host,
        **{**dict.fromkeys(names), **options},
        quic=QuicConfig(),
        session=SessionConfig(),
    )


def test_upstream_relays_keep_their_order_and_may_differ_by_path_alone():
    urls = (ABOVE, "moqt://other.example", ABOVE + "/more")
    assert tuple(each.url for each in upstreams(*urls)) == urls
    assert upstreams() == ()


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ((ABOVE, "moqt://10.0.0.7:4443/site"), "this relay itself"),
        ((ABOVE, ABOVE), "given twice"),
        ((ABOVE, ABOVE + "?token=1"), "given twice"),
        (("http://above.example",), "must begin with"),
    ],
)
def test_upstream_relays_that_cannot_be_meant_are_refused(urls, why):
    with pytest.raises(Usage, match=why):
        upstreams(*urls)


def test_options_without_what_they_are_of_are_refused(tmp_path):
    with pytest.raises(Usage, match="give --upstream"):
        upstreams(announce=True)
    with pytest.raises(Usage, match="give --directory"):
        mesh(None, reached_as="moqt://relay.example")
    assert mesh(None) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://directory.example", "must begin with one of redis://"),
        ("redis://", "names no host"),
        ("redis://directory.example:port", "Port"),
        ("redis://:secret@directory.example", "--directory-password-file"),
        ("redis://directory.example?password=secret", "--directory-password-file"),
        ("redis://directory.example?db=first", "Invalid value for 'db'"),
        ("redis://directory.example?databse=1", "unexpected keyword argument 'databse'"),
        ("redis+cluster://directory.example?databse=1", "unexpected keyword argument 'databse'"),
        ("redis+cluster://directory.example?db=1", "'db'"),
        ("rediss://directory.example?ssl_cert_reqs=perhaps", "perhaps"),
    ],
)
def test_a_directory_that_cannot_be_meant_is_refused_and_no_secret_is_repeated(url, why):
    with pytest.raises(Usage, match=why) as refused:
        mesh(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "reached_as", "why"),
    [
        ("0.0.0.0", None, "--reached-as moqt://HOST:PORT"),
        ("::", None, "--reached-as moqt://HOST:PORT"),
        ("0.0.0.0", "moqt://0.0.0.0:4443", "nobody can dial"),
        ("0.0.0.0", "moqt://127.0.0.1:4443", "from this machine alone"),
        ("10.0.0.7", "moqt://localhost:4443", "from this machine alone"),
        ("10.0.0.7", "moqt://relay.example:4443/tenant", "has no path"),
        ("10.0.0.7", "relay.example:4443", "must begin with"),
    ],
)
def test_an_address_under_which_no_relay_is_reached_is_refused(host, reached_as, why):
    with pytest.raises(Usage, match=why):
        mesh("redis://directory.example", host, reached_as=reached_as)


def test_a_mesh_is_dialled_with_its_own_token_and_reached_where_it_listens_or_as_is_said(tmp_path):
    token, password = tmp_path / "token", tmp_path / "password"
    for path in (token, password):
        path.touch(mode=0o600)
    token.write_text("t" * 32 + "\n")
    password.write_text("pass\n")
    found = mesh("redis://directory.example", token_file=token, password_file=password)
    assert found.password == "pass" and found.reached_as is None
    assert b"t" * 32 in found.session.setup_tokens[0]
    assert "pass" not in repr(found) and "directory.example" not in repr(found)
    named = mesh("redis://directory.example", "0.0.0.0", reached_as="moqt://relay.example:4443")
    assert named.reached_as == "moqt://relay.example:4443"


def test_an_authority_for_a_server_without_tls_is_refused(tmp_path):
    with pytest.raises(Usage, match="rediss://"):
        mesh("redis://directory.example", directory_cafile=tmp_path / "ca.pem")
