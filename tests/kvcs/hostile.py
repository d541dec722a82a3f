"""A relay that is not to be trusted: it has what honest members of a scope have published, and
answers with something else.

A `World` is a scope and what is published in it, in clear, signed, sealed or both. An attack
takes one and gives the tracks that the relay serves; `HostileRelay` serves them on the session
layer of the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvcs.names.namespace import PublicationNamespace
from kvcs.publishing.publication import Publication
from kvcs.trust.cose import sign
from kvcs.trust.producers import ProducerKey, Producers
from kvcs.trust.sealing import TrackOpener, TrackSealer
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Scope
from moqt.publisher import Publisher
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode, RequestErrorCode
from moqt.values.names import FullTrackName, Location
from tests.kvcs.copies import Change, Copy
from tests.kvcs.support import BLOCK, TOKENS, kv, produced

KEY = bytes(range(32))
OTHER_TOKENS = [token + 7 for token in TOKENS]
MANIFESTS = (b"manifest", b"manifest.cose")


class Mode(NamedTuple):
    """How the members of a scope publish."""

    signed: bool
    sealed: bool


MODES = {
    "plain": Mode(False, False),
    "signed": Mode(True, False),
    "sealed": Mode(False, True),
    "both": Mode(True, True),
}


class World:
    """A scope, its producer, and what has been published in it."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.content_keys = (ContentKey.generate(),) if mode.sealed else ()
        self.scope = Scope(KEY, self.content_keys)
        self.producer = ProducerKey.generate()
        self.cache = kv()
        self.honest = self.publish(self.cache)
        """The publication of our tokens, complete."""

    @property
    def producers(self) -> Producers | None:
        return Producers([self.producer.public]) if self.mode.signed else None

    def publish(self, cache, tokens=TOKENS, *, layers: int | None = None, **changes) -> Publication:
        """A publication as an honest producer makes it, of the first `layers` so far."""
        signer = self.producer if self.mode.signed else None
        settings = {"signer": signer, "manifest_every": 1, **changes}
        return produced(tokens=tokens, cache=cache[:layers], scope=self.scope, **settings)

    def forge(self, cache, tokens=TOKENS, *, keys: Iterable[ContentKey] = (), **changes):
        """A publication as somebody makes it who has neither the content keys nor the key of
        a producer; that he knows the names is granted."""
        return produced(tokens=tokens, cache=cache, scope=Scope(KEY, tuple(keys)), **changes)


def under(namespace: PublicationNamespace, store: TrackStore) -> FullTrackName:
    """The name of a track in another publication."""
    return FullTrackName(namespace.fields, store.name.name)


def data(publication) -> list[TrackStore]:
    return [each for each in publication.tracks if each.name.name not in MANIFESTS]


def manifest(publication) -> TrackStore:
    (found,) = [each for each in publication.tracks if each.name.name in MANIFESTS]
    return found


def newest(store: TrackStore) -> Location:
    """Where the last version of a manifest stands; after it only the end of the track does."""
    return Location(max(store.groups) - 1, 0)


def at(*places: tuple[int, int]) -> Callable[[Change], Change]:
    """A change at these Locations only."""
    wanted = {Location(*place) for place in places}

    def only(change: Change) -> Change:
        return lambda place, copy: change(place, copy) if place in wanted else copy

    return only


def flipped(_: Location, copy: Copy) -> Copy:
    """One bit in the middle of what is carried is another one."""
    middle = len(copy.payload) * 3 // 4
    payload = bytearray(copy.payload)
    payload[middle] ^= 4
    return copy._replace(payload=bytes(payload))


def opened(world: World, store: TrackStore, place: Location) -> bytes:
    """The payload of an Object of an honest track, as a member of the scope reads it."""
    stored = store.groups[place.group].objects[place.object]
    if not world.content_keys:
        return bytes(stored.payload)
    opener = TrackOpener(world.content_keys, store.name)
    return bytes(opener.open(*place, stored.priority, stored.properties, [stored.payload]))


def manifest_track(
    world: World,
    namespace: PublicationNamespace,
    payloads: Iterable[bytes],
    *,
    signer: ProducerKey | None = None,
    name: FullTrackName | None = None,
) -> TrackStore:
    """A manifest track as an insider makes it, with the scope's content key, of any payloads."""
    name = name or FullTrackName(namespace.fields, MANIFESTS[signer is not None])
    store = TrackStore(name)
    sealer = TrackSealer(world.content_keys[-1], name) if world.content_keys else None
    for version, payload in enumerate(payloads):
        octets = payload if signer is None else b"".join(sign([payload], signer))
        if sealer is None:
            store.append(version, 0, octets, priority=0)
        else:
            sealed = sealer.seal(version, 0, 0, [octets])
            store.append(version, 0, sealed, priority=0, properties=sealer.properties)
        store.mark_end(Location(version, 1), ObjectStatus.END_OF_GROUP, priority=0)
        store.finish_subgroup(version, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)
    return store


def cut(store: TrackStore, layers: int, blocks: int) -> TrackStore:
    """A track that is said to end after some layers, each after some blocks."""
    copy = TrackStore(store.name, store.properties)
    for group in range(layers):
        for object_id in range(blocks):
            stored = store.groups[group].objects[object_id]
            Copy.of(stored).put(copy, stored.location)
        copy.mark_end(Location(group, blocks), ObjectStatus.END_OF_GROUP, priority=0)
        copy.finish_subgroup(group, 0)
    copy.mark_end(Location(layers, 0), ObjectStatus.END_OF_TRACK)
    copy.finish_subgroup(layers, 0)
    copy.finish(PublishDoneCode.TRACK_ENDED)
    return copy


class HostileRelay(Publisher):
    """Serves the tracks it was given, and refuses some names with a code of its choice."""

    def __init__(
        self,
        tracks: Iterable[TrackStore],
        refusing: Mapping[bytes, RequestErrorCode] | None = None,
    ) -> None:
        super().__init__()
        for store in tracks:
            self.add_track(store)
        self._refusing = refusing or {}

    def subscribe_received(self, request) -> None:
        if not self._refused(request):
            super().subscribe_received(request)

    def fetch_received(self, request) -> None:
        if not self._refused(request):
            super().fetch_received(request)

    def _refused(self, request) -> bool:
        code = self._refusing.get(request.name.name)
        if code is not None:
            request.reject(code, "no")
        return code is not None


def rows(tensor, blocks: int):
    return tensor[: blocks * BLOCK]
