"""A hostile relay against every way of publishing: nothing wrong is ever handed over.

Each row of `ATTACKS` says what the relay does and what comes of it: RIGHT when the consumer has
what is true all the same, BELIEVED where docs/security.md says that it cannot notice, and the
error otherwise. A row that is the same for all modes has one outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from kvcs.names.errors import PublisherLost, RetrievalError, UnknownKey, VerificationFailed
from kvcs.programs.common import exit_code
from kvcs.trust.producers import ProducerKey
from kvsp.names import ijson
from kvsp.names.content_keys import ContentKey
from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode
from moqt.values.names import Location
from tests.kvcs.copies import served
from tests.kvcs.hostile import (
    MODES,
    OTHER_TOKENS,
    HostileRelay,
    World,
    at,
    cut,
    data,
    flipped,
    manifest,
    manifest_track,
    newest,
    opened,
    rows,
    under,
)
from tests.kvcs.support import BLOCKS, LAYERS, TOKENS, Link, kv, same

WRONG = kv(seed=99)
"""What is not the cache of these tokens."""

RIGHT, BELIEVED = "right", "believed"
BAD, LOST, LOCKED = VerificationFailed, PublisherLost, UnknownKey
EXITS = {BAD: 5, LOST: 1, LOCKED: 4}
Tracks = Iterable[TrackStore]


# --- Objects ----------------------------------------------------------------------------


def flips_a_bit_of_every_object(world: World) -> Tracks:
    return [manifest(world.honest), *(served(each, flipped) for each in data(world.honest))]


def flips_a_bit_of_one_object(world: World) -> Tracks:
    k, v = data(world.honest)
    return [manifest(world.honest), served(k, at((2, 1))(flipped)), v]


def flips_a_bit_of_the_manifest(world: World) -> Tracks:
    return [served(manifest(world.honest), flipped), *data(world.honest)]


def cuts_every_payload(world: World) -> Tracks:
    def shorter(_, copy):
        return copy._replace(payload=copy.payload[:-1])

    return [manifest(world.honest), *(served(each, shorter) for each in data(world.honest))]


def empties_every_payload(world: World) -> Tracks:
    def empty(_, copy):
        return copy._replace(payload=b"")

    return [manifest(world.honest), *(served(each, empty) for each in data(world.honest))]


def lengthens_every_payload(world: World) -> Tracks:
    def longer(_, copy):
        return copy._replace(payload=copy.payload + bytes(9))

    return [manifest(world.honest), *(served(each, longer) for each in data(world.honest))]


def moved(world: World, source: Callable[[int, int], tuple[int, int]]) -> Tracks:
    from_ = {
        Location(layer, block): Location(*source(layer, block))
        for layer in range(LAYERS)
        for block in range(BLOCKS)
    }
    return [manifest(world.honest), *(served(each, from_=from_) for each in data(world.honest))]


def swaps_blocks(world: World) -> Tracks:
    return moved(world, lambda layer, block: (layer, BLOCKS - 1 - block))


def reorders_layers(world: World) -> Tracks:
    return moved(world, lambda layer, block: (LAYERS - 1 - layer, block))


def replays_one_object(world: World) -> Tracks:
    return moved(world, lambda layer, block: (0, 0))


def swaps_keys_and_values(world: World) -> Tracks:
    k, v = data(world.honest)
    return [manifest(world.honest), served(k, of=v), served(v, of=k)]


def raises_every_priority(world: World) -> Tracks:
    def first(_, copy):
        return copy._replace(priority=copy.priority ^ 1)

    return [manifest(world.honest), *(served(each, first) for each in data(world.honest))]


def renames_the_key(world: World) -> Tracks:
    def renamed(_, copy):
        return copy._replace(properties=b"\x0b\x02\x02\x09" if copy.properties else b"")

    return [served(each, renamed) for each in world.honest.tracks]


def takes_the_key_id_out(world: World) -> Tracks:
    def bare(_, copy):
        return copy._replace(properties=b"")

    return [served(each, bare) for each in world.honest.tracks]


# --- ends -------------------------------------------------------------------------------


def ends_tracks_early(world: World) -> Tracks:
    return [manifest(world.honest), *(cut(each, 3, BLOCKS) for each in data(world.honest))]


def ends_layers_early(world: World) -> Tracks:
    return [manifest(world.honest), *(cut(each, LAYERS, 2) for each in data(world.honest))]


def keeps_objects_back(world: World) -> Tracks:
    def drop(place, copy):
        return None if place.object == 3 else copy

    return [manifest(world.honest), *(served(each, drop) for each in data(world.honest))]


def has_no_values(world: World) -> Tracks:
    k, _ = data(world.honest)
    return [manifest(world.honest), k]


# --- publications -----------------------------------------------------------------------


def mixes_two_productions(world: World) -> Tracks:
    k, _ = data(world.honest)
    other = world.publish(WRONG)
    return [manifest(world.honest), k, *relabelled(world, data(other)[1:])]


def gives_another_production_under_our_manifest(world: World) -> Tracks:
    return [manifest(world.honest), *relabelled(world, data(world.publish(WRONG)))]


def gives_another_production_under_our_name(world: World) -> Tracks:
    return relabelled(world, world.publish(WRONG).tracks)


def answers_another_prompts_cache(world: World) -> Tracks:
    return relabelled(world, world.publish(WRONG, OTHER_TOKENS).tracks)


def answers_another_prompts_cache_under_our_manifest(world: World) -> Tracks:
    other = world.publish(WRONG, OTHER_TOKENS)
    return [manifest(world.honest), *relabelled(world, data(other))]


def gives_a_longer_prompts_cache(world: World) -> Tracks:
    longer = world.publish(kv(tokens=len(TOKENS) + 4, seed=9), [*TOKENS[:-1], 1, 2, 3, 4, 5])
    return relabelled(world, longer.tracks)


def relabelled(world: World, stores: Tracks) -> list[TrackStore]:
    """Tracks under the names of the honest publication."""
    return [served(each, name=under(world.honest.namespace, each)) for each in stores]


# --- manifests --------------------------------------------------------------------------


def replays_an_old_manifest(world: World) -> Tracks:
    """The first version, which lists nothing, for ever."""

    def oldest(place, copy):
        return copy if place.group == 0 else None

    return [served(manifest(world.honest), oldest), *data(world.honest)]


def replays_an_old_manifest_as_the_newest(world: World) -> Tracks:
    whole = manifest(world.honest)
    from_ = {Location(version, 0): Location(0, 0) for version in whole.groups}
    return [served(whole, from_=from_), *data(world.honest)]


def gives_another_publications_manifest(world: World) -> Tracks:
    other = world.publish(world.cache)
    return [*relabelled(world, [manifest(other)]), *data(world.honest)]


def gives_the_manifest_in_clear(world: World) -> Tracks:
    store = manifest(world.honest)
    text = opened(world, store, newest(store))
    plain = World(MODES["plain"])
    return [
        manifest_track(plain, world.honest.namespace, [text], name=store.name),
        *data(world.honest),
    ]


def gives_no_manifest(world: World) -> Tracks:
    return data(world.honest)


# --- what is forged ---------------------------------------------------------------------


def forges_a_publication(world: World) -> Tracks:
    return world.forge(WRONG).tracks


def forges_a_publication_under_our_name(world: World) -> Tracks:
    forged = world.forge(WRONG)
    whole = manifest(forged)
    text = bytes(whole.groups[newest(whole).group].objects[0].payload).replace(
        forged.namespace.publication_id.hex().encode(),
        world.honest.namespace.publication_id.hex().encode(),
    )
    plain = World(MODES["plain"])
    made = manifest_track(plain, world.honest.namespace, [text])
    return [made, *relabelled(world, data(forged))]


def signs_with_a_key_of_its_own(world: World) -> Tracks:
    return world.forge(WRONG, signer=ProducerKey.generate()).tracks


def signs_under_the_name_of_the_producer(world: World) -> Tracks:
    return world.forge(WRONG, signer=ProducerKey.generate(kid=world.producer.kid)).tracks


def seals_with_a_key_of_its_own(world: World) -> Tracks:
    return world.forge(WRONG, keys=[ContentKey.generate()]).tracks


def gives_objects_in_clear_under_a_sealed_manifest(world: World) -> Tracks:
    forged = world.forge(world.cache)
    return [manifest(world.honest), *relabelled(world, data(forged))]


# --- members of the scope who are no producers ------------------------------------------


def insider_publishes_unsigned(world: World) -> Tracks:
    return world.publish(WRONG, signer=None).tracks


def insider_signs_with_a_key_of_his_own(world: World) -> Tracks:
    return world.publish(WRONG, signer=ProducerKey.generate()).tracks


def insider_alters_the_signed_manifest(world: World) -> Tracks:
    """Another text under a signature of the producer's: in COSE as in clear one is as long."""
    other = world.publish(WRONG, signer=world.producer)
    store = manifest(other)
    message = opened(world, store, newest(store))
    altered = message.replace(b'"deterministic":false', b'"deterministic":true ')
    assert altered != message
    return [manifest_track(world, other.namespace, [altered], name=store.name), *data(other)]


