"""The file of principals: one judgement of each file, by a relay and by a KVSP service."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsp.http.auth import Credentials, PrincipalsFile
from kvsp.names.errors import FileError
from kvsp.principals import (
    EVERY_SCOPE,
    MAX_FILE_OCTETS,
    MAX_PRINCIPALS,
    READ,
    RIGHTS,
    ROLES,
    WRITE,
    Principal,
    Principals,
    PrincipalsFileError,
    Right,
    load_principals,
    load_token,
    new_token,
    principal_entry,
    principals_version,
    principals_with,
    save_token,
    token_digest,
)
from kvsp.records.problems import Problem
from relay.rights.policy import Action
from relay.rights.tokens import TokenPolicy
from tests.relay.star import Star

SCOPE, OTHER = bytes(range(16)), b"\x01" * 16
NAMESPACE = (b"kvcs-1", SCOPE, b"compat")
URI = "https://h1.example/kvsp/"
TOKEN = "h1-" + "0123456789" * 4
DIGEST = token_digest(TOKEN).hex()
H1 = Principal(
    "h1",
    roles=frozenset({"holder"}),
    uris=frozenset({URI}),
    scopes={SCOPE.hex(): frozenset({READ})},
)
ENTRY = principal_entry(H1, [TOKEN])
AT_0 = "{path}: principals[0]"


def text(*entries: Any) -> bytes:
    return json.dumps({"principals": entries}).encode()


def but(**members: Any) -> bytes:
    """A file whose one entry differs from a good one in these members."""
    return text(ENTRY | members)


GOOD = text(ENTRY)


def pair(**members: Any) -> bytes:
    """Two entries that have nothing in common but these members."""
    return text(*({"principal": name, **members} for name in "ab"))


def written(data: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)
        path.chmod(mode)

    return write


def linked(mode: int) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        written(GOOD, mode)(path.with_name("secret"))
        path.symlink_to("secret")

    return link


NO_JSON = "{path}: is no JSON as RFC 7493 has it: "
RIGHTS_ARE = AT_0 + ': rights are "read" and "write", in an array'
NO_DIGEST = AT_0 + ": a token's SHA-256 is not 64 lower-case hex digits"
NO_SCOPE = AT_0 + ': a scope is neither "*" nor 32 lower-case hex digits'
ABSOLUTE = AT_0 + ': "uris" and "publishes_for" hold absolute URIs'
NO_NAME = AT_0 + ' has no "principal", which is its name'
OTHERS_WRITE = "{path}: others than its owner may write it; run: chmod go-w {path}"

REFUSED: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
    # JSON
    "empty": (b"", NO_JSON + "Expecting value at character 0"),
    "cut short": (GOOD[:-1], NO_JSON),
    "two texts": (GOOD * 2, NO_JSON + "Extra data"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD, NO_JSON + "the text starts with a byte order"),
    "UTF-16": (GOOD.decode().encode("utf-16"), NO_JSON + "octet 0 is not UTF-8"),
    "not UTF-8": (GOOD.replace(b"h1", b"\xff1"), NO_JSON),
    "a lone surrogate": (but(principal="\udc00"), NO_JSON),
    "no number": (but(note=float("nan")), NO_JSON + "NaN is not a JSON number"),
    "an integer beyond 2^53": (but(note=2**53), NO_JSON + "an integer is beyond 2^53-1"),
    "nested without end": (b"[" * 100_000, NO_JSON + "nested deeper"),
    "a member twice": (
        GOOD.replace(b'{"principal":', b'{"principal": "nobody", "principal":'),
        NO_JSON + "member 'principal' is given twice",
    ),
    "a scope twice": (
        GOOD.replace(b'"scopes": {', f'"scopes": {{"{SCOPE.hex()}": ["write"], '.encode()),
        NO_JSON + f"member '{SCOPE.hex()}' is given twice",
    ),
    # the list
    "a list at the top": (json.dumps([ENTRY]).encode(), '{path}: has no array "principals"'),
    "nothing": (b"null", '{path}: has no array "principals"'),
    "no principals": (b"{}", '{path}: has no array "principals"'),
    "principals null": (b'{"principals": null}', '{path}: has no array "principals"'),
    "principals an object": (b'{"principals": {}}', '{path}: has no array "principals"'),
    "5,000 entries": (
        text(*({"principal": str(number)} for number in range(5000))),
        "{path}: has more than 4096 principals",
    ),
    "an entry null": (text(None), AT_0 + " is no object"),
    "the second entry a number": (text(ENTRY, 1), "{path}: principals[1] is no object"),
    # an entry
    "no name": (text({}), NO_NAME),
    "an empty name": (but(principal=""), NO_NAME),
    "a name that is a number": (but(principal=1), NO_NAME),
    "a name null": (but(principal=None), NO_NAME),
    "tokens null": (but(tokens=None), AT_0 + ': "tokens" is no array'),
    "tokens a string": (but(tokens=DIGEST), AT_0 + ': "tokens" is no array'),
    "a token null": (but(tokens=[None]), AT_0 + ': "tokens" holds what is no string'),
    "a digest cut short": (but(tokens=[DIGEST[:-2]]), NO_DIGEST),
    "a digest too long": (but(tokens=[DIGEST + "00"]), NO_DIGEST),
    "a digest in upper case": (but(tokens=[DIGEST.upper()]), NO_DIGEST),
    "a digest with spaces": (but(tokens=[DIGEST[:-2] + " 0"]), NO_DIGEST),
    "the token itself": (but(tokens=[TOKEN]), NO_DIGEST),
    "scopes null": (but(scopes=None), AT_0 + ' has no object "scopes"'),
    "scopes an array": (but(scopes=[SCOPE.hex()]), AT_0 + ' has no object "scopes"'),
    "a scope cut short": (but(scopes={"00": ["read"]}), NO_SCOPE),
    "a scope in upper case": (but(scopes={"AB" * 16: ["read"]}), NO_SCOPE),
    "a scope without name": (but(scopes={"": ["read"]}), NO_SCOPE),
    "rights null": (but(scopes={"*": None}), RIGHTS_ARE),
    "rights an object": (but(scopes={"*": {"read": False}}), RIGHTS_ARE),
    "rights a string": (but(scopes={"*": "read"}), RIGHTS_ARE),
    "rights a number": (but(scopes={"*": 7}), RIGHTS_ARE),
    "a right null": (but(scopes={"*": ["read", None]}), RIGHTS_ARE),
    "a right in an array": (but(scopes={"*": [["read"]]}), RIGHTS_ARE),
    "a right unknown": (but(scopes={"*": ["read", "admin"]}), RIGHTS_ARE),
    "a right in upper case": (but(scopes={"*": ["READ"]}), RIGHTS_ARE),
    "models null": (but(models=None), AT_0 + ': "models" is no object of names of models'),
    "models an array": (but(models=["m"]), AT_0 + ': "models" is no object of names of models'),
    "a model without name": (
        but(models={"": ["read"]}),
        AT_0 + ': "models" is no object of names of models',
    ),
    "a right of a model unknown": (but(models={"m": ["admin"]}), RIGHTS_ARE),
    "roles null": (but(roles=None), AT_0 + ': "roles" is no array'),
    "roles a string": (but(roles="holder"), AT_0 + ': "roles" is no array'),
    "a role unknown": (
        but(roles=["root"]),
        AT_0
        + ": the role 'root' is none of cats, holder, index, instance, operator, placement, relay",
    ),
    "uris null": (but(uris=None), AT_0 + ': "uris" is no array'),
    "a uri null": (but(uris=[None]), AT_0 + ': "uris" holds what is no string'),
    "every uri": (but(uris=["*"]), ABSOLUTE),
    "publishes_for null": (but(publishes_for=None), AT_0 + ': "publishes_for" is no array'),
    "publishes_for everybody": (but(publishes_for=["*"]), ABSOLUTE),
    # between entries
    "a name twice": (
        text({"principal": "a"}, {"principal": "b"}, {"principal": "a"}),
        "{path}: principals[2]: the principal 'a' is given twice, first in principals[0]",
    ),
    "a digest in two entries": (
        pair(tokens=[DIGEST]),
        "{path}: principals[1]: the same token is given twice, first in principals[0]",
    ),
    "a digest twice in one entry": (
        but(tokens=[DIGEST, DIGEST]),
        AT_0 + ": the same token is given twice, first in principals[0]",
    ),
    "a uri in two entries": (
        pair(uris=[URI]),
        "{path}: principals[1]: the URI '" + URI + "' is given twice, first in principals[0]",
    ),
    # the file
    "larger than the limit": (
        GOOD + b" " * (MAX_FILE_OCTETS + 1 - len(GOOD)),
        "{path}: larger than 4194304 octets",
    ),
    "writable by its group": (written(GOOD, 0o620), OTHERS_WRITE),
    "writable by everybody": (written(GOOD, 0o606), OTHERS_WRITE),
    "a link to what others may write": (linked(0o666), OTHERS_WRITE),
    "a link to nothing": (lambda path: path.symlink_to("none"), "{path}: No such file"),
    "no file": (lambda path: None, "{path}: No such file or directory"),
    "a folder": (lambda path: path.mkdir(), "{path}: Is a directory"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "{path}: not a regular file"),
}

TAKEN: dict[str, bytes | Callable[[Path], None]] = {
    "an unknown member": but(note={"of": "anything"}, scope={"*": ["write"]}),
    "an unknown member at the top": GOOD[:-1] + b', "version": 2}',
    "a right twice": but(scopes={SCOPE.hex(): ["read", "read"]}),
    "a role and a uri twice": but(roles=["holder"] * 2, uris=[URI] * 2),
    "as many as there may be": text(
        ENTRY, *({"principal": str(number)} for number in range(MAX_PRINCIPALS - 1))
    ),
    "as large as it may be": GOOD + b" " * (MAX_FILE_OCTETS - len(GOOD)),
    "readable by everybody": written(GOOD, 0o644),
    "nobody may write it": written(GOOD, 0o400),
    "a link": linked(0o600),
}


def put(made: bytes | Callable[[Path], None], path: Path) -> None:
    make = written(made) if isinstance(made, bytes) else made
    make(path)


def at_service(principals: PrincipalsFile) -> Principal:
    return principals.authenticate(Credentials(authorization=f"Bearer {TOKEN}"))


def at_relay(policy: TokenPolicy, action: Action = Action.FETCH) -> bool:
    session = Star().connect().server
    return policy.allow(session, action, NAMESPACE, ((0, TOKEN.encode()),))


@pytest.mark.parametrize("name", REFUSED)
def test_a_relay_and_a_service_refuse_an_odd_file_with_the_same_words(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, words = REFUSED[name]
    path = tmp_path / "principals.json"
    words = words.format(path=path)
    # while they run
    put(GOOD, path)
    service, relay = PrincipalsFile(path), TokenPolicy(path)
    assert at_service(service) == H1 and at_relay(relay)
    path.unlink()
    put(made, path)
    with caplog.at_level(logging.ERROR):
        with pytest.raises(Problem) as problem:
            at_service(service)
        assert problem.value.status == 503
        assert not relay.reload() and not at_relay(relay)
    logged = [record.getMessage() for record in caplog.records]
    at_the_service = logged[0].removesuffix("; requests are refused with 503 until that is mended")
    at_the_relay = logged[1].removesuffix("; new requests are denied until that is mended")
    assert at_the_service == at_the_relay and at_the_service.startswith(words)
    assert len(logged) == 2
    # at the start
    for program in (PrincipalsFile, TokenPolicy, load_principals):
        with pytest.raises(PrincipalsFileError) as refused:
            program(path)
        assert str(refused.value) == at_the_service
    # and what is not to be known, or is of no use, is not said
    assert TOKEN not in at_the_service and DIGEST not in at_the_service.lower()
    assert len(at_the_service) < 500 and "\n" not in at_the_service


@pytest.mark.parametrize("name", TAKEN)
def test_a_relay_and_a_service_take_an_odd_file_to_mean_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    put(TAKEN[name], path)
    assert at_service(PrincipalsFile(path)) == H1
    relay = TokenPolicy(path)
    assert at_relay(relay) and not at_relay(relay, Action.PUBLISH)


def test_a_long_wrong_value_is_not_repeated_whole(tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    for data in (
        text({"principal": "x" * 99_999}, {"principal": "x" * 99_999}),
        but(roles=["x" * 99_999]),
        pair(uris=["https://" + "x" * 99_999]),
        GOOD.replace(b'"principal":', b'"%s": 1, "%s":' % ((b"x" * 99_999,) * 2)),
    ):
        put(data, path)
        with pytest.raises(PrincipalsFileError) as error:
            load_principals(path)
        assert len(str(error.value)) < 500


# --- principals ----------------------------------------------------------------------


def test_rights_are_per_scope_and_a_star_is_every_scope() -> None:
    assert H1.may(SCOPE, READ) and not H1.may(SCOPE, WRITE) and not H1.may(OTHER, READ)
    everywhere = Principal("x", scopes={EVERY_SCOPE: frozenset({WRITE})})
    assert everywhere.may(OTHER, WRITE) and not everywhere.may(OTHER, READ)
    assert everywhere.may(None, WRITE) and not everywhere.may(None, READ)
    assert not H1.may(None, READ), "one scope is not all of them"
    for call in (
        lambda: H1.require(OTHER, READ),
        lambda: H1.require_any_scope(WRITE),
        lambda: H1.require_role("operator"),
        lambda: H1.require_uri("https://h2.example/kvsp/"),
        lambda: H1.require_holder("moqt://relay.example/"),
    ):
        with pytest.raises(Problem) as caught:
            call()
        assert caught.value.status == 403
    H1.require_uri(URI)
    H1.require_holder(URI)
    H1.require_any_scope(READ)
    Principal("p", publishes_for=frozenset({URI})).require_holder(URI)


def test_a_principal_is_found_by_any_of_its_tokens_and_any_of_its_uris() -> None:
    h2 = Principal("h2", uris=frozenset({"https://h2.example/", "moqt://h2.example/"}))
    known = Principals([(H1, [token_digest("a"), token_digest("b")]), (h2, [token_digest("c")])])
    assert [known.by_token(token) for token in (b"a", b"b", b"c", b"d")] == [H1, H1, h2, None]
    assert known.by_uri(URI) == H1 and known.by_uri("moqt://h2.example/") == h2
    assert known.by_uri("https://h3.example/") is None
    assert [*known] == [H1, h2] and len(known) == 2 and not Principals()


def test_nobody_is_found_by_the_digest_that_the_file_shows(tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    put(GOOD, path)
    known = load_principals(path)
    assert known.by_token(TOKEN.encode()) == H1
    assert known.by_token(DIGEST.encode()) is None
    assert known.by_token(bytes.fromhex(DIGEST)) is None


# --- tokens --------------------------------------------------------------------------


def test_a_token_has_at_least_128_random_bits() -> None:
    assert len({new_token() for _ in range(64)}) == 64
    assert len(new_token()) * 6 >= 128


def test_digests_are_sha_256() -> None:
    assert token_digest("").hex().startswith("e3b0c442")
    assert token_digest(b"") == token_digest("")


def test_a_token_file_is_made_once_for_its_owner_only_and_read_back(tmp_path: Path) -> None:
    path, token = tmp_path / "token", new_token()
    save_token(path, token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_token(path) == token
    with pytest.raises(FileError, match="exists already"):
        save_token(path, new_token())
    assert load_token(path) == token
    path.chmod(0o640)
    with pytest.raises(FileError, match="chmod 600"):
        load_token(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words", b"two\nlines", b"\xff" * 30, b"x" * 1001, b"x" * 5000]
)
def test_a_token_file_holds_one_token_and_its_content_is_never_said(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(FileError) as error:
        load_token(path)
    assert str(error.value).startswith(f"{path}: ")
    assert not content.strip() or content.decode("latin-1") not in str(error.value)


# --- writing -------------------------------------------------------------------------


def test_what_is_written_is_read_as_the_same(tmp_path: Path) -> None:
    everything = Principal(
        "all",
        roles=ROLES,
        uris=frozenset({"https://a.example/kvsp/"}),
        publishes_for=frozenset({"moqt://relay.example/"}),
        scopes={EVERY_SCOPE: RIGHTS, SCOPE.hex(): frozenset({Right.READ})},
    )
    path = tmp_path / "principals.json"
    put(principals_with(path, ENTRY), path)
    put(principals_with(path, principal_entry(everything, ["x", "y"])), path)
    assert [*load_principals(path)] == [H1, everything]
    assert load_principals(path).by_token(b"y") == everything


def test_what_no_program_would_take_is_not_added(tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    put(GOOD, path)
    with pytest.raises(PrincipalsFileError, match=r"with the new record: principals\[1\]: .*'h1'"):
        principals_with(path, ENTRY)
    with pytest.raises(PrincipalsFileError, match=r"the record: principals\[0\]"):
        principals_with(None, ENTRY | {"roles": ["root"]})
    put(b"\xef\xbb\xbf" + GOOD, path)
    with pytest.raises(PrincipalsFileError, match="byte order mark"):
        principals_with(path, {"principal": "h2"})


def test_what_is_not_known_to_us_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    put(but(note="of the operator")[:-1] + b', "version": 2}', path)
    tree = json.loads(principals_with(path, {"principal": "h2"}))
    assert tree["version"] == 2 and tree["principals"][0]["note"] == "of the operator"


def test_a_change_of_the_file_or_of_who_may_write_it_is_another_version(tmp_path: Path) -> None:
    path = tmp_path / "principals.json"
    assert principals_version(path) == ()
    put(GOOD, path)
    before = principals_version(path)
    assert before == principals_version(path) != ()
    os.utime(path, ns=(0, 0))
    assert (changed := principals_version(path)) != before
    (tmp_path / "new").write_bytes(GOOD)
    os.replace(tmp_path / "new", path)
    assert principals_version(path) != changed
