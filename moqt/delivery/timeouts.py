"""Delivery timeouts (MOQT "Delivery Timeouts"): whose value counts, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from moqt.track.store import TrackStore
from moqt.track.stored import SubgroupLog
from moqt.values.codes import PropertyType
from moqt.values.messages import Parameters, property_value


class Timeouts(NamedTuple):
    """OBJECT_DELIVERY_TIMEOUT and SUBGROUP_DELIVERY_TIMEOUT in milliseconds; 0 = none."""

    object_ms: int = 0
    subgroup_ms: int = 0

    @classmethod
    def asked(cls, parameters: Parameters) -> Timeouts:
        """A subscriber's own."""
        return cls(
            parameters.object_delivery_timeout or 0, parameters.subgroup_delivery_timeout or 0
        )

    def updated(self, parameters: Parameters) -> Timeouts:
        """What holds after a REQUEST_UPDATE: what it leaves out does not change."""
        object_ms, subgroup_ms = (
            parameters.object_delivery_timeout,
            parameters.subgroup_delivery_timeout,
        )
        return Timeouts(
            self.object_ms if object_ms is None else object_ms,
            self.subgroup_ms if subgroup_ms is None else subgroup_ms,
        )

    def merged(self, other: Timeouts) -> Timeouts:
        """Of two parties' values the smaller that is one."""
        return Timeouts(
            _smaller(self.object_ms, other.object_ms),
            _smaller(self.subgroup_ms, other.subgroup_ms),
        )

    @property
    def datagram_ms(self) -> int:
        """A datagram has one timeout, the smaller of both."""
        return _smaller(self.object_ms, self.subgroup_ms)


def _smaller(a: int, b: int) -> int:
    return min(a, b) if a and b else a or b


def track_timeouts(store: TrackStore) -> Timeouts:
    """The original publisher's for the whole Track."""
    return Timeouts(
        *(
            value if isinstance(value, int) else 0
            for value in (
                property_value(store.properties, PropertyType.OBJECT_DELIVERY_TIMEOUT),
                property_value(store.properties, PropertyType.SUBGROUP_DELIVERY_TIMEOUT),
            )
        )
    )


def subgroup_timeouts(log: SubgroupLog, track: Timeouts) -> Timeouts:
    """The original publisher's for one Subgroup: each Object Property on its first Object
    that is there goes before the Track Property."""
    if log.timeouts is None or log.first_id != log.timeouts[0]:
        return track
    return Timeouts(log.timeouts[1] or track.object_ms, log.timeouts[2] or track.subgroup_ms)
