"""The bounds of a placement controller. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    """Tables that are full refuse new entries, with a time to come back."""

    instances: int = 10_000
    """Known instances; those that failed longest ago are forgotten first."""

    min_status_ttl_ms: int = 300
    max_status_ttl_ms: int = 60_000
    recovery_ms: int = 10_000
    """How long instances have to report after the controller restarted, at least."""

    min_active: int = 1
    """Active instances of one kind that are left when others ask to sleep."""

    sessions: int = 100_000
    """Known sessions; finished ones are forgotten first, oldest first."""

    checkpoint_octets: int = 4 << 30
    """Of all checkpoints together, as JSON."""

    lookup_ms: int = 1000
    """How long the Index Service may take before a session is placed without it."""

    resume_ms: int = 5000
    """How long an instance may take to accept a resume."""

    retry_ms: int = 500
    give_up_ms: int = 120_000
    """How long a session may wait for an instance."""

    maps: int = 10_000
    reshard_retry_ms: int = 1000
    command_ms: int = 5000
    """How long an answer to any other command is waited for."""

    estimates: int = 20_000
    """Matched blocks times candidates of one placement; beyond it only the least loaded
    candidates are considered."""

    directives_per_instance: int = 64
    prefetch_deadline_ms: int = 2000
    prefetch_lease_ms: int = 5000
    http_loopback: bool = False
