"""A shared journal where servers stand for each other: in a cluster, and with Sentinels."""

from __future__ import annotations

import logging
import signal
from contextlib import closing
from pathlib import Path

import pytest

from kvsp.controller.core.effects import Key
from kvsp.controller.journal import JournalError, TermOverError
from tests.redis_sites import cluster, until, watched

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from kvsp.controller.shared_journal import SharedJournal, Term

LONG_MS = 600_000
ONE, TWO = Key("session", "one"), Key("output", "one/0")


def taken(journal: SharedJournal) -> Term:
    """The term that a controller gets as soon as the journal answers, and nobody leads."""
    for _ in until("a term"):
        try:
            term = journal.take()
        except JournalError:
            continue
        if isinstance(term, Term):
            return term
    raise AssertionError


def test_a_journal_in_a_cluster_is_at_the_node_that_has_its_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(tmp_path) as site:
        journals = [SharedJournal(site.url, lease_ms=LONG_MS) for _ in range(2)]
        with closing(journals[0]) as first, closing(journals[1]) as second:
            assert "controller.redis.replicas is 0" in caplog.text
            term = taken(first)
            assert isinstance(second.take(), int)
            term.write({ONE: b'{"step": 1}', TWO: b'{"tokens": [1]}'})
            term.resign()
            new = taken(second)
            assert dict(new.documents()) == {ONE: {"step": 1}, TWO: {"tokens": [1]}}
            with pytest.raises(TermOverError):
                term.write({ONE: b"{}"})
            has = [port for port in site.running if site.ask(port, "DBSIZE")]
            assert len(has) == 1


def test_a_replica_that_is_promoted_has_all_that_was_acknowledged_and_fences_who_led_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with watched(tmp_path) as (site, primary, replica):
        journals = [SharedJournal(site.url, lease_ms=1000, replicas=1) for _ in range(2)]
        with closing(journals[0]) as first, closing(journals[1]) as second:
            term = taken(first)
            for step in range(50):
                term.write({ONE: b'{"step": %d}' % step, Key("output", str(step)): b"{}"})
            site.signal(primary, signal.SIGKILL)
            for _ in until("the replica is promoted"):
                if site.ask(replica, "INFO", "replication").get("role") == "master":
                    break
            # alone it takes nothing: the next one to be promoted would lack it
            with pytest.raises(JournalError):
                second.take()
            site.start(primary, "--replicaof", "127.0.0.1", str(replica))
            new = taken(second)
            assert new.epoch > term.epoch
            documents = dict(new.documents())
            assert documents[ONE] == {"step": 49} and len(documents) == 51
            for _ in until("who led before is told that its term is over"):
                try:
                    term.write({ONE: b"{}"})
                except TermOverError:
                    break
                except JournalError:
                    continue  # a connection to the server that is gone
                pytest.fail("it writes on")
            assert dict(new.documents())[ONE] == {"step": 49}


def test_a_write_that_too_few_replicas_have_is_not_acknowledged(tmp_path: Path) -> None:
    with (
        watched(tmp_path) as (site, _, replica),
        closing(SharedJournal(site.url, lease_ms=LONG_MS, replicas=1)) as journal,
    ):
        term = taken(journal)
        term.write({ONE: b'{"step": 1}'})
        site.signal(replica, signal.SIGSTOP)
        with pytest.raises(JournalError, match="0 of 1 replicas have taken a write"):
            term.write({ONE: b'{"step": 2}'})
        site.signal(replica, signal.SIGCONT)


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/x"])
def test_sentinels_that_name_no_server_are_an_error_in_one_sentence(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(JournalError, match="the Valkey or Redis server of the journal: ") as caught,
    ):
        SharedJournal(url, timeout_s=0.2)
    assert "\n" not in str(caught.value)
