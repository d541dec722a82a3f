"""KVSP "Block Retrieval and Storage": what clients MUST verify, and what follows."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from starlette.responses import StreamingResponse

from kvsp.client import Client, Fault, VerificationError
from kvsp.names.codes import Codec
from kvsp.records.records import Link
from tests.kvsp.client.support import (
    DESCRIPTOR,
    FAST,
    LAYERS,
    Fake,
    Memory,
    block_answer,
    container,
    problem,
    record_at,
    select,
    serving,
)

GOOD, OTHER = container(0), container(1)


@contextlib.asynccontextmanager
async def holders(*answers):
    """Fake holders, and a client without an index."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [Fake(answer) for answer in answers]
        uris = [await stack.enter_async_context(serving(fake.app)) for fake in fakes]
        client = Client(http_loopback=True, limits=FAST)
        yield await stack.enter_async_context(client), uris, fakes


async def layers_of(client, *records, **more):
    return [layer async for layer in client.get(records, descriptor=DESCRIPTOR, **more)]


def right(request):
    return block_answer(select(request, GOOD))


async def test_layers_come_verified_in_ascending_order_and_are_the_right_octets():
    async with holders(right) as (client, (uri,), _):
        layers = await layers_of(client, record_at(uri, GOOD))
    assert [layer.layer for layer in layers] == list(range(LAYERS))
    assert [(layer.k, layer.v) for layer in layers] == list(GOOD.sections)


async def test_a_range_of_layers_is_asked_for_and_verified_by_itself():
    async with holders(right) as (client, (uri,), (fake,)):
        layers = await layers_of(client, record_at(uri, GOOD), layers=range(1, 3))
    assert [layer.layer for layer in layers] == [1, 2]
    assert str(fake.requests[0].query_params) == "layers=1-2&codec=1"


@pytest.mark.parametrize("layers", [None, range(1, 4)])
async def test_clients_must_verify_the_layer_digests_of_the_layers_that_came(layers):
    """A Repr-Digest is the holder's own: it fits what a holder has altered."""
    altered = [GOOD.sections[layer] for layer in range(LAYERS)]
    k, v = altered[3]
    altered[3] = (k, memoryview(bytes([v[0] ^ 1]) + bytes(v[1:])))
    lie = replace(GOOD, sections=tuple(altered))
    async with holders(lambda request: block_answer(select(request, lie))) as (client, (uri,), _):
        given = []
        with pytest.raises(VerificationError, match="digest-mismatch: layer 3"):
            async for layer in client.get(
                record_at(uri, GOOD), descriptor=DESCRIPTOR, layers=layers
            ):
                given.append(layer.layer)
    assert 3 not in given


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda request: block_answer(GOOD, repr_digest=None), "no sha-256 Repr-Digest"),
        (lambda request: block_answer(GOOD, repr_digest="sha-512=:AAAA:"), "no sha-256"),
        (lambda request: block_answer(GOOD, repr_digest="sha-256=:AAAA:"), "bad-digest"),
        (lambda request: block_answer(GOOD, content_type="text/html"), "application/kvsp-block"),
        (lambda request: block_answer(GOOD, content_encoding="gzip"), "content coding"),
        # right in itself, and another block than the record's
        (lambda request: block_answer(OTHER), "digest-mismatch: layer 0"),
        (lambda request: block_answer(GOOD.select(range(2))), "layers 0-1 came instead"),
        # a codec that is not the record's would escape its digests
        (lambda request: block_answer(container(0, Codec.X_ZLIB)), "codec 61441 came"),
    ],
)
async def test_an_answer_that_is_not_proven_gives_no_layer(answer, why):
    async with holders(answer) as (client, (uri,), _):
        given = []
        with pytest.raises(VerificationError, match=why):
            async for layer in client.get(record_at(uri, GOOD), descriptor=DESCRIPTOR):
                given.append(layer)
    assert given == []


async def test_clients_must_verify_repr_digest_even_when_every_layer_digest_is_right():
    wrong = block_answer(OTHER).headers["repr-digest"]
    async with holders(lambda _: block_answer(GOOD, repr_digest=wrong)) as (client, (uri,), _):
        given = []
        with pytest.raises(VerificationError, match="the container is not"):
            async for layer in client.get(record_at(uri, GOOD), descriptor=DESCRIPTOR):
                given.append(layer)
        # these are right by the record, and the source counts as bad
        assert [(layer.k, layer.v) for layer in given] == list(GOOD.sections)
        result = await client.get_blocks([[record_at(uri, GOOD)]], Memory(), descriptor=DESCRIPTOR)
    assert result.complete and result.bad_sources == {uri: 1}


