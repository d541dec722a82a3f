"""Principals, tokens and certificates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvsp.http.auth import Credentials, LoopbackOnly, PrincipalsFile, developer_token
from kvsp.principals import (
    READ,
    WRITE,
    Principal,
    new_token,
    principal_entry,
)
from kvsp.records.problems import Problem

SCOPE = bytes(16)
OTHER = b"\x01" * 16
URI = "https://h1.example/kvsp/"
H1 = Principal(
    "h1",
    roles=frozenset({"holder"}),
    uris=frozenset({URI}),
    scopes={SCOPE.hex(): frozenset({READ})},
)


def write(path: Path, entries: Any, mode: int = 0o600) -> Path:
    path.write_text(json.dumps({"principals": entries}))
    path.chmod(mode)
    return path


def bearer(token: str, **more: Any) -> Credentials:
    return Credentials(authorization=f"Bearer {token}", **more)


def refusal(authenticator: Any, credentials: Credentials) -> Problem:
    with pytest.raises(Problem) as caught:
        authenticator.authenticate(credentials)
    return caught.value


def test_a_token_leads_to_its_principal_and_the_file_holds_only_its_digest(tmp_path: Path) -> None:
    token = new_token()
    path = write(tmp_path / "principals", [principal_entry(H1, [token])])
    assert token not in path.read_text()
    assert PrincipalsFile(path).authenticate(bearer(token)) == H1


@pytest.mark.parametrize(
    "field",
    ["Bearer nonsense", "Basic aDE6aDE=", "Bearer", "Bearer a b", "", "Bearer " + "a" * 5000],
)
def test_a_bad_credential_is_401_with_invalid_token(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "principals", [principal_entry(H1, [new_token()])])
    problem = refusal(PrincipalsFile(path), Credentials(authorization=field))
    assert problem.status == 401
    assert problem.headers["WWW-Authenticate"] == 'Bearer realm="kvsp", error="invalid_token"'


def test_no_credential_is_401_without_an_error_code(tmp_path: Path) -> None:
    path = write(tmp_path / "principals", [])
    problem = refusal(PrincipalsFile(path, loopback_developer=True), Credentials())
    assert problem.status == 401
    assert problem.headers["WWW-Authenticate"] == 'Bearer realm="kvsp"'


def test_a_certificate_is_the_principal_of_one_of_its_uri_names(tmp_path: Path) -> None:
    file = PrincipalsFile(write(tmp_path / "principals", [principal_entry(H1)]))
    assert file.authenticate(Credentials(certificate_uris=("spiffe://x", URI))) == H1
    assert refusal(file, Credentials(certificate_uris=("https://h2.example/kvsp/",))).status == 401


def test_a_bad_token_is_not_saved_by_a_certificate(tmp_path: Path) -> None:
    file = PrincipalsFile(write(tmp_path / "principals", [principal_entry(H1)]))
    assert refusal(file, bearer(new_token(), certificate_uris=(URI,))).status == 401


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    old, new = new_token(), new_token()
    path = write(tmp_path / "principals", [principal_entry(H1, [old])])
    file = PrincipalsFile(path)
    replacement = write(tmp_path / "new", [principal_entry(H1, [new])])
    os.replace(replacement, path)
    assert file.authenticate(bearer(new)) == H1
    assert refusal(file, bearer(old)).status == 401


def test_a_file_that_cannot_be_judged_denies_everybody(tmp_path: Path) -> None:
    token = new_token()
    path = write(tmp_path / "principals", [principal_entry(H1, [token])])
    file = PrincipalsFile(path)
    path.write_text("{")
    problem = refusal(file, bearer(token))
    assert problem.status == 503 and "Retry-After" in problem.headers
    path.unlink()
    assert refusal(file, bearer(token)).status == 503
    assert refusal(file, Credentials(certificate_uris=(URI,))).status == 503


def test_why_a_file_cannot_be_used_is_logged_once_until_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = new_token()
    path = write(tmp_path / "principals", [principal_entry(H1, [token])])
    file = PrincipalsFile(path)

    def said() -> list[str]:
        for _ in range(3):
            assert refusal(file, bearer(token)).status == 503
        errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        caplog.clear()
        assert token not in "".join(errors)
        return errors

    path.chmod(0o666)
    (reason,) = said()
    assert f"run: chmod go-w {path}; requests are refused with 503" in reason
    write(path, [{"principal": "a", "roles": ["controller"]}])
    (reason,) = said()
    assert "'controller' is none of cats, holder, index" in reason
    path.unlink()
    (reason,) = said()
    assert "No such file" in reason
    write(path, [principal_entry(H1, [token])])
    assert file.authenticate(bearer(token)) == H1
    path.unlink()
    assert said() == [reason], "said again after it was mended"


def test_no_credential_is_accepted_on_loopback_only_when_switched_on(tmp_path: Path) -> None:
    path = write(tmp_path / "principals", [])
    local = Credentials(loopback=True)
    assert PrincipalsFile(path, loopback_developer=True).authenticate(local).has_role("operator")
    assert refusal(PrincipalsFile(path), local).status == 401
    assert refusal(LoopbackOnly(), Credentials()).status == 401
    assert LoopbackOnly().authenticate(local).is_holder(URI)


def test_in_development_a_service_that_says_who_it_is_speaks_for_itself_alone() -> None:
    a, b = "http://127.0.0.1:1/kvsp/", "http://127.0.0.1:2/kvsp/"
    header = f"Bearer {developer_token(a)}"
    named = LoopbackOnly().authenticate(Credentials(header, loopback=True))
    assert named.is_one_of(a) and not named.is_one_of(b)
    assert named.has_role("instance") and named.may(SCOPE, WRITE)
    assert refusal(LoopbackOnly(), Credentials(header)).status == 401
    for other in ("Bearer %%", "Bearer bm8tdXJp", "Basic bm8tdXJp", "Bearer /w==", "x" * 5000):
        assert LoopbackOnly().authenticate(Credentials(other, loopback=True)).is_one_of(b)


def test_outside_development_the_name_of_a_service_is_no_credential(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", [principal_entry(H1)])
    header = f"Bearer {developer_token(URI)}"
    for authenticator in (PrincipalsFile(path), PrincipalsFile(path, loopback_developer=True)):
        assert refusal(authenticator, Credentials(header, loopback=True)).status == 401
