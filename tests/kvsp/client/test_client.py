"""The client against the index and the holders as they are."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

import kvsp.client
from kvsp.blocks.container import Container
from kvsp.blocks.layout import allocate
from kvsp.client import (
    ArrayDestination,
    Client,
    ConflictError,
    Fault,
    NotAuthorizedError,
    NotFoundError,
    QuotaError,
    UnreachableError,
)
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.records.records import InstanceStatus, Link
from tests.kvsp.client.support import (
    DESCRIPTOR,
    FAST,
    KEYS,
    LAYERS,
    OTHER_SCOPE,
    SCOPE,
    TOKENS,
    Memory,
    block_of,
    container,
    eventually,
    record_at,
    world,
)
from tests.kvsp.inside import homes_of, idle

COMPAT = DESCRIPTOR.compat_id
MIB = 1 << 20


@pytest.fixture
async def one(tmp_path):
    async with world(tmp_path) as made:
        yield made


@pytest.fixture
async def two(tmp_path):
    async with world(tmp_path, 2) as made:
        yield made


# --- retrieval -----------------------------------------------------------------------


async def test_blocks_come_from_several_holders_into_arrays(two):
    await two.fill(0, 1)
    await two.fill(1, 2, 3, holder=1)
    arrays = {
        layer: (allocate(DESCRIPTOR, 20), allocate(DESCRIPTOR, 20)) for layer in range(LAYERS)
    }
    result = await two.client.get_blocks(
        await two.records(4), ArrayDestination(DESCRIPTOR, arrays), descriptor=DESCRIPTOR
    )
    assert result.complete and result.complete_blocks == 4
    assert {each.source for each in result.arrived} == set(two.uris)
    for number in range(4):
        for layer, (k, v) in enumerate(container(number).sections):
            rows = slice(4 * number, 4 * number + 4)
            assert arrays[layer][0][rows].tobytes() == bytes(k)
            assert arrays[layer][1][rows].tobytes() == bytes(v)
    assert not np.any(arrays[0][0][16:])


async def test_only_the_layers_that_are_missing_are_fetched(one):
    await one.fill(0, 1, 2)
    memory = Memory()
    result = await one.client.get_blocks(
        await one.records(3), memory, descriptor=DESCRIPTOR, wanted={0: [1, 3], 2: range(2)}
    )
    assert sorted(memory) == [(0, 1), (0, 3), (2, 0), (2, 1)] and result.complete


async def test_a_block_is_found_by_its_name_and_its_descriptor_by_its_id(one):
    await one.fill(0)
    await one.records(1)
    layers = [layer async for layer in one.client.get(block_of(0))]
    assert [(layer.k, layer.v) for layer in layers] == list(container(0).sections)
    k, _ = layers[0].tensors(DESCRIPTOR)
    assert k.shape == (DESCRIPTOR.block_tokens, DESCRIPTOR.kv_heads, DESCRIPTOR.head_dim)


async def test_a_holder_can_be_asked_without_a_record(one):
    await one.fill(0)
    layers = await one.client.get_from(
        one.uris[0], block_of(0), DESCRIPTOR, layers=range(1, 3), codec=int(Codec.X_ZLIB)
    )
    assert [(layer.k, layer.v) for layer in layers] == list(container(0).sections[1:3])


async def test_what_a_destination_raises_ends_the_retrieval(one):
    await one.fill(0)

    class Full:
        def write(self, layer):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await one.client.get_blocks(await one.records(1), Full(), descriptor=DESCRIPTOR)


# --- storing and records -------------------------------------------------------------


async def test_a_block_that_is_there_already_is_success_with_a_flag(one):
    first = await one.client.put(one.uris[0], block_of(0), container(0))
    assert first.created and first.stored.layer_digests == tuple(container(0).layer_digests())
    again = await one.client.put(one.uris[0], block_of(0), container(0))
    assert (again.created, again.stored) == (False, None)


async def test_a_large_block_that_is_there_already_is_not_sent_again(tmp_path):
    wide = Descriptor.parse(DESCRIPTOR.to_dict() | {"head_dim": 65536})
    octets = bytes(wide.section_octets())
    made = Container.build(wide, [(octets, octets)] * wide.layers)
    assert made.total_octets > 8 * MIB
    async with world(tmp_path, room=64 * MIB) as made_world:
        client, holder = made_world.client, made_world.uris[0]
        await client.put_descriptor(wide)
        block = block_of(0)._replace(compat_id=wide.compat_id)
        assert (await client.put(holder, block, made)).created
        sent = made_world.apps[0].registry.get_sample_value
        before = sent("kvsp_http_body_octets_total", {"direction": "in"})
        assert not (await client.put(holder, block, made)).created
        assert sent("kvsp_http_body_octets_total", {"direction": "in"}) == before
        # the connection pool is as good as before
        assert (await client.discover(holder)).services


async def test_one_absent_block_does_not_stop_the_deletion_of_others(one):
    await one.fill(0, 2)
    results = await one.client.delete_blocks(one.uris[0], [block_of(n) for n in range(3)])
    assert results == {block_of(0): True, block_of(1): False, block_of(2): True}
    assert not await one.client.delete(one.uris[0], block_of(0))


async def test_a_record_is_published_refreshed_and_withdrawn(one):
    record = record_at("https://h9.example/kvsp/", container(1), 1)
    assert (await one.client.publish(record)).created
    refreshed = await one.client.refresh(record)
    assert not refreshed.created and refreshed.ttl_ms == record.ttl_ms
    (found,) = await one.client.replicas(record.block)
    assert replace(found, ttl_ms=record.ttl_ms) == record
    other = replace(record, codec=int(Codec.X_ZLIB))
    assert await one.client.withdraw_records([other, record]) == {
        other.path: False,
        record.path: True,
    }
    assert not await one.client.withdraw(record)


async def test_a_record_of_another_holder_is_refused_with_the_problem(one):
    with pytest.raises(NotAuthorizedError) as caught:
        await one.client.publish(record_at("https://h8.example/kvsp/", container(1), 1))
    assert caught.value.problem.type == "kvsp-forbidden"


async def test_a_descriptor_is_stored_and_its_id_computed_again(one):
    other = Descriptor.parse(DESCRIPTOR.to_dict() | {"model": "another"})
    with pytest.raises(NotFoundError):
        await one.client.get_descriptor(other.compat_id)
    await one.client.put_descriptor(other)
    assert await one.client.get_descriptor(other.compat_id) == other
    assert await one.client.get_descriptor(other.compat_id, source=one.uris[0]) == other


async def test_a_host_tells_its_services(one):
    services = await one.client.discover(one.uris[0])
    assert services.services == {"holder": one.uris[0]} and Codec.RAW in services.codecs
    assert (await one.client.ready(one.uris[0]))["status"] == "ready"


# --- lookup and prefixes -------------------------------------------------------------


async def test_lookup_gives_the_leading_blocks_and_estimates_for_targets(one):
    await one.fill(0, 1, 3)
    await one.records(2)
    target = "https://ii7.example/kvsp/"
    found = await one.client.lookup(SCOPE.scope_id, COMPAT, KEYS, targets=[target])
    assert found.matched == 2 and found.targets[0].target == target


async def test_many_keys_are_asked_for_in_several_requests(one):
    await one.fill(0, 1, 2)
    await one.records(3)
    async with Client(
        one.client.index,
        token="client",
        http_loopback=True,
        limits=replace(FAST, keys_per_lookup=1),
    ) as client:
        found = await client.lookup(SCOPE.scope_id, COMPAT, KEYS)
        assert [block.block_key for block in found.blocks] == list(KEYS[:3])
        assert (await client.lookup(SCOPE.scope_id, COMPAT, [])).matched == 0


async def test_a_local_hit_longer_than_the_remote_one_leaves_nothing_to_load(one):
    await one.fill(0)
    await one.records(1)
    match = await one.client.longest_prefix(SCOPE, DESCRIPTOR, TOKENS, held=4)
    assert (match.matched, match.to_load, match.replicas) == (1, 0, [])


@pytest.mark.parametrize(("tokens", "usable"), [(0, 0), (3, 0), (4, 0), (5, 1), (16, 3), (17, 4)])
async def test_a_full_hit_leaves_one_token_to_compute(one, tokens, usable):
    await one.fill(0, 1, 2, 3)
    await one.records(4)
    match = await one.client.longest_prefix(SCOPE, DESCRIPTOR, TOKENS[:tokens])
    assert (match.matched, len(match.keys), match.tokens) == (usable, usable, 4 * usable)
    # what is looked up later is found by the same arithmetic
    assert match.keys == tuple(KEYS[:usable])


async def test_a_scope_without_read_access_is_refused(one):
    with pytest.raises(NotAuthorizedError):
        await one.client.longest_prefix(OTHER_SCOPE, DESCRIPTOR, TOKENS)


async def test_explain_tells_the_reason_of_every_kind_of_miss(one):
    client, other = one.client, Descriptor.parse(DESCRIPTOR.to_dict() | {"model": "another"})

    async def reason(scope=SCOPE, compat_id=COMPAT, key=KEYS[0]):
        return (await client.explain(scope.scope_id, compat_id, [key])).reason

    assert await reason() == "unknown-key"
    await one.fill(0)
    await one.records(1)
    assert await reason() is None
    assert await reason(compat_id=other.compat_id) == "other-compat"
    assert await reason(scope=OTHER_SCOPE) == "unauthorized"
    record = record_at("https://h9.example/kvsp/", container(1), 1, ttl_ms=1)
    await client.publish(record)
    await eventually(lambda: _is(client, record))
    assert (await client.explain(SCOPE.scope_id, COMPAT, KEYS[1:2])).reason == "expired"
    status = InstanceStatus(
        one.uris[0], 1, "active", 0, 0, 8, 0.0, 1000.0, 10.0, 1, links=(Link(one.uris[0], 1, 1),)
    )
    one.service.board.put(status, 0)
    assert await reason() == "holder-down"


async def _is(client, record):
    return not await client.replicas(record.block)


# --- leases --------------------------------------------------------------------------


def leases(made):
    return made.holders[0].leases


async def test_a_lease_is_renewed_before_it_ends_and_released_on_exit(one):
    await one.fill(0)
    keys = [KEYS[0], KEYS[1]]
    async with one.client.lease(one.uris[0], SCOPE.scope_id, COMPAT, keys, ttl_ms=300) as lease:
        assert (lease.leased, lease.missing) == ((KEYS[0],), (KEYS[1],))
        granted = leases(one).get("client", lease.grant.lease, one.holders[0].clock())
        before = granted.expires
        await eventually(lambda: granted.expires > before + 0.05 or _expires(one, lease) > before)
        with pytest.raises(ConflictError) as caught:
            await one.client.delete(one.uris[0], block_of(0))
        assert caught.value.problem.type == "kvsp-leased"
    assert await one.client.delete(one.uris[0], block_of(0))


def _expires(made, lease):
    found = leases(made).get("client", lease.grant.lease, made.holders[0].clock())
    return found.expires if found else 0.0


async def test_a_cancelled_lease_is_released(one):
    await one.fill(0)
    inside = asyncio.Event()

    async def hold():
        async with one.client.lease(one.uris[0], SCOPE.scope_id, COMPAT, [KEYS[0]], ttl_ms=60_000):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await one.client.delete(one.uris[0], block_of(0))


async def test_a_lease_over_the_quota_carries_what_is_allowed(one):
    await one.fill(0)
    with pytest.raises(QuotaError) as caught:
        async with one.client.lease(one.uris[0], SCOPE.scope_id, COMPAT, KEYS, ttl_ms=10**9):
            pytest.fail("granted")
    assert caught.value.problem.members["max_ttl_ms"] == 60_000


# --- from the field ------------------------------------------------------------------


async def test_the_matched_count_is_what_arrived_not_what_was_promised(one):
    await one.fill(0, 1, 2)
    records = await one.records(3)
    await one.client.delete(one.uris[0], block_of(1))
    memory = Memory()
    result = await one.client.get_blocks(records, memory, descriptor=DESCRIPTOR)
    assert result.complete_blocks == 1
    assert [(gap.block, gap.reason) for gap in result.missing] == [(1, Fault.NOT_HELD)]
    assert memory.holds(0, container(0)) and memory.holds(2, container(2))


async def test_a_hit_that_does_not_fit_is_reported_as_capacity(one):
    await one.fill(0, 1, 2)
    records = await one.records(3)
    result = await one.client.get_blocks(
        records, Memory(), descriptor=DESCRIPTOR, budget_octets=2 * records[0][0].size
    )
    assert [(gap.block, gap.reason) for gap in result.missing] == [(2, Fault.CAPACITY)]


async def test_a_block_evicted_between_lookup_and_fetch_is_a_miss(two):
    await two.fill(0)
    (replicas,) = await two.records(1)
    await two.client.delete(two.uris[0], block_of(0))
    with pytest.raises(NotFoundError):
        [layer async for layer in two.client.get(replicas)]
    await two.fill(0, holder=1)
    stale = replicas[0]
    fresh = record_at(two.uris[1], container(0))
    layers = [layer async for layer in two.client.get([stale, fresh])]
    assert {layer.source for layer in layers} == {two.uris[1]}


async def test_a_request_works_after_the_server_closed_an_idle_connection(tmp_path):
    async with world(tmp_path, idle_s=1) as made:
        await made.fill(0)
        await made.records(1)
        await eventually(lambda: not any(each.is_connected() for each in idle(made.client)))
        assert (await made.client.lookup(SCOPE.scope_id, COMPAT, KEYS)).matched == 1
        async with made.client.lease(made.uris[0], SCOPE.scope_id, COMPAT, KEYS[:1]) as lease:
            assert lease.leased


async def test_a_vanished_holder_is_a_typed_error_at_once(one):
    await one.fill(0)
    ((record,),) = await one.records(1)
    gone = replace(record, holder="http://127.0.0.1:9/kvsp/")
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        [layer async for layer in one.client.get(gone)]


async def test_no_credential_is_ever_in_a_message(tmp_path):
    async with world(tmp_path, token="very-secret") as made:
        with pytest.raises(NotAuthorizedError) as caught:
            await made.client.lookup(SCOPE.scope_id, COMPAT, KEYS)
    assert caught.value.problem.status == 401
    assert "very-secret" not in f"{caught.value!r} {caught.value} {caught.value.problem}"


# --- the object itself ---------------------------------------------------------------


def test_importing_the_package_loads_no_http_library():
    code = (
        "import sys, kvsp; assert not {'aiohttp', 'starlette', 'numpy'} & set(sys.modules); "
        "kvsp.Client; assert 'aiohttp' in sys.modules and 'starlette' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_client_is_used_inside_its_block_only():
    client = Client("https://is.example/kvsp/")
    with pytest.raises(RuntimeError, match="async with"):
        await client.lookup(SCOPE.scope_id, COMPAT, KEYS)
    async with client:
        pass
    await client.close()


def test_every_public_name_of_the_client_is_found_at_its_first_use():
    homes = homes_of(kvsp.client)
    assert set(homes) == set(kvsp.client.__all__)
    for name, module in homes.items():
        assert getattr(kvsp.client, name) is vars(sys.modules[module])[name]
    with pytest.raises(AttributeError, match="nothing"):
        kvsp.client.nothing  # noqa: B018


def test_a_plain_http_service_is_refused_unless_it_is_this_machine_and_allowed():
    for uri, allowed in (("http://127.0.0.1:1/", False), ("http://is.example/", True)):
        with pytest.raises(DecodeError, match="bad-uri"):
            Client(uri, http_loopback=allowed)


async def test_a_token_never_goes_to_a_holder_over_plain_http():
    asked = []
    async with Client(token=lambda base: asked.append(base) or "t") as client:
        record = record_at("http://127.0.0.1:9/kvsp/", container(0))
        result = await client.get_blocks([[record]], Memory(), descriptor=DESCRIPTOR)
    assert result.missing[0].reason is Fault.REFUSED and asked == []


async def test_layers_outside_the_descriptor_are_a_misuse(one):
    for layers in (range(0), range(LAYERS + 1), range(-1, 2)):
        with pytest.raises(ValueError, match="no range of layers"):
            async with aclosing(
                one.client.get([], layers=layers, descriptor=DESCRIPTOR)
            ) as arriving:
                await anext(arriving)
