"""Records whose octets are still arriving: what is withdrawn meanwhile does not come to stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvsp.names.uris import BlockId
from kvsp.principals import WRITE, Principal
from kvsp.records.problems import Problem


class Arrival:
    """One PUT of a record, from its head to its end."""

    def __init__(self) -> None:
        self._withdrawn: list[tuple[Principal, str | None]] = []

    def withdrawn(self, principal: Principal, holder: str | None) -> None:
        """A DELETE that came later has overtaken it: of this replica, or all of a holder."""
        if (principal, holder) not in self._withdrawn:
            self._withdrawn.append((principal, holder))

    def check(self, scope_id: bytes, holder: Any) -> None:
        """Raises Problem 409 when somebody who may do so withdrew the record."""
        for principal, which in self._withdrawn:
            if (
                which in (None, holder)
                and principal.may(scope_id, WRITE)
                and principal.is_holder(str(holder))
            ):
                raise Problem.http(409, "the record was withdrawn while it was on its way")


class Arrivals:
    """All PUTs of records under way; as many as there are requests."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[BlockId, str], list[Arrival]] = {}

    @contextlib.contextmanager
    def of(self, block: BlockId, replica: str) -> Iterator[Arrival]:
        """While the PUT of a record lasts."""
        key, arrival = (block, replica), Arrival()
        self._arriving.setdefault(key, []).append(arrival)
        try:
            yield arrival
        finally:
            self._arriving[key].remove(arrival)
            if not self._arriving[key]:
                del self._arriving[key]

    def withdrawn(self, principal: Principal, block: BlockId, replica: str) -> None:
        """A DELETE of a record has come."""
        for arrival in self._arriving.get((block, replica), ()):
            arrival.withdrawn(principal, None)

    def holder_withdrawn(self, principal: Principal, holder: str) -> None:
        """A DELETE of everything of a holder has come."""
        for arrivals in self._arriving.values():
            for arrival in arrivals:
                arrival.withdrawn(principal, holder)
