"""docs/operations.md says of the admin listener what it does."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from relay.config import RelayConfig
from relay.scopes import Scopes
from relay.service import admin
from relay.service.told import answers

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


async def test_every_path_of_the_admin_listener_is_described_and_no_other():
    text = PAGE.read_text()
    listener = admin.Admin(answers.OwnAnswers(Scopes(RelayConfig()), CollectorRegistry()))
    await listener.start("127.0.0.1", 0)
    try:
        routes = set(listener.routes)
    finally:
        await listener.close()
    described = set(re.findall(r"`(GET|POST) (/[a-z.]*)", text))
    assert described == routes
    assert f"At most {admin.MAX_CONNECTIONS} connections" in text
    assert f"at most {admin.CONNECTION_SECONDS:.0f} s" in text
    assert f"({answers.PAGE:,} at most)" in text
