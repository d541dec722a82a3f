"""Event logs: qlog 0.3 as a JSON text sequence, QUIC's events and others in one file."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from moqt.quic.qlog import QlogWriter, log_path
from tests.moqt.probe import file_of, write_to
from tests.moqt.quic_pair import Pair, Source, quic_config


def records(path: Path) -> list[dict[str, Any]]:
    octets = path.read_bytes()
    assert octets.startswith(b"\x1e") and octets.endswith(b"\n")
    return [json.loads(text) for text in octets.split(b"\x1e")[1:]]


def test_a_log_is_a_header_and_an_event_per_record(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlog"
    writer = QlogWriter.open(path, "client", now=5.0, group_id="abcd")
    writer.event(5.25, "moqt:control_message_created", {"stream_id": 2, "name": b"\x01\xff"})
    writer.close()
    header, event = records(path)
    assert (header["qlog_version"], header["qlog_format"]) == ("0.3", "JSON-SEQ")
    assert header["trace"]["vantage_point"]["type"] == "client"
    assert header["trace"]["common_fields"]["group_id"] == "abcd"
    assert event == {
        "time": 250.0,
        "name": "moqt:control_message_created",
        "data": {"stream_id": 2, "name": "01ff"},
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_events_reach_the_file_within_a_second_of_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlog"
    writer = QlogWriter.open(path, "server", now=0.0)
    writer.event(0.1, "a:b", {})
    assert path.read_bytes() == b""
    writer.event(1.2, "a:c", {})
    assert [r.get("name") for r in records(path)] == [None, "a:b", "a:c"]
    writer.close()


def test_a_log_ends_at_its_limit_and_counts_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlog"
    writer = QlogWriter.open(path, "server", now=0.0, max_octets=1000)
    for index in range(100):
        writer.event(index / 1000, "a:b", {"filler": "x" * 50})
    writer.close()
    assert path.stat().st_size <= 1000
    assert writer.dropped == 100 - (len(records(path)) - 1)


class _Full:
    """A file on a disk that fills up after `room` octets and is freed again."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return int(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlog"
    writer = QlogWriter.open(path, "server", now=0.0)
    writer.flush()
    full = _Full(file_of(writer), 30)
    write_to(writer, full)
    for index in range(10):
        writer.event(0.1, "a:b", {"index": index})
    writer.flush()
    assert writer.dropped == 10
    full.room = 1 << 20
    writer.event(0.2, "a:c", {})
    writer.close()
    assert [r.get("name") for r in records(path)] == [None, "a:c"]  # no half record before it
    writer.event(0.3, "a:d", {})
    assert writer.dropped == 11


def test_a_file_that_cannot_be_made_and_data_that_is_no_json_are_only_counted(
    tmp_path: Path,
) -> None:
    writer = QlogWriter.open(tmp_path / "absent" / "x.sqlog", "client", now=0.0)
    writer.event(1.0, "a:b", {})
    writer.close()
    assert writer.dropped == 2  # its header, too
    writer = QlogWriter.open(tmp_path / "x.sqlog", "client", now=0.0)
    endless: dict[str, Any] = {}
    endless["self"] = endless
    writer.event(1.0, "a:b", endless)
    writer.event(1.0, "a:b", {("a", "tuple"): 1})
    assert writer.dropped == 2
    writer.close()


def test_logs_of_the_same_connection_id_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first = log_path(tmp_path, "../ab", "client")
    assert first.parent == tmp_path
    first.touch()
    assert log_path(tmp_path, "../ab", "client") not in (first, tmp_path / "../ab")


@pytest.mark.parametrize("size", [100_000])
def test_a_connection_writes_its_quic_events_to_its_own_file(tmp_path: Path, size: int) -> None:
    logs = tmp_path / "logs"
    pair = Pair(quic_config(qlog_dir=logs), quic_config(qlog_dir=logs), loss=0.02)
    writer = pair.client.live.qlog
    assert writer is not None and pair.server.live.qlog is not writer
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    payload = os.urandom(size)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    assert bytes(pair.server.record.data[stream_id]) == payload
    writer.event(pair.now, "moqt:session_started", {})
    pair.client.live.close(0, "")
    assert pair.run(lambda: pair.client.live.terminated and pair.server.live.terminated)
    assert len(list(logs.iterdir())) == 2
    (path,) = logs.glob("*_client*.sqlog")
    (other,) = logs.glob("*_server*.sqlog")
    events = records(path)[1:]
    assert "moqt:session_started" in {event["name"] for event in events}
    times = [event["time"] for event in events]
    assert times == sorted(times) and times[0] == 0
    sent = [e["data"] for e in events if e["name"] == "transport:packet_sent"]
    octets = {
        offset
        for packet in sent
        for frame in packet["frames"]
        if frame["frame_type"] == "stream"
        for offset in range(frame["offset"], frame["offset"] + frame["length"])
    }
    assert octets == set(range(size))
    received = [e["data"] for e in records(other) if e.get("name") == "transport:packet_received"]
    frames = [frame["frame_type"] for packet in received for frame in packet["frames"]]
    assert {"crypto", "ack", "stream"} <= set(frames)
    assert payload[:32].hex() not in path.read_text()


def test_a_log_tells_what_congestion_control_thinks_and_when_it_changes(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    client = quic_config(qlog_dir=logs, congestion_control_algorithm="cubic")
    pair = Pair(client, quic_config(), loss=0.03)
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    pair.client.record.on_ready = Source(pair.client.live, stream_id, bytes(300_000))
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    pair.client.live.close(0, "")
    assert pair.run(lambda: pair.client.live.terminated)
    (path,) = logs.iterdir()
    events = records(path)[1:]
    changes = [e["data"] for e in events if e["name"] == "recovery:congestion_state_updated"]
    assert changes[0] == {"old": "slow_start", "new": "congestion_avoidance"}
    metrics = [e["data"] for e in events if e["name"] == "recovery:metrics_updated"]
    assert {"congestion_window", "bytes_in_flight", "pacing_rate", "min_rtt"} <= set(metrics[-1])
    assert metrics[-1]["min_rtt"] >= 20  # milliseconds
    lost = [e["data"]["packet_number"] for e in events if e["name"] == "recovery:packet_lost"]
    assert len(lost) == len(set(lost)) == pair.client.live.counters.packets_lost > 0
