"""`kvcs-keygen`: a scope file is made once, for its owner only."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcs.trust.producers import ProducerKey, Producers
from kvsp.http.auth import Credentials, PrincipalsFile
from kvsp.names.errors import FileError
from kvsp.names.identity import Scope
from kvsp.names.private_files import changing, replace_private
from kvsp.principals import READ, ROLES, WRITE, load_principals, save_token
from moqt.token_file import read_token_file
from relay.rights.policy import Action
from relay.rights.tokens import TokenPolicy
from tests.paths import ROOT
from tests.relay.star import Star


def keygen(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcs.programs.keygen", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )


def test_a_scope_file_is_made_and_its_scope_id_printed(tmp_path: Path) -> None:
    done = keygen("scope", "scope.json", folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    path = tmp_path / "scope.json"
    scope = Scope.load(path)
    assert done.stdout == scope.scope_id.hex() + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_file_is_kept_and_the_failure_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "scope.json"
    path.write_text("dear")
    done = keygen("scope", str(path), folder=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "scope.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_text() == "dear"
    assert keygen("scope", "absent/scope.json", folder=tmp_path).returncode == 1


def test_a_token_file_is_made_and_its_record_holds_no_secret(tmp_path: Path) -> None:
    scope_id = keygen("scope", "scope.json", folder=tmp_path).stdout.strip()
    done = keygen("token", "t", "--scope-key-file", "scope.json", folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    token = read_token_file(tmp_path / "t")
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600 and len(token) == 43
    assert json.loads(done.stdout) == {
        "principal": "t",
        "uris": [],
        "roles": [],
        "scopes": {scope_id: ["read", "write"]},
        "tokens": [hashlib.sha256(token).hexdigest()],
    }
    assert token.decode() not in done.stdout
    again = keygen("token", "t", "--every-scope", folder=tmp_path)
    assert again.returncode == 1 and read_token_file(tmp_path / "t") == token


def test_relay_and_kvsp_services_read_the_same_file_of_principals(tmp_path: Path) -> None:
    holder = "https://h1.example/kvsp/"
    options = ("--every-scope", "--principals", "p.json", "--role", "instance", "--uri", holder)
    assert keygen("token", "t", *options, folder=tmp_path).returncode == 0
    token = read_token_file(tmp_path / "t")
    policy = TokenPolicy(tmp_path / "p.json")
    session = Star().connect().server
    for action in Action:
        assert policy.allow(session, action, (b"anything",), ((0, token),))
    principals = PrincipalsFile(tmp_path / "p.json")
    principal = principals.authenticate(Credentials(authorization=f"Bearer {token.decode()}"))
    assert principal.name == "t" and principal.may(bytes(16), "write")
    assert principal.roles == {"instance"} and principal.uris == {holder}


def test_a_token_for_models_gives_no_right_in_any_scope(tmp_path: Path) -> None:
    options = ("--model", "m", "--model", "n", "--read-only", "--principals", "p.json")
    assert keygen("token", "t", *options, folder=tmp_path).returncode == 0
    (record,) = json.loads((tmp_path / "p.json").read_text())["principals"]
    assert record["scopes"] == {} and record["models"] == {"m": ["read"], "n": ["read"]}
    (principal,) = load_principals(tmp_path / "p.json")
    assert principal.may_of_model("n", READ) and not principal.may(bytes(16), READ)
    assert not principal.may_of_model("o", READ) and not principal.may_of_model("n", WRITE)
    both = keygen("token", "u", "--model", "m", "--every-scope", folder=tmp_path)
    assert both.returncode == 2 and not (tmp_path / "u").exists()


def test_records_are_appended_to_a_file_of_principals(tmp_path: Path) -> None:
    for name in ("one", "two"):
        options = ("--every-scope", "--read-only", "--principals", "p.json")
        done = keygen("token", name, *options, "--principal", name.upper(), folder=tmp_path)
        assert done.returncode == 0 and done.stdout == "", done.stderr
    records = json.loads((tmp_path / "p.json").read_text())["principals"]
    assert [each["principal"] for each in records] == ["ONE", "TWO"]
    assert all(each["scopes"] == {"*": ["read"]} for each in records)
    assert load_principals(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("[]")
    refused = keygen("token", "three", *options, folder=tmp_path)
    assert refused.returncode == 2 and "p.json" in refused.stderr
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--role", "controller"), f"'controller' is none of {', '.join(sorted(ROLES))}"),
        (("--uri", "nonsense"), "for example https://h1.example/kvsp/"),
        (("--uri", "https://h2.example/kvsp"), "ends in /"),
        (("--principal", "h1"), "the principal 'h1' is given twice"),
        (("--uri", "https://h1.example/kvsp/"), "the URI 'https://h1.example/kvsp/' is given"),
    ],
)
def test_what_a_service_would_refuse_is_not_written_and_what_is_right_is_said(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    common = ("--every-scope", "--principals", "p.json")
    first = keygen(
        *("token", "h1", *common, "--role", "holder", "--uri", "https://h1.example/kvsp/"),
        folder=tmp_path,
    )
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "p.json").read_bytes()
    refused = keygen("token", "h2", *common, *options, folder=tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and said in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"h1", "p.json"}
    assert (tmp_path / "p.json").read_bytes() == before
    PrincipalsFile(tmp_path / "p.json")


def test_a_role_that_no_service_has_is_refused_when_the_record_is_printed_too(
    tmp_path: Path,
) -> None:
    refused = keygen("token", "t", "--every-scope", "--role", "controller", folder=tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert not list(tmp_path.iterdir())


def test_every_role_is_listed_in_the_help_and_the_docs() -> None:
    text = " ".join(keygen("token", "--help", folder=ROOT).stdout.replace("│", " ").split())
    page = (ROOT / "docs" / "kvsp.md").read_text().partition("The roles are")[2].partition(";")[0]
    for role in ROLES:
        assert f"{role}," in text or f"{role} (" in text
        assert f"`{role}`" in page


def test_a_file_of_principals_that_others_may_write_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"principals": []}')
    path.chmod(0o664)
    refused = keygen("token", "t", "--every-scope", "--principals", str(path), folder=tmp_path)
    assert refused.returncode == 2 and f"chmod go-w {path}" in refused.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_after_a_failure_so_that_the_next_try_works(tmp_path: Path) -> None:
    options = ("token", "x.token", "--every-scope", "--principals")
    failed = keygen(*options, "nodir/p.json", folder=tmp_path)
    assert failed.returncode == 1 and "nodir/p.json" in failed.stderr
    assert not list(tmp_path.iterdir())
    same = keygen(*options, "x.token", folder=tmp_path)
    assert same.returncode == 2 and "different files" in same.stderr
    assert not list(tmp_path.iterdir())
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvcs.programs.keygen", *options[:3]]
        printed = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
        )
    assert printed.returncode == 1 and "No space left" in printed.stderr
    assert "Traceback" not in printed.stderr
    assert not list(tmp_path.iterdir())
    assert keygen(*options, "p.json", folder=tmp_path).returncode == 0


def test_a_token_file_that_cannot_be_written_whole_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        save_token(tmp_path / "t", "secret")
    with pytest.raises(FileError, match="No space left"):
        replace_private(tmp_path / "p.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_wrong_usage_has_exit_code_2(tmp_path: Path) -> None:
    for arguments in (
        (),
        ("scope",),
        ("scope", "a", "b"),
        ("token", "t"),
        ("other",),
        ("--other",),
    ):
        assert keygen(*arguments, folder=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_help_works_as_typed(tmp_path: Path) -> None:
    for arguments in (("--help",), ("scope", "--help")):
        text = keygen(*arguments, folder=tmp_path).stdout
        example = text.partition("Example:")[2].strip().splitlines()[0]
        program, *rest = example.split()
        assert program == "kvcs-keygen"
        done = keygen(*rest, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        (tmp_path / rest[-1]).unlink()
    keygen("scope", "scope.json", folder=tmp_path)
    text = keygen("token", "--help", folder=tmp_path).stdout
    program, *rest = text.partition("Example:")[2].split()
    assert program == "kvcs-keygen" and keygen(*rest, folder=tmp_path).returncode == 0
    assert {p.name for p in tmp_path.iterdir()} == {"scope.json", "token.txt", "principals.json"}


# --- content keys and producers ---------------------------------------------------------


def secrets_of(path: Path) -> list[str]:
    """Every secret that a key file holds, hexadecimal."""
    tree = json.loads(path.read_text())
    keys = [each["key"] for each in tree.get("content_keys", [])]
    return [*keys, *(tree[name] for name in ("scope_key", "d") if name in tree)]


@pytest.mark.parametrize(
    "option, suite",
    [
        ([], 4),
        (["--cipher-suite", "aes-256-gcm"], 5),
        (["--cipher-suite", "aes-128-ctr-hmac-80"], 1),
        (["--cipher-suite", "aes-128-ctr-hmac-64"], 2),
    ],
)
def test_a_scope_is_made_with_a_content_key_of_its_own(
    tmp_path: Path, option: list[str], suite: int
) -> None:
    done = keygen("scope", "s.json", "--content-key", *option, folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    scope = Scope.load(tmp_path / "s.json", sealing=True)
    ((key_id, cipher_suite, key),) = [
        (key.key_id, key.cipher_suite, key.key) for key in scope.content_keys
    ]
    assert (key_id, cipher_suite, len(key)) == (0, suite, 32)
    assert not any(secret in done.stdout for secret in secrets_of(tmp_path / "s.json"))
    assert len(set(secrets_of(tmp_path / "s.json"))) == 2


def test_rotating_prints_the_key_id_and_keeps_the_keys_before(tmp_path: Path) -> None:
    assert keygen("scope", "s.json", "--content-key", folder=tmp_path).returncode == 0
    before = secrets_of(tmp_path / "s.json")
    done = keygen("rotate", "s.json", folder=tmp_path)
    assert done.returncode == 0 and done.stdout == f"{1 << 32}\n" and done.stderr == ""
    after = secrets_of(tmp_path / "s.json")
    assert set(before) < set(after) and len(after) == len(before) + 1
    assert stat.S_IMODE((tmp_path / "s.json").stat().st_mode) == 0o600
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "no.json").chmod(0o600)
    for name in ("absent.json", "no.json"):
        failed = keygen("rotate", name, folder=tmp_path)
        assert failed.returncode == 2 and failed.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["rotate", "producer", "token"])
def test_who_changes_one_file_at_the_same_time_loses_nothing(tmp_path: Path, what: str) -> None:
    assert keygen("scope", "s.json", "--content-key", folder=tmp_path).returncode == 0
    at_once = 4
    arguments = {
        "rotate": lambda n: ("s.json",),
        "producer": lambda n: (f"{n}.json", "--producers", "list.json"),
        "token": lambda n: (f"{n}.txt", "--every-scope", "--principals", "list.json"),
    }[what]
    with changing(tmp_path / "any"):
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "kvcs.programs.keygen", what, *arguments(n)], cwd=tmp_path
            )
            for n in range(at_once)
        ]
        # each has read by now what it would write anew, if it had not to wait
        time.sleep(1.0)
        assert {each.poll() for each in started} == {None}
    assert {each.wait(30) for each in started} == {0}
    if what == "rotate":
        assert len(Scope.load(tmp_path / "s.json", sealing=True).content_keys) == 1 + at_once
    elif what == "producer":
        assert len(Producers.load(tmp_path / "list.json")) == at_once
    else:
        assert len(json.loads((tmp_path / "list.json").read_text())["principals"]) == at_once


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256"])
def test_a_producer_has_a_private_key_and_others_its_public_half(
    tmp_path: Path, algorithm: str
) -> None:
    done = keygen("producer", "p.json", "--alg", algorithm, "--kid", "6b6964", folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    path = tmp_path / "p.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(done.stdout) == ProducerKey.load(path).public
    assert json.loads(done.stdout)["kid"] == "6b6964"
    (secret,) = secrets_of(path)
    assert secret not in done.stdout


def test_producers_are_appended_to_one_file_and_nothing_is_left_of_a_failure(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        at = ("producer", f"{name}.json", "--producers", "list.json")
        assert keygen(*at, folder=tmp_path).returncode == 0
    assert len(Producers.load(tmp_path / "list.json")) == 2
    kid = ProducerKey.load(tmp_path / "a.json").kid.hex()
    for arguments, code in (
        (("c.json", "--kid", kid, "--producers", "list.json"), 2),
        (("c.json", "--kid", "6B"), 2),
        (("c.json", "--kid", ""), 2),
        (("c.json", "--producers", "c.json"), 2),
        (("c.json", "--producers", "absent/list.json"), 1),
        (("a.json",), 1),
    ):
        failed = keygen("producer", *arguments, folder=tmp_path)
        assert failed.returncode == code and failed.stderr.count("\n") == 1, failed
        assert not (tmp_path / "c.json").exists()
    assert len(Producers.load(tmp_path / "list.json")) == 2
