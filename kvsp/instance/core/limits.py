"""The bounds of an inference instance. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvsp.names.bounds import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimits:
    """Tables that are full refuse new entries, with a time to come back."""

    directives: Count = 64
    """Prefetch directives under way at once; one more is answered with 503."""

    directives_known: Count = 1024
    """Finished ones included, which are kept `directive_kept_ms`."""

    directive_kept_ms: Count = 60_000
    """How long the status of a finished directive can still be read."""

    blocks: Count = 65_536
    """Blocks of one directive, and Block Keys in one request; beyond, 413."""

    sessions: Count = 64
    """Loading or generating at once."""

    session_kept_ms: Count = 60_000
    """How long the output of a finished session can still be read."""

    context_tokens: Count = 131_072
    """Prompt and output of one session."""

    checkpoint_tokens: Count = 64
    """Output tokens after which a checkpoint is due, at the latest."""

    maps: Count = 64
    """Shard Maps it is a member of."""

    pool_octets: Count = 1 << 30
    """Of blocks in the engine's memory."""

    status_ttl_ms: Annotated[int, msgspec.Meta(ge=300, le=60_000)] = 3000
    """TTL of its Instance Status Record; it reports several times in that."""

    service_ms: Count = 5000
    """How long another service may take to answer."""

    lookup_ms: Count = 1000
    """How long the Index Service is waited for before a resume is answered."""

    resume_load_ms: Count = 30_000
    """How long the cache of a session is waited for at most, where it cannot be computed."""

    sleep_after_ms: Count | None = None
    """Time without a session after which the instance asks to sleep; not set: never."""

    http_loopback: bool = False
