"""aioquic's event trace, streamed to a file per connection instead of kept in memory."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from aioquic.quic.logger import QuicLogger, QuicLoggerTrace

from moqt.quic.congestion.controller import ControllerState
from moqt.quic.qlog import QlogWriter, VantagePoint, log_path


class StreamingTrace(QuicLoggerTrace):
    """Hands each event to `writer`.

    aioquic adds a received packet's frames after it has logged the packet, so events wait for
    the next packet, or `settle`.
    """

    def __init__(self, *, is_client: bool, odcid: bytes, writer: QlogWriter, now: float) -> None:
        super().__init__(is_client=is_client, odcid=odcid)
        self.writer = writer
        self.now = now
        """The time of the events that follow; whoever drives the connection keeps it."""
        self._waiting: list[tuple[float, str, dict[str, Any]]] = []

    def log_event(self, *, category: str, event: str, data: dict[str, Any]) -> None:
        if event == "packet_received":
            self.settle()
        self._waiting.append((self.now, f"{category}:{event}", data))

    def settle(self) -> None:
        """The waiting events are complete."""
        for waiting in self._waiting:
            self.writer.event(*waiting)
        self._waiting.clear()


def log_metrics(
    trace: QuicLoggerTrace,
    state: ControllerState,
    phase: str,
    *,
    in_flight: int,
    trips: tuple[float, float, float],
    probe_timeouts: int,
) -> str:
    """What is known of the path; `trips`: its round trip smoothed, its variance, the latest.

    Returns the phase of congestion control; `phase` was the one before.
    """
    smoothed, variance, latest = map(trace.encode_time, trips)
    data: dict[str, Any] = {
        "bytes_in_flight": in_flight,
        "congestion_window": state.window,
        "smoothed_rtt": smoothed,
        "rtt_variance": variance,
        "latest_rtt": latest,
        "pto_count": probe_timeouts,
    }
    if state.rtt_min is not None:
        data["min_rtt"] = trace.encode_time(state.rtt_min)
    if state.pacing_rate is not None:
        data["pacing_rate"] = int(state.pacing_rate * 8)  # qlog: bits a second
    if state.bandwidth is not None:
        data["bandwidth"] = int(state.bandwidth * 8)
    if state.slow_start_threshold is not None:
        data["ssthresh"] = state.slow_start_threshold
    trace.log_event(category="recovery", event="metrics_updated", data=data)
    if state.phase != phase:
        change = {"old": phase, "new": state.phase}
        trace.log_event(category="recovery", event="congestion_state_updated", data=change)
    return state.phase


class StreamingLogger(QuicLogger):
    """Makes the traces of an endpoint's connections, in `directory`."""

    def __init__(self, directory: Path, max_octets: int) -> None:
        super().__init__()
        self.now = 0.0
        self.dropped = 0
        """Events lost, over the connections that are over."""
        self._directory = directory
        self._max_octets = max_octets
        self._open: set[StreamingTrace] = set()
        atexit.register(self.close)  # a program may end before its connections have

    def start_trace(self, is_client: bool, odcid: bytes) -> StreamingTrace:
        vantage_point: VantagePoint = "client" if is_client else "server"
        writer = QlogWriter.open(
            log_path(self._directory, odcid.hex(), vantage_point),
            vantage_point,
            now=self.now,
            title="QUIC and MOQT",
            group_id=odcid.hex(),
            max_octets=self._max_octets,
        )
        trace = StreamingTrace(is_client=is_client, odcid=odcid, writer=writer, now=self.now)
        self._open.add(trace)
        return trace

    def end_trace(self, trace: QuicLoggerTrace) -> None:
        if isinstance(trace, StreamingTrace) and trace in self._open:
            self._open.discard(trace)
            trace.settle()
            trace.writer.close()
            self.dropped += trace.writer.dropped

    def close(self) -> None:
        """Complete the logs of connections that have not ended in order."""
        atexit.unregister(self.close)
        for trace in list(self._open):
            self.end_trace(trace)
