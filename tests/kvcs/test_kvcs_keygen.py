"""`kvcs-keygen`: a scope file is made once, for its owner only."""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
import sys
from pathlib import Path

from kvsp.http.auth import Credentials, PrincipalsFile
from kvsp.identity import Scope
from moqt.token_file import read_token_file
from relay.auth import load_principals


def keygen(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcs.cli.keygen", *arguments],
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
    (at_relay,) = load_principals(tmp_path / "p.json")
    assert at_relay.digests == (hashlib.sha256(token).digest(),)
    principals = PrincipalsFile(tmp_path / "p.json")
    principal = principals.authenticate(Credentials(authorization=f"Bearer {token.decode()}"))
    assert principal.name == "t" and principal.may(bytes(16), "write")
    assert principal.roles == {"instance"} and principal.uris == {holder}


def test_records_are_appended_to_a_file_of_principals(tmp_path: Path) -> None:
    for name in ("one", "two"):
        options = ("--every-scope", "--read-only", "--principals", "p.json")
        done = keygen("token", name, *options, "--principal", name.upper(), folder=tmp_path)
        assert done.returncode == 0 and done.stdout == "", done.stderr
    records = json.loads((tmp_path / "p.json").read_text())["principals"]
    assert [each["principal"] for each in records] == ["ONE", "TWO"]
    assert all(each["scopes"] == {"*": ["read"]} for each in records)
    (tmp_path / "p.json").write_text("[]")
    refused = keygen("token", "three", *options, folder=tmp_path)
    assert refused.returncode == 1 and "p.json" in refused.stderr
    assert not (tmp_path / "three").exists()


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
