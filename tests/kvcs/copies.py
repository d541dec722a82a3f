"""Copies of tracks as they are served with something changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.names import FullTrackName, Location


class Copy(NamedTuple):
    """An Object as it is served."""

    payload: bytes
    priority: int
    properties: bytes

    @classmethod
    def of(cls, stored: StoredObject) -> Copy:
        return cls(bytes(stored.payload), stored.priority, stored.properties)

    def put(self, store: TrackStore, at: Location) -> None:
        """Append it to a track, at a Location."""
        store.append(*at, self.payload, priority=self.priority, properties=self.properties)


Change = Callable[[Location, Copy], Copy | None]


def served(
    store: TrackStore,
    change: Change = lambda _, copy: copy,
    *,
    name: FullTrackName | None = None,
    from_: Mapping[Location, Location] | None = None,
    of: TrackStore | None = None,
) -> TrackStore:
    """A copy of a complete track: under another `name`, each Object changed by `change`, None
    dropping it; at each Location of `from_` the Object that stands at its value; the payloads
    taken from the track `of`."""
    copy = TrackStore(name or store.name, store.properties)
    source = store if of is None else of
    for group_id in store.group_ids:
        for object_id in store.groups[group_id].ids:
            stored = store.groups[group_id].objects[object_id]
            if stored.status is not ObjectStatus.NORMAL:
                copy.mark_end(stored.location, stored.status, priority=stored.priority)
                continue
            at = (from_ or {}).get(stored.location, stored.location)
            made = change(stored.location, Copy.of(source.groups[at.group].objects[at.object]))
            if made is not None:
                made.put(copy, stored.location)
        copy.finish_subgroup(group_id, 0)
    if store.ended:
        copy.finish(PublishDoneCode.TRACK_ENDED)
    return copy
