"""Which publication is tried next, without a relay, an index service or a wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcs.finding.candidates import (
    OF_ONE_PREFIX,
    Candidate,
    Candidates,
    DiscoveryMode,
    named_by,
)
from kvcs.finding.relays import Sessions
from kvcs.keeping.failures import Failures
from kvcs.names.errors import NotFound, PublisherLost, Unsupported, VerificationFailed
from kvcs.names.namespace import PublicationNamespace
from kvsp.records.records import LookupResponse, MatchedBlock
from moqt.values.errors import ConnectError
from tests.kvcs.support import BLOCK, DESCRIPTOR, SCOPE, TOKENS, produced
from tests.kvcs.support_fallback import CACHE, OTHER_RELAY, FakeClient

KEYS = [bytes([n]) * 32 for n in range(5)]
OWN = SimpleNamespace(session=object())
"""The session to our own relay."""


def namespace(blocks: int = len(KEYS)) -> PublicationNamespace:
    return PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[blocks - 1])


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


def candidates(relays=None, **settings) -> Candidates:
    return Candidates(
        Relays(relays or {None: OWN}),
        SCOPE.scope_id,
        DESCRIPTOR.compat_id,
        KEYS,
        changed=lambda: None,
        **settings,
    )


def index(*named: Candidate) -> SimpleNamespace:
    return SimpleNamespace(looked_up=True, named=list(named))


def every(search: Candidates) -> list[Candidate]:
    """All of them, each tried when it is the best."""
    taken = []
    while (best := search.best()) is not None:
        search.take(best)
        taken.append(best)
    return taken


async def test_given_publications_come_in_order_each_once() -> None:
    given = [namespace(), namespace(), namespace(), namespace()]
    search = candidates(given=given)
    assert search.poll(0) is None and not search.searching
    assert [each.namespace for each in every(search)] == given
    assert isinstance(search.why(), NotFound)
    search.allow_again(Candidate(None, given[1]))
    assert [each.namespace for each in every(search)] == [given[1]]


async def test_the_failure_told_at_the_end_is_the_first_of_those_that_tell_most() -> None:
    search = candidates(given=[])
    bad, worse, lost = VerificationFailed("bad"), VerificationFailed("worse"), PublisherLost("lost")
    for failure in (lost, bad, lost, worse):
        search.failed(failure)
    assert search.why() is bad


async def test_our_own_relay_is_asked_before_the_one_that_the_index_names() -> None:
    elsewhere = Candidate(OTHER_RELAY, namespace(), len(KEYS))
    search = candidates(
        {None: OWN, OTHER_RELAY: object()}, index=index(elsewhere), discovery=DiscoveryMode.INDEX
    )
    assert every(search) == [replace(elsewhere, url=None), elsewhere]
    assert search.longest == len(KEYS)


async def test_a_relay_that_cannot_be_reached_is_no_obstacle_and_says_why() -> None:
    elsewhere = Candidate(OTHER_RELAY, namespace(), len(KEYS))
    relays = {None: ConnectError("nobody answers"), OTHER_RELAY: object()}
    search = candidates(relays, index=index(elsewhere))
    assert search.searching
    search.poll(0)
    assert not search.searching and elsewhere in every(search)
    assert isinstance(search.why(), PublisherLost) and str(search.why()) == "nobody answers"


async def test_many_publications_of_one_prefix_do_not_keep_shorter_ones_from_their_turn() -> None:
    many = [Candidate(None, namespace(), 5) for _ in range(20)]
    short = Candidate(None, namespace(2), 2)
    search = candidates(index=index(*many, short), discovery=DiscoveryMode.INDEX)
    taken = every(search)
    assert taken.index(short) == OF_ONE_PREFIX and len(taken) == 21


async def test_until_the_index_has_answered_more_may_be_found() -> None:
    slow = SimpleNamespace(looked_up=False, named=[])
    search = candidates(index=slow, discovery=DiscoveryMode.INDEX)
    assert search.open == len(KEYS) and search.best() is None
    slow.looked_up, slow.named = True, [Candidate(None, namespace(), 5)]
    assert search.open == 0 and search.best() is not None


async def test_one_that_stalled_is_tried_again_after_all_others_once() -> None:
    given = [namespace(), namespace()]
    search = candidates(given=given)
    first = search.best()
    search.take(first)
    search.stalled(first, PublisherLost("nothing came"))
    assert [each.namespace for each in every(search)] == given[1:]
    assert search.retry_stalled() and every(search) == [first]
    assert not search.retry_stalled()


def each_record(client, block, candidate):
    """The record of a block in a publication."""
    text = candidate.namespace.text
    return next(record for record in client.held[block] if record.moqt_namespace == text)


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


@pytest.mark.parametrize("kind", [VerificationFailed, Unsupported])
async def test_one_that_its_records_made_fail_is_tried_once_more_for_what_its_anchor_shows(kind):
    published, shorter = namespace(2), namespace(1)
    lie = Candidate(None, published, 5, records=(None,) * 5)
    named = index(lie, Candidate(None, shorter, 1))
    search = candidates(index=named, failures=Failures(60))
    first = search.best()
    assert first.namespace == published and first.blocks == 5
    search.take(first)
    search.failed(kind("layer 0 of block 2 is not what the record says"), first)
    again = search.best()
    assert (again.namespace, again.blocks, again.records) == (published, 2, ())
    assert not search.doubted(again), "it was the fault of the records"
    search.take(again)
    search.failed(kind("bad"), again)
    assert search.best().namespace == shorter and search.doubted(again)


async def test_one_whose_anchor_shows_nothing_is_not_tried_without_its_records():
    published = PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, bytes([9]) * 32)
    search = candidates(index=index(Candidate(None, published, 5, records=(None,) * 5)))
    first = search.best()
    search.take(first)
    search.failed(VerificationFailed("other tokens"), first)
    assert search.best() is None
