"""What a session announces, the limits it holds a peer to, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from moqt.values.errors import MisuseError


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session announces, and the limits it holds a peer to."""

    path: str = "/"
    authority: str = "localhost"
    setup_tokens: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded Token structures to send in SETUP."""
    max_filter_ranges: int = 16
    """Ranges the filters of one request may have, its fill's included (MAX_FILTER_RANGES)."""
    max_request_updates: int = 16
    """REQUEST_UPDATEs without an answer on one request stream (MAX_REQUEST_UPDATES)."""
    max_auth_token_cache_size: int = 4096
    """Octets of tokens the peer may have registered, as the draft counts them."""
    max_tokens: int = 16
    """Authorization Tokens one message may carry: each costs a look at who it stands for."""
    max_requests: int = 32_768
    """Requests and fills of the peer open at once; beyond, REQUEST_ERROR EXCESSIVE_LOAD."""
    max_request_rate: int = 5_000
    """Requests of the peer in a second, after that many and `max_requests` at once; beyond,
    REQUEST_ERROR EXCESSIVE_LOAD."""
    max_request_octets: int = 32 << 20
    """Octets of messages kept for the request streams that are open; beyond, REQUEST_ERROR
    EXCESSIVE_LOAD, and by `max_held_octets` more the session ends."""
    max_queued_requests: int = 32_768
    """Requests of ours that may wait for a stream; beyond, they fail here."""
    stream_timeout: float | None = 10.0
    """Seconds a request of ours waits for the peer to grant a stream; then it fails here with
    EXCESSIVE_LOAD. None waits for ever."""
    max_track_aliases: int = 32_768
    """Track Aliases of the peer in use; a PUBLISH beyond gets EXCESSIVE_LOAD."""
    max_namespaces_told: int = 65_536
    """Namespaces one SUBSCRIBE_NAMESPACE of ours may be told."""
    max_held_octets: int = 4 << 20
    """Octets held for streams that came before SETUP or before their Track Alias; as many may be
    kept of the headers of Objects that are not whole. Streams beyond are stopped."""
    max_unread_objects: int = 524_288
    """Objects that one Subscription or FetchResponse keeps for an application that does not read;
    it ends with EXCESSIVE_LOAD beyond. What they hold together is bounded by the windows."""
    send_budget: int = 256 * 1024
    """Octets kept unsent inside QUIC: enough to fill batches, little enough for priorities."""
    relay_id: int | None = None
    """Announced by a relay (RELAY_ID): requests among such relays say who waits for the answer."""
    first_hand: bool = False
    """Of a relay: the peer is to answer with what it has itself (FIRST_HAND)."""
    known_properties: frozenset[int] = frozenset()
    """Mandatory Track Properties (0x4000 to 0x7FFF) that the application understands."""
    grease: int | None = None
    """N of a Setup Option 0x7f*N+0x9D to send along, so that peers learn to ignore them."""
    setup_timeout: float = 10.0
    """Seconds the peer's SETUP may take once the handshake is over."""
    request_timeout: float | None = 60.0
    """Seconds a request or an update may stay unanswered, beyond its RENDEZVOUS_TIMEOUT; then
    it fails here with TIMEOUT. None waits for ever."""
    publish_linger: float = 1.0
    """How long PUBLISH_DONE waits after PUBLISH was accepted, so that a fill can be asked for."""
    alias_timeout: float = 5.0
    """Seconds a data stream may wait for the answer that says for whom it is."""
    done_timeout: float = 10.0
    """How long PUBLISH_DONE waits at least for the streams it counts."""

    def __post_init__(self) -> None:
        if self.max_request_updates < 1:  # 0 would announce "unlimited"
            raise MisuseError("max_request_updates must be at least 1")
        if self.max_request_rate < 1:
            raise MisuseError("max_request_rate must be at least 1")


@dataclass(slots=True)
class SessionCounters:
    """What happened in one session; each only grows."""

    requests_sent: int = 0
    requests_queued: int = 0
    """Of ours: those that had to wait for the peer to grant a stream."""
    requests_streamless: int = 0
    """Of those, the ones that failed because none was granted in `stream_timeout`, or because
    `max_queued_requests` waited already."""
    requests_timed_out: int = 0
    requests_received: int = 0
    requests_refused: int = 0
    """Of the peer: answered with REQUEST_ERROR, for whatever reason."""
    requests_over_limit: int = 0
    """Of those, the ones beyond `max_requests`, `max_request_rate`, `max_request_octets` or
    `max_track_aliases`."""
    fills_over_limit: int = 0
    """Updates refused because as many fills were open as may be."""
    updates_received: int = 0
    publications_received: int = 0
    tracks_skipped: int = 0
    """PUBLISH_SKIPPED sent."""
    requests_unread: int = 0
    """Ended at `max_unread_objects`."""
    streams_dropped: int = 0
    """Data streams given up because nobody said in time for whom they are, or at
    `max_held_octets`."""
    tokens_refused: int = 0
    """Requests refused because of an Authorization Token, before the application saw them."""
