"""What a metric is called where Prometheus reads it: base units stand at the end of the name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)

_OCTETS: Final = re.compile(r"_?octets_?")

PER_SECOND: Final = frozenset({"bandwidth_octets"})
"""Rates: what is so named has octets a second."""


def exported(name: str) -> str:
    """`cache_budget_octets` as `cache_budget_bytes`, `octets_in` as `in_bytes`.

    Prometheus knows the unit by the end of a name, and its word for octets is bytes; `_total` of a
    counter comes after it.
    """
    found = _OCTETS.search(name)
    if found is None:
        return name
    rest = "_".join(part for part in (name[: found.start()], name[found.end() :]) if part)
    return f"{rest}_bytes" + ("_per_second" if name in PER_SECOND else "")


def labelled(family: type[F], name: str, told: str, label: str, values: Mapping[str, float]) -> F:
    """One number for each value of `label`; `told` is what they are."""
    metric = family(name, told, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric
