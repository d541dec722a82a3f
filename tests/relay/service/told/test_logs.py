"""What a relay logs, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import urllib.request

import pytest

import moqt
from moqt.token_file import bearer
from moqt.values.codes import RequestErrorCode
from relay.rights.refusal_log import PERIOD, TOLD
from relay.service.told.logs import JsonFormatter
from tests.relay.service.program import running
from tests.relay.star import Star

TOKEN = b"a-token-that-no-log-may-have-0123456789"


ADMIN = "an-admin-token-of-the-tests-0123456789"
ABOVE = "a-token-for-those-above-0123456789"


def secret_file(folder, secret):
    path = folder / f"{secret[:12]}.secret"
    path.write_text(secret)
    path.chmod(0o600)
    return path


def told(message, *arguments):
    record = logging.LogRecord("relay", logging.WARNING, "", 0, message, arguments, None)
    return json.loads(JsonFormatter().format(record))


def test_a_line_of_json_has_connection_and_peer_apart():
    line = told("%s: closing", "[00aa11] 127.0.0.1:4443")
    assert (line["connection"], line["peer"], line["message"]) == (
        "00aa11", "127.0.0.1:4443", "closing",
    )  # fmt: skip
    line = told("[00aa11] Negotiated protocol version 0x1")  # as aioquic has it
    assert (line["connection"], line["message"]) == ("00aa11", "Negotiated protocol version 0x1")
    line = told("[00aa11] [::1]:5: closing: at\nonce")
    assert (line["peer"], line["message"]) == ("[::1]:5", "closing: at\nonce")
    assert "connection" not in told("demo is published")
    assert told("[nobody] x")["message"] == "[nobody] x"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_refusal_is_logged_with_who_and_why_and_a_flood_of_them_is_not(caplog):
    star = Star()
    pair = star.connect()
    with caplog.at_level(logging.INFO, "relay"):
        for _ in range(TOLD + 3):
            assert star.fetch(pair).failed.code == RequestErrorCode.DOES_NOT_EXIST
        lines = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
        assert len(lines) == TOLD
        assert re.fullmatch(
            r"\[0011\]: FETCH of \S+--\S+ is refused: DOES_NOT_EXIST: \S.*", lines[0]
        )
        star.pass_time(PERIOD + 1)
        star.fetch(pair)
    assert "(3 more have been refused since the line before)" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_and_the_event_log_know_a_session_by_one_name_and_no_secret(tmp_path, style):
    async def scenario(url, cafile):
        session = moqt.SessionConfig(setup_tokens=(bearer(TOKEN),))
        async with moqt.connect(url, cafile=cafile, session=session) as client:
            with pytest.raises(moqt.RequestError):
                await client.publish_namespace((b"demo", b"a.b"))

    principals = tmp_path / "principals.json"
    principals.write_text('{"principals": []}')
    principals.chmod(0o600)
    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c", "--auth", principals),
        *("--qlog-dir", tmp_path / "logs", "--log-format", style, "--log-level", "debug"),
        *("--admin", "127.0.0.1:0", "--admin-token-file", secret_file(tmp_path, ADMIN)),
        *(
            "--upstream",
            "moqt://127.0.0.1:9/",
            "--upstream-token-file",
            secret_file(tmp_path, ABOVE),
        ),
    ) as (process, ready):
        asyncio.run(scenario(f"moqt://{ready[1]}/", ready[2]))
        request = urllib.request.Request(ready[3].replace("metrics", "tracks.json"))
        request.add_header("Authorization", f"Bearer {ADMIN}")
        assert urllib.request.urlopen(request, timeout=20).status == 200
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=30)[1]
    (log,) = (tmp_path / "logs").glob("*_server.sqlog")
    connection = log.name.split("_")[0]
    for secret in (TOKEN.decode(), TOKEN.hex(), ADMIN, ABOVE):
        assert secret not in text and secret not in log.read_text()
    said = "PUBLISH_NAMESPACE of demo-a.2eb is refused: UNAUTHORIZED: no right to"
    if style == "text":
        (line,) = [each for each in text.splitlines() if said in each]
        assert re.search(rf" WARNING relay: \[{connection}\] 127\.0\.0\.1:\d+: PUBLISH", line)
        return
    lines = [json.loads(each) for each in text.splitlines()]
    (line,) = [each for each in lines if each["message"].startswith(said)]
    assert line["connection"] == connection and line["peer"].startswith("127.0.0.1:")
    assert line["level"] == "warning" and line["logger"] == "relay"
    wire = [each for each in lines if each["logger"] == "moqt.wire"]
    assert wire and connection in {each["connection"] for each in wire}
