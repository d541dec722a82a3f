"""What the client may use and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvsp.names.bounds import Count, Seconds

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What is asked of others with, and how long they are waited for. Nothing that a client
    holds grows beyond these."""

    connections: Count = 256
    """Connections at once."""

    connections_per_source: Count = 8
    """Connections to one service at once."""

    connect_s: Seconds = 5.0
    """Longest time for a connection to come about."""

    request_s: Seconds = 30.0
    """Longest time for one request with a JSON answer, retries not included."""

    block_s: Seconds = 120.0
    """Longest time for one request of a block, and for storing one."""

    stall_s: Seconds = 10.0
    """Longest time without an octet from a source."""

    attempts: Count = 3
    """Tries of one request at one service, and of one block at one source."""

    max_wait_s: Seconds = 5.0
    """Longest Retry-After that is waited for."""

    answer_octets: Count = 64 * MIB
    """Largest JSON answer that is read."""

    keys_per_lookup: Count = 4096
    """Block Keys asked for at a time."""

    keys_per_lease: Count = 1024
    """Block Keys of one lease of a retrieval; fewer where a holder grants no more."""

    requests: Count = 16
    """Requests of blocks at once, of one retrieval."""

    requests_per_source: Count = 4
    """The same at one source."""

    octets_in_flight: Count = 256 * MIB
    """Octets asked for and not yet handed over; one request is always allowed."""

    piece_octets: Count = 8 * MIB
    """About how much of a block one request asks for, in whole layers."""

    strikes: Count = 4
    """Failures in a row after which a source is not used any more."""

    bad_answers: Count = 3
    """Answers that failed verification after which a source is not used any more."""

    hedge_s: Seconds = 0.5
    """An idle source also gets what another is late with, by so much at least."""

    hedge_factor: Annotated[float, msgspec.Meta(ge=1)] = 3.0
    """The same, by this factor of the time it was estimated to take."""

    release_s: Seconds = 2.0
    """Longest time a cancelled call takes to release what it holds at a server."""
