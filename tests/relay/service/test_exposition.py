"""All that a relay exports, as a real one answers Prometheus."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from tests.relay.service.exposition import faults, kinds


def test_what_is_exported_follows_the_rules_of_prometheus(scraped):
    text, _ = scraped
    assert faults(text) == []
    assert len(kinds(text)) > 100


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("# HELP a_total A.\n# TYPE a_total counter\n# TYPE a_total counter\n", "2 TYPE lines"),
        ("# HELP a_total A.\n# HELP a_total A.\n# TYPE a_total counter\n", "2 HELP lines"),
        ("# TYPE a gauge\na 1\n", "a has no HELP"),
        ("# HELP a A.\n# TYPE a counter\na 1\n", "a is a counter"),
        ("# HELP a_total A.\n# TYPE a_total gauge\n", "a_total is a gauge"),
        ("# HELP a_octets A.\n# TYPE a_octets gauge\n", "a_octets is not in base units"),
        ("# HELP a_bytes_b A.\n# TYPE a_bytes_b gauge\n", "a_bytes_b does not end with its unit"),
        ("# HELP a A.\n# TYPE a gauge\na 1\na 2\n", "comes twice"),
        ("# HELP a A.\n# TYPE a gauge\na{b=c} 1\n", "is no sample"),
        ("a 1\n", "a has no TYPE"),
    ],
)
def test_each_breach_of_these_rules_is_noticed(broken, fault):
    assert any(fault in each for each in faults(broken)), faults(broken)


def test_build_process_and_certificate_are_told(scraped):
    text, cert = scraped
    built = re.search(r"^kvcs_relay_build_info(\{.*\}) 1\.0$", text, re.M)
    assert set(re.findall(r"(\w+)=", built[1])) == {"version", "python", "aioquic", "backend"}
    values = dict(re.findall(r"^(\w+) (\S+)$", text, re.M))
    assert float(values["process_resident_memory_bytes"]) > 10 << 20
    assert float(values["process_cpu_seconds_total"]) > 0
    assert float(values["process_open_fds"]) > 3
    began = datetime.fromtimestamp(float(values["process_start_time_seconds"]))
    assert abs((datetime.now() - began).total_seconds()) < 3600
    expiry = float(values["kvcs_relay_certificate_expiry_timestamp_seconds"])
    assert expiry == cert.not_valid_after_utc.timestamp()
    assert float(values["kvcs_relay_loop_hold_seconds"]) > 0
