"""What MOQT does not bring in time comes from holders over HTTP, verified, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvcs.finding.relays import Fallback
from kvcs.names.errors import (
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.programs.subscribe import app as subscribe
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.destinations import MemoryDestination
from kvsp.client import Fault, NotAuthorizedError, ProblemDetails, UnreachableError
from kvsp.names.identity import Scope
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import ConnectError
from tests.kvcs.inside import asks_over_http
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    Split,
    altered,
    collect,
    corrupted,
    kv,
    produced,
    publisher,
    until,
)
from tests.kvcs.support_fallback import CACHE, H1, FakeClient, check
from tests.kvcs.support_segments import grown

RELAY = "moqt://relay.example:4443"
ALL = [0, LAYERS - 1]
OTHER = kv(seed=9)


def fallback(client, *, after=0.05, **more) -> Fallback:
    return Fallback(client, after=after, relay=RELAY, **more)


def refused(url):
    async def connect() -> None:
        await asyncio.sleep(0)
        raise ConnectError(f"{url} did not answer")

    return connect()


def alone(client, connect=refused, **settings) -> Consumer:
    settings.setdefault("timeout", 5)
    tokens = settings.pop("tokens", TOKENS)
    scope = settings.pop("scope", SCOPE)
    return Consumer(
        None, scope, DESCRIPTOR, tokens, fallback=fallback(client, connect=connect), **settings
    )


def sources(consumer):
    return [(s["blocks"], s["layers"], s["source"]) for s in consumer.stats.sources]


# --- no MOQT path --------------------------------------------------------------------


async def test_without_any_relay_everything_comes_from_holders():
    consumer = alone(FakeClient())
    check(await collect(consumer))
    assert sources(consumer) == [([0, BLOCKS - 1], ALL, H1)]
    assert consumer.stats.described_sources() == f"{BLOCKS} blocks by {H1}"
    assert consumer.octets_held == 0


async def test_why_the_relay_could_not_be_asked_is_told_although_holders_have_it_all():
    async def refused(url):
        raise ConnectError(f"cannot connect to {url}: connection refused")

    consumer = alone(FakeClient(), refused)
    check(await collect(consumer))
    assert consumer.stats.relay_error == f"cannot connect to {RELAY}: connection refused"
    assert consumer.stats.as_dict()["relay_error"] == consumer.stats.relay_error


async def test_a_relay_that_does_not_answer_is_not_waited_for_longer_than_patience():
    async def never(url):
        await asyncio.Event().wait()

    consumer = alone(FakeClient(), never)
    check(await collect(consumer))
    assert consumer.stats.sources[0]["source"] == H1


async def test_layers_and_blocks_asked_for_are_all_that_holders_are_asked_for():
    client = FakeClient()
    consumer = alone(client, layers=range(2, 4), blocks=2)
    layers = await collect(consumer)
    assert [layer.index for layer in layers] == [2, 3]
    assert set(client.asked) == {(block, layer) for block in (0, 1) for layer in (2, 3)}
    assert len(client.looked_up[0]) == 2


async def test_nothing_anywhere_is_not_found():
    async with Link(Publisher()) as link:
        consumer = link.consumer(fallback=fallback(FakeClient(blocks=0)))
        with pytest.raises(NotFound, match="no holder"):
            await collect(consumer)


async def test_another_scope_key_finds_nothing_either_way():
    async with Link(publisher(produced(cache=CACHE))) as link:
        consumer = link.consumer(scope=Scope(bytes(32)), fallback=fallback(FakeClient()))
        with pytest.raises(NotFound):
            await collect(consumer)


async def test_no_relay_and_no_holder_is_not_the_same_as_not_found():
    with pytest.raises(PublisherLost, match=r"did not answer; over HTTP"):
        await collect(alone(FakeClient(blocks=0)))


async def test_a_right_refused_by_the_index_is_told():
    error = NotAuthorizedError("https://is.example/", ProblemDetails(403, None, "no"))
    async with Link(Publisher()) as link:
        consumer = link.consumer(fallback=fallback(FakeClient(error=error)))
        with pytest.raises(NotAuthorized):
            await collect(consumer)


async def test_holders_that_lie_about_the_first_block_are_a_failed_verification():
    client = FakeClient(gives=lambda block, layer: block > 0)
    client.fault = Fault.VERIFICATION
    with pytest.raises(VerificationFailed):
        await collect(alone(client))


async def test_a_block_that_no_holder_gives_ends_the_prefix_before_it():
    client = FakeClient(gives=lambda block, layer: (block, layer) != (3, 1))
    consumer = alone(client)
    layers = await collect(consumer)
    # once more from the first layer, as with another publication
    check(layers[-LAYERS:], blocks=3)
    assert consumer.stats.blocks == 3


async def test_the_timeout_covers_both_ways():
    client = FakeClient(gate=asyncio.Event())
    with pytest.raises(RetrievalTimeout):
        await collect(alone(client, timeout=0.3))


# --- the index service ---------------------------------------------------------------


async def test_an_index_that_is_down_leaves_moqt_and_is_told():
    client = FakeClient(error=UnreachableError("https://is.example/", "refused"))
    async with Link(publisher(produced(cache=CACHE))) as link:
        consumer = link.consumer(fallback=fallback(client), source=RELAY)
        check(await collect(consumer))
        await link.assert_clean()
    assert "is.example" in consumer.stats.note
    assert sources(consumer) == [([0, BLOCKS - 1], ALL, RELAY)]
    assert consumer.stats.described_sources() == f"{BLOCKS} blocks by moqt"


async def test_an_index_that_is_down_and_no_publication_is_a_failure():
    client = FakeClient(error=UnreachableError("https://is.example/", "refused"))
    async with Link(Publisher()) as link:
        with pytest.raises(RetrievalError) as raised:
            await collect(link.consumer(fallback=fallback(client)))
        assert not isinstance(raised.value, NotFound)


async def test_a_longer_publication_is_found_by_the_keys_of_its_first_blocks():
    longer = list(range(1000, 1000 + BLOCK * (BLOCKS + 3)))
    cache = kv(tokens=len(longer))
    publication = produced(tokens=longer, cache=cache)
    client = FakeClient(blocks=0).knows(publication, cache, RELAY)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(fallback=fallback(client, after=5))
        check(await collect(consumer), cache)
        assert consumer.stats.publication == publication.namespace.publication_id.hex()
        await link.assert_clean()


async def test_of_a_longer_publication_only_the_blocks_with_our_keys_are_taken():
    cache = kv(seed=3)
    publication = produced(cache=cache)
    client = FakeClient(blocks=0).knows(publication, cache, RELAY)
    ours = [*TOKENS[: 2 * BLOCK], *range(9 * BLOCK)]
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(tokens=ours, fallback=fallback(client, after=5))
        check(await collect(consumer), cache, blocks=2)
    assert consumer.stats.blocks == 2


LONGER = list(range(1000, 1000 + BLOCK * (BLOCKS + 3)))
LONG = kv(tokens=len(LONGER), seed=4)


@pytest.mark.parametrize("wrong", [(0, 0), (LAYERS - 1, BLOCKS - 1)])
async def test_a_longer_publication_is_never_taken_for_what_its_records_do_not_say(wrong):
    """The index names it for our keys: of other tokens, or with one block of other tokens."""
    publication = produced(tokens=LONGER, cache=LONG)
    layer, block = wrong
    recorded = [(k.copy(), v.copy()) for k, v in LONG]
    recorded[layer][1].view("uint8")[block * BLOCK] ^= 1
    client = FakeClient(blocks=0).knows(publication, recorded, RELAY)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(fallback=fallback(client, after=5))
        layers = []
        with pytest.raises(VerificationFailed, match=f"layer {layer} of block {block} is not"):
            async for each in consumer.layers():
                layers.append(each.index)
        assert layer not in layers
        assert consumer.stats.discarded["other-tokens"] == 1
        await link.assert_clean()


@pytest.mark.parametrize("change", [{"layer_digests": None}, {"codec": 0xF001}])
async def test_a_record_that_cannot_be_compared_binds_no_block(change):
    publication = produced(tokens=LONGER, cache=LONG)
    client = FakeClient(blocks=0).knows(publication, LONG, RELAY)
    client.held[3] = [replace(client.held[3][0], **change)]
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(fallback=fallback(client, after=5))
        check(await collect(consumer), LONG, blocks=3)
        client.held[0] = [replace(client.held[0][0], **change)]
        with pytest.raises(VerificationFailed, match="no record of an index"):
            await collect(link.consumer(fallback=fallback(client, after=5)))


async def test_after_a_publication_of_other_tokens_the_right_one_is_retrieved():
    wrong, right = produced(tokens=LONGER, cache=LONG), produced(cache=CACHE)
    client = FakeClient(blocks=0).knows(wrong, kv(tokens=len(LONGER), seed=7), RELAY)
    async with Link(publisher(wrong, right)) as link:
        consumer = link.consumer(fallback=fallback(client, after=5))
        check(await collect(consumer))


async def test_records_that_lie_of_what_follows_cost_no_publication_whose_beginning_is_ours():
    """Its first segment is of our tokens, the second goes on with others."""
    others = [*TOKENS[: 2 * BLOCK], *range(3 * BLOCK)]
    publication = grown((2, 3), CACHE, others)
    client = FakeClient(blocks=0).knows(publication, OTHER, RELAY)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(fallback=fallback(client, after=5))
        layers = await collect(consumer)
        check(layers[-LAYERS:], blocks=2)
        assert consumer.stats.discarded["other-tokens"] == 1
        await link.assert_clean()


async def test_a_publication_at_another_relay_is_retrieved_there():
    publication = produced(cache=CACHE)
    elsewhere = "moqt://other.example"
    client = FakeClient(blocks=0).knows(publication, CACHE, elsewhere)
    async with Link(Publisher()) as near, Link(publisher(publication)) as far:

        async def connect(url):
            assert url == elsewhere
            return far.session

        consumer = near.consumer(fallback=fallback(client, after=5, connect=connect))
        check(await collect(consumer))
        assert sources(consumer) == [([0, BLOCKS - 1], ALL, elsewhere)]


async def test_a_publication_longer_than_the_index_tells_of_is_preferred():
    whole, part = produced(cache=CACHE), produced(tokens=TOKENS[: 2 * BLOCK], cache=CACHE)
    client = FakeClient(blocks=0).knows(part, CACHE, RELAY)
    async with Link(publisher(whole, part)) as link:

        def listed(request):
            fields = whole.namespace.fields
            request.accept()
            if fields[: len(request.prefix)] == request.prefix:
                request.add(fields)

        link.handler.subscribe_namespace_received = listed
        consumer = link.consumer(fallback=fallback(client, after=5))
        check(await collect(consumer))
        assert consumer.stats.blocks == BLOCKS


# --- side by side --------------------------------------------------------------------


async def test_a_publication_that_stops_half_way_is_completed_by_holders():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(2):
        publication.put_layer(layer, *CACHE[layer])
    rows = slice(0, BLOCK)
    publication.put_block(2, 0, *(t[rows] for t in CACHE[2]))
    client = FakeClient()
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client), source=RELAY
        )
        check(await collect(consumer))
        await link.assert_clean()
    assert sources(consumer) == [
        ([0, 0], [0, 2], RELAY),
        ([0, 0], [3, LAYERS - 1], H1),
        ([1, BLOCKS - 1], [0, 1], RELAY),
        ([1, BLOCKS - 1], [2, LAYERS - 1], H1),
    ]
    assert consumer.stats.described_sources() == f"{BLOCKS} blocks by moqt and {H1}"


async def test_a_session_that_ends_half_way_is_completed_by_holders_of_the_same_production():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(2):
        publication.put_layer(layer, *CACHE[layer])
    client = FakeClient()
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client, after=30)
        )
        layers = []
        async with consumer:
            async for layer in consumer.layers():
                layers.append(layer)
                if layer.index == 1:
                    link.session.close()
    check(layers)
    # the last layer handed over is asked for, too: it shows that the production is the same
    assert client.asked[0, 1] == 1
    assert not any(layer == 0 for _, layer in client.asked)


async def test_blocks_of_another_production_are_never_mixed_with_objects():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(2):
        publication.put_layer(layer, *CACHE[layer])
    client = FakeClient(OTHER)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client, after=30)
        )
        layers = []
        async with consumer:
            async for layer in consumer.layers():
                layers.append(layer)
                if layer.index == 1 and layer.publication:
                    link.session.close()
    # all of them again, and all of one production
    check(layers[-LAYERS:], OTHER)
    assert consumer.stats.publication is None
    assert consumer.stats.discarded["other-production"] >= 1


@pytest.mark.parametrize("put", [(2, 0), (2, 3), (0, 2), (1, 0)])
async def test_a_block_that_nothing_shows_to_be_of_the_same_production_is_not_mixed_in(put):
    """The publication stands still, and no manifest lists what came of it."""
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    layers, blocks = put
    for layer in range(layers):
        publication.put_layer(layer, *CACHE[layer])
    for block in range(blocks):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        publication.put_block(layers, block, *(tensor[rows] for tensor in CACHE[layers]))
    async with Link(publisher(publication)) as link:
        for cache in (OTHER, CACHE):
            consumer = link.consumer(
                publications=[publication.namespace],
                fallback=fallback(FakeClient(cache), after=0.5),  # what was put has come by then
            )
            check((await collect(consumer))[-LAYERS:], cache)
            assert (consumer.stats.publication is None) is (cache is OTHER)


async def test_a_late_block_that_contradicts_the_manifest_is_not_used():
    publication = produced(cache=CACHE)
    client = FakeClient(OTHER)
    served = Split(publication)
    k = publication.tracks[1]
    # never there: the one Object only a holder could give
    served.add_track(altered(k, lambda at, octets: None if tuple(at) == (1, 2) else octets))
    async with Link(served) as link:
        consumer = link.consumer(publications=[publication.namespace], fallback=fallback(client))
        layers = await collect(consumer)
    check(layers[-LAYERS:], OTHER)


async def test_a_corrupted_object_is_taken_from_a_holder_and_only_that_block():
    publication = produced(cache=CACHE)
    served = publisher(publication)
    served.add_track(altered(publication.tracks[1], corrupted((3, 2))))
    client = FakeClient()
    async with Link(served) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client, after=30)
        )
        check(await collect(consumer))
        await link.assert_clean()
    assert client.asked == {(2, 3): 1}
    assert consumer.stats.discarded["digest-mismatch"] == 1
    assert consumer.stats.recoveries == 0


async def test_a_corrupted_object_that_no_holder_gives_is_asked_for_again():
    publication = produced(cache=CACHE)
    served = Split(publication)
    bad = altered(publication.tracks[1], corrupted((3, 2)))
    served.subscribed[bad.name] = bad
    client = FakeClient(gives=lambda block, layer: False)
    async with Link(served) as link:
        consumer = link.consumer(
            publications=[publication.namespace], mode="live", fallback=fallback(client, after=30)
        )
        check(await collect(consumer))
    assert consumer.stats.recoveries >= 1


async def test_a_publication_that_is_bad_throughout_is_replaced_by_holders():
    publication = produced(cache=CACHE)
    served = publisher(publication)
    wrong = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]
    served.add_track(altered(publication.tracks[1], corrupted(*wrong)))
    async with Link(served) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(FakeClient(), after=30)
        )
        check((await collect(consumer))[-LAYERS:])
    assert consumer.stats.publication is None
    assert sources(consumer) == [([0, BLOCKS - 1], ALL, H1)]


async def test_blocks_beyond_the_publication_come_from_holders():
    publication = produced(tokens=TOKENS[: 3 * BLOCK], cache=CACHE)
    client = FakeClient()
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client, after=30), source=RELAY
        )
        check(await collect(consumer))
        await link.assert_clean()
    assert sources(consumer) == [([0, 2], ALL, RELAY), ([3, BLOCKS - 1], ALL, H1)]
    assert consumer.stats.described_sources() == f"3 blocks by moqt, 2 by {H1}"


async def test_blocks_beyond_the_publication_that_no_holder_gives_are_left_out():
    publication = produced(tokens=TOKENS[: 3 * BLOCK], cache=CACHE)
    client = FakeClient(gives=lambda block, layer: block < 4 or layer < 2)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client, after=30)
        )
        check((await collect(consumer))[-LAYERS:], blocks=4)
    assert consumer.stats.blocks == 4


async def test_what_was_kept_is_no_part_of_what_was_begun_again_with_other_blocks():
    """Layers of a publication that failed go into the next one, unless they were begun again."""
    tokens = TOKENS[: 2 * BLOCK]
    bad, good = (produced(tokens=tokens, cache=CACHE, deterministic=True) for _ in range(2))
    client = FakeClient(gives=lambda block, layer: block < 2)
    gate = asyncio.Event()
    answer = client.lookup

    async def lookup(*args, **settings):
        await gate.wait()
        return await answer(*args, **settings)

    client.lookup = lookup

    class Late(Publisher):
        def subscribe_received(self, request):
            if request.name.namespace != good.namespace.fields:
                super().subscribe_received(request)
                return
            gate.set()  # holders have more, it seems, when the second one is begun
            asyncio.get_running_loop().call_later(0.05, super().subscribe_received, request)

    handler = Late()
    for publication in (bad, good):
        for store in publication.tracks:
            handler.add_track(store)
    handler.add_track(altered(bad.tracks[2], lambda at, octets: None if at.group == 3 else octets))
    async with Link(handler) as link:
        consumer = link.consumer(
            publications=[bad.namespace, good.namespace], fallback=fallback(client, after=5)
        )
        layers = await collect(consumer)
        assert [layer.index for layer in layers] == [0, 1, 2, *range(LAYERS)]
        check(layers[-LAYERS:], blocks=2)
        assert consumer.stats.layers == LAYERS


async def test_what_arrives_by_both_ways_counts_once():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publication.put_layer(0, *CACHE[0])
    gate = asyncio.Event()
    client = FakeClient(gate=gate)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(
            publications=[publication.namespace], fallback=fallback(client), source=RELAY
        )
        layers = []

        async def feed():
            await until(lambda: asks_over_http(consumer))
            # the holder was asked for everything that is left; now it comes by MOQT
            publication.put_layer(1, *CACHE[1])
            await until(lambda: len(layers) >= 2)
            gate.set()

        async with consumer, asyncio.TaskGroup() as group:
            group.create_task(feed())
            async for layer in consumer.layers():
                layers.append(layer)
    check(layers)
    octets = sum(k.nbytes + v.nbytes for k, v in CACHE)
    assert consumer.stats.octets == octets
    assert client.asked[0, 1] == 1
    assert (consumer.stats.duplicates, consumer.stats.objects_verified) == (0, 2 * 2 * BLOCKS)


async def test_a_refused_namespace_is_no_obstacle_to_holders():
    class Refusing(Publisher):
        def subscribe_namespace_received(self, request):
            request.reject(RequestErrorCode.UNAUTHORIZED, "no")

    async with Link(Refusing()) as link:
        consumer = link.consumer(fallback=fallback(FakeClient()))
        check(await collect(consumer))
        with pytest.raises(NotAuthorized):
            await collect(link.consumer(fallback=fallback(FakeClient(blocks=0))))


async def test_what_the_destination_raises_ends_the_retrieval():
    class Full(MemoryDestination):
        def arrays(self, layer):
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await collect(alone(FakeClient(), destination=Full(DESCRIPTOR)))


# --- the programs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--kvsp-http-loopback"], "give --kvsp"),
        (["--kvsp", "http://127.0.0.1:9/kvsp/"], "with --kvsp-http-loopback"),
        (["--kvsp", "https://is.example/kvsp"], "'https://is.example/kvsp': bad-uri"),
        (["--kvsp", "https://is.example/", "--kvsp-token-file", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_an_index_is_a_wrong_usage(options, fault, tmp_path):
    access = ["--scope-key-file", "s", "--compat", "c", "--tokens", "t"]
    out = ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(subscribe, [RELAY, *access, *out, *options])
    assert result.exit_code == 2
    assert fault in result.stderr
