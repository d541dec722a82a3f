"""The settings of `kvsp-server`: what is put together, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcs.programs.keygen import app as keygen
from kvsp.cli.server import app as program
from kvsp.client import Client as KvspClient
from kvsp.http.auth import developer_token
from kvsp.http.server import Server as HttpServer
from kvsp.names.errors import KvspError
from kvsp.names.identity import Scope
from kvsp.names.uris import instance_id
from kvsp.principals import Principal, principal_entry
from kvsp.service.server import Assembly
from kvsp.service.settings import SettingsError
from kvsp.service.sources import read_settings
from moqt.quic.certificates import make_self_signed
from tests.e2e.kvsp_support import free_port
from tests.kvsp.client.support import DESCRIPTOR, block_of, container
from tests.kvsp.controller.support import SESSION, A, B, checkpoint, status
from tests.kvsp.support_http import Client, running
from tests.kvsp.support_server import serving
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "kvsp.md").read_text()
IS = "https://is.example/kvsp/"
PC = "https://pc.example/kvsp/"
OTHER = "00000000-0000-4000-8000-000000000000"


def dev(roles: str, **members):
    return read_settings(None, {"roles": roles.split(","), "dev": True, **members}).settings


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


async def test_blocks_survive_a_restart_when_a_data_directory_is_given(tmp_path):
    made = container(0)
    for start in range(2):
        assembly = Assembly(dev("index,holder", data_dir=str(tmp_path / "data")))
        base = assembly.base_uri
        async with (
            serving(assembly.app, port=assembly.server.port),
            KvspClient(base, http_loopback=True) as client,
            asyncio.timeout(20),
        ):
            if not start:
                await client.put_descriptor(DESCRIPTOR)
                assert (await client.put(base, block_of(0), made)).created
            # the index hears of it in the background; at the new base URI after a restart
            while base not in (records := await _replicas(client)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            got = [layer async for layer in client.get(records[base], descriptor=DESCRIPTOR)]
            assert [(bytes(each.k), bytes(each.v)) for each in got] == [
                (bytes(k), bytes(v)) for k, v in made.sections
            ]


async def _replicas(client):
    block = block_of(0)
    found = await client.lookup(block.scope_id, block.compat_id, [block.block_key])
    return {each.holder: each for matched in found.blocks for each in matched.replicas}


def test_what_a_holder_and_the_bodies_of_requests_may_take_is_set_in_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(
        '[http]\nbodies_octets = "7MiB"\nbodies_octets_per_principal = 3145728\n'
        "[holder]\ndisk_mib = 9\nuploads = 5\nuploads_per_client = 2\nscrub_mib_per_s = 1.5\n"
        "quarantine_mib = 0\n"
    )
    flags = {"roles": ["holder"], "dev": True, "data_dir": str(tmp_path / "data")}
    made = Assembly(read_settings(file, flags).settings)
    limits = made.app.limits
    assert (limits.bodies_octets, limits.bodies_octets_per_principal) == (7 << 20, 3 << 20)
    (service,) = made.app.services
    held = service.holder.settings
    assert (held.uploads, held.uploads_per_client) == (5, 2)
    assert held.scrub_octets_per_s == 1.5 * (1 << 20)
    # leases are kept where the blocks are, and end with the process where those do
    assert held.lease_file == tmp_path / "data" / "leases.sqlite"
    memory = Assembly(dev("holder", data_dir=str(tmp_path / "other"), holder={"host_mib": 1}))
    assert memory.app.services[0].holder.settings.lease_file is None


async def test_the_ready_line_names_roles_as_the_option_does(capsys):
    assembly = Assembly(dev("index,controller"))
    async with serving(assembly.app, port=assembly.server.port):
        assert capsys.readouterr().out.strip().endswith(" roles=index,controller")


def test_the_table_names_of_the_settings_and_an_example_are_in_the_help():
    help_text = " ".join(CliRunner().invoke(program, ["--help"]).output.split())
    assert "listen, peers, client, http, holder, index, controller, instance" in help_text
    assert "kvsp-server --dev --roles index,controller,holder" in help_text
    assert "Exit code: 0 ended by SIGTERM" in help_text


def test_flags_go_before_the_file(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('roles = ["holder"]\n[listen]\naddress = "127.0.0.1:1"\ndrain_s = 3\n')
    flags = {"dev": True, "roles": ["index"], "listen": {"address": None}}
    settings = read_settings(file, flags).settings
    assert (settings.roles, settings.listen.address) == (("index",), "127.0.0.1:1")
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
        (
            f'roles = ["index"]\nlisten = {{base_uri = "{IS}", certificate = "c.pem"}}',
            "listen: TLS needs both",
        ),
        (
            f'roles = ["index"]\nlisten = {{base_uri = "{IS}"}}\npeers = {{certificate = "c.pem"}}',
            "peers: TLS needs both",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(tmp_path, text, said):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(file, {})
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
        Assembly(read_settings(None, flags).settings)
    assert "secret-token" not in str(caught.value)
    token.chmod(0o600)
    assert Assembly(read_settings(None, flags).settings).base_uri == "https://h.example/kvsp/"
    scope = tmp_path / "scope.json"
    Scope.generate().save(scope)
    scope.chmod(0o640)
    with pytest.raises(KvspError, match="chmod 600"):
        Assembly(dev("instance", peers={"placement": PC}, instance={"scopes": [str(scope)]}))


def as_the_readme_says(folder, base):
    """The settings of docs/kvsp.md, for a base URI here, with the files that it names; the
    token of a writer."""
    section = PAGE.partition("## The HTTP services")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```toml\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^\$ kvcs-keygen (.*)", section, re.MULTILINE)
    self_signed(folder)
    shutil.copy(folder / "server.pem", folder / "clients.pem")
    changes = {
        "https://kvsp.example:8443/kvsp/": base,
        "0.0.0.0:8443": base.split("/")[2],
        "/var/lib/kvsp": "data",
    }
    for old, new in changes.items():
        assert old in text
        text, command = text.replace(old, new), command.replace(old, new)
    (folder / "server.toml").write_text(text)
    for arguments in (
        shlex.split(command),
        ["token", "writer", "--every-scope", "--principals", "principals.json"],
    ):
        made = CliRunner().invoke(keygen, arguments)
        assert made.exit_code == 0, made.output
    return read_settings(Path("server.toml"), {}).settings, (folder / "writer").read_text().strip()


async def test_the_settings_of_the_readme_store_a_block_with_a_certificate_nobody_else_trusts(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    base = f"https://127.0.0.1:{free_port()}/kvsp/"
    settings, token = as_the_readme_says(tmp_path, base)
    async with (
        run_server(Assembly(settings)),
        KvspClient(base, token=token, cafile="server.pem") as client,
        asyncio.timeout(20),
    ):
        await client.put_descriptor(DESCRIPTOR)
        assert (await client.put(base, block_of(0), container(0))).created
        while base not in await _replicas(client):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def run_server(assembly):
    server = HttpServer(assembly.app, assembly.server)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await task


def self_signed(folder):
    cert, key = make_self_signed(folder / "made")
    shutil.copy(cert, folder / "server.pem")
    shutil.copy(key, folder / "server.key")


def https(folder, **listen):
    """A file of settings of an index with TLS, and what its [listen] says besides."""
    self_signed(folder)
    members = {
        "address": "127.0.0.1:0",
        "base_uri": IS,
        "certificate": str(folder / "server.pem"),
        "key": str(folder / "server.key"),
        **listen,
    }
    config = folder / "server.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in members.items()]
    config.write_text("\n".join(['roles = ["index"]', "[listen]", *lines]) + "\n")
    return config


def test_a_server_without_principals_warns_that_this_machine_may_do_everything(tmp_path, caplog):
    config = https(tmp_path)
    assert Assembly(read_settings(config, {}).settings).server.certificate is not None
    (said,) = caplog.records
    assert said.levelname == "WARNING" and "set principals under [listen]" in said.getMessage()
    caplog.clear()
    (tmp_path / "p.json").write_text('{"principals": []}')
    Assembly(read_settings(https(tmp_path, principals=str(tmp_path / "p.json")), {}).settings)
    Assembly(dev("index"))
    assert not caplog.records


def test_a_data_directory_belongs_to_one_process(tmp_path):
    settings = {"roles": ["index"], "dev": True, "data_dir": str(tmp_path)}
    code = "import sys; from kvsp.service.server import Assembly"
    code += "; from kvsp.service.sources import read_settings"
    code += f"; made = Assembly(read_settings(None, {settings!r}).settings)"
    code += "; print('claimed', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "claimed\n"
        for roles in ("index", "holder", "index,controller"):
            result = CliRunner().invoke(
                program, ["--dev", "--roles", roles, "--data-dir", str(tmp_path)]
            )
            assert result.exit_code == 1
            assert result.output.splitlines() == [
                f"kvsp-server: {tmp_path}: another process uses this data directory; stop it, or "
                "name another folder with --data-dir"
            ]
        other.stdin.close()
    assert Assembly(dev("index", data_dir=str(tmp_path))).app


def test_a_disk_tier_that_cannot_start_is_exit_code_1_and_names_the_file(tmp_path):
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "incoming").write_text("")
    arguments = ["--dev", "--roles", "holder", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 1 and result.exception.__class__ is SystemExit
    (line,) = result.output.splitlines()
    assert line.startswith(f"kvsp-server: {tmp_path / 'blocks' / 'incoming'}: ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("client_ca", None),
        ("certificate", "junk"),
        ("key", "junk"),
        ("principals", None),
        ("principals", "junk"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_with_exit_code_2_and_its_name(
    tmp_path, name, content
):
    path = tmp_path / "wrong"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(program, ["--config", str(https(tmp_path, **{name: str(path)}))])
    assert result.exit_code == 2 and result.exception.__class__ is SystemExit
    (line,) = [each for each in result.output.splitlines() if "WARNING" not in each]
    named = f"listen.{name}: " if content is None else ""
    assert line.startswith(f"kvsp-server: {named}{path}: ")


def test_a_start_that_fails_leaves_no_data_directory_behind(tmp_path):
    there, made = tmp_path / "there", tmp_path / "new" / "data"
    there.mkdir()
    (there / "mine").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for folder in (made, there):
            for more in (
                ["--listen", f"127.0.0.1:{port}"],
                ["--listen", "127.0.0.1:0", "--config", str(tmp_path / "torn.toml")],
            ):
                (tmp_path / "torn.toml").write_text('[instance]\nscopes = ["torn"]\n')
                (tmp_path / "torn").write_text("{")
                arguments = ["--dev", "--roles", "index,controller,holder,instance", *more]
                result = CliRunner().invoke(program, [*arguments, "--data-dir", str(folder)])
                assert result.exit_code in (1, 2), result.output
    assert not made.parent.exists()
    assert (there / "mine").exists()


def test_a_port_in_use_is_exit_code_1_and_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--dev", "--roles", "index", "--listen", address]
        result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 1 and result.exception.__class__ is SystemExit
    (line,) = result.output.splitlines()
    assert address.replace(":", " port ") in line and "choose another port" in line


def test_the_program_says_in_one_line_what_is_wrong(tmp_path):
    result = CliRunner().invoke(program, ["--roles", "index"])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "kvsp-server: the base URI that clients use is missing; set base_uri under [listen] in the "
        "--config file, or use --dev"
    ]
