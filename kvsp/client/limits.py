"""What the client may use and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Octets, seconds and counts. Nothing the client holds grows beyond these."""

    connections: int = 256
    connections_per_source: int = 8
    connect_s: float = 5.0
    request_s: float = 30.0
    """Longest time for one request with a JSON answer, retries not included."""

    block_s: float = 120.0
    """Longest time for one request of a block, and for storing one."""

    stall_s: float = 10.0
    """Longest time without an octet from a source."""

    attempts: int = 3
    """Tries of one request at one service, and of one block at one source."""

    max_wait_s: float = 5.0
    """Longest Retry-After that is waited for."""

    answer_octets: int = 64 * MIB
    """Largest JSON answer that is read."""

    keys_per_lookup: int = 4096
    """Block Keys asked for at a time."""

    requests: int = 16
    """Requests of blocks at once, of one retrieval."""

    requests_per_source: int = 4
    octets_in_flight: int = 256 * MIB
    """Octets asked for and not yet handed over; one request is always allowed."""

    piece_octets: int = 8 * MIB
    """About how much of a block one request asks for, in whole layers."""

    strikes: int = 4
    """Failures in a row after which a source is not used any more."""

    bad_answers: int = 3
    """Answers that failed verification after which a source is not used any more."""

    hedge_s: float = 0.5
    hedge_factor: float = 3.0
    """An idle source also gets what another is late with: by this factor of the time it
    was estimated to take, and `hedge_s` at least."""

    release_s: float = 2.0
    """Longest time a cancelled call takes to release what it holds at a server."""
