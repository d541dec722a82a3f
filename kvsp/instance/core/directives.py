"""Prefetch directives at an instance (KVSP "Prefetch Directives"; sans-IO, `now` in ms)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.moves import DIRECTIVE_MOVES, DirectiveEvent
from kvsp.names.codes import DirectiveState
from kvsp.records.moves import move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import DirectiveBlock, FailedBlock, PrefetchDirective, PrefetchStatus

CAPACITY = "capacity"
TIMEOUT = "timeout"
CANCELLED = "cancelled"


@dataclass(slots=True)
class Loading:
    """One directive: what has arrived and what has failed, never what was promised."""

    directive: PrefetchDirective
    ends_ms: int
    state: DirectiveState = DirectiveState.PENDING
    loaded: set[bytes] = field(default_factory=set)
    failed: dict[bytes, str] = field(default_factory=dict)
    finished_ms: int = 0

    @property
    def missing(self) -> list[DirectiveBlock]:
        """The blocks that have neither arrived nor failed, in directive order."""
        blocks = {block.block_key: block for block in self.directive.blocks}
        return [
            block
            for key, block in blocks.items()
            if key not in self.loaded and key not in self.failed
        ]

    def status(self, now_ms: int) -> PrefetchStatus:
        """The status resource."""
        keys = tuple(dict.fromkeys(block.block_key for block in self.directive.blocks))
        pending = self.state is DirectiveState.PENDING
        return PrefetchStatus(
            directive=self.directive.directive,
            state=self.state,
            loaded=tuple(key for key in keys if key in self.loaded),
            failed=tuple(FailedBlock(key, self.failed[key]) for key in keys if key in self.failed),
            remaining_ms=max(0, self.ends_ms - now_ms) if pending else 0,
        )


class DirectiveTable:
    """Directives by identifier."""

    def __init__(self, limits: InstanceLimits) -> None:
        self._limits = limits
        self._all: dict[str, Loading] = {}
        self.counters: Counter[str] = Counter()
        """Directives by their final state, and `blocks_loaded`."""
        self._forgotten: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def under_way(self) -> int:
        return sum(each.state is DirectiveState.PENDING for each in self._all.values())

    def accept(self, directive: PrefetchDirective, now_ms: int) -> Loading | None:
        """Take a directive; None for one that is known already with the same body.

        Raises Problem `kvsp-directive-conflict`, `kvsp-too-large`, 503 when as many as may
        be are under way.
        """
        self._forget(now_ms)
        known = self._all.get(directive.directive)
        if known is not None:
            if known.directive != directive:
                raise Problem(
                    ProblemName.DIRECTIVE_CONFLICT,
                    "another directive has this identifier; choose a new one",
                )
            return None
        if len(directive.blocks) > self._limits.blocks:
            raise Problem(
                ProblemName.TOO_LARGE,
                f"a directive has at most {self._limits.blocks} blocks",
                limit=self._limits.blocks,
            )
        full = len(self._all) >= self._limits.directives_known
        if full or self.under_way >= self._limits.directives:
            raise Problem.http(503, "as many directives as may be are under way", retry_after=1)
        made = Loading(directive, now_ms + directive.deadline_ms)
        self._all[directive.directive] = made
        return made

    def restore(
        self,
        directive: PrefetchDirective,
        remaining_ms: int,
        now_ms: int,
        status: PrefetchStatus | None,
    ) -> Loading | None:
        """Have a directive of before the restart again, to be carried out in what remains of
        its time: that is returned; None when it is over, with `status` if it had one."""
        made = Loading(directive, now_ms + max(0, remaining_ms))
        self._all[directive.directive] = made
        if remaining_ms > 0:
            return made
        if status is None:
            self.finish(made, now_ms)
        else:
            made.state, made.finished_ms = status.state, now_ms
            made.loaded = set(status.loaded)
            made.failed = {each.block_key: each.reason for each in status.failed}
        return None

    def find(self, name: str) -> Loading | None:
        return self._all.get(name)

    def take_forgotten(self) -> set[str]:
        """The directives that were forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, set()
        return forgotten

    def get(self, name: str, now_ms: int) -> Loading:
        """Raises Problem `kvsp-unknown-resource`."""
        self._forget(now_ms)
        known = self._all.get(name)
        if known is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "no such directive is known any more")
        return known

    def loaded(self, loading: Loading, block_key: bytes) -> None:
        """A block is in the engine's memory."""
        if loading.state is DirectiveState.PENDING:
            loading.loaded.add(block_key)
            self.counters["blocks_loaded"] += 1

    def failed(self, loading: Loading, block_key: bytes, reason: str) -> None:
        """A block cannot be had; the rest goes on."""
        if loading.state is DirectiveState.PENDING:
            loading.failed[block_key] = reason

    def finish(self, loading: Loading, now_ms: int, reason: str = TIMEOUT) -> None:
        """Loading has ended; what has not arrived has failed for `reason`."""
        if loading.state is not DirectiveState.PENDING:
            return
        for block in loading.missing:
            loading.failed[block.block_key] = reason
        event = DirectiveEvent.ALL_LOADED
        if loading.failed:
            event = DirectiveEvent.SOME_LOADED if loading.loaded else DirectiveEvent.NONE_LOADED
        loading.state = move(DIRECTIVE_MOVES, loading.state, event)
        loading.finished_ms = now_ms
        self.counters[loading.state] += 1

    def cancel(self, name: str, now_ms: int) -> None:
        """DELETE: forget a directive. Raises Problem `kvsp-unknown-resource`."""
        self.finish(self.get(name, now_ms), now_ms, CANCELLED)
        del self._all[name]

    def _forget(self, now_ms: int) -> None:
        """Forget what finished long ago."""
        oldest_ms = now_ms - self._limits.directive_kept_ms
        for name, each in list(self._all.items()):
            if each.state is not DirectiveState.PENDING and each.finished_ms < oldest_ms:
                del self._all[name]
                self._forgotten.add(name)
