"""The harness of the browser: what it says without one, what it runs, and one case where one is."""

from __future__ import annotations

import re
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from interop import clients, run
from interop.browser import chromium, program
from interop.browser.cases import Browser, cases, names
from interop.browser.listener import SHORT, make_short_lived
from interop.browser.page import FILES, FOLDER, PageFailed
from interop.case import Stage
from interop.clients import CLIENT_SECONDS
from interop.outcomes import Outcome, judge
from interop.peers import Unavailable
from interop.processes import Program
from interop.relays import Running, our_relay
from interop.tap import parse


@pytest.fixture
def without_browser(monkeypatch, tmp_path):
    monkeypatch.delenv(chromium.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_a_browser_the_row_is_a_skip_that_says_what_to_install(without_browser, tmp_path):
    nobody = Running(1, tmp_path / "cert.pem", None)
    points = clients.chromium(nobody, "https", tmp_path)
    (result,) = judge(points, "chromium", "kvcs", {})
    assert result.outcome is Outcome.SKIP
    assert "chromium-headless-shell" in result.note and chromium.VARIABLE in result.note
    assert run.versions()["Chromium"] == "absent"


def test_a_browser_that_is_named_and_not_there_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv(chromium.VARIABLE, "no-such-browser")
    with pytest.raises(Unavailable, match="no-such-browser"):
        chromium.find_browser()


def test_a_browser_that_does_not_run_is_unavailable(tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(Unavailable, match="does not run: exit 127"):
        chromium.browser_version(broken)


def test_a_browser_that_ends_at_once_is_a_failure_with_its_last_words(monkeypatch, tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho 'no display' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(chromium.VARIABLE, str(broken))
    cert, _ = make_short_lived(tmp_path / "tls")
    with Program("relay", ["true"], tmp_path) as relay:
        points = clients.chromium(Running(1, cert, relay), "https", tmp_path)
    assert points and all(point.failed for point in points)
    assert "no display" in str(points[0].diagnostics)


def test_the_list_has_a_name_for_each_case(capsys):
    assert program.main(["--list"]) == 0
    assert tuple(capsys.readouterr().out.splitlines()) == names()


def test_an_unknown_case_is_unsupported(capsys):
    assert program.main(["-t", "no-such-case"]) == 127
    assert capsys.readouterr().out == ""


def test_every_case_says_what_it_checks_and_has_a_deadline():
    every = cases(Browser(None, "https://localhost/", b""))
    assert tuple(each.name for each in every) == names()
    for each in every:
        assert each.name.startswith("wt-") and each.summary
        assert 0 < each.seconds <= 30
    assert sum(each.seconds for each in every) > CLIENT_SECONDS / 2  # else the limit is too wide


async def test_the_page_is_emptied_after_a_case_that_failed():
    class Refusing:
        resets = 0

        async def open(self, *arguments):
            raise PageFailed("refused")

        async def reset(self):
            self.resets += 1

    page = Refusing()
    (setup,) = (e for e in cases(Browser(page, "https://h/", b"")) if e.name == "wt-setup")
    with pytest.raises(PageFailed):
        await setup.run(Stage("moqt://h", verify=False))
    assert page.resets == 1


def test_every_file_of_the_page_is_served():
    assert {path.name for path in FOLDER.iterdir()} == set(FILES.values())
    for name in FILES.values():
        text = (FOLDER / name).read_text()
        for wanted in re.findall(r'(?:from|src=)\s*"(?:\./)?([\w.]+)"', text):
            assert wanted in FILES.values(), f"{name} wants {wanted}"


def test_every_call_that_the_harness_makes_is_one_of_the_page():
    calls = (FOLDER / "drive.mjs").read_text().partition("const calls = {")[2]
    offered = set(re.findall(r"^  (?:async )?(\w+)(?:: |\()", calls, re.M))
    source = (FOLDER.parent / "page.py").read_text() + (FOLDER.parent / "cases.py").read_text()
    made = set(re.findall(r'(?:_call|_ask|\.call)\(\s*"(\w+)"', source))
    assert made == offered


def test_the_certificate_is_one_that_browsers_take_by_its_hash(tmp_path):
    cert_path, _ = make_short_lived(tmp_path)
    cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
    assert cert.not_valid_after_utc - cert.not_valid_before_utc == SHORT
    assert SHORT.days < 14
    assert isinstance(cert.public_key().curve, ec.SECP256R1)


def has_browser():
    try:
        return bool(chromium.browser_version(chromium.find_browser()))
    except Unavailable:
        return False


@pytest.mark.skipif(not has_browser(), reason="no Chromium here")
@pytest.mark.parametrize("name", ["wt-subscribe", "wt-wrong-protocol-refused"])
def test_a_page_in_chromium_passes_against_our_relay(name, tmp_path):
    with our_relay(tmp_path) as relay:
        command = [sys.executable, "-m", "interop.browser", "-r", relay.url("https"), "-t", name]
        command += ["--cert", relay.certificate, "--relay-log", relay.program.log]
        with Program("chromium", command, tmp_path) as browser:
            assert browser.wait(60) == 0, browser.last_words
            (point,) = parse(browser.output)
    assert point.passed and point.name == name
