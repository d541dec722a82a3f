"""Settings of a relay: a file, over it the environment, over that the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request

import pytest

from relay.service.cli import settings
from relay.service.limits import LIMITS
from relay.service.settings import SettingsError, read, unknown_variables
from tests.relay.service.program import check_sentence, run, running

FILE = """
listen = "127.0.0.1:0"
self-signed = "tls"
cache_memory = "64MiB"
mtu = 9000
drain_timeout = 3

[limits]
max_requests = 7
linger = 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "relay.toml"
    path.write_text(FILE)
    return path


def printed(*arguments, **environment):
    result = run(*arguments, "--print-config", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_a_relay_runs_with_the_settings_of_a_file_and_its_paths_are_beside_it(file):
    with running("--config", file, "--metrics", "127.0.0.1:0") as (process, ready):
        assert ready[2] == str(file.parent / "tls" / "cert.pem")
        metrics = urllib.request.urlopen(ready[3]).read().decode()
        found = re.search(r"^kvcs_relay_cache_budget_bytes (.*)$", metrics, re.MULTILINE)
        assert float(found[1]) == 64 << 20
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_environment_is_above_the_file_and_the_command_line_above_both(file):
    text = printed("--config", file, "--congestion", "cubic", KVCS_RELAY_MTU="1300")
    assert "mtu = 1300  # KVCS_RELAY_MTU\n" in text
    assert 'congestion = "cubic"  # command line\n' in text
    assert f'cache_memory = "64MiB"  # {file}\n' in text
    assert 'log_level = "warning"  # default\n' in text
    assert "mtu = 1400  # command line\n" in printed(
        "--config", file, "--mtu", "1400", KVCS_RELAY_MTU="1300"
    )


def test_each_limit_is_the_last_that_was_said_of_it(file):
    text = printed(
        "--limit",
        "max_requests=9",
        KVCS_RELAY_CONFIG=str(file),
        KVCS_RELAY_LIMIT="linger=6 max_tokens=3",
    )
    assert "max_requests = 9  # command line\n" in text
    assert "linger = 6.0  # KVCS_RELAY_LIMIT\n" in text
    assert "max_tokens = 3  # KVCS_RELAY_LIMIT\n" in text


def test_what_is_printed_is_a_file_that_says_the_same_again(file):
    text = printed("--config", file, "--mtu", "1400")
    again = file.with_name("again.toml")
    again.write_text(text)
    second = printed("--config", again)
    assert [line.partition("  # ")[0] for line in second.splitlines()] == [
        line.partition("  # ")[0] for line in text.splitlines()
    ]
    assert all(f"\n{name} = " in text or f"\n# {name}: none" in text for name in LIMITS)


def test_settings_are_checked_without_making_or_taking_anything(file, tmp_path):
    result = run("--config", file, "--check-config", "--qlog-dir", tmp_path / "logs")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvcs-relay: a relay can start with these settings\n"
    assert os.listdir(tmp_path) == ["relay.toml"]


@pytest.mark.parametrize("name", ["reset_key", "qlog_dir", "keylog_file", "self_signed"])
def test_a_place_where_nothing_can_be_made_is_told_by_the_check_and_by_the_start(tmp_path, name):
    (tmp_path / "file").touch()
    place = {"reset_key": tmp_path, "keylog_file": tmp_path / "file" / "keys"}
    path = tmp_path / "relay.toml"
    path.write_text(f'listen = "127.0.0.1:0"\n{name} = "{place.get(name, tmp_path / "file")}"\n')
    own = () if name == "self_signed" else ("--self-signed", tmp_path / "c")
    check_sentence(run("--config", path, *own, "--check-config"), 2, f"--{name}".replace("_", "-"))
    assert run("--config", path, *own).returncode == 2


def test_settings_are_printed_although_a_file_that_they_name_is_missing(tmp_path):
    text = printed("--listen", "127.0.0.1:0", "--cert", tmp_path / "none", "--key", tmp_path / "no")
    assert f'cert = "{tmp_path / "none"}"  # command line\n' in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mtv = 3", ["relay.toml", "'mtv'", "did you mean mtu?"]),
        ('mtu = "big"', ["relay.toml", "mtu", "a whole number"]),
        ("cache_memory = 5", ["relay.toml", "cache_memory", "a string"]),
        ('webtransport = "yes"', ["relay.toml", "webtransport", "true or false"]),
        ("mtu = 70", ["--mtu", "between", "relay.toml"]),
        ('congestion = "hope"', ["--congestion", "relay.toml"]),
        ("[limits]\nmax_request = 3", ["relay.toml", "max_request", "did you mean max_requests?"]),
        ('[limits]\nmax_requests = "3"', ["relay.toml", "max_requests", "a number"]),
        ("limits = 3", ["relay.toml", "[limits]"]),
        ("mtu = " + 5000 * "9", ["relay.toml", "no TOML"]),
        ("x = " + 100_000 * "[", ["relay.toml", "too deeply"]),
        ('log_level = "a\\u0000b"', ["relay.toml", "log_level", "null"]),
        ("drain_timeout = nan", ["--drain-timeout", "relay.toml"]),
        ("drain_timeout = inf", ["--drain-timeout", "relay.toml"]),
        ("mtu =", ["relay.toml", "no TOML"]),
        ('auth = "none.json"', ["--auth", "none.json", "relay.toml"]),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_sentence_with_file_and_key(tmp_path, line, words):
    path = tmp_path / "relay.toml"
    path.write_text(f"{line}\n" if "[" in line else f'listen = "127.0.0.1:0"\n{line}\n')
    result = run("--config", path, "--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c")
    check_sentence(result, 2, *words)


def test_a_variable_that_cannot_be_meant_is_named(tmp_path):
    here = ("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c", "--check-config")
    result = run(*here, KVCS_RELAY_MTU="70")
    check_sentence(result, 2, "--mtu", "KVCS_RELAY_MTU")
    result = run(*here, KVCS_RELAY_MTV="1300")
    assert result.returncode == 0
    assert "KVCS_RELAY_MTV; did you mean KVCS_RELAY_MTU?" in result.stderr


def test_variables_that_a_cluster_makes_for_a_service_of_that_name_are_no_settings():
    variables = ["SERVICE_HOST", "PORT", "PORT_4443_UDP_ADDR", "MTU", "MTV", "CONFIG"]
    environment = dict.fromkeys([f"KVCS_RELAY_{each}" for each in variables], "")
    found = unknown_variables("KVCS_RELAY", environment, [*settings(), "config"])
    assert found == ["KVCS_RELAY_MTV; did you mean KVCS_RELAY_MTU?"]


def test_every_option_has_its_place_in_the_file(tmp_path):
    samples = {bool: "true", int: "1300", float: "2.5"}
    path = tmp_path / "relay.toml"
    for name, setting in settings().items():
        value = samples.get(
            setting.kind, json.dumps(setting.choices[0] if setting.choices else "x")
        )
        path.write_text(f"{name} = {value}\n")
        assert list(read(path, settings()).values) == [name]
        path.write_text(f"{name} = [1]\n")
        with pytest.raises(SettingsError, match=name):
            read(path, settings())
