"""A holder's numbers for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsp.holder.holder import Holder

PREFIX: Final = "kvsp_holder_"


class HolderMetrics(Collector):
    """Reads the holder's counters when scraped, in the thread that runs the holder."""

    def __init__(self, holder: Holder, records: Any) -> None:
        self._holder = holder
        self._records = records

    def collect(self) -> Iterable[Metric]:
        yield from self._tiers()
        yield from self._totals()
        yield from self._leases()
        yield from self._published()

    def _tiers(self) -> Iterable[Metric]:
        store = self._holder.store
        used = _gauge("tier_octets", "Octets stored or reserved.", "tier")
        budget = _gauge("tier_budget_octets", "The budget; absent without one.", "tier")
        limit = _gauge(
            "tier_limit_octets", "What it may hold now: less than the budget when full.", "tier"
        )
        rate = _gauge("tier_read_mbit_per_s", "Measured rate of reads.", "tier")
        for tier in store.tiers:
            used.add_metric([tier], store.used(tier))
            if (bound := store.budget(tier)) is not None:
                budget.add_metric([tier], bound)
            if (bound := store.limit(tier)) is not None:
                limit.add_metric([tier], bound)
            if (measured := store.read_mbit_per_s(tier)) is not None:
                rate.add_metric([tier], measured)
        yield from (used, budget, limit, rate)
        away = _gauge("tier_unavailable", "1 while a shared medium does not work.", "tier")
        for medium in self._holder.shared:
            away.add_metric([medium.tier], int(medium.unavailable))
        yield away
        yield GaugeMetricFamily(PREFIX + "blocks", "Blocks held.", value=len(store))

    def _totals(self) -> Iterable[Metric]:
        counters = self._holder.store.counters
        yield _labelled("hits", "Reads by tier.", "tier", counters.hits)
        yield _labelled(
            "misses", "Reads of what is not here, by reason.", "reason", counters.misses
        )
        yield _labelled(
            "stores_rejected", "Blocks not stored, by reason.", "reason", counters.stores_rejected
        )
        yield _labelled("evictions", "Parts evicted, by tier.", "tier", counters.evictions)
        yield _labelled("octets_read", "Octets read, by tier.", "tier", counters.octets_read)
        yield _total(
            "reads_refused",
            "Reads refused for what their client has transcoded or checked already.",
            counters.reads_refused,
        )
        yield _total("blocks_stored", "Blocks stored.", counters.stored)
        yield _total("demotions", "Parts moved to a slower tier.", counters.demotions)
        yield _total("promotions", "Parts copied to a faster tier.", counters.promotions)
        yield _total(
            "blocks_adopted", "Blocks taken over that other holders stored.", counters.adopted
        )
        yield _total("parts_lost", "Parts a fault took away.", counters.lost)
        yield _total(
            "parts_quarantined", "Damaged files kept to be looked at.", counters.quarantined
        )
        yield _labelled(
            "copies_verified", "Copies read again, by what came of it.", "result", counters.verified
        )
        yield _total("octets_verified", "Octets of copies read again.", counters.octets_verified)
        yield _total(
            "scrubs", "Times all blocks on disk were verified.", self._holder.scrubber.rounds
        )
        yield _labelled(
            "media_full", "Times a medium was full before its budget.", "tier", counters.shrunk
        )

    def _leases(self) -> Iterable[Metric]:
        leases = self._holder.leases
        leases.expire(self._holder.clock())
        yield GaugeMetricFamily(PREFIX + "leases", "Unexpired leases.", value=len(leases))
        yield GaugeMetricFamily(
            PREFIX + "leased_octets", "Octets under lease, each replica once.", value=leases.octets
        )
        yield _total("leases_granted", "Leases granted.", leases.granted)
        yield _total("leases_refused", "Leases refused by the quota.", leases.refused)

    def _published(self) -> Iterable[Metric]:
        records = self._records
        for name, text in (
            ("published", "Records published or refreshed."),
            ("withdrawn", "Records withdrawn."),
            ("failures", "Times the index service did not answer."),
            ("refusals", "Records the index service refused."),
        ):
            yield _total(f"records_{name}", text, getattr(records, name, 0))
        table = getattr(records, "table", None)
        yield GaugeMetricFamily(
            PREFIX + "records_unpublished",
            "Blocks that the index service is not known to list.",
            value=0 if table is None else table.unpublished,
        )
        yield GaugeMetricFamily(
            PREFIX + "records_late_seconds",
            "How long the record that has waited longest has waited.",
            value=0 if table is None else table.late_s(self._holder.clock()),
        )
        yield GaugeMetricFamily(
            PREFIX + "records_missing",
            "Records that the index service did not have although it took them.",
            value=getattr(records, "missing", 0),
        )
        yield GaugeMetricFamily(
            PREFIX + "index_unavailable",
            "1 while the index service does not answer.",
            value=int(records.unavailable),
        )


def _gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=[label])


def _total(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(
    name: str, text: str, label: str, values: Mapping[str, int] | Counter[str]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
