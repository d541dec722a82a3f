"""Of several controllers with one journal one answers, and the next takes over whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsp.controller.core.effects import Key
from kvsp.controller.journal import JournalError, TermOverError
from tests.kvsp.controller.deployment import Deployment
from tests.kvsp.controller.support import COMPAT, SCOPE, SESSION, checkpoint
from tests.kvsp.support_http import running

LEASE_MS = 60


class Store:
    """A journal that controllers share, in memory; its clock is moved by a test."""

    def __init__(self) -> None:
        self.texts: dict[Key, bytes] = {}
        self.epoch = 0
        self.owner: Lease | None = None
        """Whose lease it is; None when it has run out."""
        self.down = False

    def check(self) -> None:
        if self.down:
            raise JournalError("connection refused")

    def run_out(self) -> None:
        """The lease runs out."""
        self.owner = None


class Lease:
    lease_ms = LEASE_MS

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runs = threading.Event()
        """Cleared while its process is stopped."""
        self.runs.set()
        self.stopped_at: set[str] = set()

    def pass_by(self, what: str) -> None:
        """Wait here while the process is stopped."""
        if not self.runs.is_set():
            self.stopped_at.add(what)
            assert self.runs.wait(30)
        self.store.check()

    def take(self) -> Term | int:
        self.pass_by("take")
        if self.store.owner not in (None, self):
            return LEASE_MS
        self.store.owner = self
        self.store.epoch += 1
        return Term(self, self.store.epoch)

    def close(self) -> None: ...


class Term:
    def __init__(self, lease: Lease, epoch: int) -> None:
        self.epoch = epoch
        self._lease, self._store = lease, lease.store

    def _ours(self, what: str) -> bool:
        self._lease.pass_by(what)
        return self._store.epoch == self.epoch

    def renew(self) -> bool:
        if ours := self._ours("renew"):
            self._store.owner = self._lease
        return ours

    def resign(self) -> None:
        if self._ours("resign"):
            self._store.run_out()

    def write(self, writes: Mapping[Key, bytes | None]) -> None:
        if not self._ours("write"):
            raise TermOverError("another controller leads")
        for key, text in writes.items():
            if text is None:
                self._store.texts.pop(key, None)
            else:
                self._store.texts[key] = text

    def documents(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        self._lease.pass_by("documents")
        for key, text in self._store.texts.items():
            yield key, msgspec.json.decode(text)

    def close(self) -> None: ...


class Site:
    """A controller among several."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.lease = Lease(store)
        self.deployment = Deployment(folder, self.lease)
        self.elected = self.deployment.lead
        self._store = store

    @property
    def leads(self) -> bool:
        return self.elected.leading is not None

    def stop(self) -> None:
        """As by SIGSTOP: time goes on, and its lease runs out."""
        self.lease.runs.clear()
        self.deployment.now += LEASE_MS
        self._store.run_out()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def several(tmp_path: Path, store: Store) -> AsyncIterator[tuple[Site, Site]]:
    """A leader, and one that stands by."""
    first, second = (Site(tmp_path / name, store) for name in ("first", "second"))
    async with running(first.deployment.app):
        await until(lambda: first.leads)
        async with running(second.deployment.app):
            yield first, second
            for site in (first, second):
                site.lease.runs.set()


