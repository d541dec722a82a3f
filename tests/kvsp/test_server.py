"""The settings of `kvsp-server`: what is put together, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvsp.cli.server import app as program
from kvsp.errors import KvspError
from kvsp.http.auth import Principal, developer_token, principal_entry
from kvsp.identity import Scope
from kvsp.server import Assembly
from kvsp.server_settings import SettingsError, load_settings
from kvsp.uris import instance_id
from tests.kvsp.controller.support import SESSION, A, B, checkpoint, status
from tests.kvsp.support_http import Client, running

IS = "https://is.example/kvsp/"
PC = "https://pc.example/kvsp/"
OTHER = "00000000-0000-4000-8000-000000000000"


def dev(roles: str, **members):
    return load_settings(None, {"roles": roles.split(","), "dev": True, **members})


def test_all_roles_share_one_base_uri_in_one_process(tmp_path):
    made = Assembly(dev("holder,index,controller,instance", data_dir=str(tmp_path)))
    assert [service.role for service in made.app.services] == [
        "index",
        "placement",
        "holder",
        "instance",
    ]
    assert made.base_uri == f"http://127.0.0.1:{made.server.port}/kvsp/"
    paths = set(made.app.openapi["paths"])
    assert {"/lookup", "/prefetch", "/instances", "/leases", "/cats/cache-keys"} <= paths


def test_an_instance_is_always_the_holder_of_what_is_in_its_memory():
    made = Assembly(dev("instance", peers={"placement": PC, "index": IS}))
    assert [service.role for service in made.app.services] == ["holder", "instance"]


async def test_in_development_each_of_two_instances_starts_a_session_by_its_first_checkpoint():
    app = Assembly(dev("index,controller")).app
    anybody = Client(app, address="127.0.0.1")
    async with running(app):
        for base, session in ((A, SESSION), (B, OTHER)):
            instance = anybody.as_(developer_token(base))
            sent = checkpoint(session=session).to_dict()
            path = f"sessions/{session}/checkpoint"
            reported = await instance.request(
                "PUT", f"instances/{instance_id(base)}", json_body=status(base).to_dict()
            )
            assert reported.status == 200
            assert (await instance.request("PUT", path, json_body=sent)).status == 200
            shown = await anybody.get(f"sessions/{session}")
            assert shown.json["instance"] == base
        # the rule is the same as elsewhere: a session is the instance's that it is assigned to
        intruder = await anybody.as_(developer_token(A)).request("PUT", path, json_body=sent)
        assert intruder.problem == "kvsp-forbidden"


def test_flags_go_before_the_file(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('roles = ["holder"]\n[listen]\naddress = "127.0.0.1:1"\ndrain_s = 3\n')
    flags = {"dev": True, "roles": ["index"], "listen": {"address": None}}
    settings = load_settings(file, flags)
    assert (settings.roles, settings.listen.address) == (["index"], "127.0.0.1:1")
    assert settings.listen.drain_s == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no role is given"),
        ('roles = ["relay"]\ndev = true', "role 'relay' is none of"),
        ('roles = ["index", "index"]\ndev = true', "twice"),
        ('roles = ["index"]', "base URI that clients use is missing"),
        ('roles = ["index"]\nlisten = {base_uri = "http://a.example/kvsp/"}', "listen.base_uri"),
        ('roles = ["instance"]\ndev = true', "needs a placement controller"),
        ('roles = ["controller"]\ndev = true', "needs an index"),
        ('roles = ["holder"]\ndev = true\nholder = {disk_mib = 1}', "needs --data-dir"),
        ('roles = ["index"]\ndev = true\nlisten = {principals = "p.json"}', "leave out --dev"),
        ('roles = ["index"]\ndev = true\nlisten = {insecure = true}', "leave out --dev"),
        ('roles = ["index"]\ndev = true\nlisten = {client_ca = "ca.pem"}', "leave out --dev"),
        ('roles = ["holder"]\nlisten = {base_uri = "https://h.example/kvsp/"}', "credential"),
        ('roles = ["index"]\ndev = true\nlisten = {adress = "x"}', "adress"),
        ('roles = ["index"]\ndev = 1', "dev"),
        ("roles = [", "server.toml"),
        (
            'roles = ["instance"]\ndev = true\npeers = {placement = "https://p.example/kvsp/"}\n'
            'instance = {engine = "torch"}',
            "set instance.model",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(tmp_path, text, said):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file, {})
    assert said in str(caught.value)


def test_the_development_server_listens_on_this_machine_only():
    for address in ("0.0.0.0:0", "192.0.2.1:80", "[::]:0"):
        with pytest.raises(SettingsError, match="this machine only"):
            Assembly(dev("index", listen={"address": address}))
    for address in ("127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:70000"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            Assembly(dev("index", listen={"address": address}))


@pytest.mark.parametrize("role", ["index", "holder", "controller,index", "instance"])
def test_a_data_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path, role):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "data"
    with pytest.raises(SettingsError, match="cannot be written") as caught:
        Assembly(dev(role, data_dir=str(folder), peers={"placement": PC}))
    assert str(caught.value).startswith(f"{folder}: ") and "--data-dir" in str(caught.value)


def test_files_with_secrets_are_their_owners_only(tmp_path):
    token, principals = tmp_path / "token", tmp_path / "principals.json"
    token.write_text("secret-token")
    principals.write_text(json.dumps({"principals": [principal_entry(Principal("a"))]}))
    flags = {
        "roles": ["holder"],
        "listen": {"base_uri": "https://h.example/kvsp/", "principals": str(principals)},
        "peers": {"index": IS, "token_file": str(token)},
    }
    token.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600") as caught:
        Assembly(load_settings(None, flags))
    assert "secret-token" not in str(caught.value)
    token.chmod(0o600)
    assert Assembly(load_settings(None, flags)).base_uri == "https://h.example/kvsp/"
    scope = tmp_path / "scope.json"
    Scope.generate().save(scope)
    scope.chmod(0o640)
    with pytest.raises(KvspError, match="chmod 600"):
        Assembly(dev("instance", peers={"placement": PC}, instance={"scopes": [str(scope)]}))


def test_the_program_says_in_one_line_what_is_wrong(tmp_path):
    result = CliRunner().invoke(program, ["--roles", "index"])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "kvsp-server: the base URI that clients use is missing; give it, or use --dev"
    ]
