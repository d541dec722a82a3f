"""What a session keeps of its peer's doing, as one value: for metrics, tests and bills."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Remembered:
    """The size of every table of a session that a peer can make grow, at one moment.

    Entries, except where the name says octets. Deliveries and tracks are the stores' and the
    scheduler's, which count them themselves.
    """

    requests_incoming: int = 0
    requests_outgoing: int = 0
    requests_queued: int = 0
    """Ours for which the peer grants no stream."""
    request_octets: int = 0
    """Of their messages, and of those whose end has not come."""
    prefixes: int = 0
    """What the peer's SUBSCRIBE_NAMESPACEs and SUBSCRIBE_TRACKS ask for."""
    namespaces: int = 0
    """What the peer has told our SUBSCRIBE_NAMESPACEs of."""
    updates: int = 0
    """REQUEST_UPDATEs of either side without an answer."""
    deadlines: int = 0
    streams_read: int = 0
    """Streams of either side that are being read, but for the control stream."""
    streams_sent: int = 0
    """Streams that Objects are written to."""
    streams_waiting: int = 0
    """Data streams of which it is not known yet for whom they are."""
    streams_expected: int = 0
    """Request IDs of fetches and fills whose stream may still come."""
    octets_held: int = 0
    """What came on waiting streams, or before SETUP."""
    octets_kept: int = 0
    """Of the headers of Objects that are not whole, on streams that are read."""
    pieces_early: int = 0
    """Pieces of streams that came before SETUP."""
    aliases: int = 0
    """Track Aliases in use."""
    aliases_ended: int = 0
    """Track Aliases of subscriptions that are over, so that late streams are known as late."""
    shared_objects: int = 0
    """First Objects on shared aliases of which it is known who got them."""
    tokens: int = 0
    """Those of the peer's SETUP."""
    token_octets: int = 0
    """What the peer has registered in the token cache, as MAX_AUTH_TOKEN_CACHE_SIZE counts."""
    request_id_gaps: int = 0
    malformed_tracks: int = 0

    @property
    def of_requests(self) -> dict[str, int]:
        """What is there only while requests or streams are: each 0 when none is open."""
        return {name: value for name, value in asdict(self).items() if name not in _LASTING}

    def __add__(self, other: Remembered) -> Remembered:
        """Of two sessions together."""
        mine, theirs = asdict(self), asdict(other)
        return Remembered(**{name: value + theirs[name] for name, value in mine.items()})


_LASTING = frozenset(
    {
        "aliases_ended",
        "shared_objects",
        "tokens",
        "token_octets",
        "request_id_gaps",
        "malformed_tracks",
    }
)
"""What outlives the requests it came with, each within a limit of its own."""
