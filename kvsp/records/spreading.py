"""What fetching takes at many instances at once (KVSP "Placement Inputs").

The same numbers as `costs.fetch_runs_us` gives for one instance after the other: each block goes
to the source whose own time, this block added, is smallest. Here each block is one step for all
instances, whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvsp.records import costs
from kvsp.records.records import Link, ReplicaRecord

FEW: Final = 8
"""Up to so many instances, one after the other takes less time."""

Matrix = NDArray[np.float64]


def fetch_us(
    targets: Sequence[tuple[str, Iterable[Link]]], runs: Sequence[costs.Run], layers: int
) -> list[int | None]:
    """For each target, a base URI and the links it reported, the time to make the blocks of
    `runs` resident there, as `costs.fetch_runs_us`."""
    if len(targets) <= FEW:
        return [costs.fetch_runs_us(target, runs, links, layers) for target, links in targets]
    spread = Spread(targets, runs)
    for run in runs:
        spread.take(run, layers)
    return [None if math.isinf(us) else costs.round_up(us) for us in spread.longest.tolist()]


class Spread:
    """The time of each source of each target, a row for a target and a column for a source."""

    def __init__(
        self, targets: Sequence[tuple[str, Iterable[Link]]], runs: Sequence[costs.Run]
    ) -> None:
        # ascending, so that the first one of equal sources is the one that the rule takes
        names = sorted({each.holder for run in runs for each in run[0]})
        self._columns = {name: column for column, name in enumerate(names)}
        self._rows_of: dict[str, list[int]] = {}
        for row, (target, _) in enumerate(targets):
            self._rows_of.setdefault(target, []).append(row)
        self._rows = np.arange(len(targets))
        # without a link a source takes for ever
        self._times = np.full((len(targets), len(names)), np.inf)
        self._rates = np.zeros((len(targets), len(names)))
        for row, (_, links) in enumerate(targets):
            for link in links:
                if (column := self._columns.get(link.holder)) is not None:
                    self._times[row, column] = link.rtt_us
                    self._rates[row, column] = link.mbit_per_s
        self.longest = np.zeros(len(targets))
        """The time of the slowest source that was used; infinite where a block has none."""

    def take(self, run: costs.Run, layers: int) -> None:
        """Take the blocks of a run from their sources."""
        holders = sorted({each.holder for each in run[0]})
        absent = np.ones(len(self._rows), np.bool_)
        for each in holders:
            absent[self._rows_of.get(each, [])] = False
        if not holders:
            self.longest[absent] = np.inf
            return
        columns = [self._columns[each] for each in holders]
        loads = _loads(run[0], holders, self._rates[:, columns], layers)
        times = self._times[:, columns]
        for _ in run:
            self.step(times, loads, absent)
        self._times[:, columns] = times

    def step(self, times: Matrix, loads: Matrix, absent: NDArray[np.bool_]) -> None:
        """One block: at each target it goes where it is there soonest."""
        after = times + loads
        place = after.argmin(axis=1)
        soonest = after[self._rows, place]
        np.maximum(self.longest, soonest, out=self.longest, where=absent)
        times[self._rows[absent], place[absent]] = soonest[absent]


def _loads(
    replicas: Sequence[ReplicaRecord], holders: Sequence[str], rates: Matrix, layers: int
) -> Matrix:
    """The quickest load of a block from each holder at each target, in the form of `rates`."""
    loads = np.full(rates.shape, np.inf)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for variant in _variants(replicas, layers):
            most = max(map(len, variant.values()))
            octets, reads = np.zeros((most, len(holders))), np.full((most, len(holders)), np.inf)
            there = np.array([each in variant for each in holders])
            for column, holder in enumerate(holders):
                for part, (size, read) in enumerate(variant.get(holder, ())):
                    octets[part, column], reads[part, column] = size, read
            load = sum(8 * octets[part] / np.minimum(rates, reads[part]) for part in range(most))
            # no octets at no rate: a part that is none, of what cannot be loaded at all
            load = np.where(np.isnan(load), np.inf, load)
            np.minimum(loads, load, out=loads, where=there)
    return loads


def _variants(
    replicas: Sequence[ReplicaRecord], layers: int
) -> list[dict[str, list[tuple[float, float]]]]:
    """What is read of each replica, in octets and at most so many Mbit/s, by holder: a second
    replica of a holder is in the second one."""
    variants: list[dict[str, list[tuple[float, float]]]] = []
    for each in replicas:
        parts = [(float(each.size), math.inf)]
        if each.residency is not None:
            parts = [
                (
                    each.size * len(entry.layers) / layers,
                    math.inf if entry.read_mbit_per_s is None else entry.read_mbit_per_s,
                )
                for entry in each.residency
            ]
        for variant in variants:
            if each.holder not in variant:
                variant[each.holder] = parts
                break
        else:
            variants.append({each.holder: parts})
    return variants
