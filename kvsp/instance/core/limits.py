"""The bounds of an inference instance. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimits:
    """Tables that are full refuse new entries, with a time to come back."""

    directives: int = 64
    """Under way at once."""

    directives_known: int = 1024
    """Finished ones included, which are kept `directive_kept_ms`."""

    directive_kept_ms: int = 60_000
    blocks: int = 65_536
    """Blocks of one directive, and Block Keys in one request."""

    sessions: int = 64
    """Loading or generating at once."""

    session_kept_ms: int = 60_000
    """How long the output of a finished session can still be read."""

    context_tokens: int = 131_072
    """Prompt and output of one session."""

    checkpoint_tokens: int = 64
    """Output tokens after which a checkpoint is due, at the latest."""

    maps: int = 64
    pool_octets: int = 1 << 30
    """Of blocks in the engine's memory."""

    status_ttl_ms: int = 3000
    service_ms: int = 5000
    """How long another service may take to answer."""

    lookup_ms: int = 1000
    """How long the Index Service is waited for before a resume is answered."""

    resume_load_ms: int = 30_000
    sleep_after_ms: int | None = None
    """Time without a session after which the instance asks to sleep; None for never."""

    http_loopback: bool = False
