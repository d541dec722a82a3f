"""What may be set of a `kvcs.Client`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Limits and waits of a `Client`; sizes in octets, times in seconds.

    Raises ValueError for a value out of range.
    """

    lookup_timeout: float = 0.3
    """How long a look-up may wait where the network has to be asked: for the listing of a relay
    that was just connected to, prefix by prefix at one that lists nothing, and for the index
    service. A relay that has not answered by then is not waited for again for `failed_seconds`."""

    stall: float = 0.5
    """How long a load waits for the first Object, and for the next one until two layers have come;
    then five median gaps between layers, at least two fifths of this. Time in which others on the
    same session are served counts as an n-th of it where n loads are under way."""

    timeout: float = 10.0
    """How long a load may take, whatever comes: choose what recomputing takes."""

    keep_octets: int = 1 << 30
    """What kept publications may have together. A new one takes the place of those that were asked
    for longest ago and are complete; when there are none of these, it is dropped."""

    keep_seconds: float = 600.0
    """How long a publication is kept that nobody asks for, and one of which nothing is put."""

    keep_publications: int = 4096
    """How many are kept at most."""

    pending_octets: int = 256 << 20
    """Layers that were handed over and are not hashed so far: with more, their publication is
    dropped."""

    failed_seconds: float = 30.0
    """How long a publication that stalled, was lost or failed verification is not offered again,
    and a relay that did not answer is not asked."""

    most_loads: int = 256
    """Loads at a time; one more fails at once."""

    def __post_init__(self) -> None:
        for name in ("lookup_timeout", "stall", "timeout", "keep_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is more than 0 seconds, not {getattr(self, name):g}")
        if self.failed_seconds < 0:
            raise ValueError(f"failed_seconds is 0 or more, not {self.failed_seconds:g}")
        for name in ("keep_octets", "keep_publications", "pending_octets", "most_loads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
