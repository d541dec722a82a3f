"""What relays and their clients say of certificates and protocols, and how one is exchanged."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta

import pytest

import moqt
from moqt.quic.certificates import make_self_signed
from moqt.quic.config import QuicConfig
from moqt.quic.udp.endpoint import QuicConnectError, connect
from moqt.quic.webtransport.client import WebTransportClient
from tests.e2e.support import eventually, readable, relay
from tests.moqt.quic_pair import Recorder

READY = re.compile(r"sha256 ([0-9A-F:]{95}) base64 (\S{44})\n")


def test_a_relay_serves_a_new_certificate_without_a_restart_and_keeps_its_sessions(tmp_path):
    async def scenario(hub, first):
        old = await moqt.connect(hub.url, cafile=hub.cafile)
        await old.publish_namespace((b"before",))
        (tmp_path / "tls" / "cert.pem").unlink()
        for _ in range(1500):
            if "new connections get the new certificate" in hub.process.stderr:
                break
            await asyncio.sleep(0.02)
        new = (tmp_path / "tls" / "cert.sha256").read_text().strip()
        assert new != first and new in hub.process.stderr
        with pytest.raises(moqt.ConnectError, match="no authority trusted here"):
            await moqt.connect(hub.url, cafile=tmp_path / "old.pem")
        async with moqt.connect(hub.url, cafile=hub.cafile) as session:
            await session.publish_namespace((b"after",))
        await old.publish_namespace((b"still",))
        old.close()

    with relay(tmp_path, "--self-signed-days", "13") as hub:
        first = READY.search(hub.process.stdout)[2]
        assert (tmp_path / "tls" / "cert.sha256").read_text() == first + "\n"
        (tmp_path / "old.pem").write_bytes(hub.cafile.read_bytes())
        asyncio.run(scenario(hub, first))


def test_who_connects_again_needs_no_certificate_unless_the_relay_gives_out_no_tickets(tmp_path):
    async def resumed(hub):
        shown = []
        for _ in range(3):
            async with moqt.connect(hub.url, cafile=hub.cafile) as session:
                await session.publish_namespace((b"again",))
                shown.append(session.peer_certificate)
        assert None not in shown and len(set(shown)) == 1
        return await asyncio.to_thread(hub.metric, "quic_handshakes_resumed_total")

    with relay(tmp_path / "gives") as hub:
        assert asyncio.run(resumed(hub)) == 2
    (tmp_path / "relay.toml").write_text("[limits]\nmax_session_tickets = 0\n")
    with relay(tmp_path / "gives none", "--config", tmp_path / "relay.toml") as hub:
        assert asyncio.run(resumed(hub)) == 0


@pytest.mark.parametrize(("years", "words"), [(-3, "it was valid until"), (3, "it is valid from")])
def test_a_certificate_out_of_its_time_is_one_sentence_with_the_clock(
    tmp_path, cache, years, words
):
    now = datetime.now(UTC) + timedelta(days=365 * years)
    cert, key = make_self_signed(tmp_path / "given", now=now)
    with relay(tmp_path, "--cert", cert, "--key", key, self_signed=False) as hub:
        assert f"clients will refuse the certificate in {cert}: {words}" in hub.process.stderr
        hub.cafile = cert
        for process in (
            hub.subscribe(cache, tmp_path / "out").finish(expected=1),
            hub.publish(cache).finish(expected=1),
        ):
            program = f"kvcs-{process.name}"
            assert f"certificate was not accepted: {words}" in readable(process, program)
            assert "this machine's clock says 20" in process.stderr
        eventually(lambda: hub.process.stderr.count("refused a client at") >= 2, "the relay's word")
        assert hub.process.stderr.count(f"our certificate was not accepted: {words}") >= 2


def test_a_client_without_a_common_protocol_is_told_and_logged(hub):
    async def scenario():
        port = int(hub.url.rpartition(":")[2])
        quic = QuicConfig(cafile=hub.cafile, alpn=("moqt-07",))
        with pytest.raises(QuicConnectError) as failure:
            await connect("127.0.0.1", port, quic, Recorder)
        return str(failure.value)

    words = "the client offers moqt-07; spoken here: moqt-22, h3"
    assert words in asyncio.run(scenario())
    eventually(lambda: words in hub.process.stderr, "the relay's word")
    assert "refused a client at 127.0.0.1:" in hub.process.stderr
    hub.reaches(quic_handshakes_failed_total=1)


def test_a_webtransport_client_without_a_common_protocol_is_told_and_logged(hub):
    async def scenario():
        port = int(hub.url.rpartition(":")[2])
        closed = asyncio.get_running_loop().create_future()

        class Told(Recorder):
            def connection_closed(self, code, reason, application):
                closed.set_result(reason)

        def make(transport):
            return WebTransportClient(
                transport, Told, ("moqt-07",), authority=f"localhost:{port}", path="/"
            )

        await connect("127.0.0.1", port, QuicConfig(cafile=hub.cafile, alpn=("h3",)), make)
        return await asyncio.wait_for(closed, 10)

    assert "status 400; offered were moqt-07" in asyncio.run(scenario())
    words = "WT-Available-Protocols offers moqt-07; known here: moqt-22"
    eventually(lambda: words in hub.process.stderr, "the relay's word")
    assert "refused a client at 127.0.0.1:" in hub.process.stderr
