"""What is found of a prompt: by what relays have told, and by asking those that have not."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.client.counters import Counters, Looked
from kvcs.client.directory import ClientDirectory
from kvcs.client.loop import LoopThread
from kvcs.client.settings import ClientSettings
from kvcs.names.namespace import PublicationNamespace
from kvsp.client import ClientError
from kvsp.names.errors import DecodeError
from kvsp.names.identity import block_keys
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, SCOPE, TOKENS

KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)
MORE = [*TOKENS, 7]
"""A prompt of which one token is left to compute."""


class FakeLink:
    """A relay that has told of publications of so many blocks, or tells when it is asked."""

    def __init__(self, url, *blocks, refuses=False, answers=True, asked=()):
        self.url, self.refuses, self.silent_until = url, refuses, 0.0
        self.ready = asyncio.Event()
        if answers:
            self.ready.set()
        self.told = self.named(blocks)
        self.on_asking = self.named(asked)
        self.probes = 0

    def named(self, blocks):
        ids = SCOPE.scope_id, DESCRIPTOR.compat_id
        return [(n, PublicationNamespace.create(*ids, KEYS[n - 1])) for n in sorted(blocks)[::-1]]

    def known(self, keys):
        return [] if self.refuses else [each for each in self.told if each[0] <= len(keys)]

    async def probe(self, keys):
        self.probes += 1
        return self.on_asking


@pytest.fixture
def directory_of():
    threads = []

    def make(*links, mine=lambda _: False, index=lambda: None, **settings):
        threads.append(LoopThread("test"))
        settings.setdefault("lookup_timeout", 5.0)
        counters = Counters()
        made = ClientDirectory(
            threads[-1],
            links,
            SCOPE,
            DESCRIPTOR,
            ClientSettings(**settings),
            counters,
            mine=mine,
            index=index,
        )
        made.counts = lambda: counters.of("lookups")
        made.thread = threads[-1]
        made.silent = lambda: counters.of("silent")
        return made

    yield make

    async def nothing():
        pass

    for each in threads:
        each.stop(nothing, 5)


def test_the_longest_of_all_relays_is_found_at_once(directory_of):
    directory = directory_of(FakeLink("one", 2, 3), FakeLink("two", 4), FakeLink("three"))
    lookup = directory.ask(MORE)
    assert lookup.done
    assert (lookup.found.blocks, lookup.found.relay, lookup.found.most) == (4, "two", BLOCKS)
    assert lookup.found.tokens == 4 * BLOCK
    assert directory.counts() == {Looked.HIT: 1}


def test_of_as_many_blocks_the_first_relays_is_found(directory_of):
    directory = directory_of(FakeLink("one", 4), FakeLink("two", 4))
    assert directory.longest(MORE).relay == "one"


def test_never_all_tokens_are_found(directory_of):
    directory = directory_of(FakeLink("one", BLOCKS))
    for tokens, blocks in ((MORE, BLOCKS), (TOKENS, BLOCKS - 1)):
        assert directory.longest(tokens).blocks == blocks
    assert directory.longest(TOKENS[:BLOCK]) is None


def test_what_failed_is_not_offered_again_everywhere_or_at_its_relay(directory_of):
    one, two = FakeLink("one", 4, 3), FakeLink("two")
    two.told = [one.told[0]]
    directory = directory_of(one, two)
    first = directory.longest(MORE)
    directory.doubt(first, everywhere=False)
    second = directory.longest(MORE)
    assert (second.relay, second.namespace) == ("two", first.namespace)
    directory.doubt(second)
    assert directory.longest(MORE).blocks == 3


def test_with_no_time_to_remember_it_is_offered_again(directory_of):
    directory = directory_of(FakeLink("one", 4), failed_seconds=0)
    found = directory.longest(MORE)
    directory.doubt(found)
    assert directory.longest(MORE) == found


def test_what_is_computed_here_is_left_out(directory_of):
    link = FakeLink("one", 4, 3)
    directory = directory_of(link, mine=lambda namespace: namespace == link.told[0][1])
    assert directory.longest(MORE).blocks == 3


def test_a_relay_that_has_not_answered_is_waited_for_once(directory_of):
    directory = directory_of(
        FakeLink("one", 2), FakeLink("late", answers=False), lookup_timeout=0.1
    )
    lookup = directory.ask(MORE)
    assert not lookup.done and lookup.found is None
    assert lookup.wait(10).blocks == 2
    assert directory.silent() == {"late": 1}
    again = directory.ask(MORE)
    assert again.done and again.found.blocks == 2


def test_what_cannot_be_longer_is_found_without_waiting_for_others(directory_of):
    directory = directory_of(FakeLink("one", BLOCKS), FakeLink("late", answers=False))
    assert directory.ask(MORE).done


def test_one_that_answers_in_time_is_not_silent(directory_of):
    late = FakeLink("late", 4, answers=False)
    directory = directory_of(late)
    lookup = directory.ask(MORE)
    directory.thread.soon(late.ready.set)
    assert lookup.wait(10).blocks == 4
    assert not directory.silent()


def test_a_relay_that_lists_nothing_is_asked_each_time(directory_of):
    link = FakeLink("one", refuses=True, asked=(2,))
    directory = directory_of(link)
    for times in (1, 2):
        assert directory.longest(MORE).blocks == 2
        assert link.probes == times


def test_an_index_service_that_does_not_answer_costs_nothing_but_what_it_knew(directory_of):
    class Index:
        async def lookup(self, *_, **__):
            raise ClientError("http://index/", "nobody is there")

    directory = directory_of(FakeLink("one", 2), index=Index)
    assert directory.longest(MORE).blocks == 2


def test_a_token_that_is_none_is_said(directory_of):
    with pytest.raises(DecodeError):
        directory_of(FakeLink("one")).longest([1.5] * 20)
