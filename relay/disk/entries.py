"""What of a track is on the disk, and what has happened there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moqt.track.knowledge import INTERVAL_OCTETS, properties_price
from moqt.values.intervals import IntervalSet
from moqt.values.names import START
from relay.disk.files import Sealed
from relay.disk.records import Summary

ENTRY_OCTETS: Final = 1152
"""Octets of memory billed for a track on the disk besides its name, its properties, its files and
what is known of it;"""
FILE_OCTETS: Final = 768
"""for each of its files;"""
FIELD_OCTETS: Final = 512
"""for each field of its namespace besides the octets of that: with the way to it in the table of
what is published, which each prefix is in that no other track has."""


@dataclass(slots=True)
class DiskCounters:
    """What has happened to the disk tier since the start; only ever grows."""

    hits: int = 0
    """Objects read from the disk."""
    octets_read: int = 0
    octets_written: int = 0
    """Of the files, bookkeeping included."""
    files_written: int = 0
    tracks_given_up: int = 0
    """Tracks, or what there was of them, that are not kept: without room, or the disk failed."""
    objects_skipped: int = 0
    """Objects that the queue had no room for when they came."""
    evictions: int = 0
    """Tracks that made room for others."""
    expirations: int = 0
    """Tracks dropped because of MAX_CACHE_DURATION."""
    files_bad: int = 0
    """Files that were damaged, or could not be read: what they held is asked for upstream."""
    errors: int = 0
    """Jobs that the operating system refused."""
    timeouts: int = 0
    """Reads that took longer than `disk_timeout`."""
    reads_refused: int = 0
    """Reads that were not begun: `disk_reads` were under way, or the disk hangs."""
    memory_refused: int = 0
    """Times that bookkeeping found no room within `disk_memory_octets`."""


class Entry:
    """A track of which there are files."""

    def __init__(self, summary: Summary, sealed: Sealed, expires: float | None) -> None:
        self.name = summary.name
        self.properties = summary.properties
        self.largest = summary.largest
        self.end = summary.end
        self._told_octets = (
            ENTRY_OCTETS
            + len(self.name.namespace) * FIELD_OCTETS
            + sum(map(len, (*self.name.namespace, self.name.name)))
            + properties_price(summary.properties)
        )
        """Octets of memory for what publishers say of it: its name and its properties."""
        self.files: list[Sealed] = []
        self.octets = 0
        """Of the files."""
        self.known = IntervalSet()
        """What exists of it is in the files."""
        self.expires = expires
        """When the first of its Objects may be served no more, in seconds of the epoch."""
        self.suspended = 0.0
        """Until when it is not read."""
        self.billed = 0
        """Octets of memory."""
        self.add(summary, sealed, expires)

    def add(self, summary: Summary, sealed: Sealed, expires: float | None) -> None:
        """One file more."""
        self.files.append(sealed)
        self.octets += sealed.octets
        for low, high in summary.known:
            self.known.add(low, high)
        if expires is not None:
            self.expires = expires if self.expires is None else min(expires, self.expires)

    @property
    def price(self) -> int:
        """Octets of memory that it is billed."""
        return self._told_octets + len(self.files) * FILE_OCTETS + len(self.known) * INTERVAL_OCTETS

    @property
    def whole(self) -> bool:
        """All of the track, to its end, is on the disk."""
        return self.largest is None or self.known.first_missing(START, self.largest) is None

    def fits(self, summary: Summary) -> bool:
        """Whether that may be a file of the same content."""
        return (self.largest, self.end) == (summary.largest, summary.end)