async def test_when_all_layers_were_retrieved_clients_must_verify_the_replica_digest():
    """A holder that serves whole blocks only has no layer digests in its record."""
    async with holders(lambda _: block_answer(GOOD)) as (client, (uri,), (fake,)):
        record = record_at(uri, GOOD, layer_digests=None)
        assert len(await layers_of(client, record, layers=range(2))) == 2
        assert str(fake.requests[0].query_params) == "codec=1"
        with pytest.raises(VerificationError, match="not what its record covers"):
            await layers_of(client, replace(record, digest=bytes(32)))


async def test_a_record_whose_digests_contradict_each_other_proves_nothing():
    async with holders(right) as (client, (uri,), _):
        with pytest.raises(VerificationError, match="contradict"):
            await layers_of(client, record_at(uri, GOOD, digest=bytes(32)))


async def test_transcoded_representations_are_protected_by_repr_digest_only():
    packed = container(0, Codec.X_ZLIB)
    async with holders(lambda _: block_answer(packed)) as (client, (uri,), _):
        layers = await layers_of(client, record_at(uri, GOOD), codec=int(Codec.X_ZLIB))
    assert [(layer.k, layer.v) for layer in layers] == list(GOOD.sections)


async def test_of_a_transcoded_representation_nothing_is_given_before_its_end():
    packed = container(0, Codec.X_ZLIB)
    wrong = block_answer(OTHER).headers["repr-digest"]
    async with holders(lambda _: block_answer(packed, repr_digest=wrong)) as (client, (uri,), _):
        with pytest.raises(VerificationError):
            async for layer in client.get(
                record_at(uri, GOOD), codec=int(Codec.X_ZLIB), descriptor=DESCRIPTOR
            ):
                pytest.fail(f"layer {layer.layer} was given")


@pytest.mark.parametrize(
    "bad",
    [
        lambda request: block_answer(OTHER),
        lambda request: problem(404, "kvsp-unknown-resource"),
        lambda request: problem(404, "kvsp-layers-unavailable", available=[]),
        lambda request: problem(500, None),
        lambda request: problem(403, "kvsp-forbidden"),
        lambda request: problem(503, None, retry_after=60),
        lambda request: problem(302, None),
    ],
)
async def test_whatever_one_source_does_the_next_replica_gives_the_layers(bad):
    async with holders(bad, right) as (client, uris, (asked, _)):
        # the bad one looks much better, so it is asked first
        links = [Link(uris[0], 100_000, 1), Link(uris[1], 1, 1)]
        records = [record_at(uri, GOOD) for uri in uris]
        memory = Memory()
        result = await client.get_blocks([records], memory, descriptor=DESCRIPTOR, links=links)
        assert result.complete and memory.holds(0, GOOD) and asked.requests
        assert {each.source for each in result.arrived} == {uris[1]}
        assert {layer.source for layer in await layers_of(client, *records)} == {uris[1]}


async def test_a_source_that_fails_after_some_layers_is_followed_by_one_for_the_others():
    part = block_answer(GOOD)
    part.body = part.body[: len(part.body) // 2]

    async def breaking(request):
        async def chunks():
            yield part.body
            raise ConnectionError

        fields = {name: part.headers[name] for name in ("content-type", "repr-digest")}
        length = str(GOOD.total_octets)
        return StreamingResponse(chunks(), headers=fields | {"content-length": length})

    async with holders(breaking, right) as (client, uris, fakes):
        layers = await layers_of(client, *(record_at(uri, GOOD) for uri in uris))
    assert [(layer.k, layer.v) for layer in layers] == list(GOOD.sections)
    if fakes[0].requests:
        assert {layer.source for layer in layers} == set(uris)


async def test_a_source_that_lies_again_and_again_is_dropped_and_counted():
    async with holders(lambda _: block_answer(OTHER)) as (client, (uri,), (fake,)):
        blocks = [[record_at(uri, GOOD, number)] for number in (0, 2, 3)] * 8
        result = await client.get_blocks(blocks, Memory(), descriptor=DESCRIPTOR)
    assert {gap.reason for gap in result.missing} == {Fault.VERIFICATION}
    asked = [request.method for request in fake.requests]
    assert result.bad_sources[uri] == asked.count("GET") < len(blocks)
    # and it is told, of each block once
    told = {request.url.path for request in fake.requests if request.method == "POST"}
    assert len(told) == asked.count("POST") >= 1
    assert all(path.endswith("/verification") for path in told)


async def test_a_redirect_is_not_followed_and_its_target_never_sees_the_token():
    async with holders(right) as (_, (target,), (seen,)):
        redirect = problem(307, None)
        redirect.headers["location"] = target + "blocks/x"
        async with (
            holders(lambda _: redirect) as (_, (uri,), (fake,)),
            Client(http_loopback=True, token="geheim", limits=FAST) as client,
        ):
            result = await client.get_blocks(
                [[record_at(uri, GOOD)]], Memory(), descriptor=DESCRIPTOR
            )
    assert result.missing[0].reason is Fault.VERIFICATION
    assert fake.requests[0].headers["authorization"] == "Bearer geheim"
    assert seen.requests == []
