"""Settings, limits, counters and the clock of a relay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moqt.track.properties import max_cache_duration
from moqt.values.messages import Properties

_MAY_BE_0 = (
    "transit_octets",
    "linger",
    "publisher_linger",
    "failure_memory",
    "cache_duration",
    "max_cache_duration",
    "disk_octets",
    "disk_octets_per_scope",
    "cache_octets_per_scope",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Every limit of a relay; sizes in octets, times in seconds.

    Those on tracks, namespaces and waiting requests hold for each scope (`relay.scopes`).
    At a limit a request is refused with EXCESSIVE_LOAD and `retry_after_ms`.
    """

    cache_octets: int = 1 << 30
    """What the cache may hold, bookkeeping included."""
    cache_octets_per_scope: int = 0
    """Of these, what one scope may have; 0: all, while nobody else wants it. When all is taken, who
    has most of it gives."""
    transit_octets: int = 64 << 20
    """What Objects under way, those that grow or that nobody has begun to send yet, may take beyond
    the cache, all together, one track half of it, and what grows of one scope half of it where
    there are others; beyond, their streams are reset."""
    cache_duration: float = 0.0
    """For how long Objects of a track are served from the cache that says nothing of it by
    MAX_CACHE_DURATION; 0: for as long as there is room."""
    max_cache_duration: float = 0.0
    """Cap on that of any track, whatever it says; 0: none."""
    disk_octets: int = 0
    """What files of the disk tier may take, bookkeeping included."""
    disk_octets_per_scope: int = 0
    """Of these, what one scope may take; 0: all. When all is taken, who has most of it gives."""
    disk_files: int = 16_384
    """Files on the disk, one or a few for each track."""
    disk_queue_octets: int = 64 << 20
    """What may wait to be written, one scope half of it; what comes beyond is written later if it
    is still in memory then."""
    disk_memory_octets: int = 128 << 20
    """Memory that the bookkeeping of the disk tier may take, one scope half of it: names and
    properties of tracks on the disk, and which ranges of them are there, or on their way; one that
    finds no room is kept in memory alone."""
    disk_reads: int = 256
    """Reads from the disk that may be under way, one scope half of them; for more, and while the
    disk hangs, publishers are asked."""
    disk_timeout: float = 5.0
    """How long a read from the disk may take before publishers are asked instead."""
    max_scopes: int = 16
    """Paths in use at once, that is, with a request that was allowed; a session that dials one more
    is closed with INVALID_PATH, and one that waits with a path gets EXCESSIVE_LOAD."""
    max_tracks: int = 65_536
    """Tracks known at once, cached ones included."""
    max_namespaces: int = 65_536
    """Namespaces published at once, each publisher counted; the same for listings of prefixes."""
    max_namespaces_per_session: int = 16_384
    """Of these, those of one session."""
    max_absent: int = 16_384
    """Tracks remembered that do not exist, as their publishers say; beyond, the oldest goes."""
    max_registered: int = 65_536
    """Namespaces that the directory of a mesh is told of, of each scope, and as many prefixes of
    them."""
    max_mesh_sessions: int = 128
    """Sessions to relays that the directory names; one that nobody uses makes room for another, and
    one scope has as many at most as are still free."""
    max_pending: int = 4096
    """Requests waiting for a publisher at once; one session has as many at most as are still free,
    so that there is room for others."""
    upstream_timeout: float = 5.0
    """How long a publisher may take to answer a SUBSCRIBE or a FETCH."""
    stall_timeout: float = 30.0
    """How long an upstream FETCH may bring nothing before it is given up."""
    max_rendezvous: float = 30.0
    """Cap on a subscriber's RENDEZVOUS_TIMEOUT."""
    linger: float = 30.0
    """How long an upstream subscription outlives the last downstream request."""
    publisher_linger: float = 5.0
    """How long subscribers wait for another source when the last one of their track is lost: for a
    publisher that comes back, or a relay that has it by then; 0: they end at once."""
    max_fetches_per_track: int = 4
    """Upstream FETCHes of one track at once; further ranges wait."""
    max_intervals_per_track: int = 4096
    """Separate ranges of one track up to which it is learned that nothing exists in more."""
    fetch_window: int = 32 << 20
    """Octets an upstream FETCH may be ahead of those who read it."""
    failure_memory: float = 1.0
    """How long a range that could not be had is not asked for again."""
    retry_after_ms: int = 1000
    """What a refused request is told to wait."""
    pending_subgroups: int = 4096
    """Subgroups one subscription may be behind; beyond, it ends with TOO_FAR_BEHIND."""
    pending_datagrams: int = 1024
    """Objects that may wait to go out as datagrams, per subscription; beyond, they are dropped."""
    pending_fills: int = 64
    """Fills one subscription may have open; an update that asks for one more is refused."""
    stream_patience: float = 1.0
    """Seconds without a new stream from a peer after which a Subgroup that waits for one takes
    that of another of lower priority, which goes on with a later one."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in _MAY_BE_0):
                raise ValueError(f"{name} must be positive, not {value}")


def cache_duration(properties: Properties, config: RelayConfig) -> float | None:
    """For how long Objects of a track with these Track Properties may be served from a cache, in
    seconds (MOQT "MAX_CACHE_DURATION"); None: without end."""
    duration = max_cache_duration(properties)
    if duration is None:
        duration = config.cache_duration or None
    most = config.max_cache_duration
    if most and (duration is None or duration > most):
        return most
    return duration


@dataclass(slots=True)
class Clock:
    """The time, in seconds: it stands still between two ticks."""

    now: float = 0.0


@dataclass(slots=True)
class Counters:
    """What has happened since the start; only ever grows."""

    sessions: int = 0
    upstream_subscriptions: int = 0
    upstream_fetches: int = 0
    upstream_timeouts: int = 0
    downstream_subscriptions: int = 0
    downstream_fetches: int = 0
    publications: int = 0
    publications_offered: int = 0
    publishers_lost: int = 0
    """Tracks whose readers were left without any source."""
    publishers_returned: int = 0
    """Of those, the ones that had one again within `publisher_linger`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests answered with REQUEST_ERROR, by the name of its code."""
    requests_over_limit: int = 0
    """Of those, the ones beyond a limit of the relay."""
    requests_absent: int = 0
    """Of those, the ones for tracks whose publishers had said that they do not exist."""
    requests_unreachable: int = 0
    """Of the refused ones, those that a relay might have served that could not be asked."""
    claims_ignored: int = 0
    """Sessions and requests that say to be of a relay (RELAY_ID, RELAY_PATH), and may not."""
    directory_lookups: int = 0
    """Namespaces, and prefixes that are listed, that the directory was asked for."""
    directory_failures: int = 0
    """Times that it did not answer."""
    namespaces_unregistered: int = 0
    """That it was not told of, beyond `max_registered`."""
    mesh_sessions_refused: int = 0
    """To other relays, that were not made, beyond `max_mesh_sessions`."""
    malformed_tracks: int = 0
    tracks_renewed: int = 0
    """Tracks whose cached content was dropped because their publisher contradicted it."""
    scopes_refused: int = 0
    """Sessions closed, and requests refused, because of one path too many."""
    requests_revoked: int = 0
    """Ended because the right to them was withdrawn."""
    objects_nonexistent: int = 0
    """Objects dropped because they had been declared non-existent."""
    objects_in: int = 0
    octets_in: int = 0
    objects_out: int = 0
    octets_out: int = 0
    """Payload octets of the Objects whose sending has begun."""

    @property
    def requests_refused(self) -> int:
        return self.refused.total()

    @property
    def requests(self) -> int:
        """Those for tracks that were taken, either way: who is refused makes nobody work."""
        upstream = self.upstream_subscriptions + self.upstream_fetches + self.publications
        here = self.downstream_subscriptions + self.downstream_fetches
        return upstream + self.publications_offered + here
