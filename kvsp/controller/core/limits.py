"""The bounds of a placement controller. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvsp.names.bounds import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    """Tables that are full refuse new entries, with a time to come back."""

    instances: Count = 10_000
    """Known instances; those that failed longest ago are forgotten first."""

    min_status_ttl_ms: Count = 300
    """Shortest TTL of an Instance Status Record; a shorter one counts as this."""

    max_status_ttl_ms: Count = 60_000
    """Longest TTL of an Instance Status Record; a longer one is cut to it."""

    recovery_ms: Count = 10_000
    """How long instances have to report after the controller restarted, at least."""

    min_active: Count = 1
    """Active instances of one kind that are left when others ask to sleep."""

    sessions: Count = 100_000
    """Known sessions; finished ones are forgotten first, oldest first."""

    checkpoint_octets: Count = 4 << 30
    """Of all checkpoints together, in memory."""

    lookup_ms: Count = 1000
    """How long the Index Service may take before a session is placed without it."""

    resume_ms: Count = 5000
    """How long an instance may take to accept a resume."""

    retry_ms: Count = 500
    """How long after a resume that failed the next one is tried."""

    give_up_ms: Count = 120_000
    """How long a session may wait for an instance."""

    maps: Count = 10_000
    """Known Shard Maps."""

    reshard_retry_ms: Count = 1000
    """How long after a commit or an abort that failed the next one is tried."""

    command_ms: Count = 5000
    """How long an answer to any other command is waited for."""

    estimates: Count = 20_000
    """Matched blocks times candidates of one placement; beyond it only the least loaded
    candidates are considered."""

    directives_per_instance: Count = 64
    """Prefetch directives under way at one instance."""

    prefetch_deadline_ms: Count = 2000
    """`deadline_ms` of a directive for which the request names none."""

    prefetch_lease_ms: Count = 5000
    """`lease_ms` of a directive for which the request names none."""

    mean_service_us: Count = 2_000_000
    """Mean service time of an instance of which neither a report nor a served session tells."""

    http_loopback: bool = False
