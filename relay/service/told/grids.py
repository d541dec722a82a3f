"""What of a publication has come, for the status page: its tracks by the Objects that are there.

A relay cannot decode KVCS. What it knows are Locations, and these are what layers and blocks of a
KV cache are in: a track a layer, an Object some blocks of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from moqt.track.store import TrackStore
from moqt.values.names import FullTrackName, Location, printable_name, printable_namespace
from relay.core import Relay
from relay.disk.entries import Entry
from relay.disk.tier import Shelf

ROWS: Final = 128
"""Tracks of a publication that are told one by one."""
RUNS: Final = 64
"""Ranges of Locations of a track that are told."""
LOOKED_AT: Final = 4096
"""Objects of a track that are looked at for that: what a turn of the loop costs."""

Run = tuple[int, int, int, int]
"""Group and Object of the first and of the last Location of a range."""


class Grid:
    """One publication: all tracks of a namespace, of which `ROWS` are looked at."""

    def __init__(self, scope: str, name: FullTrackName) -> None:
        self.namespace = name.namespace
        self.scope = scope
        self.names: list[FullTrackName] = []
        self.tracks = 0

    def add(self, name: FullTrackName) -> None:
        self.tracks += 1
        if len(self.names) < ROWS:
            self.names.append(name)

    def told(self) -> dict[str, Any]:
        return {
            "scope": self.scope,
            "namespace": printable_namespace(self.namespace),
            "tracks": self.tracks,
            "rows": [],
        }


def row(relay: Relay | None, shelf: Shelf | None, name: FullTrackName) -> dict[str, Any]:
    """A track: where its Objects are, in memory and in files, and who reads it."""
    track = None if relay is None else relay.tracks.get(name)
    entry = None if shelf is None else shelf.entries.get(name)
    memory = [] if track is None else list(islice(_runs(track.store), RUNS))
    disk = [] if entry is None else list(islice(_kept(entry), RUNS))
    largest = None if track is None else track.store.largest
    if largest is None and entry is not None:
        largest = entry.largest
    return {
        "track": printable_name(name.namespace, name.name).rpartition("--")[2],
        "memory": memory,
        "disk": disk,
        "largest": None if largest is None else list(largest),
        "ended": track is None or track.store.ended,
        "readers": 0 if track is None else len(track.requests) + len(track.offers),
        "octets": 0 if track is None else track.store.octets,
        "disk_octets": 0 if entry is None else entry.octets,
    }


def _runs(store: TrackStore) -> Iterator[Run]:
    """Ranges of Objects in memory, whole ones, in ascending order."""
    run: Run | None = None
    looked = 0
    for group in store.group_ids:
        log = store.groups[group]
        for number in log.ids:
            looked += 1
            if looked > LOOKED_AT:
                break
            stored = log.objects[number]
            if stored.status or not stored.complete:
                continue
            if run is not None and run[2] == group and run[3] + 1 == number:
                run = (*run[:3], number)
                continue
            if run is not None:
                yield run
            run = (group, number, group, number)
        if looked > LOOKED_AT:
            break
    if run is not None:
        yield run


def _kept(entry: Entry) -> Iterator[Run]:
    """Ranges of what files have, up to the largest Location."""
    most = entry.largest
    if most is None:
        return
    for low, high in entry.known:
        if low > most:
            return
        last = min(Location(*high), most)
        yield (low[0], low[1], last.group, last.object)
