"""Where settings come from, which one counts, and what is said of one that cannot be meant."""

from __future__ import annotations

import re
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsp.cli.server import app as program
from kvsp.service.schema import Setting, settings
from kvsp.service.settings import SettingsError
from kvsp.service.sources import as_toml, read_settings

DEV = {"roles": ["index", "holder"], "dev": True}


def written(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def test_a_variable_goes_before_the_file_and_a_flag_before_both(tmp_path: Path) -> None:
    file = written(tmp_path, "[holder]\nuploads = 1\nuploads_per_client = 1\nchecks = 1\n")
    environment = {"KVSP_HOLDER_UPLOADS": "2", "KVSP_HOLDER_CHECKS": "2", "OTHER": "x"}
    flags = DEV | {"holder": {"uploads": 3, "checks": None}}
    loaded = read_settings(file, flags, environment)
    holder = loaded.settings.holder
    assert (holder.uploads, holder.checks, holder.uploads_per_client) == (3, 2, 1)
    assert loaded.origins == {
        "holder.uploads": "the flags",
        "holder.checks": "KVSP_HOLDER_CHECKS",
        "holder.uploads_per_client": str(file),
        "roles": "the flags",
        "dev": "the flags",
    }


def test_variables_say_every_kind_of_value() -> None:
    environment = {
        "KVSP_ROLES": "index, holder",
        "KVSP_DEV": "yes",
        "KVSP_DATA_DIR": "data",
        "KVSP_HTTP_JSON_OCTETS": "3MiB",
        "KVSP_HTTP_REQUEST_S": "2.5",
        "KVSP_HOLDER_LEASES_TTL_MS": "7",
        "KVSP_LISTEN_MOQT": "moqt://a.example/,moqt://b.example/",
        "KVSP_INSTANCE_LINKS": '[{holder="http://127.0.0.1:1/", mbit_per_s=1, rtt_us=2.5}]',
        "KVSP_PEERS_INDEX": "",
    }
    made = read_settings(None, {}, environment).settings
    assert (made.roles, made.dev, made.data_dir) == (("index", "holder"), True, Path("data"))
    assert (made.http.json_octets, made.http.request_s) == (3 << 20, 2.5)
    assert made.holder.leases.ttl_ms == 7
    assert made.listen.moqt == ("moqt://a.example/", "moqt://b.example/")
    assert [link.rtt_us for link in made.instance.links] == [2.5]
    assert made.peers.index is None


def test_every_setting_has_a_variable_of_its_own() -> None:
    assert len({each.variable for each in settings().values()}) == len(settings())


def test_a_variable_that_is_no_setting_is_told_with_the_nearest_one_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_settings(None, DEV, {"KVSP_HOLDER_UPLOAD": "1", "KVSP_PORT_80_TCP": "x"})
    first, second = (each.getMessage() for each in caplog.records)
    assert first == (
        "KVSP_HOLDER_UPLOAD in the environment is no setting; did you mean KVSP_HOLDER_UPLOADS?"
    )
    assert second == "KVSP_PORT_80_TCP in the environment is no setting"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[listen]\nadress = 1", "listen.adress is no setting; did you mean listen.address?"),
        ("[http]\nbodies_mib = 1", "http.bodies_mib is no setting; did you mean http."),
        ('[holder]\nurl = "x"', "holder.url is no setting; did you mean holder.objects.url?"),
        ("[hodler]\nuploads = 1", "hodler is no setting; did you mean holder?"),
        ("zzz = 1", "zzz is no setting (docs/configuration.md lists them)"),
        ("holder = 1", "holder is a table: write [holder]"),
        ("[holder]\nuploads = 0", "holder.uploads: expected int >= 1"),
        ("[holder]\nuploads = true", "holder.uploads: expected int, got bool"),
        ("[http]\nrequest_s = inf", "http.request_s: a finite number is needed"),
        ('[http]\njson_octets = "8 MB"', '8MiB"'.replace("8", "64")),
        ("[http]\nhttp_loopback = true", "http.http_loopback is no setting"),
        ('[instance]\nengine = "tpu"', "instance.engine: invalid enum value 'tpu'"),
        ('[instance]\nlinks = [{holder = "x", rtt = 1}]', "instance.links: object contains"),
        ('[peers]\nindex = "http://far.example/"', "peers.index: "),
        ('[listen]\nmoqt = ["https://r.example/"]', "does not begin with moqt://"),
        ('[index.redis]\nprefix = "x"', "index.redis.url is missing"),
        ('[holder.objects]\nregion = "x"', "holder.objects.url is missing"),
        ('[holder.objects]\nurl = "s3://b/"', "set --data-dir"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_name_and_what_to_do(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(written(tmp_path, text), DEV)
    assert said in str(caught.value)


def test_what_is_wrong_says_where_it_was_set(tmp_path: Path) -> None:
    file = written(tmp_path, "[holder]\nuploads = -1\n")
    for path, environment, where in (
        (file, {}, str(file)),
        (None, {"KVSP_HOLDER_UPLOADS": "-1"}, "KVSP_HOLDER_UPLOADS"),
        (None, {"KVSP_HOLDER_UPLOADS": "many"}, "KVSP_HOLDER_UPLOADS"),
    ):
        with pytest.raises(SettingsError) as caught:
            read_settings(path, DEV, environment)
        assert str(caught.value).startswith(f"{where}: holder.uploads: expected int")


@pytest.mark.parametrize("url", ["redis://me:secret@r.example/0", "redis://secret@r.example/0"])
def test_a_secret_in_an_address_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    file = written(tmp_path, f'[index.redis]\nurl = "{url}"\n')
    with pytest.raises(SettingsError, match=r"set index\.redis\.username and pass") as caught:
        read_settings(file, DEV)
    assert "secret" not in str(caught.value)


def test_relative_paths_are_the_files_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    text = 'data_dir = "data"\n[instance]\nscopes = ["a.json", "/b.json"]\n'
    written(tmp_path / "etc", text)
    environment = {"KVSP_HOLDER_SCRATCH_DIR": "tmp"}
    made = read_settings(Path("../etc/server.toml"), DEV, environment).settings
    assert made.data_dir is not None and made.data_dir.resolve() == tmp_path / "etc" / "data"
    scopes = [path.resolve() for path in made.instance.scopes]
    assert scopes == [tmp_path / "etc" / "a.json", Path("/b.json")]
    assert made.holder.scratch_dir == Path("tmp")


# --- showing and checking ------------------------------------------------------------


def another(setting: Setting) -> Any:
    """A value that is not the default."""
    value = setting.default
    if setting.name == "roles":
        return ["index", "holder"]
    if setting.name == "instance.engine":
        return "toy"
    if setting.name == "instance.store_tier":
        return "device"
    if setting.name == "instance.links":
        return [{"holder": "http://127.0.0.1:1/", "mbit_per_s": 1.5, "rtt_us": 2.0}]
    if setting.name == "listen.moqt":
        return ["moqt://relay.example/é\u007f"]
    if setting.is_list:
        return ["http://127.0.0.1:1/"]
    if isinstance(value, bool):
        return setting.name == "dev" or not value
    if setting.plain in (int, float):
        return 7_001 if value is None else value + 1
    if setting.member in ("index", "placement"):
        return "http://127.0.0.1:1/"
    return "text"


UNTOUCHED = re.compile(r"listen\.(base_uri|cert|key|client_ca|principals|insecure)|peers\.index$")
"""What goes with `dev` or the roles only as it is."""


def test_what_is_printed_is_a_file_of_the_same_settings(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for name, setting in settings().items():
        if not UNTOUCHED.match(name):
            *inner, member = name.split(".")
            table = tree
            for each in inner:
                table = table.setdefault(each, {})
            table[member] = another(setting)
    loaded = read_settings(None, tree)
    text = as_toml(loaded)
    assert "# the flags" in text
    again = read_settings(written(tmp_path, text), {})
    absolute = {name: str(value) for name, value in vars_of(loaded.settings).items()}
    shown = {name: str(value) for name, value in vars_of(again.settings).items()}
    differing = {name for name in shown if shown[name] != absolute[name]}
    assert all(settings()[name].is_path for name in differing)
    changed = {name for name in loaded.origins if not settings()[name].is_path}
    assert all(
        vars_of(loaded.settings)[n] != settings()[n].default for n in changed - {"instance.engine"}
    )
    assert len(changed) > 120


def vars_of(made: Any) -> dict[str, Any]:
    return {name: attrgetter(name)(made) for name in settings()}


def test_print_config_shows_every_setting_and_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSP_HOLDER_UPLOADS", "9")
    file = written(tmp_path, 'data_dir = "data"\n')
    arguments = ["--dev", "--roles", "holder", "--config", str(file), "--print-config"]
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 0
    assert "uploads = 9  # KVSP_HOLDER_UPLOADS" in result.output
    assert f'data_dir = "{tmp_path}/data"  # {file}' in result.output
    members = [
        line.partition(" =")[0].removeprefix("# ").removesuffix(" is not set")
        for line in result.output.splitlines()
        if line and not line.startswith("[")
    ]
    assert members == [each.member for each in settings().values()]
    assert tomllib.loads(result.output)["holder"]["uploads"] == 9
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "the settings are right"),
        ('[peers]\ncafile = "none.pem"', 2, "peers.cafile: {folder}/none.pem: No such file"),
        ('[holder]\nscratch_dir = "none"', 2, "holder.scratch_dir: {folder}/none: No such"),
        ('[listen]\nprincipals = "p"', 2, "leave out --dev"),
        ('[instance]\nscopes = ["other-role.json"]', 0, "the settings are right"),
        ('[holder.objects]\nurl = "s3://b/"\ncredentials_file = "c"', 2, "credentials_file: "),
        ('[listen]\naddress = "nowhere"', 2, "is not HOST:PORT"),
        ("[peers]\ncafile = 5", 2, "expected a path, in quotes"),
        ('[peers]\ncafile = "a\\u0000b"', 2, "expected a path, in quotes"),
        ("x = " + 100_000 * "[", 2, "nests too deeply"),
        ("x = " + 5000 * "9", 2, "no TOML file"),
    ],
)
def test_check_config_says_whether_a_start_could_work_and_starts_nothing(
    tmp_path: Path, text: str, code: int, said: str
) -> None:
    file = written(tmp_path, f'data_dir = "data"\n{text}\n')
    arguments = ["--dev", "--roles", "holder", "--config", str(file), "--check-config"]
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == code
    assert said.format(folder=tmp_path) in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "data").exists()
