"""The relay's numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moqt.requests import IncomingFetch, IncomingSubscribe, RequestState
from moqt.session import Remembered
from relay.audience.downstream import TrackRequest
from relay.core import Relay
from relay.disk.entries import DiskCounters
from relay.scopes import Scopes
from relay.service.told.names import exported, labelled

GAUGES = {
    "scopes": "Paths in use, or with something cached.",
    "sessions": "Established sessions.",
    "upstream_sessions": "Established sessions to upstream relays.",
    "mesh_sessions": "Established sessions to relays that the directory named.",
    "namespaces": "Published namespaces, each publisher counted.",
    "tracks": "Tracks known, cached ones included.",
    "pending_requests": "Requests waiting for a publisher.",
    "upstream_subscriptions": "Established subscriptions to publishers.",
    "upstream_fetches": "FETCHes running at publishers.",
    "downstream_subscriptions": "Established subscriptions of subscribers.",
    "downstream_fetches": "FETCHes being served.",
    "cache_octets": "Payload octets cached.",
    "cache_billed_octets": "Octets billed to the cache's budget, bookkeeping included.",
    "cache_budget_octets": "The cache's budget.",
    "cache_transit_octets": "Octets that Objects under way take beyond the cache's budget.",
    "cache_objects": "Whole Objects cached.",
    "cache_intervals": "Ranges known not to exist, billed to the cache at 128 octets each.",
    "cache_properties": "Octets billed to the cache for Track Properties.",
    "cache_statuses": "End of Group and End of Track Objects held.",
    "disk_octets": "Octets that files of the disk tier take, with what is to be written.",
    "disk_budget_octets": "What they may take; less than asked for while the disk is full.",
    "disk_queue_octets": "Octets that wait to be written to the disk.",
    "disk_tracks": "Tracks on the disk.",
    "disk_files": "Their files.",
    "disk_reads": "Reads from the disk that have not come back, given up ones included.",
    "disk_memory_octets": "Octets of memory billed for the bookkeeping of the disk tier.",
    "disk_failing": "1 while nothing is written because the disk has refused something.",
    "loop_hold_seconds": "Longest time, since it was ready, in which no socket was looked at.",
    "tasks": "Tasks of the event loop.",
    "loop_work_seconds": "Most CPU time of the loop's thread, since then, between two looks.",
}
COUNTERS = {
    "sessions": "Sessions established.",
    "requests_over_limit": "Of the refused, those beyond a limit of the relay.",
    "claims_ignored": "Sessions and requests that say to be of a relay, and may not.",
    "requests_unreachable": "Of the refused, those that an upstream relay might have served that "
    "could not be asked.",
    "requests_absent": "Of these, those for tracks whose publishers had said they do not exist.",
    "directory_lookups": "Namespaces, or listed prefixes, the mesh directory was asked for.",
    "directory_failures": "Times that the directory did not answer.",
    "namespaces_unregistered": "Namespaces, or prefixes of them, the directory was not told of "
    "(max_registered).",
    "mesh_sessions_refused": "Sessions to other relays not made (max_mesh_sessions).",
    "tracks_renewed": "Tracks whose cached content was dropped: their publisher contradicted it.",
    "malformed_tracks": "Tracks given up because their Objects contradict each other.",
    "scopes_refused": "Sessions closed, and requests refused, because of one path too many.",
    "requests_revoked": "Requests ended because the right to them was withdrawn.",
    "objects_nonexistent": "Objects dropped because they had been declared non-existent.",
    "upstream_subscriptions": "SUBSCRIBEs sent to publishers.",
    "upstream_fetches": "FETCHes sent to publishers.",
    "upstream_timeouts": "Requests publishers did not answer in time.",
    "downstream_subscriptions": "SUBSCRIBEs accepted.",
    "downstream_fetches": "FETCHes accepted.",
    "publications": "PUBLISHes accepted.",
    "publishers_lost": "Tracks whose readers were left without any source.",
    "publishers_returned": "Of those, the ones that had one again within publisher_linger.",
    "publications_offered": "PUBLISHes sent to who asked with SUBSCRIBE_TRACKS.",
    "objects_in": "Objects stored.",
    "octets_in": "Payload octets stored.",
    "objects_out": "Objects whose sending began.",
    "octets_out": "Their payload octets.",
    "cache_hits": "Objects sent that were in memory as a whole.",
    "cache_misses": "Objects that publishers or upstream relays had to send.",
    "cache_ranges_missed": "Ranges that were asked of them.",
    "cache_evictions": "Objects evicted for want of memory.",
    "cache_expirations": "Objects dropped because of MAX_CACHE_DURATION.",
    "cache_intervals_refused": "Ranges known not to exist that were not remembered, "
    "at max_intervals_per_track or for want of memory.",
    "cache_stores_rejected": "Objects not forwarded because those under way left no room.",
}
DISK = {
    "disk_hits": "Objects read from the disk.",
    "disk_octets_read": "Their payload octets.",
    "disk_octets_written": "Octets written to the disk, bookkeeping included.",
    "disk_files_written": "Files that were finished.",
    "disk_tracks_given_up": "Files not finished: there was no room, or the disk failed.",
    "disk_objects_skipped": "Objects for which the queue to the disk had no room when they came.",
    "disk_evictions": "Tracks dropped from the disk for want of room.",
    "disk_expirations": "Tracks dropped from the disk because of MAX_CACHE_DURATION.",
    "disk_files_bad": "Files that were damaged or could not be read.",
    "disk_errors": "Writes that the operating system refused.",
    "disk_timeouts": "Reads that took longer than disk_timeout.",
    "disk_reads_refused": "Reads not begun: disk_reads were under way, or the disk hangs.",
    "disk_memory_refused": "Times that bookkeeping found no room within disk_memory_octets.",
}
DELIVERIES = {
    "too_far_behind": "Subscriptions ended with TOO_FAR_BEHIND.",
    "expired_subscriptions": "Subscriptions ended with EXPIRED.",
    "expired_objects": "Objects not sent because a delivery timeout had passed.",
    "expired_streams": "Streams reset with DELIVERY_TIMEOUT.",
    "streams_given_up": "Streams reset so that a Subgroup of higher priority gets one.",
    "datagrams_sent": "Objects sent as datagrams.",
    "datagrams_too_large": "Datagrams that no packet holds, or QUIC had no room for.",
    "datagrams_dropped": "Objects for which a subscription's queue of datagrams had no room.",
    "ranges_unknown": "End of Range entries UNKNOWN sent.",
    "ranges_timed_out": "End of Range entries TIMED_OUT sent.",
}
SESSIONS = {
    "session_requests_sent": "Requests sent to peers.",
    "session_requests_queued": "Requests that waited for the peer to grant a stream.",
    "session_requests_streamless": "Requests that failed because no stream was granted in time.",
    "session_requests_timed_out": "Requests that the peer did not answer in time.",
    "session_requests_received": "Requests of peers.",
    "session_requests_refused": "Requests of peers answered with REQUEST_ERROR.",
    "session_requests_over_limit": "Of these, those beyond a limit of requests or aliases.",
    "session_fills_over_limit": "Updates refused because as many fills were open as may be.",
    "session_updates_received": "REQUEST_UPDATEs of peers.",
    "session_publications_received": "PUBLISHes of peers.",
    "session_tracks_skipped": "PUBLISH_SKIPPED sent.",
    "session_requests_unread": "Requests of our own given up, whose Objects nobody here read.",
    "session_streams_dropped": "Data streams given up: nobody said in time for whom they are, or "
    "too many octets were held.",
    "session_tokens_refused": "Requests refused because of an Authorization Token.",
}
EVERY_COUNTER = COUNTERS | DISK | DELIVERIES | SESSIONS
REFUSED = "requests_refused"
SHARES = {
    "scope_cache_octets": "What each scope has in memory, billed as cache_billed_octets is.",
    "scope_disk_octets": "What each scope has in files, with what is to be written.",
}
REMEMBERED = "remembered"
UPDATES = "metrics_updates"
PREFIX = "kvcs_relay_"


class RelayMetrics(Collector):
    """Copies the relay's numbers when told to, and shows the last copy when scraped.

    A scrape comes from another thread, which must not look into tables that change.
    """

    def __init__(self, scopes: Scopes) -> None:
        self.scopes = scopes
        self.registry = CollectorRegistry()
        self._gauges: dict[str, float] = {}
        self._shares: dict[str, dict[str, int]] = {}
        self._remembered = Remembered()
        self._counters: dict[str, float] = {}
        self._refused: dict[str, int] = {}
        self._updates = 0
        self.update()
        self.registry.register(self)

    def update(self, loop_hold: float = 0.0, loop_work: float = 0.0, tasks: int = 0) -> None:
        """Take the relay's numbers of now. Call it from the thread that runs the relay.

        `loop_hold` is the longest hold of its event loop, in seconds, `loop_work` the most CPU time
        that its thread took in a turn, `tasks` how many that loop has.
        """
        cache, counters = self.scopes.cache, self.scopes.counters
        self._gauges = dict.fromkeys(GAUGES, 0) | {
            "scopes": len(self.scopes.relays),
            "cache_octets": cache.octets,
            "cache_billed_octets": cache.billed,
            "cache_budget_octets": cache.budget,
            "cache_transit_octets": cache.in_transit,
            "cache_objects": cache.objects,
            "cache_properties": cache.properties,
            "cache_statuses": cache.statuses,
            "cache_intervals": cache.intervals,
            "loop_hold_seconds": loop_hold,
            "loop_work_seconds": loop_work,
            "tasks": tasks,
        }
        disk = self.scopes.disk
        if disk is not None:
            self._gauges |= {
                "disk_octets": disk.octets,
                "disk_budget_octets": disk.budget,
                "disk_queue_octets": disk.queued,
                "disk_tracks": disk.tracks,
                "disk_files": disk.files,
                "disk_reads": disk.reads.jobs,
                "disk_memory_octets": disk.remembered,
                "disk_failing": disk.failing,
            }
        held = {} if disk is None else disk.shelves
        self._shares = {
            "scope_cache_octets": {scope: each.octets for scope, each in cache.shares.items()},
            "scope_disk_octets": {
                scope: held[scope].octets for scope in self.scopes.relays if scope in held
            },
        }
        for relay in self.scopes.relays.values():
            for name, value in _total(relay).items():
                self._gauges[name] += value
        sessions = self.scopes.sessions()
        self._gauges["sessions"] = len(sessions)
        self._remembered = Remembered()
        for session in sessions:
            self._remembered += session.remembered()
        self._counters = {
            name: getattr(cache, name.removeprefix("cache_"))
            if name.startswith("cache_")
            else getattr(counters, name)
            for name in COUNTERS
            if name not in ("cache_misses", "cache_ranges_missed")
        }
        self._counters["cache_misses"] = counters.objects_in
        self._counters["cache_ranges_missed"] = cache.misses
        self._refused = dict(counters.refused)
        counted = asdict(DiskCounters() if disk is None else disk.counters)
        self._counters |= {f"disk_{name}": value for name, value in counted.items()}
        numbers = self.scopes.numbers()
        self._counters |= asdict(numbers.deliveries)
        self._counters |= {f"session_{k}": v for k, v in asdict(numbers.sessions).items()}
        self._updates += 1

    def collect(self) -> Iterable[Metric]:
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(PREFIX + exported(name), GAUGES[name], value=value)
        for name, octets in self._shares.items():
            yield labelled(
                GaugeMetricFamily, PREFIX + exported(name), SHARES[name], "scope", octets
            )
        yield labelled(
            GaugeMetricFamily,
            PREFIX + REMEMBERED,
            "What sessions keep of their peers' doing.",
            "table",
            asdict(self._remembered),
        )
        for name, count in self._counters.items():
            yield CounterMetricFamily(PREFIX + exported(name), EVERY_COUNTER[name], value=count)
        yield labelled(
            CounterMetricFamily,
            PREFIX + REFUSED,
            "Requests answered with REQUEST_ERROR by the relay, by its code.",
            "reason",
            self._refused,
        )
        yield CounterMetricFamily(
            PREFIX + UPDATES, "Times that these numbers were taken.", value=self._updates
        )


def _total(relay: Relay) -> dict[str, int]:
    """The gauges of one scope."""
    total: Counter[str] = Counter()
    for part in relay.parts:
        total.update(_numbers(part))
    return total


def _numbers(relay: Relay) -> dict[str, int]:
    return {
        "upstream_sessions": len(relay.upstreams),
        "mesh_sessions": 0 if relay.askable.finder is None else len(relay.askable.finder.sessions),
        "namespaces": relay.namespaces.publications,
        "tracks": len(relay.tracks),
        "pending_requests": len(relay.waiting),
        "upstream_subscriptions": relay.upstream_subscriptions,
        "upstream_fetches": sum(len(track.ranges.fetches) for track in relay.active),
        "downstream_subscriptions": subscriptions(relay),
        "downstream_fetches": _requests(relay, IncomingFetch),
    }


def subscriptions(relay: Relay) -> int:
    """Established subscriptions of subscribers, those by PUBLISH included."""
    return _requests(relay, IncomingSubscribe) + sum(
        offer.state is RequestState.ESTABLISHED for track in relay.active for offer in track.offers
    )


def _requests(relay: Relay, kind: type[TrackRequest]) -> int:
    return sum(
        isinstance(request, kind) and request.state is RequestState.ESTABLISHED
        for track in relay.active
        for request in track.requests
    )
