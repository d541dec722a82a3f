"""Names of metrics as Prometheus has them."""

from __future__ import annotations

import pytest

from relay.service.told.names import exported


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("cache_octets", "cache_bytes"),
        ("cache_budget_octets", "cache_budget_bytes"),
        ("octets_in", "in_bytes"),
        ("disk_octets_written", "disk_written_bytes"),
        ("bandwidth_octets", "bandwidth_bytes_per_second"),
        ("cache_objects", "cache_objects"),
    ],
)
def test_the_unit_of_octets_is_bytes_and_stands_at_the_end(ours, theirs):
    assert exported(ours) == theirs
