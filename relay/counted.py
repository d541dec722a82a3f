"""Numbers of many sessions as one: what each counts, added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TypeVar

from moqt.delivery.scheduler import DeliveryCounters
from moqt.session import Session
from moqt.values.config import SessionCounters

N = TypeVar("N", DeliveryCounters, SessionCounters)


def _total(kind: type[N], each: Iterable[N]) -> N:
    names = [one.name for one in fields(kind)]
    values = [[getattr(one, name) for name in names] for one in each]
    return kind(*map(sum, zip(*values, strict=True))) if values else kind()


@dataclass(frozen=True, slots=True)
class Numbers:
    """What sessions have counted."""

    deliveries: DeliveryCounters = field(default_factory=DeliveryCounters)
    """What their deliveries gave up."""
    sessions: SessionCounters = field(default_factory=SessionCounters)

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> Numbers:
        every = tuple(sessions)
        return cls(
            _total(DeliveryCounters, (each.scheduler.counters for each in every)),
            _total(SessionCounters, (each.counters for each in every)),
        )

    @classmethod
    def total(cls, each: Iterable[Numbers]) -> Numbers:
        every = tuple(each)
        return cls(
            _total(DeliveryCounters, (one.deliveries for one in every)),
            _total(SessionCounters, (one.sessions for one in every)),
        )
