"""Blocks from a real holder over HTTP: leased while they are loaded, verified, refused."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvsp.blocks.container import Container
from kvsp.client.client import Client
from kvsp.client.limits import ClientLimits
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.leases.table import LeaseQuota
from kvsp.holder.records.publishing import NoIndex
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.http.app import App
from kvsp.http.auth import LoopbackOnly
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.loading import HttpFetcher, LoadError
from tests.kvsp.instance.support import ENGINE, block_id, computed, keys
from tests.kvsp.support_server import serving


@asynccontextmanager
async def holding(quota: LeaseQuota | None = None):
    """A holder with the blocks of the prompt, a fetcher, and the holder's base URI."""
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
            yield holder, HttpFetcher(client), client, base


async def fetch(fetcher, base, key, write=None):
    made = KvBlock(ENGINE.descriptor)
    await fetcher.fetch(base, block_id(key), ENGINE.descriptor, 1000, write or made.write)
    return made


async def test_a_block_is_leased_while_it_is_loaded_and_released_afterwards():
    async with holding() as (holder, fetcher, _, base):
        leased = []
        made = KvBlock(ENGINE.descriptor)

        def write(layer, k, v):
            leased.append(holder.leases.is_leased(block_id(keys()[1]), holder.clock()))
            made.write(layer, k, v)

        await fetch(fetcher, base, keys()[1], write)
        assert leased == [True] * 4
        assert (holder.leases.granted, len(holder.leases)) == (1, 0)
        assert made.sections() == computed()[keys()[1]].sections()
        (link,) = fetcher.links
        assert (link.holder, link.mbit_per_s > 0) == (base, True)


async def test_a_source_that_refuses_the_lease_is_named_by_its_problem():
    async with holding(LeaseQuota(octets=1)) as (_, fetcher, _, base):
        with pytest.raises(LoadError) as caught:
            await fetch(fetcher, base, keys()[0])
        assert caught.value.reason == "kvsp-lease-quota"


async def test_a_block_that_is_not_there_is_a_miss():
    async with holding() as (_, fetcher, _, base):
        with pytest.raises(LoadError) as caught:
            await fetch(fetcher, base, bytes(32))
        assert caught.value.reason == "kvsp-unknown-resource"


async def test_a_replica_that_is_not_what_its_record_says_is_not_taken():
    async with holding() as (holder, _, client, base):
        # the record of another block's octets, as the index would give it
        wrong = holder.record(block_id(keys()[1]), 1000)

        class Records:
            index = base

            def __getattr__(self, name):
                return getattr(client, name)

            async def replicas(self, block):
                return [replace(wrong, block_key=block.block_key, holder=base)]

        with pytest.raises(LoadError) as caught:
            await fetch(HttpFetcher(Records()), base, keys()[0])
        assert caught.value.reason == "digest-mismatch"
        assert len(holder.leases) == 0


async def test_a_source_that_is_away_is_unreachable():
    async with holding() as (_, fetcher, _, _):
        with pytest.raises(LoadError) as caught:
            await fetch(fetcher, "http://127.0.0.1:9/kvsp/", keys()[0])
        assert caught.value.reason == "unreachable"
