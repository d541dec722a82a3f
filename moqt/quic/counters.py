"""What an endpoint counts for its operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(slots=True)
class TransportCounters:
    """Since the endpoint began; only ever grows."""

    connections_accepted: int = 0
    connections_refused: int = 0
    """For want of room, over all and per address."""
    handshakes_failed: int = 0
    """Begun, and ended by one of the two or by time."""
    handshakes_resumed: int = 0
    """Completed with a session ticket, without a certificate."""
    versions_refused: int = 0
    """Answered with Version Negotiation."""
    datagrams_ignored: int = 0
    """For no connection there is, and beginning none."""
    datagrams_handed_over: int = 0
    """For connections of other processes on the port, which got them."""
    retries_sent: int = 0
    """Handshakes that had to prove their address first."""
    resets_sent: int = 0
    """Of the datagrams ignored, those answered with a Stateless Reset."""
    connections_over_budget: int = 0
    """Closed because they held too much out of order."""
    path_changes: int = 0
    """Connections that went on from another address."""
    paths_narrowed: int = 0
    """Connections whose path ceased to carry `max_datagram_size`, which go on with 1,200."""
    packets_lost: int = 0
    """Found lost, of those sent."""
    packets_spurious: int = 0
    """Of these, those that came after all."""
    webtransport_sessions: int = 0
    webtransport_sessions_refused: int = 0
    webtransport_streams_refused: int = 0
    """Streams for a session that was not there."""


class Wait(StrEnum):
    """What a connection that sends nothing waits for."""

    APPLICATION = "application"
    """Something to send."""
    PACING = "pacing"
    CONGESTION_WINDOW = "congestion_window"
    FLOW_CONTROL = "flow_control"
    """Credit of the peer's, of a stream or of the session."""


class Waits:
    """Seconds that the connections of an endpoint have stood still, by what they waited for."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Wait, 0.0)