def producer_names_no_publication(world: World) -> Tracks:
    """A manifest that could be of any namespace: an honest one of another implementation."""
    publication = world.publish(WRONG)
    whole = manifest(world.forge(WRONG))
    tree = ijson.loads(bytes(whole.groups[newest(whole).group].objects[0].payload))
    del tree["publication"], tree["scope_id"]
    signer = world.producer if world.mode.signed else None
    made = manifest_track(world, publication.namespace, [ijson.canonical(tree)], signer=signer)
    return [made, *data(publication)]


class Row(NamedTuple):
    """An attack, and what comes of it in each mode."""

    attack: Callable[[World], Tracks]
    plain: Any
    signed: Any
    sealed: Any
    both: Any
    refusing: dict[bytes, RequestErrorCode] | None = None

    @property
    def name(self) -> str:
        refusing = "".join(f" refusing {code.name}" for code in (self.refusing or {}).values())
        return self.attack.__name__.replace("_", " ") + refusing


def always(attack, outcome) -> Row:
    return Row(attack, outcome, outcome, outcome, outcome)


def instead(code: RequestErrorCode) -> Row:
    """The signed manifest is said to be out of reach, and there is a plain one."""
    return Row(forges_a_publication, LOST, LOST, LOST, LOST, refusing={b"manifest.cose": code})


