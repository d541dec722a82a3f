"""What a relay that is not honest may make of a publication: the tracks it serves in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moqt.track.store import TrackStore
from moqt.values.names import Location
from tests.kvcs.copies import served
from tests.kvcs.hostile import at, cut, data, flipped, manifest, newest, under

if TYPE_CHECKING:
    from tests.kvcs.stories import Made

Tracks = list[TrackStore]
Lie = Callable[["Made"], Tracks]


def flips_a_bit(made: Made) -> Tracks:
    k, *others = data(made.publication)
    wrong = served(k, at((made.last_layer, 0))(flipped))
    return [manifest(made.publication), wrong, *others]


def cuts_payloads(made: Made) -> Tracks:
    def shorter(_, copy):
        return copy._replace(payload=copy.payload[:-1])

    return [manifest(made.publication), *(served(each, shorter) for each in data(made.publication))]


def swaps_layers(made: Made) -> Tracks:
    def moved(store: TrackStore) -> TrackStore:
        places = [place for place in all_places(store) if place.group < 2]
        return served(
            store, from_={place: Location(1 - place.group, place.object) for place in places}
        )

    return [manifest(made.publication), *map(moved, data(made.publication))]


def ends_early(made: Made) -> Tracks:
    first, *others = data(made.publication)
    return [manifest(made.publication), cut(first, made.last_layer, made.sizes[0]), *others]


def keeps_objects_back(made: Made) -> Tracks:
    def drop(place, copy):
        return None if place == (1, 0) else copy

    return [manifest(made.publication), *(served(each, drop) for each in data(made.publication))]


def gives_another_production(made: Made) -> Tracks:
    other = made.again(made.tokens)
    return [manifest(made.publication), *relabelled(made, data(other))]


def gives_other_tokens(made: Made) -> Tracks:
    other = made.again([token ^ 1 for token in made.tokens])
    return [manifest(made.publication), *relabelled(made, data(other))]


def gives_other_tokens_under_their_manifest(made: Made) -> Tracks:
    return relabelled(made, made.again([token ^ 1 for token in made.tokens]).tracks)


def replays_the_first_manifest(made: Made) -> Tracks:
    """And another production, none of which it lists."""
    whole = manifest(made.publication)
    last = newest(whole)
    listed = served(whole, lambda place, copy: copy if place.group < last.group else None)
    k, *others = data(made.publication)
    wrong = served(k, at((made.last_layer, 0))(flipped))
    return [listed, wrong, *others]


def garbles_the_manifest(made: Made) -> Tracks:
    return [served(manifest(made.publication), flipped), *data(made.publication)]


def relabelled(made: Made, stores: Sequence[TrackStore]) -> Tracks:
    return [served(each, name=under(made.publication.namespace, each)) for each in stores]


def all_places(store: TrackStore) -> list[Location]:
    return [stored.location for stored in store.objects()]


LIES: list[Lie] = [
    flips_a_bit,
    cuts_payloads,
    swaps_layers,
    ends_early,
    keeps_objects_back,
    gives_another_production,
    gives_other_tokens,
    gives_other_tokens_under_their_manifest,
    replays_the_first_manifest,
    garbles_the_manifest,
]