async def test_who_stands_by_answers_nothing_of_a_controller(
    several: tuple[Site, Site],
) -> None:
    first, second = (site.deployment for site in several)
    await first.report()
    operator = second.client("operator")
    place = {"scope_id": SCOPE.hex(), "compat_id": COMPAT.hex(), "block_keys": [], "tokens": 1}
    for method, path, body in (
        ("GET", "instances", None),
        ("GET", f"sessions/{SESSION}", None),
        ("GET", "maps/m", None),
        ("POST", "place", place),
    ):
        answer = await operator.request(method, path, json_body=body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1"), path
        assert "another one leads" in answer.json["detail"]
    assert (await second.report()).status == 503
    assert (await second.checkpoint()).status == 503
    assert len((await first.client("operator").get("instances")).json["instances"]) == 1


async def test_it_is_shown_who_leads(several: tuple[Site, Site]) -> None:
    for site, leading in zip(several, (1, 0), strict=True):
        operator = site.deployment.client("operator")
        text = (await operator.get("/metrics")).body.decode()
        assert f"kvsp_placement_leading {leading}.0" in text
        assert ("kvsp_placement_sessions" in text) == bool(leading)
        ready = (await operator.get("/readyz")).json
        stands_by = any("another one leads" in reason for reason in ready["reasons"])
        assert (ready["status"], stands_by) == ("degraded", not leading)


async def test_the_next_one_knows_everything_that_was_acknowledged(
    several: tuple[Site, Site],
) -> None:
    first, second = several
    await first.deployment.report()
    assert (await first.deployment.checkpoint(9)).json["output_offset"] == 9
    first.stop()
    await until(lambda: second.leads)
    assert second.deployment.shell.core.sessions.recorded(SESSION) == checkpoint(9)
    assert (await second.deployment.report()).json == {"state": "active"}
    assert (await second.deployment.checkpoint(12)).json["output_offset"] == 12


async def test_who_was_stopped_answers_nothing_when_it_goes_on_and_stands_by(
    several: tuple[Site, Site],
) -> None:
    first, second = several
    await first.deployment.report()
    first.stop()
    # by its own clock alone: it has not heard of the other one yet
    assert (await first.deployment.client("operator").get("instances")).status == 503
    await until(lambda: second.leads)
    first.lease.runs.set()
    await until(lambda: first.lease.stopped_at)
    assert (await first.deployment.client("operator").get("instances")).status == 503
    second.stop()
    await until(lambda: first.leads)
    assert (await first.deployment.client("operator").get("instances")).status == 200


async def test_a_write_that_was_stopped_on_its_way_is_refused_and_not_acknowledged(
    several: tuple[Site, Site],
) -> None:
    first, second = several
    await first.deployment.report()
    await first.deployment.checkpoint(3)
    first.lease.runs.clear()
    late = asyncio.create_task(first.deployment.checkpoint(9))
    await until(lambda: "write" in first.lease.stopped_at)
    first.stop()
    await until(lambda: second.leads)
    assert (await second.deployment.checkpoint(5)).json["output_offset"] == 5
    first.lease.runs.set()
    answer = await late
    assert answer.status == 503
    assert second.deployment.shell.core.sessions.recorded(SESSION) == checkpoint(5)
    second.stop()
    await until(lambda: first.leads)
    # what it had decided before is gone with its term
    assert first.deployment.shell.core.sessions.recorded(SESSION) == checkpoint(5)


async def test_while_the_store_does_not_answer_nobody_leads_and_then_one_does_again(
    several: tuple[Site, Site], store: Store
) -> None:
    first, second = several
    await first.deployment.report()
    store.down = True
    assert (await first.deployment.checkpoint(3)).status == 503
    first.deployment.now += LEASE_MS
    for site in several:
        await until(lambda: "does not answer" in site.elected.standing_by)  # noqa: B023
        answer = await site.deployment.checkpoint(3)
        assert (answer.status, site.elected.failure) == (503, None)
        assert "store of its journal does not answer" in answer.json["detail"]
    store.down = False
    store.run_out()
    await until(lambda: first.leads or second.leads)
    leader = first if first.leads else second
    assert (await leader.deployment.checkpoint(3)).json["output_offset"] == 3


async def test_who_ends_hands_the_lead_over_at_once(tmp_path: Path, store: Store) -> None:
    first, second = (Site(tmp_path / name, store) for name in ("first", "second"))
    async with running(second.deployment.app):
        await until(lambda: second.leads)
        async with running(first.deployment.app):
            assert store.owner is second.lease
            await second.elected.stop()
            await until(lambda: first.leads)
    assert store.owner is None


async def test_a_journal_that_cannot_be_read_is_given_to_another_controller(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(term: Term) -> Iterator[tuple[Key, dict[str, Any]]]:
        if term._lease is first.lease:
            raise JournalError("broken")
        return documents(term)

    documents = Term.documents
    monkeypatch.setattr(Term, "documents", fail)
    first, second = (Site(tmp_path / name, store) for name in ("first", "second"))
    async with running(first.deployment.app), running(second.deployment.app):
        await until(lambda: second.leads)
        assert not first.leads
