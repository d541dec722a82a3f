"""What several tests of the relay stand on."""

from __future__ import annotations

import pytest

from tests.relay.rights.principals import RECORDS, write


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "principals.json"
    write(path, RECORDS)
    return path
