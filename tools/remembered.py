"""What peers can make a relay remember: the rows of a table in docs/limits.md.

`tests/relay/test_remembered.py` floods a relay, and fails for a container that grows and that no
row names.
"""

from __future__ import annotations

from typing import NamedTuple

TITLE = """
## What peers can make a relay remember

Nothing else grows by what a peer says. Metrics are `kvcs_relay_remembered{table="…"}` where a
table is named alone. What is forgotten, or was not learned, is unknown: it is asked for again.

| what | of what | at most | price, octets | metric | when it is full |
|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """One kind of thing that is remembered."""

    what: str
    per: str
    limit: str
    price: str
    metric: str
    full: str
    containers: frozenset[str]
    """`Class.attribute` of each container that it is in."""

    def __str__(self) -> str:
        cells = (self.what, self.per, self.limit, self.price, self.metric, self.full)
        return f"| {' | '.join(cells)} |\n"


def _row(what: str, per: str, limit: str, price: str, metric: str, full: str, held: str) -> Row:
    return Row(what, per, limit, price, metric, full, frozenset(held.split()))


REFUSED = "EXCESSIVE_LOAD"

ROWS = (
    _row(
        "Objects, and the IDs of those", "all tracks", "`--cache-memory`",
        "payload, properties, 768 each", "`cache_billed_bytes`",
        "whole tracks out of use for longest go first",
        "Share.uses Cache.owners Cache._fresh Cache._awaited _Ages.came Cache._aging "
        "GroupLog.objects GroupLog.ids SubgroupLog.ids "
        "TrackStore.groups TrackStore.group_ids GroupLog.subgroups StoredObject.parts "
        "StoredObject.ends",
    ),
    _row(
        "End of Group and End of Track Objects", "all tracks", "`--cache-memory`", "768 each",
        "`cache_statuses`", "only what they say is kept", "",
    ),
    _row(
        "ranges known not to exist, and declared gaps", "track", "`max_intervals_per_track`",
        "128 each, to the cache", "`cache_intervals`, `cache_intervals_refused_total`",
        "what touches another range is learned, more is not",
        "IntervalSet._starts IntervalSet._ends",
    ),
    _row(
        "Track Properties", "track", "`--cache-memory`", "128 and its octets each, to the cache",
        "`cache_properties`", f"the publisher's track is not taken: {REFUSED}", "",
    ),
    _row(
        "what a running FETCH has left out", "FETCH to a publisher", "`--cache-memory`",
        "128 each, to the cache", "`cache_intervals`, `cache_intervals_refused_total`",
        "not learned", "",
    ),
    _row(
        "ranges a FETCH could not tell, or had no room for", "FETCH, track",
        "256 (`MAX_RANGES`, `MAX_FAILURES`)", "", "", "the last one grows; forgotten after "
        "`failure_memory`",
        "Ranges._failures UpstreamFetch._unknown UpstreamFetch._rejected",
    ),
    _row(
        "ranges that wait to be fetched", "track", "256 (`MAX_QUEUED`)", "", "",
        "who reads them asks again when others have come", "Ranges.queue",
    ),
    _row(
        "complete tracks in files", "all tracks", "`--cache-disk`, `disk_files`",
        "the octets of the file", "`disk_bytes`, `disk_files`",
        "the one out of use for longest goes, of who has more than its share",
        "Shelf.entries DiskTier._expiries DiskTier.shelves",
    ),
    _row(
        "Objects on their way to files", "all tracks", "`disk_queue_octets`",
        "payload, properties, 82 each", "`disk_queue_bytes`, `disk_objects_skipped_total`",
        "written later, if they are in memory then, 65,536 of a track (`MAX_SKIPPED`)",
        "DiskTier._pending DiskTier._queued_by DiskTier._busy DiskTier.open DiskTier._touched "
        "Keeping._skipped Part._order",
    ),
    _row(
        "names, properties and ranges of tracks on the disk, or on their way", "all tracks",
        "`disk_memory_octets`, one scope half",
        "128 a range; 1,152 a track, its octets, 512 a field of its namespace and 768 a file",
        "`disk_memory_bytes`, `disk_memory_refused_total`",
        "the one out of use for longest goes; one in too many pieces is kept in memory alone",
        "Lost._ranges",
    ),
    _row(
        "reads from the disk that have not come back", "all tracks", "`disk_reads`, one scope half",
        "", "`disk_reads`, `disk_reads_refused_total`", "publishers are asked", "Reads._waiting",
    ),
    _row(
        "tracks without a publisher that wait to be read", "all tracks",
        "`max_tracks`, each for `disk_timeout`", "", "", "", "Reads._queue Shelf.turns",
    ),
    _row(
        "ranges that wait to be read from a file", "track", "256 (`MAX_READS`)", "", "",
        "who reads them asks again when others have come", "Kept._wanted",
    ),
    _row(
        "IDs of Objects that are gone", "Subgroup that is not over", "16,384 (`MAX_IDS`)",
        "", "", "the lower half is forgotten", "",
    ),
    _row(
        "Subgroups a subscription has sent or is to send", "subscription", "`pending_subgroups`",
        "", "`too_far_behind_total`", "PUBLISH_DONE TOO_FAR_BEHIND",
        "SubscriptionDelivery._finished SubscriptionDelivery._subgroups "
        "SubscriptionDelivery._resume",
    ),
    _row(
        "requests, and their streams", "session", "`max_requests`", "",
        "`requests_incoming`, `requests_outgoing`, `streams_read`", REFUSED,
        "OpenRequests.incoming OpenRequests.outgoing Session._streams RequestOctets._of "
        "IncomingPublishNamespace._when_ended Deadlines._heap UpstreamTrack.subscriptions "
        "UpstreamTrack.denied Readers._requests Readers.sessions",
    ),
    _row(
        "names, filters, tokens, properties of requests", "session", "`max_request_octets`",
        "as many as the largest message of each", "`request_octets`",
        f"{REFUSED}; `max_held_octets` beyond it the session is closed", "",
    ),
    _row(
        "updates without an answer", "request", "`max_request_updates`", "", "`updates`",
        "TOO_MANY_REQUEST_UPDATES", "Updates._held Updates._sent Updates._unsent",
    ),
    _row(
        "fills", "subscription, session", "`pending_fills`, `max_requests`", "",
        "`streams_expected`", REFUSED, "SubscriptionDelivery._fills SubscriberSide._fill_ids",
    ),
    _row(
        "Track Aliases in use", "session", "`max_track_aliases`", "", "`aliases`", REFUSED,
        "TrackAliases._subscribers",
    ),
    _row(
        "Track Aliases that are over", "session", "1,024 (`MAX_DEAD_ALIASES`)", "",
        "`aliases_ended`", "the oldest is forgotten", "TrackAliases.dead",
    ),
    _row(
        "first Objects on shared aliases", "session", "1,024 (`MAX_COPIES`)", "",
        "`shared_objects`", "the oldest is forgotten", "TrackAliases._copies",
    ),
    _row(
        "data streams whose owner is not known", "session",
        "`max_held_octets`, `max_open_streams_uni`", "their octets",
        "`streams_waiting`, `octets_held`",
        "who holds most is let go, until an eighth is free; each after `alias_timeout`",
        "DataStreams.waiting DataStreams._held_for DataIn.held",
    ),
    _row(
        "data streams that are read", "session", "`max_open_streams_uni`", "",
        "`streams_read`", "QUIC grants no more",
        "DataStreams.reading Filling._feeds Filling.bringing UpstreamSubscribe.streams "
        "UpstreamPublish.streams",
    ),
    _row(
        "headers of Objects that are not whole, with their properties", "session",
        "`max_held_octets`", "their octets", "`octets_kept`, `session_streams_dropped_total`",
        "the stream that brings more is stopped", "Incremental.pending",
    ),
    _row(
        "what came before SETUP", "session", "`max_held_octets`, 4,096 pieces (`MAX_EARLY`)",
        "its octets", "`octets_held`, `pieces_early`", "the session is closed",
        "EarlyStreams._pieces EarlyStreams._of",
    ),
    _row(
        "tokens of SETUP", "session", "`max_tokens`", "", "`tokens`",
        "the session is closed with UNAUTHORIZED", "",
    ),
    _row(
        "tokens that are registered", "session", "`max_auth_token_cache_size`",
        "16 and their value", "`token_octets`", "AUTH_TOKEN_CACHE_OVERFLOW",
        "TokenCache._entries",
    ),
    _row(
        "Request IDs that were left out", "session", "4,096 runs (`MAX_REQUEST_ID_GAPS`)", "",
        "`request_id_gaps`", "the oldest count as used", "",
    ),
    _row(
        "namespaces that are published", "scope, session",
        "`max_namespaces`, `max_namespaces_per_session`", "", "`namespaces`", REFUSED,
        "PrefixMap._exact PrefixMap._below Namespaces._published_by "
        "IncomingSubscribeNamespace._told Namespaces.listings Offers.wanted",
    ),
    _row(
        "namespaces we are told of", "SUBSCRIBE_NAMESPACE of ours", "`max_namespaces_told`", "",
        "`remembered`: `namespaces`", "it is given up", "OutgoingSubscribeNamespace.namespaces",
    ),
    _row(
        "prefixes asked for", "session", "`max_requests`", "", "`prefixes`", REFUSED,
        "Prefixes._of Prefixes._at Prefixes._below",
    ),
    _row(
        "tracks", "scope", "`max_tracks`", "", "`tracks`", f"idle ones go, then {REFUSED}",
        "Relay.tracks Relay.active",
    ),
    _row(
        "requests that wait for a publisher", "scope", "`max_pending`", "", "`pending_requests`",
        REFUSED, "Waiting.pending Waiting._until Readers._requests",
    ),
    _row(
        "malformed tracks", "session, scope", "1,024 (`MAX_MALFORMED`)", "", "`malformed_tracks`",
        "the one found first is forgotten; each after a minute", "MalformedTracks._tracks",
    ),
)  # fmt: skip


def table() -> str:
    return TITLE + "".join(map(str, ROWS))
