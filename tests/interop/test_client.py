"""The test client under the runner's contract, against a relay in this process."""

from __future__ import annotations

import pytest

import moqt
from interop import client
from interop.case import CASES, perform
from interop.tap import parse
from moqt.quic.certificates import make_self_signed
from relay.core import Relay

SUITE = [
    "setup-only",
    "announce-only",
    "publish-namespace-done",
    "subscribe-error",
    "announce-subscribe",
    "subscribe-before-announce",
]
SOME = ["location-absolute-range", "fill-exactly-once", "large-object", "fetch-range"]
SOME += ["token-malformed", "unknown-filter-type", "goaway"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
async def serving(certificate):
    """A function that serves a handler and returns its URL."""
    servers = []

    async def serve(handler):
        cert, key = certificate
        quic = moqt.QuicConfig(certfile=cert, keyfile=key)
        servers.append(await moqt.serve("127.0.0.1", 0, quic=quic, handler=handler))
        return f"moqt://127.0.0.1:{servers[-1].port}"

    yield serve
    for server in servers:
        await server.close()


def options(*arguments, **environment):
    return client.parse_options(arguments, environment)


def test_arguments_win_over_the_environment_and_that_over_the_defaults():
    assert options().relay == "https://localhost:4443"
    assert options(RELAY_URL="moqt://a").relay == "moqt://a"
    assert options("-r", "moqt://b", RELAY_URL="moqt://a").relay == "moqt://b"
    assert options(TESTCASE="fetch").test == "fetch"
    assert options("--test", "join", TESTCASE="fetch").test == "join"


def test_certificates_are_verified_unless_it_is_switched_off():
    assert options().verify
    assert options(TLS_DISABLE_VERIFY="0").verify
    assert not options(TLS_DISABLE_VERIFY="1").verify
    assert not options("--tls-disable-verify").verify


def test_the_list_has_one_name_a_line_and_the_public_suite_first(capsys):
    assert client.main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names[: len(SUITE)] == SUITE == [c.name for c in CASES.values() if c.public]
    assert len(set(names)) == len(names)


def test_an_unknown_case_is_unsupported(capsys):
    assert client.main(["-t", "no-such-case"]) == 127
    assert capsys.readouterr().out == ""


def test_every_case_says_what_it_checks_and_has_a_deadline():
    for case in CASES.values():
        assert case.summary, case.name
        assert 0 < case.seconds <= 30


@pytest.mark.parametrize("name", [*SUITE, *SOME])
async def test_our_relay_passes(name, serving):
    point = await perform(CASES[name], await serving(Relay()), verify=False)
    assert point.passed, point
    assert any(key.endswith("connection_id") for key in point.diagnostics)


async def test_a_relay_that_does_something_else_fails_the_case(serving, capsys):
    url = await serving(moqt.Publisher())  # takes no PUBLISH_NAMESPACE
    chosen = [CASES["setup-only"], CASES["announce-only"]]
    status = await client.run(chosen, options("-r", url, "--tls-disable-verify"))
    first, second = parse(capsys.readouterr().out)
    assert status == 1
    assert first.passed and second.failed
    assert "NOT_SUPPORTED" in second.diagnostics["message"]


async def test_a_certificate_that_is_not_trusted_ends_the_run(serving, capsys):
    url = await serving(Relay())
    chosen = [CASES["setup-only"], CASES["announce-only"]]
    status = await client.run(chosen, options("-r", url))
    output = capsys.readouterr().out
    assert status == 1
    assert "Bail out!" in output
    assert [point.failed for point in parse(output)] == [True, True]


async def test_a_case_that_does_not_end_fails_at_its_deadline(serving):
    class Silent(moqt.SessionHandler):
        def publish_namespace_received(self, request): ...

    case = CASES["announce-only"]
    quick = type(case)(case.name, case.run, 0.3, case.public)
    point = await perform(quick, await serving(Silent()), verify=False)
    assert point.failed and point.diagnostics["received"] == "timeout"
