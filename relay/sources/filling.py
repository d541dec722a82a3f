"""Objects on their way into a track's store, whoever brings them.

An Object that comes more than once is stored once and compared (MOQT "Malformed Tracks").
Sans-IO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moqt.track.knowledge import properties_price
from moqt.track.store import TrackStore
from moqt.track.stored import Buffer, StoredObject, buffer_length
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.errors import MalformedTrack
from moqt.values.messages import Properties
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader, Payload
from relay.cache import OBJECT_OVERHEAD, Share
from relay.config import Clock, Counters, RelayConfig, cache_duration
from relay.sources.kept import Kept


@dataclass(slots=True, eq=False)
class Arrival:
    """An Object that one stream is bringing; `offset` octets of it have come there."""

    stored: StoredObject
    offset: int = 0


class Filling:
    """Puts Objects into one track's store, within what the cache has room for."""

    def __init__(
        self,
        name: FullTrackName,
        config: RelayConfig,
        share: Share,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self.cache = share.cache
        self.share = share
        """What its scope has in the cache."""
        self.counters = counters
        self.kept: Kept | None = None
        """Its part in the disk tier, where there is one."""
        self._name = name
        self._config = config
        self._clock = clock
        self.store = self._new_store()
        self._feeds: dict[tuple[int, int], int] = {}
        self.bringing: dict[StoredObject, int] = {}
        """The growing Objects, and how many streams bring each."""
        self.contradicted: Callable[[str], bool] = lambda reason: False
        """Told that what comes contradicts what is here, before that is MalformedTrack: whether
        `store` is another one now."""

    def _new_store(self) -> TrackStore:
        limit = self._config.max_intervals_per_track
        store = TrackStore(self._name, authoritative=False, max_intervals=limit)
        store.on_stored = self._stored
        self.share.take(store)
        if self.kept is not None:
            store.knowledge.heard = self.kept.vouched
        store.max_cache_duration = cache_duration((), self._config)
        return store

    def _set_properties(self, properties: Properties) -> None:
        self.store.set_properties(properties)
        self.store.max_cache_duration = cache_duration(properties, self._config)

    def begin_anew(self) -> TrackStore:
        """Another store, with nothing in it; what the one before held is let go."""
        for stored in tuple(self.bringing):
            self._abort(stored)
        self._feeds.clear()
        old = self.store
        old.source = old.on_evicted = None
        self.cache.forget(old)
        if self.kept is not None:
            self.kept.drop()
        self.store = self._new_store()
        self._set_properties(old.properties)
        return self.store

    def restore(self, kept: Kept) -> None:
        """What the disk has of the track is what is known of it; nothing is in memory yet."""
        self.kept, entry, store = kept, kept.entry, self.store
        store.knowledge.heard = kept.vouched
        if entry is not None:
            self._set_properties(entry.properties)
            store.largest = entry.largest
            store.set_end_of_track(entry.end)
            store.finish(PublishDoneCode.TRACK_ENDED)

    @property
    def holds(self) -> bool:
        """Some of the Track is here, in memory or on the disk."""
        kept = self.kept
        return self.store.octets > 0 or (kept is not None and kept.entry is not None)

    @property
    def whole(self) -> bool:
        """Every Object of the Track, to its end, is here, in memory or on the disk."""
        return (self.kept is not None and self.kept.whole) or self.store.is_complete()

    def _stored(self, store: TrackStore, stored: StoredObject) -> None:
        kept = self.kept
        if kept is None or not kept.placing:
            counters = self.counters
            counters.objects_in += 1
            counters.octets_in += stored.length
            if kept is not None:
                kept.stored(stored)
        self.cache.add(store, stored)

    def has_room_for(self, properties: Properties) -> bool:
        """Whether Track Properties can be kept."""
        return self.share.room(properties_price(properties) - self.store.knowledge.properties)

    def take_properties(self, properties: Properties) -> None:
        """What a publisher says the Track Properties are; it was asked whether there is room."""
        if properties != self.store.properties:
            self._set_properties(properties)
            self.cache.retime(self.store)

    def declared_nonexistent(self, header: ObjectHeader) -> bool:
        """Whether an Object comes that was recorded as non-existent: it must not be cached or
        forwarded (MOQT "Caching Relays")."""
        at = Location(header.group, header.object)
        if at not in self.store.known or self.store.get(at) is not None:
            return False
        group = self.store.groups.get(at.group)
        # beyond a declared end it is not merely late, but contradicts what was said
        beyond = group is not None and group.end is not None and at.object >= group.end
        ended = self.store.end_of_track is not None and at >= self.store.end_of_track
        return not beyond and not ended and at not in self.store.knowledge.gaps

    def begin(self, header: ObjectHeader, follows: int | None, *, live: bool) -> Arrival | None:
        """Place an Object, or find the one that is there; None when there is no room."""
        store, cache = self.store, self.cache
        stored = store.get(Location(header.group, header.object))
        if stored is not None:
            self._place(header)
        else:
            overhead = len(header.properties) + OBJECT_OVERHEAD
            fits = cache.fits(header.length + overhead)
            if not fits or not cache.reserve(store, 0, overhead):
                cache.stores_rejected += 1
                return None
            try:
                stored = self._place(header, follows, live=live)
            finally:
                if stored is None:
                    cache.give_back(store, 0, overhead)
            assert stored is not None
            if not live:
                self._fetched(header)
            if not stored.length:
                store.complete(stored)
            elif store.max_cache_duration is not None:
                cache.age(store, stored)
        if not stored.complete:
            self.bringing[stored] = self.bringing.get(stored, 0) + 1
        return Arrival(stored)

    def add(
        self,
        header: ObjectHeader,
        payload: Payload,
        follows: int | None,
        *,
        live: bool,
        arrived: float | None = None,
    ) -> StoredObject | None:
        """Place an Object that has come whole, if it is like nearly every one: not a status, not
        there, not known to be nowhere, and there is room. None for another, which has to `begin`.
        `arrived` is when it came, if not now.
        """
        store, cache = self.store, self.cache
        at = Location(header.group, header.object)
        # what grows is not known yet: no room is made for what it has room for already
        if header.status or at in store.known or (self.bringing and store.get(at) is not None):
            return None
        overhead = len(header.properties) + OBJECT_OVERHEAD
        if not cache.reserve(store, header.length, overhead):
            return None
        stored = None
        try:
            stored = self._place(header, follows, live=live, payload=payload, arrived=arrived)
        finally:
            if stored is None:
                cache.give_back(store, header.length, overhead)
        if stored is None:  # it is growing
            return None
        if not live:
            self._fetched(header)
        if header.length and store.max_cache_duration is not None:
            cache.age(store, stored)
        return stored

    def _fetched(self, header: ObjectHeader) -> None:
        """A FETCH has brought the Object."""
        if header.subgroup is not None:
            log = self.store.subgroup(header.group, header.subgroup)
            if not log.finished and (header.group, header.subgroup) not in self._feeds:
                # No live stream feeds it, so nobody will ever say that it ends.
                log.broken = True

    def _place(
        self,
        header: ObjectHeader,
        follows: int | None = None,
        *,
        live: bool = True,
        payload: Payload | None = None,
        arrived: float | None = None,
    ) -> StoredObject | None:
        return self.store.begin(
            Location(header.group, header.object),
            subgroup=header.subgroup,
            priority=header.priority,
            properties=header.properties,
            length=header.length,
            follows=follows,
            now=self._clock.now if arrived is None else arrived,
            live=live,
            payload=payload,
        )

    def grow(self, arrival: Arrival, part: Buffer) -> bool:
        """More of an Object; what another stream has brought is compared.

        False when it is not stored (any more): the rest of it is of no use.
        """
        stored, store = arrival.stored, self.store
        if stored.gone:
            return False
        size = buffer_length(part)
        known = min(size, stored.received - arrival.offset)
        if known > 0:
            view = memoryview(part)
            if not _same(stored, arrival.offset, view[:known]):
                raise MalformedTrack(
                    f"{store.name}: Object {stored.location.group}/{stored.location.object} came "
                    f"twice with different payloads"
                )
            part = view[known:]
        arrival.offset += size
        if size > known:
            if not self.cache.reserve(store, size - known):
                self.cache.stores_rejected += 1
                self._abort(stored)
                return False
            store.grow(stored, part)
            if stored.complete:
                self.bringing.pop(stored, None)
                self._finish(stored)
        return True

    def _finish(self, stored: StoredObject) -> None:
        if stored.retired:
            self.cache.release(self.store, stored)
            self.store.evict(stored)
        else:
            self.store.complete(stored)

    def cut(self, arrival: Arrival) -> None:
        """The stream that brought an Object ended inside it."""
        stored = arrival.stored
        count = self.bringing.get(stored)
        if count is None:
            return
        if count > 1:
            self.bringing[stored] = count - 1
        else:
            self._abort(stored)

    def _abort(self, stored: StoredObject) -> None:
        self.bringing.pop(stored, None)
        self.cache.release(self.store, stored)
        self.store.abort(stored)
        self.store.forget_group(stored.location.group)

    def status(self, header: ObjectHeader, follows: int | None) -> None:
        """An End of Group or End of Track Object (MOQT "Object Status")."""
        location = Location(header.group, header.object)
        if self.share.room(OBJECT_OVERHEAD) or self.cache.carries(self.store, OBJECT_OVERHEAD):
            self.store.mark_end(
                location,
                header.status,
                subgroup=header.subgroup,
                priority=header.priority,
                follows=follows,
            )
        else:
            self.cache.stores_rejected += 1
            if header.status is ObjectStatus.END_OF_TRACK:
                self.store.set_end_of_track(location)
            else:
                self.store.set_end_of_group(location)
        if header.subgroup is None:
            self.store.forget_group(header.group)

    def feed_opened(self, key: tuple[int, int], priority: int | None) -> None:
        """A live stream brings Objects of this Subgroup, of that priority.

        Its log is kept until `feed_closed`: what it knows of the final Object holds for this
        stream, too, even if the Object has to make room for those of this stream.
        """
        self._feeds[key] = self._feeds.get(key, 0) + 1
        log = self.store.subgroup(*key, priority)
        log.readers += 1
        log.broken = False
        log.done = log.finished

    def feed_sifted(self, key: tuple[int, int]) -> None:
        """A filter of ours may have left out Objects of the Subgroup that such a stream brings."""
        self.store.subgroup(*key).sifted = True

    def feed_closed(
        self, key: tuple[int, int], last: int | None, *, end_of_group: bool, sifted: bool = False
    ) -> None:
        """It ended; `last` is its last Object ID when it ended with FIN, else None. When it was
        `sifted`, that says of the Subgroup's end only that no more of it will come."""
        count = self._feeds.pop(key, 1) - 1
        if count:
            self._feeds[key] = count
        self.store.subgroup(*key).readers -= 1
        try:
            if last is not None and sifted:
                log = self.store.subgroup(*key)
                log.done, log.broken = True, False
                self.store.changed(log)
            elif last is not None:
                self.store.finish_subgroup(*key, end_of_group=end_of_group, last=last)
            elif not count:
                self.store.break_subgroup(*key)
        finally:
            self.store.forget_group(key[0])

    def feed_empty(self, key: tuple[int, int], priority: int | None) -> None:
        """A live stream of this Subgroup was reset before its first Object began."""
        if key not in self._feeds:
            self.store.break_subgroup(*key, priority=priority)
            self.store.forget_group(key[0])


def _same(stored: StoredObject, offset: int, part: memoryview) -> bool:
    """Whether `stored` has the octets of `part` at `offset`."""
    done = 0
    while done < part.nbytes:
        there = stored.read(offset + done, part.nbytes - done)
        size = buffer_length(there)
        if there != part[done : done + size]:
            return False
        done += size
    return True
