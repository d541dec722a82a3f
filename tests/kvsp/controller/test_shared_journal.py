"""What several controllers share: one leads at a time, and writes what nobody overwrites."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvsp.controller.core.effects import Key
from kvsp.controller.journal import JournalError, TermOverError
from tests.redis_server import redis_server

pytest.importorskip("redis", reason="the extra 'redis' is not installed")
import redis

from kvsp.controller.shared_journal import SharedJournal, Term

ONE, TWO = Key("session", "one"), Key("instance", "https://two.example/kvsp/")
LONG_MS = 60_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return tmp_path.name


def taken(journal: SharedJournal) -> Term:
    """The term that a controller gets at once, or when the one before has run out."""
    while True:
        term = journal.take()
        if isinstance(term, Term):
            return term
        assert term <= 1, "somebody else leads"


def test_one_controller_leads_and_the_others_are_told_for_how_long(url: str, prefix: str) -> None:
    first, second = (SharedJournal(url, prefix=prefix, lease_ms=LONG_MS) for _ in range(2))
    with closing(first), closing(second):
        term = taken(first)
        left_ms = second.take()
        assert isinstance(left_ms, int) and 0 < left_ms <= LONG_MS
        assert term.renew()
        term.resign()
        assert taken(second).epoch > term.epoch
        assert not term.renew()


def test_what_was_written_in_a_term_is_there_in_the_next_one(url: str, prefix: str) -> None:
    first, second = (SharedJournal(url, prefix=prefix, lease_ms=LONG_MS) for _ in range(2))
    with closing(first), closing(second):
        term = taken(first)
        term.write({ONE: b'{"step": 1}', TWO: b'{"step": 1}'})
        term.write({ONE: None, TWO: b'{"step": 2}'})
        term.resign()
        assert dict(taken(second).documents()) == {TWO: {"step": 2}}


def test_who_was_stopped_and_goes_on_after_another_has_begun_writes_nothing(
    url: str, prefix: str
) -> None:
    with (
        closing(SharedJournal(url, prefix=prefix, lease_ms=1)) as stopped,
        closing(SharedJournal(url, prefix=prefix, lease_ms=LONG_MS)) as other,
    ):
        old = taken(stopped)
        old.write({ONE: b'{"step": 1}'})
        new = taken(other)
        new.write({TWO: b'{"step": 2}'})
        with pytest.raises(TermOverError, match="another controller leads"):
            old.write({ONE: b'{"step": 9}', TWO: None})
        assert not old.renew()
        old.resign()
        assert isinstance(stopped.take(), int)
        assert dict(new.documents()) == {ONE: {"step": 1}, TWO: {"step": 2}}


def test_a_new_term_of_the_same_controller_fences_its_own_last_one(url: str, prefix: str) -> None:
    """A write whose answer was lost may still be on its way."""
    with closing(SharedJournal(url, prefix=prefix, lease_ms=LONG_MS)) as journal:
        before, after = taken(journal), taken(journal)
        with pytest.raises(TermOverError):
            before.write({ONE: b"{}"})
        after.write({TWO: b"{}"})
        assert dict(after.documents()) == {TWO: {}}


def test_a_lease_that_ran_out_goes_on_when_nobody_has_taken_it(url: str, prefix: str) -> None:
    with closing(SharedJournal(url, prefix=prefix, lease_ms=1)) as journal:
        term = taken(journal)
        with closing(redis.Redis.from_url(url)) as server:
            while server.time() == (began := server.time()):
                pass
            assert began
        assert term.renew()
        term.write({ONE: b"{}"})


def test_a_server_that_lost_everything_gives_out_no_epoch_twice(url: str, prefix: str) -> None:
    with closing(SharedJournal(url, prefix=prefix, lease_ms=LONG_MS)) as journal:
        before = taken(journal)
        with closing(redis.Redis.from_url(url)) as server:
            while taken(journal).epoch <= before.epoch:
                pass
            last = taken(journal)
            server.flushall()
        with pytest.raises(TermOverError):
            last.write({ONE: b"{}"})
        with closing(SharedJournal(url, prefix=prefix, lease_ms=LONG_MS)) as other:
            new = taken(other)
            with pytest.raises(TermOverError):
                last.write({ONE: b"{}"})
            assert new.epoch > before.epoch


def test_it_is_said_when_the_server_may_forget_what_was_acknowledged(
    url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(SharedJournal(url, prefix=prefix)):
        assert "appendonly is no, not yes" in caplog.text
    caplog.clear()
    with closing(redis.Redis.from_url(url)) as server:
        server.config_set("appendonly", "yes")
        server.config_set("appendfsync", "always")
    with caplog.at_level(logging.WARNING), closing(SharedJournal(url, prefix=prefix)):
        assert caplog.text == ""


def test_a_server_that_is_away_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="the Valkey or Redis server of the journal"):
        SharedJournal(f"unix://{tmp_path}/nobody")
    with redis_server(tmp_path) as url:
        journal = SharedJournal(url)
        term = taken(journal)
    for use in (term.renew, journal.take, lambda: term.write({ONE: b"{}"})):
        with pytest.raises(JournalError) as caught:
            use()
        assert not isinstance(caught.value, TermOverError)
    journal.close()