ATTACKS = [
    always(flips_a_bit_of_every_object, BAD),
    always(flips_a_bit_of_one_object, BAD),
    always(flips_a_bit_of_the_manifest, BAD),
    always(cuts_every_payload, BAD),
    always(empties_every_payload, BAD),
    always(lengthens_every_payload, BAD),
    always(swaps_blocks, BAD),
    always(reorders_layers, BAD),
    always(replays_one_object, BAD),
    always(swaps_keys_and_values, BAD),
    Row(raises_every_priority, RIGHT, RIGHT, BAD, BAD),
    Row(renames_the_key, RIGHT, RIGHT, LOCKED, LOCKED),
    Row(takes_the_key_id_out, RIGHT, RIGHT, BAD, BAD),
    always(ends_tracks_early, LOST),
    always(ends_layers_early, LOST),
    always(keeps_objects_back, LOST),
    always(has_no_values, LOST),
    always(mixes_two_productions, BAD),
    always(gives_another_production_under_our_manifest, BAD),
    always(gives_another_production_under_our_name, BAD),
    always(answers_another_prompts_cache, BAD),
    always(answers_another_prompts_cache_under_our_manifest, BAD),
    always(gives_a_longer_prompts_cache, BAD),
    Row(replays_an_old_manifest, RIGHT, BAD, RIGHT, BAD),
    Row(replays_an_old_manifest_as_the_newest, RIGHT, BAD, BAD, BAD),
    always(gives_another_publications_manifest, BAD),
    Row(gives_the_manifest_in_clear, RIGHT, RIGHT, BAD, BAD),
    always(gives_no_manifest, LOST)._replace(signed=BAD, both=BAD),
    Row(forges_a_publication, BELIEVED, BAD, BAD, BAD),
    Row(forges_a_publication_under_our_name, BELIEVED, BAD, BAD, BAD),
    Row(signs_with_a_key_of_its_own, BELIEVED, BAD, BAD, BAD),
    Row(signs_under_the_name_of_the_producer, BELIEVED, BAD, BAD, BAD),
    Row(seals_with_a_key_of_its_own, LOCKED, BAD, BAD, BAD),
    Row(gives_objects_in_clear_under_a_sealed_manifest, RIGHT, RIGHT, BAD, BAD),
    Row(insider_publishes_unsigned, BELIEVED, BAD, BELIEVED, BAD),
    Row(insider_signs_with_a_key_of_his_own, BELIEVED, BAD, BELIEVED, BAD),
    Row(insider_alters_the_signed_manifest, BELIEVED, BAD, BELIEVED, BAD),
    Row(producer_names_no_publication, BELIEVED, BAD, BELIEVED, BAD),
    instead(RequestErrorCode.TIMEOUT),
    instead(RequestErrorCode.INTERNAL_ERROR),
    instead(RequestErrorCode.EXCESSIVE_LOAD),
]


@pytest.mark.parametrize("way", ["fetch", "live"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: row.name)
async def test_nothing_wrong_is_handed_over(row: Row, mode: str, way: str) -> None:
    world = World(MODES[mode])
    outcome = getattr(row, mode)
    relay = HostileRelay(row.attack(world), row.refusing)
    handed, error = [], None
    async with Link(relay) as link:
        consumer = link.consumer(
            scope=world.scope, producers=world.producers, mode=way, patience=0.3
        )
        async with consumer:
            try:
                async for layer in consumer.layers():
                    handed.append(layer)
            except RetrievalError as caught:
                error = caught
        assert consumer.octets_held == 0
        await link.assert_clean()
    wanted = WRONG if outcome == BELIEVED else world.cache
    if outcome in (RIGHT, BELIEVED):
        assert error is None, error
        assert [layer.index for layer in handed] == list(range(LAYERS))
    else:
        assert type(error) is outcome, (error, len(handed))
        assert exit_code(error) == EXITS[outcome]
        assert len(str(error)) < 400 and not [key for key in secrets_of(world) if key in str(error)]
    for layer in handed:
        for got, tensor in zip((layer.k, layer.v), wanted[layer.index], strict=True):
            assert same(got, rows(tensor, BLOCKS)), f"layer {layer.index} is wrong"


def secrets_of(world: World) -> list[str]:
    return [key.key.hex() for key in world.content_keys] + [bytes(range(32)).hex()]
