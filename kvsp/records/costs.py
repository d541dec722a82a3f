"""What fetching, recomputing and waiting cost (KVSP "Placement Inputs").

Pure functions of reported numbers. Estimates are integers in microseconds, rounded up;
None stands for what cannot be computed and counts as infinite.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from kvsp.names.codes import MAX_SAFE_INTEGER
from kvsp.records.records import Link, ReplicaRecord

DEFAULT_MEAN_SERVICE_US = 2_000_000
"""Mean service time of an instance that reports none and was not observed."""

Run: TypeAlias = Sequence[Sequence[ReplicaRecord]]
"""Blocks that follow each other and have alike replicas: of each those with every layer, in the
same order, of the same holders, sizes and residencies."""

_NOISE_DIGITS = 6  # a millionth of a microsecond is noise of the additions


def round_up(us: float) -> int | None:
    """Whole microseconds, rounded up; None for what no record can hold."""
    if not us <= MAX_SAFE_INTEGER:
        return None
    return math.ceil(round(us, _NOISE_DIGITS))


def load_us(record: ReplicaRecord, mbit_per_s: float, layers: int) -> float:
    """Time to load one replica over a link, its round trip not counted, in microseconds.

    Each residency entry is read at the slower of the link and its tier; its octets are
    the part of `size` that its layers are of the descriptor's `layers`. Infinite when a
    rate is 0.
    """
    if record.residency is None:
        return transfer_us(record.size, mbit_per_s)
    return sum(
        transfer_us(
            record.size * len(entry.layers) / layers,
            mbit_per_s if entry.read_mbit_per_s is None else min(mbit_per_s, entry.read_mbit_per_s),
        )
        for entry in record.residency
    )


def transfer_us(octets: float, mbit_per_s: float) -> float:
    """Time to send octets at a rate, in microseconds; infinite at rate 0."""
    # 1 Mbit/s is one bit per microsecond
    try:
        return 8 * octets / mbit_per_s
    except (ZeroDivisionError, OverflowError):
        return math.inf


def runs(blocks: Iterable[Sequence[ReplicaRecord]], layers: int) -> list[Run]:
    """Blocks of `layers` layers as few runs: what holds for one block of a run does for all."""
    found: list[list[Sequence[ReplicaRecord]]] = []
    before = None
    for replicas in blocks:
        whole = [each for each in replicas if each.residency is None or _is_whole(each, layers)]
        alike = [(each.holder, each.size, each.residency) for each in whole]
        if alike != before:
            found.append([])
            before = alike
        found[-1].append(whole)
    return list(found)


def _is_whole(record: ReplicaRecord, layers: int) -> bool:
    return record.holds(range(layers), layers)


def assign_sources(
    blocks: Iterable[Sequence[ReplicaRecord]], links: Mapping[str, Link], layers: int
) -> list[ReplicaRecord] | None:
    """For each block, in prefix order, the replica it is taken from.

    `blocks` holds the replicas of each block that is to be fetched, `links` what the
    target reported, by holder URI. Each block goes to the source whose own time, this
    block added, is smallest; ties to the lower holder URI. Only replicas with every layer
    at a holder with a link are sources. None when a block has no source.
    """
    assignment = _assign(runs(blocks, layers), links, layers)
    return None if assignment is None else assignment[0]


def fetch_us(
    target: str,
    blocks: Iterable[Sequence[ReplicaRecord]],
    links: Iterable[Link],
    layers: int,
) -> int | None:
    """Time to make `blocks` resident at the instance with base URI `target`.

    The largest over its sources of round trip and loads. Blocks of which `target` itself
    holds every layer are resident; with nothing else to fetch, 0. None when a block has
    no usable source.
    """
    return fetch_runs_us(target, runs(blocks, layers), links, layers)


def fetch_runs_us(
    target: str, blocks: Iterable[Run], links: Iterable[Link], layers: int
) -> int | None:
    """`fetch_us` of blocks whose runs are known: for many targets those are found once."""
    absent = [run for run in blocks if not any(each.holder == target for each in run[0])]
    assignment = _assign(absent, {link.holder: link for link in links}, layers)
    if assignment is None:
        return None
    return round_up(max(assignment[1].values(), default=0))


def _assign(
    blocks: Iterable[Run], links: Mapping[str, Link], layers: int
) -> tuple[list[ReplicaRecord], dict[str, float]] | None:
    chosen: list[ReplicaRecord] = []
    times: dict[str, float] = {}
    for run in blocks:
        loads = _loads(run[0], links, layers)
        # what each source's own time would be with one block more; the place is that of its replica
        following = [
            (times.get(holder, links[holder].rtt_us) + load, holder, place)
            for holder, (load, place) in loads.items()
        ]
        following = [each for each in following if math.isfinite(each[0])]
        heapq.heapify(following)
        for replicas in run:
            if not following:
                return None
            own, holder, place = following[0]
            chosen.append(replicas[place])
            times[holder] = own
            own += loads[holder][0]
            if math.isfinite(own):
                heapq.heapreplace(following, (own, holder, place))
            else:
                heapq.heappop(following)
    return chosen, times


def _loads(
    replicas: Sequence[ReplicaRecord], links: Mapping[str, Link], layers: int
) -> dict[str, tuple[float, int]]:
    """The quickest load from each holder with a link, and the place of its replica."""
    loads: dict[str, tuple[float, int]] = {}
    for place, replica in enumerate(replicas):
        link = links.get(replica.holder)
        if link is not None:
            load = load_us(replica, link.mbit_per_s, layers)
            known = loads.get(replica.holder)
            if known is None or load < known[0]:
                loads[replica.holder] = load, place
    return loads


def recompute_us(tokens: int, prefill_tokens_per_s: float) -> int | None:
    """Time to prefill `tokens` tokens: 0 for none, else None for rate 0."""
    if tokens == 0:
        return 0
    if prefill_tokens_per_s <= 0:
        return None
    return round_up(1e6 * tokens / prefill_tokens_per_s)


def wait_us(queued: int, mean_service_us: float) -> int | None:
    """Time until the `queued` requests of an instance are served."""
    return round_up(queued * mean_service_us)


def cost_us(
    *,
    wait: int | None,
    fetch: int | None,
    recompute_unmatched: int | None,
    recompute_all: int | None,
) -> int | None:
    """`wait + min(fetch + recompute_unmatched, recompute_all)`, None counting as infinite."""
    load = None if fetch is None or recompute_unmatched is None else fetch + recompute_unmatched
    ways = [way for way in (load, recompute_all) if way is not None]
    return None if wait is None or not ways else wait + min(ways)
