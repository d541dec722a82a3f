"""Which publication is tried next, without a relay, an index service or a wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcs.finding.candidates import Candidate, Candidates, named_by
from kvcs.finding.relays import Sessions
from kvcs.names.errors import NotFound, PublisherLost, VerificationFailed
from kvcs.names.namespace import PublicationNamespace
from kvsp.records.records import LookupResponse, MatchedBlock
from moqt.values.errors import ConnectError
from tests.kvcs.support import BLOCK, DESCRIPTOR, SCOPE, TOKENS, produced
from tests.kvcs.support_fallback import CACHE, OTHER_RELAY, FakeClient

KEYS = [bytes([n]) * 32 for n in range(5)]
OWN = object()
"""The session to our own relay."""


def namespace() -> PublicationNamespace:
    return PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[-1])


class Relays(Sessions):
    """Relays by URL; what is an exception cannot be reached."""

    def __init__(self, relays) -> None:
        self.relays = relays

    def reaches(self, url) -> bool:
        return url in self.relays

    def dial(self, url):
        answer = asyncio.get_running_loop().create_future()
        relay = self.relays[url]
        if isinstance(relay, Exception):
            answer.set_exception(relay)
        else:
            answer.set_result(relay)
        return answer


def candidates(relays, **settings) -> Candidates:
    async def wait(until):
        raise AssertionError("nothing is to be waited for")

    return Candidates(
        Relays(relays),
        SCOPE.scope_id,
        DESCRIPTOR.compat_id,
        KEYS,
        changed=asyncio.Event(),
        wait=wait,
        **settings,
    )


def index(*named: Candidate) -> SimpleNamespace:
    return SimpleNamespace(looked_up=True, named=list(named))


def each_record(client, block, candidate):
    """The record of a block in a publication."""
    text = candidate.namespace.text
    return next(record for record in client.held[block] if record.moqt_namespace == text)


async def test_given_publications_come_in_order_each_once() -> None:
    first, second = namespace(), namespace()
    search = candidates({None: OWN}, given=[first, second])
    assert await search.next(0) == (Candidate(None, first), OWN)
    assert await search.next(0) == (Candidate(None, second), OWN)
    with pytest.raises(NotFound):
        await search.next(0)
    search.allow_again(Candidate(None, second))
    assert (await search.next(0))[0].namespace == second


async def test_the_failure_told_at_the_end_is_the_one_that_tells_most() -> None:
    search = candidates({None: OWN}, given=[])
    bad, lost = VerificationFailed("bad"), PublisherLost("lost")
    for failure in (lost, bad, lost):
        search.failed(failure)
    with pytest.raises(VerificationFailed):
        await search.next(0)


async def test_our_own_relay_is_asked_before_the_one_that_the_index_names() -> None:
    there, elsewhere = object(), Candidate(OTHER_RELAY, namespace(), len(KEYS))
    search = candidates({None: OWN, OTHER_RELAY: there}, index=index(elsewhere))
    assert await search.next(0) == (replace(elsewhere, url=None), OWN)
    assert await search.next(0) == (elsewhere, there)
    assert search.longest == len(KEYS) and search.known() is None


async def test_a_relay_that_cannot_be_reached_is_passed_over_and_says_why() -> None:
    there, elsewhere = object(), Candidate(OTHER_RELAY, namespace(), len(KEYS))
    relays = {None: ConnectError("nobody answers"), OTHER_RELAY: there}
    search = candidates(relays, index=index(elsewhere))
    assert await search.next(0) == (elsewhere, there)
    with pytest.raises(PublisherLost, match="nobody answers"):
        await search.next(0)


def test_publications_in_an_answer_are_those_that_have_every_earlier_block() -> None:
    short, long = produced(tokens=TOKENS[: 2 * BLOCK], cache=CACHE), produced(cache=CACHE)
    client = FakeClient()
    client.knows(short, CACHE, OTHER_RELAY).knows(long, CACHE, OTHER_RELAY)
    matched = [MatchedBlock(each[0].block_key, tuple(each)) for each in client.held]
    assert named_by(LookupResponse(len(matched), tuple(matched))) == [
        Candidate(OTHER_RELAY, long.namespace, 5),
        Candidate(OTHER_RELAY, short.namespace, 2),
    ]
    # of a block that only a holder has, nobody can tell where it is published
    matched[1] = MatchedBlock(matched[1].block_key, matched[1].replicas[:1])
    found = named_by(LookupResponse(len(matched), tuple(matched)))
    assert [each.blocks for each in found] == [1, 1]
    assert all(each.records == (each_record(client, 0, each),) for each in found)
