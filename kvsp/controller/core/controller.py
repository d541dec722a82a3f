"""The placement controller without sockets: calls and times in, effects out.

The shell keeps one order for every call: take the effects, make their writes durable,
then answer, then carry out the commands. Times are milliseconds of any clock that does
not go back while the process lives. Refusals are `Problem`s and change nothing.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvsp.controller.core.effects import Effects, Key, Ledger, Report
from kvsp.controller.core.instances import KIND as INSTANCE
from kvsp.controller.core.instances import InstanceTable
from kvsp.controller.core.limits import ControllerLimits
from kvsp.controller.core.maps import KIND as MAP
from kvsp.controller.core.maps import MapTable
from kvsp.controller.core.placement import LowestCost, PlacementPolicy
from kvsp.controller.core.prefetching import KIND as DIRECTIVE
from kvsp.controller.core.prefetching import DirectiveTable
from kvsp.controller.core.requests import Placement, PlaceRequest
from kvsp.controller.core.sessions import KIND as SESSION
from kvsp.controller.core.sessions import SessionTable
from kvsp.names.codes import InstanceState
from kvsp.principals import Principal
from kvsp.records.estimates import Candidate, Choice, Demand, Found
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    InstanceStatus,
    SessionCheckpoint,
    SessionProgress,
)
from kvsp.records.sharding import ShardMap


class Controller:
    """Instances, sessions, shard maps and directives under one policy."""

    def __init__(
        self,
        limits: ControllerLimits | None = None,
        policy: PlacementPolicy | None = None,
        *,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.limits = limits or ControllerLimits()
        self.policy: PlacementPolicy = policy or LowestCost()
        self.ledger = Ledger(self.limits)
        self.instances = InstanceTable(self.ledger)
        self.sessions = SessionTable(self.ledger, self.instances, self._choose)
        self.maps = MapTable(self.ledger, self.instances)
        self.directives = DirectiveTable(self.ledger, new_id)

    # --- instances -------------------------------------------------------------------

    def take_status(self, status: InstanceStatus, now_ms: int) -> InstanceState:
        """A status PUT (KVSP "Instance Status and Lifecycle"); the state the instance is
        to have. Raises Problem as `InstanceTable.take_status`."""
        answer = self.instances.take_status(status, now_ms)
        if answer.lost:
            self._instance_lost(status.instance, now_ms)
        return answer.state

    def set_state(self, instance: str, state: InstanceState) -> InstanceState:
        """Have an instance drain or wake. Raises Problem as `InstanceTable.set_state`."""
        return self.instances.set_state(instance, state)

    def _instance_lost(self, instance: str, now_ms: int) -> None:
        self.directives.instance_lost(instance)
        self.maps.instance_lost(instance, now_ms)
        self.sessions.instance_lost(instance, now_ms)

    # --- placement -------------------------------------------------------------------

    def place(self, request: PlaceRequest, found: Found, now_ms: int) -> Placement:
        """Choose an instance, assign the session if one is named, and start a prefetch.

        Raises Problem: 503 when no active instance is acceptable (one that sleeps is then
        woken), `kvsp-checkpoint-conflict` for a session that is under way.
        """
        tokens = request.tokens
        if tokens is None:
            tokens = len(request.block_keys) * found.block_tokens if found.block_tokens else None
        choice = self._choose(request.compat_id, Demand(tokens, found), frozenset())
        if choice is None:
            woken = self.instances.wake_one(request.compat_id)
            detail = "a sleeping one is being woken" if woken else "none sleeps either"
            raise Problem.http(
                503, f"no active instance can take the request; {detail}", retry_after=1
            )
        epoch = None
        if request.session is not None:
            epoch = self.sessions.assign(
                request.session, choice.instance, request.compat_id, request.scope_id, now_ms
            )
        directive = None
        chosen = self.instances.get(choice.instance)
        if request.prefetch and choice.use_cache and chosen is not None:
            directive = self.directives.send(chosen.status, request, found, now_ms)
        self.ledger.counters["placed"] += 1
        return Placement(
            choice.instance, choice.cost_us, choice.fetch_us, len(found.blocks), epoch, directive
        )

    def _choose(self, compat_id: bytes, demand: Demand, without: frozenset[str]) -> Choice | None:
        candidates = [
            candidate
            for candidate in self.instances.candidates(compat_id)
            if candidate.status.instance not in without
        ]
        room = max(1, self.limits.estimates // max(1, len(demand.found.blocks)))
        if len(candidates) > room:
            # estimating takes time for each block and candidate, and everybody waits for it
            candidates = heapq.nsmallest(room, candidates, key=_load)
            self.ledger.counters["placements_narrowed"] += 1
        return self.policy.choose(demand, candidates)

    # --- sessions --------------------------------------------------------------------

    def checkpoint(
        self, sender: Principal, checkpoint: SessionCheckpoint, now_ms: int
    ) -> SessionProgress:
        """A checkpoint PUT; what is recorded afterwards, which is the acknowledgement.

        Raises Problem: `kvsp-stale-epoch`, `kvsp-unknown-epoch`, `kvsp-forbidden` unless
        the sender is the instance the session is assigned to, `kvsp-checkpoint-conflict`.
        """
        session = self.sessions.check(checkpoint.session, checkpoint.epoch)
        if session is None:
            instance = self._instance_of(sender)
            self.sessions.assign(
                checkpoint.session, instance, checkpoint.compat_id, checkpoint.scope_id, now_ms
            )
        else:
            sender.require_uri(session.instance)
        return self.sessions.record(checkpoint)

    def extend_checkpoint(self, sender: Principal, delta: CheckpointDelta) -> SessionProgress:
        """What a checkpoint adds to the recorded one; what is recorded afterwards.

        Raises Problem as `checkpoint`; `kvsp-checkpoint-conflict` also where the whole
        checkpoint is needed.
        """
        session = self.sessions.check(delta.session, delta.epoch)
        if session is not None:
            sender.require_uri(session.instance)
        return self.sessions.extend(delta)

    def _instance_of(self, sender: Principal) -> str:
        """The one live instance a sender is. Raises Problem `kvsp-forbidden`."""
        own = [
            known.status.instance
            for known in self.instances
            if known.state is not InstanceState.FAILED and sender.is_one_of(known.status.instance)
        ]
        if len(own) != 1:
            raise Problem(
                ProblemName.FORBIDDEN,
                f"the sender is {len(own)} reporting instances; only one instance starts a "
                "session by its checkpoint, after its first status",
            )
        return own[0]

    def end_session(self, name: str, now_ms: int) -> None:
        """A session is over. Raises Problem `kvsp-unknown-resource`."""
        self.sessions.end(name, now_ms)

    # --- shard maps ------------------------------------------------------------------

    def put_map(self, shard_map: ShardMap, deadline_ms: int, now_ms: int) -> bool:
        """Create a map or begin to change it. Raises Problem as `MapTable.put`."""
        return self.maps.put(shard_map, deadline_ms, now_ms)

    # --- reports and time ------------------------------------------------------------

    def report(self, number: int, report: Report, now_ms: int) -> None:
        """How a command went. Late and repeated reports change nothing."""
        asker = self.ledger.settle(number)
        if asker is None:
            return
        if asker.kind == SESSION:
            self.sessions.report(asker.name, number, report, now_ms)
        elif asker.kind == MAP:
            self.maps.report(asker.name, number, report, now_ms)
        elif asker.kind == DIRECTIVE:
            self.directives.report(asker.name, number, report, now_ms)

    def next_due(self) -> int | None:
        """When `tick` has something to do, None for never."""
        return self.ledger.timers.next_due()

    def tick(self, now_ms: int) -> None:
        """Do what is due."""
        while (key := self.ledger.timers.pop(now_ms)) is not None:
            if key.kind == INSTANCE:
                self.instances.fail(key.name)
                self._instance_lost(key.name, now_ms)
            elif key.kind == SESSION:
                self.sessions.due(key.name, now_ms)
            elif key.kind == MAP:
                self.maps.due(key.name, now_ms)
            else:
                self.directives.due(key.name, now_ms)

    def take(self) -> Effects:
        """What is to be made durable and carried out since the last call."""
        return self.ledger.take()

    def restore(self, documents: Iterable[tuple[Key, Mapping[str, Any]]], now_ms: int) -> None:
        """Take back everything that was durable, before anything else is called."""
        kinds: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
        for key, document in documents:
            kinds.setdefault(key.kind, []).append((key.name, document))
        for name, document in kinds.get(INSTANCE, ()):
            self.instances.restore(name, document, now_ms)
        for name, document in kinds.get(MAP, ()):
            self.maps.restore(name, document, now_ms)
        self.sessions.restore(kinds, now_ms)


def _load(candidate: Candidate) -> tuple[float, float, str]:
    status = candidate.status
    return (
        status.queued * candidate.mean_service_us,
        status.kv_utilization,
        status.instance,
    )
