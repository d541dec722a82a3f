"""What the relay itself publishes: complete tracks without a publisher, in memory or on the disk.

Sans-IO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from moqt.requests import IncomingTrackStatus
from moqt.values.codes import RequestErrorCode
from moqt.values.names import ON_DISK, FullTrackName, TrackNamespace
from relay.audience.namespaces import Namespaces
from relay.audience.prefixes import PrefixMap
from relay.disk.entries import Entry
from relay.disk.tier import Shelf
from relay.rights.policy import Action
from relay.rights.refusals import Refusals
from relay.track import UpstreamTrack

WRITTEN_SOON_MS: Final = 250
"""When to ask again whether a track is on the disk that is being written."""


def unmarked(name: FullTrackName) -> FullTrackName:
    """The track that is meant by one whose namespace may begin with `ON_DISK`."""
    marked = name.namespace[:1] == (ON_DISK,)
    return FullTrackName(name.namespace[1:], name.name) if marked else name


class OnDisk:
    """The complete tracks that the disk has of one scope, by namespace, also while nobody is in it:
    who enters a scope does not wait until all of them have been looked at."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.table: PrefixMap[Entry] = PrefixMap()
        self.told: Callable[[TrackNamespace, Entry, bool], None] | None = None
        """Told of each that comes (True) or goes; None: nobody is in the scope, and ..."""
        self.emptied: Callable[[], None] | None = None
        """... told when the disk has nothing of it any more."""
        for name, entry in shelf.entries.items():
            if entry.whole:
                self.table.add(name.namespace, entry)
        self.listen()

    def listen(self) -> None:
        """Hear what becomes of the shelf."""
        self.shelf.changed = self._changed

    def _changed(self, namespace: TrackNamespace, entry: Entry, here: bool) -> None:
        (self.table.add if here and entry.whole else self.table.remove)(namespace, entry)
        if self.told is not None:
            self.told(namespace, entry, here)
        elif self.emptied is not None and not self.shelf.octets:
            self.emptied()


class PublishedHere:
    """Which of one scope's tracks only the caches have."""

    def __init__(
        self,
        namespaces: Namespaces,
        tracks: Mapping[FullTrackName, UpstreamTrack],
        on_disk: OnDisk | None,
    ) -> None:
        self._namespaces = namespaces
        self._tracks = tracks
        self._shelf = None if on_disk is None else on_disk.shelf
        if on_disk is not None:
            namespaces.on_disk = on_disk.table
            on_disk.told = self._shelf_changed

    def update(self, track: UpstreamTrack) -> None:
        """A complete track without a publisher makes the relay its publisher."""
        namespace = track.name.namespace
        here = (
            # What costs least comes first: one prefix may have tens of thousands of tracks.
            track.store.end_of_track is not None
            and not track.over
            and not track.subscriptions
            and track.name in self._tracks
            and next(self._namespaces.published.above(namespace), None) is None
            and track.filling.whole
        )
        if here != track.published_here:
            track.published_here = here
            table = self._namespaces.published_here
            if here:
                track.end_complete()
                table.add(namespace, track)
            else:
                table.remove(namespace, track)
            self._namespaces.tell(namespace, lost=not here)

    def _shelf_changed(self, namespace: TrackNamespace, entry: Entry, here: bool) -> None:
        self._namespaces.tell(namespace, lost=not here)
        track = self._tracks.get(entry.name)
        if track is not None and not here:
            self.update(track)  # memory may have a part of it alone

    def purge(
        self,
        prefix: TrackNamespace,
        tracks: Iterable[UpstreamTrack],
        forget: Callable[[UpstreamTrack], None],
    ) -> tuple[int, int, int]:
        """Drop what is cached of `tracks`, those under `prefix`, and what the disk has under it:
        how many and how many octets, and how many stay because somebody reads them."""
        purged: set[FullTrackName] = set()
        used: set[FullTrackName] = set()
        octets = 0
        for track in tracks:
            (purged if track.idle else used).add(track.name)
        if self._shelf is not None:
            on_disk = self._shelf.purge(prefix, used)
            octets += sum(on_disk.values())
            purged.update(on_disk)
        for name in purged:
            held = self._tracks.get(name)
            if held is None:
                continue
            octets += held.store.octets
            if any(each.published for each in held.subscriptions):
                held.origin.stop()  # what was to be compared is not there
                held.renew("it is purged")  # only its publisher could offer it again
            else:
                held.close_upstream()
                forget(held)
        return len(purged), octets, len(used)

    def asked_of_disk(self, request: IncomingTrackStatus, refusals: Refusals) -> bool:
        """Whether `request` asks if a track outlives this process: answered then (`ON_DISK`)."""
        name = unmarked(request.name)
        if name is request.name:
            return False
        if not refusals.admits(request, Action.TRACK_STATUS, name.namespace):
            return True
        entry = None if self._shelf is None else self._shelf.entries.get(name)
        if entry is not None and entry.whole:
            request.answer(entry.largest, ())
            return True
        track, retry = self._tracks.get(name), None
        if self._shelf is None:
            reason = "the relay has no disk tier"
        elif track is not None and track.filling.kept is not None and track.filling.kept.writing:
            reason, retry = "it is being written", WRITTEN_SOON_MS
        elif self._shelf.tier.failing:
            reason = "the relay's disk is full, or fails"
        else:
            reason = "it is not on the relay's disk"
        refusals.refuse(request, RequestErrorCode.DOES_NOT_EXIST, reason, retry=retry)
        return True
