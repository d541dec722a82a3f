"""What an Index Service knows of instances, for estimates and for naming holders that are
down (KVSP "Lookup").

The draft leaves open how an Index Service learns of links and status. Here a placement
controller passes on each Instance Status Record; within one process both share a board.
"""

from __future__ import annotations

from collections import OrderedDict

from kvsp.names.codes import InstanceState
from kvsp.records.records import InstanceStatus

DOWN_KEPT_MS = 600_000
"""How long an instance that stopped reporting is still known to be down."""


class StatusBoard:
    """The last status of each instance, until it expires. Bounded: the oldest goes first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._last: OrderedDict[str, tuple[InstanceStatus, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def put(self, status: InstanceStatus, now_ms: int) -> None:
        """Note a status; one with a lower epoch than the known one is left out."""
        known = self._last.get(status.instance)
        if known is not None and known[0].epoch > status.epoch:
            return
        self._last[status.instance] = status, now_ms + status.ttl_ms
        self._last.move_to_end(status.instance)
        while len(self._last) > self._size:
            self._last.popitem(last=False)

    def get(self, instance: str, now_ms: int) -> InstanceStatus | None:
        """The unexpired status of an instance that has not failed."""
        status, expires_ms = self._last.get(instance, (None, 0))
        if status is None or expires_ms <= now_ms or status.state is InstanceState.FAILED:
            return None
        return status

    def is_down(self, instance: str, now_ms: int) -> bool:
        """Whether it reported once and does not any more, or said that it failed."""
        return instance in self._last and self.get(instance, now_ms) is None

    def reporting(self, now_ms: int) -> list[str]:
        """The instances whose status is unexpired."""
        return [instance for instance in list(self._last) if self.get(instance, now_ms)]

    def sweep(self, now_ms: int) -> None:
        """Forget instances that have been down for long."""
        for instance, (_, expires_ms) in list(self._last.items()):
            if expires_ms + DOWN_KEPT_MS <= now_ms:
                self._last.pop(instance, None)
