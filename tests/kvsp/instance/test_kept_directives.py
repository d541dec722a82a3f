"""Directives are obligations: an instance that restarts still has them (KVSP "Prefetch
Directives")."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsp.files import Files
from kvsp.instance.core.directives import TIMEOUT
from kvsp.instance.kept_directives import KeptDirective, KeptDirectives
from kvsp.instance.prefetching import Prefetcher
from kvsp.names.codes import DirectiveState
from kvsp.records.problems import Problem
from kvsp.records.records import PrefetchStatus
from tests.kvsp.instance.support import (
    Instance,
    block_id,
    directive,
    keys,
    make_instance,
    running,
    until,
)
from tests.kvsp.power import Hasty, Killed, Lossy

NOW = 1_900_000_000_000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(instance: Instance, name: str) -> DirectiveState:
    return instance.shell.prefetcher.status(name).state


async def test_a_directive_whose_time_is_not_over_is_carried_out_after_a_restart(
    tmp_path: Path,
) -> None:
    """All of it: what was loaded before went with the memory of the process."""
    made = directive(keys())
    async with running(directives=tmp_path / "kept") as first:
        first.source.hanging = {keys()[1]}
        await first.shell.prefetcher.accept(made)
        await until(lambda: len(first.source.asked) >= 2)
    async with running(directives=tmp_path / "kept") as second:
        name = made.directive
        await until(lambda: state_of(second, name) is not DirectiveState.PENDING)
        status = second.shell.prefetcher.status(name)
        assert (status.state, status.loaded) == (DirectiveState.COMPLETE, tuple(keys()))
        assert all(block_id(key) in second.agent.pool for key in keys())
        # it is the same one: repeated it begins nothing, under another body it is refused
        await second.shell.prefetcher.accept(made)
        assert second.source.asked == keys()


async def test_a_directive_that_takes_the_name_of_one_just_cancelled_can_be_cancelled_too(
    tmp_path: Path,
) -> None:
    made, ended, gone = directive(keys()), asyncio.Event(), list[str]()

    class Slow:
        async def load(self, *_: Any, **__: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.shield(ended.wait())
                gone.append("one")

    instance = make_instance()
    kept = KeptDirectives(tmp_path)
    loader: Any = Slow()
    prefetcher = Prefetcher(instance.agent, loader, instance.shell.clock_ms, kept)
    await prefetcher.accept(made)
    await asyncio.sleep(0.01)
    await prefetcher.cancel(made.directive)
    await prefetcher.accept(made)
    await asyncio.sleep(0.01)
    ended.set()
    await until(lambda: gone == ["one"])
    await prefetcher.cancel(made.directive)
    await until(lambda: gone == ["one", "one"])
    await prefetcher.stop()


async def test_a_file_that_holds_another_json_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    assert await KeptDirectives(tmp_path).load() == []
    assert names(tmp_path) == ["a.json.damaged"]


async def test_a_cancelled_directive_does_not_come_back(tmp_path: Path) -> None:
    made = directive(keys())
    async with running(directives=tmp_path / "kept") as first:
        first.source.hanging = {keys()[0]}
        await first.shell.prefetcher.accept(made)
        await first.shell.prefetcher.cancel(made.directive)
    async with running(directives=tmp_path / "kept") as second:
        with pytest.raises(Problem):
            second.shell.prefetcher.status(made.directive)
        assert second.source.asked == []


def prefetcher(
    folder: Path | None, unix_ms: Callable[[], int], files: Files | None = None, **limits: Any
) -> tuple[Prefetcher, Instance]:
    instance = make_instance(**limits)
    kept = KeptDirectives(folder, files=files or Files())
    shell = instance.shell
    made = Prefetcher(instance.agent, shell.loader, shell.clock_ms, kept, unix_ms)
    return made, instance


async def test_of_a_directive_that_is_over_the_outcome_can_be_read_for_its_time(
    tmp_path: Path,
) -> None:
    first, instance = prefetcher(tmp_path, lambda: NOW, directive_kept_ms=1000)
    instance.source.reasons = {keys()[0]: "kvsp-lease-quota"}
    made = directive(keys(), deadline_ms=500)
    await first.accept(made)
    await until(lambda: first.status(made.directive).state is DirectiveState.PARTIAL)
    outcome = first.status(made.directive)
    await until(lambda: b"lease-quota" in (tmp_path / f"{made.directive}.json").read_bytes())
    await first.stop()
    second, instance = prefetcher(tmp_path, lambda: NOW + 900, directive_kept_ms=1000)
    await second.start()
    assert second.status(made.directive) == outcome
    assert instance.source.asked == []
    await second.stop()
    third, _ = prefetcher(tmp_path, lambda: NOW + 1600, directive_kept_ms=1000)
    await third.start()
    with pytest.raises(Problem):
        third.status(made.directive)
    assert names(tmp_path) == []


async def test_a_deadline_that_passed_while_no_process_was_there_has_failed_its_blocks(
    tmp_path: Path,
) -> None:
    made = directive(keys(), deadline_ms=500)
    kept = KeptDirectives(tmp_path)
    await kept.keep(KeptDirective(made, NOW + 500, None, 0))
    after, instance = prefetcher(tmp_path, lambda: NOW + 501)
    await after.start()
    status = after.status(made.directive)
    assert (status.state, status.loaded) == (DirectiveState.FAILED, ())
    assert {each.reason for each in status.failed} == {TIMEOUT} and not instance.source.asked


async def test_a_clock_that_was_set_back_makes_no_deadline_longer(tmp_path: Path) -> None:
    made = directive(keys(), deadline_ms=500)
    await KeptDirectives(tmp_path).keep(KeptDirective(made, NOW + 500, None, 0))
    after, instance = prefetcher(tmp_path, lambda: NOW - 86_400_000)
    instance.source.hanging = {keys()[0]}
    await after.start()
    assert 0 < (after.status(made.directive).remaining_ms or 0) <= 500
    await after.stop()


async def test_a_forgotten_directive_leaves_no_file(tmp_path: Path) -> None:
    now = [5]
    instance = make_instance()
    kept = KeptDirectives(tmp_path)
    made = Prefetcher(instance.agent, instance.shell.loader, lambda: now[0], kept, lambda: NOW)
    first = directive(keys())
    await made.accept(first)
    await until(lambda: made.status(first.directive).state is DirectiveState.COMPLETE)
    now[0] += instance.agent.limits.directive_kept_ms + 1
    with pytest.raises(Problem):
        made.status(first.directive)
    await until(lambda: not names(tmp_path))
    await made.stop()


class Failing(Files):
    def sync(self, descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_directive_that_cannot_be_kept_is_not_accepted(tmp_path: Path) -> None:
    made, instance = prefetcher(tmp_path, lambda: NOW, Failing())
    one = directive(keys())
    with pytest.raises(Problem) as caught:
        await made.accept(one)
    assert caught.value.status == 503 and "cannot keep" in caught.value.detail
    assert len(instance.agent.directives) == 0 and not instance.source.asked
    assert names(tmp_path) == []


async def test_the_answer_to_a_directive_waits_until_it_is_on_disk(tmp_path: Path) -> None:
    """For the one that repeats it, too."""
    writing, go_on = asyncio.Event(), asyncio.Event()
    instance = make_instance()

    class Slow(KeptDirectives):
        async def keep(self, kept: KeptDirective) -> None:
            writing.set()
            await go_on.wait()

    shell = instance.shell
    made = Prefetcher(instance.agent, shell.loader, shell.clock_ms, Slow(None), lambda: NOW)
    one = directive(keys())
    first = asyncio.ensure_future(made.accept(one))
    second = asyncio.ensure_future(made.accept(one))
    await writing.wait()
    await asyncio.sleep(0.01)
    assert not first.done() and not second.done() and not instance.source.asked
    go_on.set()
    await asyncio.gather(first, second)
    await until(lambda: instance.source.asked == keys())
    await made.stop()


@pytest.mark.parametrize("names_stay", [False, True])
async def test_a_directive_that_was_accepted_is_there_after_a_power_cut_at_any_step(
    tmp_path: Path, names_stay: bool
) -> None:
    for at in range(1, 30):
        files = Lossy(names_stay=names_stay, at=at)
        (below := tmp_path / str(at)).mkdir()
        folder, made = below / "kept", directive(keys())
        kept = KeptDirectives(folder, files=files)
        done = 0
        outcome = PrefetchStatus(made.directive, DirectiveState.COMPLETE, tuple(keys()), (), 0)
        with contextlib.suppress(Killed):
            await kept.keep(KeptDirective(made, NOW, None, 0))
            done = 1
            await kept.keep(KeptDirective(made, NOW, outcome, NOW))
            done = 2
            await kept.forget(made.directive)
            done = 3
        files.cut_power(below)
        found = await KeptDirectives(folder).load()
        assert [each.directive for each in found] in ([made], []) if done in (0, 2) else True
        if done in (1, 2):
            assert done == 2 or [each.directive for each in found] == [made]
        if done == 3:
            assert at > 8
            return
    pytest.fail("it never got to its end")


@pytest.mark.parametrize("leave_out", ["sync", "sync_folder"])
async def test_the_power_cuts_of_these_tests_take_what_was_not_synced(
    tmp_path: Path, leave_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = Hasty(leave_out, names_stay=leave_out == "sync")
    made = directive(keys())
    await KeptDirectives(tmp_path / "kept", files=files).keep(KeptDirective(made, NOW, None, 0))
    files.cut_power(tmp_path)
    assert await KeptDirectives(tmp_path / "kept").load() == []
    assert ("its directive forgotten" in caplog.text) is (leave_out == "sync")
