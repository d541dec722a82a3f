"""Names, prefixes and limits (MOQT "Track Naming", "Reason Phrase Structure", "GOAWAY")."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.session.prefixes import Prefixes
from moqt.track.store import TrackStore
from moqt.values.messages import Goaway, PublishDone, Subscribe
from moqt.values.names import FullTrackName, is_prefix, is_reserved, printable_name
from moqt.wire.codec import codec_for
from tests.moqt.memory import ALPN

CODEC = codec_for(ALPN)


def overlap(first, second):
    """Whether a session takes no request for `second` beside one for `first`."""
    prefixes = Prefixes()
    assert prefixes.claim(1, first)
    return not prefixes.claim(2, second)


@pytest.mark.parametrize(
    ("prefix", "namespace", "matches"),
    [
        ((), (), True),
        ((), (b"foo", b"bar"), True),
        ((b"foo",), (b"foo",), True),
        ((b"foo",), (b"foo", b"bar"), True),
        ((b"foo",), (b"foobar",), False),
        ((b"foo", b"bar"), (b"foo",), False),
        ((b"foo", b"b"), (b"foo", b"bar"), False),
    ],
)
def test_a_prefix_matches_field_by_field(prefix, namespace, matches):
    assert is_prefix(prefix, namespace) is matches
    assert overlap(prefix, namespace) is (matches or is_prefix(namespace, prefix))


def test_two_prefixes_overlap_when_one_matches_the_other():
    assert overlap((b"a",), (b"a", b"b")) and overlap((b"a", b"b"), (b"a",))
    assert not overlap((b"a", b"b"), (b"a", b"c"))


@pytest.mark.parametrize(
    ("first", "reserved"),
    [(b".", True), (b".session", True), (b".sessions", False), (b".x", False), (b"a", False)],
)
def test_only_the_namespaces_of_the_implementation_itself_are_kept_from_the_application(
    first, reserved
):
    assert is_reserved((first, b"x")) is reserved


@pytest.mark.parametrize(
    ("namespace", "name", "text"),
    [
        ((b"example.net", b"team2", b"project_x"), b"report",
         "example.2enet-team2-project_x--report"),
        ((), b"", "--"),
        ((b"A-b",), b"\x00\xff.", "A.2db--.00.ff.2e"),
    ],
)  # fmt: skip
def test_a_name_is_shown_with_a_dot_and_two_lower_case_hex_digits_for_other_octets(
    namespace, name, text
):
    assert printable_name(namespace, name) == str(FullTrackName(namespace, name)) == text


def test_different_names_are_shown_differently():
    names = [((b"a", b"b"), b"c"), ((b"a-b",), b"c"), ((b"a",), b"b--c"), ((b"a.2db",), b"c")]
    assert len({printable_name(*each) for each in names}) == len(names)


@pytest.mark.parametrize(
    "message",
    [
        Subscribe(0, (b"x",) * 32, b""),
        Subscribe(0, (), bytes(4096)),
        Subscribe(0, (bytes(4000), bytes(90)), bytes(6)),
        Subscribe(0, (), b""),
        PublishDone(0, 0, "x" * 1024),
        Goaway("x" * 8192),
    ],
    ids=lambda message: message.TYPE.name,
)
def test_what_is_exactly_as_long_as_allowed_is_taken(message):
    assert CODEC.message_decoder().feed(CODEC.encode_message(message)) == [message]


def test_names_are_equal_by_their_octets_alone():
    publisher = Publisher()
    composed, decomposed = "é".encode(), "e\u0301".encode()
    publisher.add_track(TrackStore(FullTrackName((composed, b"a"), b"")))
    for other in ((decomposed, b"a"), (composed, b"A"), (composed, b"a ")):
        assert FullTrackName(other, b"") not in publisher.tracks
