"""A publication in the index: descriptor first, one record per block, until it ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvcs.names.payload import data_digest
from kvcs.publishing.replicas import Replicas, moqt_record
from kvsp.blocks.layout import block_section
from kvsp.cli.common import warnings_noted
from kvsp.client import Published, RequestRefusedError, UnreachableError
from kvsp.client.errors import ProblemDetails
from kvsp.names.errors import DecodeError
from kvsp.names.identity import block_keys
from kvsp.records.problems import ProblemName
from kvsp.records.records import ReplicaRecord
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, SCOPE, TOKENS, kv, produced

CACHE = kv()
URL = "moqt://relay.example:4443"
KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)
NAMESPACE = produced(cache=CACHE).namespace


class Index:
    """What a client does at an index service, as a list of words."""

    def __init__(self, failures=()) -> None:
        self.did: list[str] = []
        self.records: dict[str, ReplicaRecord] = {}
        self.failures = list(failures)
        self.full = asyncio.Event()

    async def put_descriptor(self, descriptor):
        assert descriptor is DESCRIPTOR
        self.did.append("descriptor")

    async def publish(self, record):
        await asyncio.sleep(0)
        if self.failures:
            self.did.append("failed")
            raise self.failures.pop(0)
        self.did.append("record")
        self.records[record.path] = record
        if len(self.records) == BLOCKS:
            self.full.set()
        return Published(record.ttl_ms, True)

    async def withdraw(self, record):
        self.did.append("withdrawn")
        return self.records.pop(record.path, None) is not None


def replicas(index, **settings) -> Replicas:
    return Replicas(index, NAMESPACE, KEYS, DESCRIPTOR, URL, **settings)


@contextlib.asynccontextmanager
async def running(made: Replicas):
    task = asyncio.create_task(made.run(CACHE))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_record_names_the_publication_and_has_the_digests_of_kvsp():
    record = moqt_record(NAMESPACE, KEYS[2], CACHE, 2, DESCRIPTOR, URL)
    again = ReplicaRecord.from_json(record.to_json(), descriptor=DESCRIPTOR)
    assert again == record
    assert (record.holder, record.moqt_namespace) == (URL, NAMESPACE.text)
    # the digest of a layer is that of the Data of its k Object, then of its v Object
    k, v = (block_section(t, 2, BLOCK) for t in CACHE[1])
    assert record.layer_digests[1] == data_digest(bytes(k) + bytes(v))


async def test_every_block_is_published_after_the_descriptor_and_withdrawn_at_the_end():
    index = Index()
    async with running(replicas(index)):
        async with asyncio.timeout(10):
            await index.full.wait()
        assert index.did[0] == "descriptor"
        assert {record.block_key for record in index.records.values()} == set(KEYS)
    assert index.records == {}


async def test_records_are_refreshed_before_their_time_to_live_is_over():
    index = Index()
    async with running(replicas(index, ttl_ms=100)), asyncio.timeout(10):
        while index.did.count("record") < 2 * BLOCKS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_records_may_be_left_to_a_relay_that_goes_on():
    index = Index()
    async with running(replicas(index, keep=True)), asyncio.timeout(10):
        await index.full.wait()
    assert len(index.records) == BLOCKS


@pytest.mark.parametrize(
    "failure",
    [
        UnreachableError("https://is.example/", "refused"),
        RequestRefusedError("https://is.example/", ProblemDetails(503)),
        RequestRefusedError(
            "https://is.example/", ProblemDetails(409, str(ProblemName.COMPAT_UNKNOWN))
        ),
    ],
)
async def test_an_index_that_is_away_or_has_forgotten_is_told_again(failure, capsys):
    index = Index([failure])
    with warnings_noted("kvcs-publish", "kvsp"):
        async with running(replicas(index)), asyncio.timeout(10):
            await index.full.wait()
    forgotten = "compat-unknown" in str(failure)
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("kvcs-publish: the index service is away: ") for line in said)
    assert len(said) == (not forgotten)
    assert index.did.count("descriptor") == 1 + forgotten


def test_a_relay_that_is_no_moqt_uri_cannot_be_a_holder():
    with pytest.raises(DecodeError, match="bad-uri"):
        Replicas(Index(), NAMESPACE, KEYS, DESCRIPTOR, "https://relay.example/")
