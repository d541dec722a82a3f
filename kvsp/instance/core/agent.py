"""The core of an inference instance without sockets, engine or clock: what it is, what it
serves, and what it answers (KVSP "Instance Status and Lifecycle" to "Resharding").

Times are milliseconds of any clock that does not go back while the process lives.
Refusals are `Problem`s and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvsp.instance.core.directives import DirectiveTable, Loading
from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.moves import LIFE_MOVES, LifeEvent
from kvsp.instance.core.rates import Rates
from kvsp.instance.core.sessions import Serving, ServingTable, StartSession
from kvsp.instance.core.shards import Member, ShardTable
from kvsp.instance.engines.pool import BlockPool
from kvsp.names.codes import InstanceState
from kvsp.names.identity import Descriptor, Scope
from kvsp.records import costs
from kvsp.records.moves import IllegalMove, move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    InstanceStatus,
    Link,
    PrefetchDirective,
    Resume,
    StateReport,
)
from kvsp.records.sharding import ReshardPlan

_EVENTS: Mapping[InstanceState, LifeEvent] = {
    InstanceState.ACTIVE: LifeEvent.ACTIVATE,
    InstanceState.DRAINING: LifeEvent.DRAIN,
}


class Agent:
    """One instance in one epoch after another."""

    def __init__(
        self,
        base_uri: str,
        descriptor: Descriptor,
        scopes: Iterable[Scope],
        *,
        epoch: int,
        bit_identical: bool,
        keep_prompts: bool = False,
        limits: InstanceLimits | None = None,
    ) -> None:
        """`keep_prompts` lets checkpoints carry the prompt, so that a session outlives the
        loss of a prompt block at the price of prompts at the placement controller."""
        self.base_uri = base_uri
        self.descriptor = descriptor
        self.limits = limits or InstanceLimits()
        self.scopes = {scope.scope_id: scope for scope in scopes}
        self.epoch = epoch
        self.state = InstanceState.ACTIVE
        self.keep_prompts = keep_prompts
        self.rates = Rates()
        self.pool = BlockPool(self.limits.pool_octets)
        self.directives = DirectiveTable(self.limits)
        self.sessions = ServingTable(self.limits, descriptor, bit_identical=bit_identical)
        self.shards = ShardTable(self.limits)
        self.ending = False
        """Whether the process is about to end: it drains, whatever is asked."""
        self._idle_since_ms: int | None = None

    # --- lifecycle -------------------------------------------------------------------

    def set_state(self, wanted: InstanceState, now_ms: int) -> StateReport:
        """PUT state, or the state a status PUT is answered with.

        Raises Problem `kvsp-invalid-transition`.
        """
        if wanted is not self.state:
            event = _EVENTS.get(wanted)
            try:
                if event is None:
                    raise IllegalMove(f"no request makes an instance {wanted}")
                if self.ending and event is LifeEvent.ACTIVATE:
                    raise IllegalMove("the instance is about to end")
                self.state = move(LIFE_MOVES, self.state, event)
            except IllegalMove as error:
                raise Problem(
                    ProblemName.INVALID_TRANSITION, str(error), state=self.state.value
                ) from None
            self._idle_since_ms = None
        self.settle_down(now_ms)
        return self.report()

    def end(self, now_ms: int) -> None:
        """The process is about to end: drain, and ask the controller to send nothing more."""
        self.ending = True
        if self.state is InstanceState.ACTIVE:
            self.set_state(InstanceState.DRAINING, now_ms)

    def obey(self, wanted: InstanceState, now_ms: int) -> None:
        """Take the state the placement controller answered; one that cannot be is left."""
        if wanted in _EVENTS and wanted is not self.state and not self.ending:
            event = _EVENTS[wanted]
            # asleep already: the answer crossed the report of it
            if (self.state, event) in LIFE_MOVES:
                self.set_state(wanted, now_ms)

    def settle_down(self, now_ms: int) -> None:
        """A draining instance without sessions sleeps; note since when there are none."""
        if self.sessions.live:
            self._idle_since_ms = None
            return
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        if self.state is InstanceState.DRAINING:
            self.state = move(LIFE_MOVES, self.state, LifeEvent.EMPTY)

    def report(self) -> StateReport:
        """What GET and PUT state answer."""
        return StateReport(self.state, self.epoch, self.sessions.live)

    def status(self, links: Iterable[Link], now_ms: int) -> InstanceStatus:
        """The Instance Status Record."""
        self.settle_down(now_ms)
        after_ms, since_ms = self.limits.sleep_after_ms, self._idle_since_ms
        wants_sleep = self.ending or (
            self.state is InstanceState.ACTIVE
            and after_ms is not None
            and since_ms is not None
            and now_ms - since_ms >= after_ms
        )
        live = [each for each in self.sessions if each.live]
        running = sum(each.can_generate for each in live)
        return InstanceStatus(
            instance=self.base_uri,
            epoch=self.epoch,
            state=self.state,
            running=running,
            queued=len(live) - running,
            batch_size=self.limits.sessions,
            kv_utilization=round(self.pool.utilization, 6),
            prefill_tokens_per_s=self.rates.prefill.per_s,
            decode_tokens_per_s=self.rates.decode.per_s,
            ttl_ms=self.limits.status_ttl_ms,
            links=tuple(links),
            requested_state=InstanceState.SLEEPING if wants_sleep else None,
            mean_service_us=self.rates.service_us or costs.DEFAULT_MEAN_SERVICE_US,
            compat_ids=(self.descriptor.compat_id,),
        )

    def begin_epoch(self, epoch: int) -> list[Serving]:
        """Report anew under a higher epoch: the sessions that other instances have by now."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow {self.epoch}")
        self.epoch = epoch
        dropped = list(self.sessions)
        for serving in dropped:
            self.sessions.drop(serving, "the instance counted as failed")
        return dropped

    # --- requests --------------------------------------------------------------------

    def accept_prefetch(self, directive: PrefetchDirective, now_ms: int) -> Loading | None:
        """A directive; None for a repeated one.

        Raises Problem `kvsp-not-active`, `kvsp-incompatible`, and as `DirectiveTable.accept`.
        """
        self._check_active()
        self._check_compat(directive.compat_id)
        return self.directives.accept(directive, now_ms)

    def start_session(self, name: str, request: StartSession) -> Serving | None:
        """Begin a session; None for a repeated request.

        Raises Problem `kvsp-not-active`, `kvsp-incompatible`, and as `ServingTable.start`.
        """
        self._check_active()
        self._check_compat(request.compat_id)
        scope = self._scope(request.scope_id)
        return self.sessions.start(name, request, scope, keep_prompt=self.keep_prompts)

    def resume_session(self, request: Resume) -> Serving | None:
        """Take a session over; None for a repeated request.

        Raises Problem `kvsp-not-active`, `kvsp-incompatible`, and as `ServingTable.resume`.
        """
        known = self.sessions.find(request.checkpoint.session)
        if known is None or known.epoch != request.epoch:
            self._check_active()
        self._check_compat(request.checkpoint.compat_id)
        scope = self._scope(request.checkpoint.scope_id)
        return self.sessions.resume(request, scope, keep_prompt=self.keep_prompts)

    def accept_plan(self, plan: ReshardPlan, now_ms: int) -> Member:
        """A reshard plan. Raises Problem `kvsp-incompatible`, and as `ShardTable.plan`."""
        self._check_compat(plan.compat_id)
        if plan.block_tokens != self.descriptor.block_tokens:
            raise Problem(
                ProblemName.INCOMPATIBLE,
                f"blocks have {self.descriptor.block_tokens} tokens under this Compatibility ID",
            )
        return self.shards.plan(plan, now_ms)

    def _check_active(self) -> None:
        if self.state is not InstanceState.ACTIVE:
            raise Problem(
                ProblemName.NOT_ACTIVE,
                f"the instance is {self.state} and takes nothing new",
                state=self.state.value,
            )

    def _check_compat(self, compat_id: bytes) -> None:
        if compat_id != self.descriptor.compat_id:
            raise Problem(
                ProblemName.INCOMPATIBLE,
                f"this instance serves the Compatibility ID {self.descriptor.compat_id.hex()}",
            )

    def _scope(self, scope_id: bytes) -> Scope:
        scope = self.scopes.get(scope_id)
        if scope is None:
            raise Problem(
                ProblemName.FORBIDDEN,
                "this instance does not have the key of the scope and cannot serve it",
            )
        return scope
