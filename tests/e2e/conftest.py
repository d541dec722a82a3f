"""Nothing that a test started outlives it."""

from __future__ import annotations

import pytest

from tests.e2e.support import Process, make_cache, relay


@pytest.fixture(autouse=True)
def no_process_is_left():
    try:
        yield
    finally:
        while Process.running:
            Process.running.pop().kill()


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def hub(tmp_path):
    """A relay of this test's own."""
    with relay(tmp_path) as running:
        yield running
