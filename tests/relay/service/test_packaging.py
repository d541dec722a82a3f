"""What `packaging` has fits the relay: series are exported, options are there, files are copied."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from relay.service.cli import settings
from tests.paths import ROOT
from tests.relay.service.exposition import kinds

yaml = pytest.importorskip("yaml", reason="PyYAML reads the files of packaging")

PACKAGING = ROOT / "packaging"
PAGE = ROOT / "docs" / "operations.md"
SERIES = re.compile(r"\b(?:kvcs_relay|process)_[a-z_]*[a-z]\b")


def read(name):
    return yaml.safe_load((PACKAGING / name).read_text())


def rules():
    (group,) = read("prometheus/alerts.yaml")["groups"]
    return group["rules"]


def panels():
    return json.loads((PACKAGING / "grafana" / "kvcs-relay.json").read_text())["panels"]


def expressions():
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def test_every_series_of_an_alert_or_a_panel_is_exported(scraped):
    known = set(kinds(scraped[0]))
    for expression in expressions():
        named = set(SERIES.findall(expression))
        assert named <= known, f"{expression}: {named - known}"
        assert named or "up{" in expression
    assert len(list(expressions())) > 40


def test_expressions_use_counters_as_counters_and_gauges_as_gauges(scraped):
    types = kinds(scraped[0])
    for expression in expressions():
        rated = set(re.findall(r"(?:rate|increase)\(([a-z_]+)", expression))
        for name in SERIES.findall(expression):
            counter = types[name] == "counter"
            assert counter == (name in rated) or name == "kvcs_relay_loop_hold_seconds", expression


def test_labels_that_are_asked_for_are_there(scraped):
    given = {}
    for name, labels in re.findall(r"^([a-z_]+)\{(.*)\} \S+$", scraped[0], re.M):
        given.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    given["kvcs_relay_requests_refused_total"] = {"reason"}
    given["kvcs_relay_quic_rtt_seconds"] = {"of"}
    for expression in expressions():
        for name, labels in re.findall(r"([a-z_]+)\{(.*?)\}", expression):
            asked = set(re.findall(r"(\w+)=", labels)) - {"job"}
            assert asked <= given.get(name, set()), expression


def test_every_alert_is_described_with_what_to_do():
    described = set(re.findall(r"^\| `(Relay\w+)` \|", PAGE.read_text(), re.M))
    assert described == {rule["alert"] for rule in rules()}


def test_every_metric_that_the_page_names_is_exported(scraped):
    known = set(kinds(scraped[0]))
    text = PAGE.read_text()
    named = set(SERIES.findall(text))
    for line in text.splitlines():
        if line.startswith("| `"):
            short = re.findall(r"`((?!kvcs_)[a-z_]+_total)`", line)
            named |= {f"kvcs_relay_{each}" for each in short}
    assert named <= known, named - known


@pytest.mark.parametrize("relay", ["relay-a", "relay-b"])
def test_the_options_of_the_composed_relays_are_options_of_the_relay(relay):
    compose = read("compose.yaml")
    for option in compose["services"][relay]["command"]:
        name, _, value = option.removeprefix("--").partition("=")
        setting = settings()[name.replace("-", "_")]
        assert value and (not setting.choices or value in setting.choices)
    service = compose["services"][relay]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["user"] == "10001:10001"
    scraped_at = read("prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]
    assert f"{relay}:9464" in scraped_at["targets"]


def test_all_that_the_composition_mounts_or_waits_for_is_there():
    compose = read("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            here = (PACKAGING / source).exists() if source[0] == "." else source
            assert here is True or here in compose["volumes"]
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        if "build" in service:
            assert (PACKAGING / service["build"]["context"] / "packaging" / "Dockerfile").exists()


def test_the_secrets_of_the_composition_are_made_once_and_are_its_own(tmp_path):
    (program,) = read("compose.yaml")["services"]["secrets"]["command"]
    program = program.replace("/var/lib/kvcs-relay", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        made = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert {"cert.pem", "key.pem", "admin.token"} <= set(made)
    assert len(made["admin.token"]) >= 32
    assert (tmp_path / "admin.token").stat().st_mode & 0o77 == 0
    again = subprocess.run(
        [sys.executable, "-m", "relay.service.cli", "--check-config", "--listen", "127.0.0.1:0",
         "--cert", tmp_path / "cert.pem", "--key", tmp_path / "key.pem", "--admin", "127.0.0.1:0",
         "--admin-token-file", tmp_path / "admin.token"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr


def test_the_dockerfile_copies_what_is_there_and_ends_as_a_user_without_rights():
    text = (PACKAGING / "Dockerfile").read_text()
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    for word, rest in lines:
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = shlex.split(rest)
            assert all((ROOT / each).exists() for each in sources), rest
    assert [rest for word, rest in lines if word == "USER"] == ["10001:10001"]
    assert [json.loads(rest) for word, rest in lines if word == "ENTRYPOINT"] == [["kvcs-relay"]]


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    unit = (PACKAGING / "kvcs-relay.service").read_text()
    assert "Type=notify" in unit and "DynamicUser=yes" in unit and "ProtectSystem=strict" in unit
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    path = tmp_path / "kvcs-relay.service"
    path.write_text(unit.replace("/usr/local/bin/kvcs-relay", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    said = [line for line in done.stderr.splitlines() if "kvcs-relay.service" in line]
    assert not said, done.stderr
