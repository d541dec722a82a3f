"""What every story is held to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_failure_is_only_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The adapter turns a crash into a closed connection and a line in the log."""
    with caplog.at_level(logging.WARNING):
        yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
