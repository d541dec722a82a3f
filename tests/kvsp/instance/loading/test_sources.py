"""Blocks from a real holder over HTTP: leased while they are loaded, verified, refused."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

from kvsp.blocks.container import Container
from kvsp.client.client import Client
from kvsp.client.limits import ClientLimits
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.leases.table import LeaseQuota
from kvsp.holder.records.index import NoIndex
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.http.app import App
from kvsp.http.auth import LoopbackOnly
from kvsp.instance.loading.sources import Sources, Wanted
from tests.kvsp.client.support import eventually
from tests.kvsp.instance.support import BASE, ENGINE, OCTETS, block_id, computed, keys
from tests.kvsp.support_server import serving


@asynccontextmanager
async def holding(quota: LeaseQuota | None = None):
    """A holder with the blocks of the prompt, a client, and the holder's base URI."""
    records = NoIndex()
    holder = Holder(
        [(MemoryTier(), 1 << 20)],
        HolderSettings(base_uri="http://127.0.0.1/kvsp/"),
        records=records,
        quota=quota,
    )
    for key, block in computed().items():
        container = Container.build(ENGINE.descriptor, block.sections())

        async def octets(container=container):
            for part in container:
                yield bytes(part)

        await holder.put(block_id(key), ENGINE.descriptor, octets())
    service = HolderService(holder, records, Descriptors([ENGINE.descriptor]))
    app = App([service], base_uri="http://127.0.0.1/kvsp/", authenticator=LoopbackOnly())
    async with serving(app) as server:
        base = f"http://127.0.0.1:{server.port}/kvsp/"
        limits = ClientLimits(attempts=1)
        async with Client(http_loopback=True, limits=limits) as client:
            yield holder, client, base


async def retrieve(client, base, *wanted, whole=None):
    """Retrieve blocks of the prompt; those that came, and why the others did not."""
    came = {}
    sources = Sources(client, ENGINE.descriptor, (), BASE, OCTETS)
    failures = await sources.retrieve(
        [Wanted(block_id(key), (base,)) for key in wanted],
        whole or came.__setitem__,
        lease_ms=1000,
        seconds=None,
    )
    return came, {block: error.reason for block, error in failures.items()}


async def test_blocks_are_leased_with_one_request_while_they_are_loaded_and_released_afterwards():
    async with holding() as (holder, client, base):
        leased, came = [], {}

        def whole(block, made):
            leased.append(holder.leases.is_leased(block, holder.clock()))
            came[block] = made

        _, failures = await retrieve(client, base, *keys(), whole=whole)
        assert (leased, failures) == ([True] * 3, {})
        assert holder.leases.granted == 1
        await eventually(lambda: not len(holder.leases))
        for key, made in computed().items():
            assert came[block_id(key)].sections() == made.sections()
        (link,) = client.links
        assert (link.holder, link.mbit_per_s > 0) == (base, True)


async def test_a_source_that_refuses_the_lease_is_named_by_its_problem():
    async with holding(LeaseQuota(octets=1)) as (_, client, base):
        came, failures = await retrieve(client, base, keys()[0])
        assert (came, failures) == ({}, {block_id(keys()[0]): "kvsp-lease-quota"})


async def test_a_source_that_grants_fewer_blocks_at_once_is_asked_for_as_many():
    async with holding(LeaseQuota(octets=OCTETS + OCTETS // 2)) as (holder, client, base):
        came, failures = await retrieve(client, base, *keys())
        assert (len(came), failures) == (3, {})
        assert holder.leases.granted == 3


async def test_a_source_that_takes_fewer_blocks_in_a_request_is_asked_for_as_many():
    async with holding(LeaseQuota(request_keys=1)) as (holder, client, base):
        came, failures = await retrieve(client, base, *keys())
        assert (len(came), failures) == (3, {})
        assert holder.leases.granted == 3


async def test_a_block_that_is_not_there_is_a_miss():
    async with holding() as (_, client, base):
        came, failures = await retrieve(client, base, bytes(32), keys()[0])
        assert list(came) == [block_id(keys()[0])]
        assert failures == {block_id(bytes(32)): "kvsp-unknown-resource"}


async def test_a_replica_that_is_not_what_its_record_says_is_not_taken():
    async with holding() as (holder, client, base):
        # the record of another block's octets, as the index would give it
        wrong = holder.record(block_id(keys()[1]), 1000)
        record = replace(wrong, block_key=keys()[0], holder=base)
        sources = Sources(client, ENGINE.descriptor, (), BASE, OCTETS)
        failures = await sources.retrieve(
            [Wanted(block_id(keys()[0]), [record])], {}.__setitem__, 1000, None
        )
        assert failures[block_id(keys()[0])].reason == "digest-mismatch"
        await eventually(lambda: not len(holder.leases))


async def test_a_source_that_is_away_is_unreachable():
    async with holding() as (_, client, _):
        _, failures = await retrieve(client, "http://127.0.0.1:9/kvsp/", keys()[0])
        assert failures == {block_id(keys()[0]): "unreachable"}


class Odd:
    """Somebody's own way, with a fault in it."""

    def takes(self, source: str) -> bool:
        return source.startswith("odd:")

    async def fetch(self, source, block, descriptor, lease_ms, write) -> None:
        raise ZeroDivisionError(source)


async def test_a_way_that_fails_as_it_should_not_costs_no_block_that_has_another_source(caplog):
    async with holding() as (_, client, base):
        first, second, third = (block_id(key) for key in keys())
        wanted = [Wanted(first, ["odd:1", base]), Wanted(second, ["odd:1"]), Wanted(third, [base])]
        came = {}
        sources = Sources(client, ENGINE.descriptor, (Odd(),), BASE, OCTETS)
        failures = await sources.retrieve(wanted, came.__setitem__, 1000, None)
        assert set(came) == {first, third}
        assert {block: error.reason for block, error in failures.items()} == {second: "unreachable"}
    assert "odd:1: the way to it failed as it should not" in caplog.text
