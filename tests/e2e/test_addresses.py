"""A relay on every address of its host, reached at each of them."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest

import moqt
from moqt.quic.config import QuicConfig
from tests.e2e.support import relay


def dials(port: int, host: str, cafile) -> None:
    async def scenario() -> None:
        quic = QuicConfig(cafile=cafile, server_name="localhost")
        shown = f"[{host}]" if ":" in host else host
        for scheme in ("moqt", "https"):
            async with moqt.connect(f"{scheme}://{shown}:{port}/", quic=quic) as session:
                await session.publish_namespace((b"here",))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [("0.0.0.0:0", ("127.0.0.1", "127.0.0.2")), ("[::]:0", ("127.0.0.2", "::1"))],
)
def test_a_relay_on_every_address_answers_from_the_one_that_was_dialled(tmp_path, listen, hosts):
    if ":" in listen[1:4] and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with relay(tmp_path, "--listen", listen) as hub:
        port = int(re.search(r":(\d+)$", hub.url)[1])
        for host in hosts:
            dials(port, host, hub.cafile)
        assert hub.process.stderr == ""
