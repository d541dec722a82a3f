"""What a TrackStore knows of those around it: who listens to it, and who fills it."""

from __future__ import annotations

from typing import Protocol

from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.names import Location


class StoreListener(Protocol):
    """A cursor, or whatever else must know that the store changed."""

    def store_changed(self, log: SubgroupLog | None) -> None:
        """Objects, octets or an end were added; `log` is the Subgroup concerned, if one is."""

    def subgroup_cut(self, log: SubgroupLog) -> None:
        """The stream that brought the Subgroup was reset: more Objects of it may exist."""

    def datagram_stored(self, stored: StoredObject) -> None:
        """A whole Object in Delivery Mode Datagram was added (`store_changed` follows)."""


class Assumption(Protocol):
    """A fetch into the store that is still running; what it leaves out may not exist."""

    @property
    def proven(self) -> bool | None:
        """Whether it ended well; None while it runs."""

    @property
    def stalled(self) -> bool:
        """It waits for its readers, so waiting for its end may take for ever."""


class Source(Protocol):
    """Where a store gets what it does not have (a relay's upstream)."""

    def want(self, start: Location, end: Location) -> bool:
        """Fetch [start, end] into the store; False when nobody can be asked.

        Asking again for what is already on its way costs nothing. The listeners are
        told when Objects arrive and when a fetch ends, successful or not.
        """

    def assumed(self, start: Location) -> tuple[Assumption, Location] | None:
        """Whether a running fetch has left out `start`, and up to where.

        That means "does not exist" only if the fetch ends with FIN (MOQT
        "FETCH"). A delivery whose own stream makes the same promise may go on before
        that, and has to look at the Assumption before its FIN.
        """
