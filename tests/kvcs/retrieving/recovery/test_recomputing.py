"""When nothing gives the cache, it is computed anew, within the time that this takes."""

from __future__ import annotations

import pytest

from kvcs.finding.relays import Fallback
from kvcs.names.errors import MisuseError, NotFound, PublisherLost
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from moqt.publisher import Publisher
from moqt.values.errors import ConnectError
from tests.kvcs import virtual
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    collect,
    kv,
    produced,
    publisher,
    same,
)
from tests.kvcs.virtual import VirtualLink

CACHE = kv(seed=5)


class Model:
    """Computes layers, and knows what it was asked for."""

    def __init__(self, cache=CACHE) -> None:
        self.cache = cache
        self.asked: list[tuple[range, int]] = []

    async def __call__(self, layers, tokens):
        self.asked.append((layers, tokens))
        for layer in layers:
            yield layer, *self.cache[layer]


def check(layers, wanted=CACHE) -> None:
    for layer in layers:
        for got, expected in zip((layer.k, layer.v), wanted[layer.index], strict=True):
            assert same(got, expected[: len(got)])


async def test_what_nobody_publishes_is_recomputed():
    model = Model()
    async with Link(Publisher()) as link:
        consumer = link.consumer(fallback=Fallback(recompute=model))
        layers = await collect(consumer)
    assert [layer.index for layer in layers] == list(range(LAYERS))
    check(layers)
    assert model.asked == [(range(LAYERS), BLOCKS * BLOCK)]
    assert consumer.stats.sources == [
        {"blocks": [0, BLOCKS - 1], "layers": [0, LAYERS - 1], "source": "recomputed"}
    ]
    assert consumer.stats.note is not None and "recomputed" in consumer.stats.note


async def test_what_is_published_is_not_recomputed():
    model = Model()
    async with Link(publisher(produced(cache=CACHE))) as link:
        consumer = link.consumer(fallback=Fallback(recompute=model, recompute_within=10))
        check(await collect(consumer))
    assert not model.asked


async def test_a_publication_that_stands_still_is_waited_for_as_long_as_recomputing_takes():
    model = Model()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    k, v = kv()[0]
    publication.put_layer(0, k, v)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace],
            timeout=60,
            fallback=Fallback(recompute=model, recompute_within=0.3),
        )
        layers = await collect(consumer)
    assert [layer.index for layer in layers] == [0, *range(LAYERS)]
    check(layers[1:])
    assert not layers[-1].publication


@pytest.mark.parametrize("blocks", [1, 3])
async def test_only_the_layers_and_blocks_asked_for_are_recomputed(blocks):
    model = Model()
    async with Link(Publisher()) as link:
        consumer = link.consumer(
            fallback=Fallback(recompute=model), blocks=blocks, layers=range(2, 4)
        )
        layers = await collect(consumer)
    assert model.asked == [(range(2, 4), blocks * BLOCK)]
    assert [len(layer.k) for layer in layers] == [blocks * BLOCK] * 2
    check(layers)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ([(k[:4], v) for k, v in CACHE], "has 4 tokens"),
        ([(k[:, :1], v) for k, v in CACHE], "shape"),
        ([(k.view("uint16"), v) for k, v in CACHE], "elements of uint16"),
    ],
)
async def test_what_is_recomputed_has_to_be_what_was_asked_for(cache, words):
    async with Link(Publisher()) as link:
        consumer = link.consumer(fallback=Fallback(recompute=Model(cache)))
        with pytest.raises(MisuseError, match=words):
            await collect(consumer)


async def test_tokens_that_fill_no_block_are_not_recomputed():
    model = Model()
    async with Link(Publisher()) as link:
        consumer = link.consumer(tokens=TOKENS[:3], fallback=Fallback(recompute=model))
        with pytest.raises(NotFound):
            await collect(consumer)
    assert not model.asked


async def test_relays_are_asked_in_their_order_and_what_failed_is_told():
    asked = []

    async def connect(relay):
        asked.append(relay)
        raise ConnectError(f"nobody at {relay}")

    names = [f"moqt://r{n}.example" for n in range(4)]
    fallback = Fallback(relay=names[0], relays=[names[1], names[0], names[2]], connect=connect)
    with pytest.raises(PublisherLost, match="nobody at"):
        await Consumer(None, SCOPE, DESCRIPTOR, TOKENS, fallback=fallback, timeout=5).retrieve()
    assert asked == names[:3]


async def test_another_relay_is_asked_only_when_it_is_needed():
    async with Link(publisher(produced(cache=CACHE))) as link:

        async def connect(relay):
            raise AssertionError(relay)

        fallback = Fallback(relays=["moqt://r1.example"], connect=connect)
        check(await collect(link.consumer(fallback=fallback)))


class Mute(Publisher):
    """Answers no listing."""

    def subscribe_namespace_received(self, request) -> None: ...


@pytest.mark.parametrize("second", ["gone", "empty", "mute"])
def test_a_relay_that_says_nothing_keeps_no_further_one_from_being_asked(second):
    async def story() -> None:
        served = publisher(produced(cache=CACHE))
        other = Mute() if second == "mute" else Publisher()
        async with (
            VirtualLink(Mute()) as own,
            VirtualLink(other) as two,
            VirtualLink(served) as far,
        ):

            async def connect(relay):
                if relay == "moqt://two.example" and second == "gone":
                    raise ConnectError("two.example cannot be reached")
                return (two if relay == "moqt://two.example" else far).session

            relays = ["moqt://two.example", "moqt://far.example"]
            consumer = own.consumer(fallback=Fallback(connect=connect, relays=relays))
            check(await collect(consumer))
            assert consumer.stats.source == "moqt://far.example"

    virtual.run(story())


async def test_a_publication_that_stands_still_at_one_relay_is_taken_from_the_next():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    k, v = CACHE[0]
    publication.put_layer(0, k, v)
    async with (
        Link(publisher(publication)) as here,
        Link(publisher(produced(cache=CACHE))) as there,
    ):

        async def connect(relay):
            return there.session

        fallback = Fallback(relays=["moqt://r1.example"], connect=connect)
        consumer = here.consumer(fallback=fallback, patience=0.1)
        layers = await collect(consumer)
    assert [layer.index for layer in layers][-LAYERS:] == list(range(LAYERS))
    check(layers[-LAYERS:])
    assert {span["source"] for span in consumer.stats.sources} == {"moqt://r1.example"}
