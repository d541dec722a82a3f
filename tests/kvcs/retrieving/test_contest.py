"""Whose manifest is asked for, and for how long: without a session or a clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvcs.finding.candidates import Candidate, Candidates, DiscoveryMode
from kvcs.finding.relays import Sessions
from kvcs.names.errors import PublisherLost
from kvcs.names.namespace import PublicationNamespace
from kvcs.retrieving.contest import DRIPS, MOST_SEATS, SEATS, Contest
from tests.kvcs.support import DESCRIPTOR, SCOPE

KEYS = [bytes([n]) * 32 for n in range(8)]
PATIENCE = 2.0


class OneRelay(Sessions):
    def __init__(self) -> None:
        """It is there already."""

    def reaches(self, url) -> bool:
        return url is None

    def dial(self, url):
        there = asyncio.get_running_loop().create_future()
        there.set_result(SimpleNamespace())
        return there


class Asked:
    """A publication whose manifest is asked for, and comes when the test says so."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.manifest_arrivals = 0
        self.assembly = SimpleNamespace(manifest=None, blocks=0, complete=False)
        self.error = None
        self.over = False

    def start(self, *, early: bool = False) -> None:
        self.over = False

    def poll(self, now: float) -> None:
        return None

    def close(self) -> None:
        self.over = True

    def answer(self, blocks: int | None = None) -> None:
        self.manifest_arrivals += 1
        has = self.blocks if blocks is None else blocks
        self.assembly = SimpleNamespace(manifest=object(), blocks=has, complete=True)


class Asking:
    """A contest among publications of so many blocks, and those asked for, by blocks."""

    def __init__(self, *blocks: int) -> None:
        named = [
            Candidate(
                None,
                PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[n - 1]),
                n,
            )
            for n in sorted(blocks, reverse=True)
        ]
        self.candidates = Candidates(
            OneRelay(),
            SCOPE.scope_id,
            DESCRIPTOR.compat_id,
            KEYS,
            changed=lambda: None,
            index=SimpleNamespace(looked_up=True, named=named),
            discovery=DiscoveryMode.INDEX,
        )
        self.asked: dict[int, Asked] = {}
        self.made: list[Asked] = []
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.contest = Contest(
            self.candidates,
            self._make,
            wanted=len(KEYS),
            patience=PATIENCE,
            settle_by=now + PATIENCE,
            early=False,
        )

    def _make(self, candidate, session) -> Asked:
        self.asked[candidate.blocks] = made = Asked(candidate.blocks)
        self.made.append(made)
        return made

    def run(self, now: float, until: float, each=lambda now: None) -> float:
        """Poll when it is due, and ten times a second; when it has a winner, or `until`."""
        while now < until and self.contest.winner is None and self.contest.error is None:
            each(now)
            due = self.contest.poll(now)
            now = min(now + 0.1, until if due is None else due)
        return now


async def test_a_manifest_that_comes_drop_by_drop_does_not_keep_a_shorter_one_from_its_turn():
    asking = Asking(5, 2)

    def drip(now: float) -> None:
        if 5 in asking.asked:
            asking.asked[5].manifest_arrivals += 1
        if 2 in asking.asked and asking.asked[2].assembly.manifest is None:
            asking.asked[2].answer()

    ended = asking.run(0.0, 60.0, drip)
    assert asking.contest.winner is not None and asking.contest.winner.blocks == 2
    assert ended <= DRIPS * PATIENCE + 1
    assert asking.asked[5].over


async def test_nor_do_as_many_as_are_asked_at_a_time():
    asking = Asking(*range(8 - SEATS + 1, 9), 1)

    def drip(now: float) -> None:
        for blocks, asked in list(asking.asked.items()):
            if blocks > 1:
                asked.manifest_arrivals += 1
            elif asked.assembly.manifest is None:
                asked.answer()

    asking.run(0.0, 60.0, drip)
    assert asking.contest.winner is not None and asking.contest.winner.blocks == 1


@pytest.mark.parametrize(("silent", "within"), [(7, 5), (60, 15), (400, 30)])
async def test_hundreds_of_silent_publications_of_the_same_prefix_do_not_hide_one(silent, within):
    asking = Asking(*[5] * (silent + 1))
    most = 0

    def answer(now: float) -> None:
        nonlocal most
        most = max(most, sum(not each.over for each in asking.made))
        if len(asking.made) > silent and asking.made[silent].assembly.manifest is None:
            asking.made[silent].answer()

    ended = asking.run(0.0, 60.0, answer)
    assert asking.contest.winner is not None
    assert ended <= within
    assert most <= MOST_SEATS


@pytest.mark.parametrize("silent", [[2], [1, 2, 3, 4]])
async def test_one_that_stalled_is_gone_back_to_when_all_others_are_silent(silent):
    asking = Asking(5, *silent)
    asking.run(0.0, 60.0, lambda now: 5 in asking.asked and asking.asked[5].answer())
    winner = asking.contest.winner
    assert winner is not None and winner.blocks == 5
    asking.contest.close()
    asking.candidates.stalled(winner.candidate, PublisherLost("nothing came"))
    del asking.asked[5]
    asking.begin(1.0)
    asking.run(1.0, 60.0, lambda now: 5 in asking.asked and asking.asked[5].answer())
    assert asking.contest.winner is not None and asking.contest.winner.blocks == 5


async def test_publications_are_compared_by_what_their_manifests_say_and_not_by_anchor_keys():
    asking = Asking(5, 3, 2)

    def each(now: float) -> None:
        for blocks, asked in list(asking.asked.items()):
            if asked.assembly.manifest is None:
                asked.answer({5: 5, 3: 7, 2: 6}[blocks])

    asking.run(0.0, 60.0, each)
    winner = asking.contest.winner
    assert winner is not None and (winner.candidate.blocks, winner.blocks) == (3, 7)


@pytest.mark.parametrize("silent", [False, True])
async def test_no_more_manifests_are_read_for_that_than_there_are_seats(silent):
    asking = Asking(6, 5, 4, 3, 2, 1)

    def each(now: float) -> None:
        for blocks, asked in list(asking.asked.items()):
            if asked.assembly.manifest is None and (blocks == 6 or not silent):
                asked.answer()

    ended = asking.run(0.0, 60.0, each)
    winner = asking.contest.winner
    assert winner is not None and winner.blocks == 6
    assert sorted(asking.asked) == [3, 4, 5, 6]
    assert ended < PATIENCE  # those that do not answer are not waited for


async def test_when_the_best_has_all_that_is_wanted_no_other_manifest_is_read():
    asking = Asking(len(KEYS), 3, 2)
    asking.run(0.0, 60.0, lambda now: 8 in asking.asked and asking.asked[8].answer())
    assert list(asking.asked) == [len(KEYS)]
