"""Whatever happens to processes, disks and networks: nothing wrong is delivered, or said."""

from __future__ import annotations

import pytest

from tools.fault_rounds import rounds


@pytest.mark.parametrize("seed", [1, 4])
def test_nothing_wrong_is_delivered_or_said_whatever_is_killed_stopped_or_filled(seed, tmp_path):
    result = rounds(1, seed, tmp_path)
    assert result["failed"] == {}
    assert sum(result["ended"].values()) >= 2  # a consumer in the midst of it, and one at its end
