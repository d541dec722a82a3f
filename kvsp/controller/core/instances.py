"""What the controller knows of instances (KVSP "Instance Status and Lifecycle")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvsp.controller.core.effects import Key, Ledger, SendState
from kvsp.controller.core.moves import INSTANCE_MOVES, InstanceEvent
from kvsp.names.codes import InstanceState
from kvsp.names.uris import instance_id
from kvsp.records.estimates import Candidate
from kvsp.records.moves import IllegalMove, move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import InstanceStatus

KIND = "instance"
_SMOOTHING = 0.2


@dataclass(slots=True)
class Instance:
    """One instance. `wanted` is what the controller wants, `status` what was reported."""

    status: InstanceStatus
    wanted: InstanceState
    expires_ms: int
    observed_service_us: float | None = None

    @property
    def state(self) -> InstanceState:
        """The state that counts: nothing new goes to an instance that is not active.

        Active needs both sides: the controller wants it and the instance reported it.
        """
        if self.wanted is InstanceState.FAILED:
            return InstanceState.FAILED
        if self.status.state is InstanceState.ACTIVE is not self.wanted:
            return InstanceState.DRAINING
        return self.status.state

    def observe_service(self, service_us: float) -> None:
        """Take one served session into the moving average."""
        before = self.observed_service_us
        mixed = service_us if before is None else before + _SMOOTHING * (service_us - before)
        self.observed_service_us = mixed

    def to_record(self) -> InstanceStatus:
        """The status record with the controller's state in it."""
        return replace(self.status, state=self.state)


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """`state` answers the instance; `lost` tells that an earlier epoch of it ended."""

    state: InstanceState
    lost: bool


class InstanceTable:
    """Every known instance, by base URI. An entry that failed keeps the epoch it failed in."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._all: dict[str, Instance] = {}
        self._uris: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._all.values())

    def get(self, uri: str) -> Instance | None:
        return self._all.get(uri)

    def uri_of(self, name: str) -> str | None:
        """The base URI of a known instance by its resource identifier."""
        uri = self._uris.get(name)
        return uri if uri in self._all else None

    def is_live(self, uri: str) -> bool:
        """Whether it reports and has not failed."""
        known = self._all.get(uri)
        return known is not None and known.state is not InstanceState.FAILED

    def epoch_of(self, uri: str) -> int:
        """The epoch of a known instance, -1 of another."""
        known = self._all.get(uri)
        return -1 if known is None else known.status.epoch

    def candidates(self, compat_id: bytes) -> list[Candidate]:
        """The active instances that serve a Compatibility ID."""
        return [
            Candidate(known.status, self._mean_service(known))
            for known in self._all.values()
            if known.state is InstanceState.ACTIVE and _serves(known.status, compat_id)
        ]

    def _mean_service(self, known: Instance) -> float:
        for value in (known.status.mean_service_us, known.observed_service_us):
            if value is not None:
                return value
        return self._ledger.limits.mean_service_us

    def take_status(self, status: InstanceStatus, now_ms: int) -> StatusAnswer:
        """Take an Instance Status Record.

        Raises Problem `kvsp-stale-epoch` for a lower epoch than the highest seen,
        `kvsp-instance-failed` for the epoch in which the instance failed, 503 when the
        table is full.
        """
        known = self._all.get(status.instance)
        if known is None or status.epoch > known.status.epoch:
            if known is None:
                self._make_room()
            lost = known is not None and known.state is not InstanceState.FAILED
            self._enter(status, now_ms)
            return StatusAnswer(self._all[status.instance].wanted, lost)
        if status.epoch < known.status.epoch:
            raise Problem(
                ProblemName.STALE_EPOCH,
                f"epoch {known.status.epoch} of this instance was seen already",
                epoch=known.status.epoch,
            )
        if known.state is InstanceState.FAILED:
            raise Problem(
                ProblemName.INSTANCE_FAILED,
                "the status expired and the instance counts as failed; drop its sessions and "
                "report with a higher epoch",
                epoch=status.epoch,
            )
        return self._refresh(known, status, now_ms)

    def _enter(self, status: InstanceStatus, now_ms: int) -> None:
        fresh = Instance(status, status.state, 0)
        # at the end of the table, so that the oldest entries come first
        self._all.pop(status.instance, None)
        self._all[status.instance] = fresh
        self._uris[instance_id(status.instance)] = status.instance
        self._renew(fresh, now_ms)
        self._write(fresh)

    def _refresh(self, known: Instance, status: InstanceStatus, now_ms: int) -> StatusAnswer:
        before = known.status.state, known.wanted
        known.status = status
        if status.state is InstanceState.FAILED:
            self.fail(status.instance)
            return StatusAnswer(InstanceState.FAILED, lost=True)
        if status.state is InstanceState.SLEEPING and known.wanted is InstanceState.DRAINING:
            known.wanted = move(INSTANCE_MOVES, known.wanted, InstanceEvent.SLEPT)
        elif self._may_sleep(known):
            known.wanted = move(INSTANCE_MOVES, known.wanted, InstanceEvent.DRAIN)
        self._renew(known, now_ms)
        if before != (status.state, known.wanted):
            self._write(known)
        return StatusAnswer(known.wanted, lost=False)

    def _may_sleep(self, known: Instance) -> bool:
        """Whether a wish to sleep is granted: enough of its kind stay active."""
        if known.status.requested_state is not InstanceState.SLEEPING:
            return False
        if known.state is not InstanceState.ACTIVE:
            return False
        others = sum(
            other.state is InstanceState.ACTIVE
            and other.status.compat_ids == known.status.compat_ids
            for other in self._all.values()
            if other is not known
        )
        return others >= self._ledger.limits.min_active

    def _renew(self, known: Instance, now_ms: int) -> None:
        if known.status.state is InstanceState.FAILED:
            known.wanted = InstanceState.FAILED
            return
        limits = self._ledger.limits
        ttl_ms = max(known.status.ttl_ms, limits.min_status_ttl_ms)
        known.expires_ms = now_ms + min(ttl_ms, limits.max_status_ttl_ms)
        self._ledger.timers.set(Key(KIND, known.status.instance), known.expires_ms)

    def fail(self, uri: str) -> None:
        """The instance failed: its record expired, or it said so."""
        known = self._all[uri]
        if known.wanted is not InstanceState.FAILED:
            known.wanted = move(INSTANCE_MOVES, known.wanted, InstanceEvent.FAIL)
            self._ledger.counters["instances_failed"] += 1
        self._ledger.timers.cancel(Key(KIND, uri))
        self._write(known)

    def set_state(self, uri: str, state: InstanceState) -> InstanceState:
        """Have an instance drain or become active; it is told at once.

        Raises Problem `kvsp-unknown-resource`, `kvsp-invalid-transition`.
        """
        known = self._all.get(uri)
        if known is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "no such instance has reported")
        events = {
            InstanceState.ACTIVE: InstanceEvent.ACTIVATE,
            InstanceState.DRAINING: InstanceEvent.DRAIN,
        }
        try:
            if state not in events:
                raise IllegalMove("only the states active and draining can be set")
            known.wanted = move(INSTANCE_MOVES, known.wanted, events[state])
        except IllegalMove as error:
            raise Problem(
                ProblemName.INVALID_TRANSITION, str(error), state=known.state.value
            ) from None
        self._write(known)
        self._ledger.send(
            Key(KIND, uri),
            SendState,
            instance=uri,
            timeout_ms=self._ledger.limits.command_ms,
            state=state,
        )
        return known.wanted

    def wake_one(self, compat_id: bytes) -> str | None:
        """Wake a sleeping instance that serves a Compatibility ID, the lowest URI first."""
        asleep = sorted(
            uri
            for uri, known in self._all.items()
            if known.wanted is InstanceState.SLEEPING and _serves(known.status, compat_id)
        )
        if not asleep:
            return None
        self.set_state(asleep[0], InstanceState.ACTIVE)
        return asleep[0]

    def _make_room(self) -> None:
        if len(self._all) < self._ledger.limits.instances:
            return
        for uri, known in self._all.items():
            if known.state is InstanceState.FAILED:
                del self._all[uri]
                del self._uris[instance_id(uri)]
                self._ledger.write(Key(KIND, uri), None)
                return
        raise Problem.http(503, "the controller knows as many instances as it may", retry_after=10)

    def _write(self, known: Instance) -> None:
        document = {"wanted": known.wanted, "status": known.status.to_dict()}
        self._ledger.write(Key(KIND, known.status.instance), document)

    def restore(self, uri: str, document: Mapping[str, Any], now_ms: int) -> None:
        """Take back what was durable; the instance gets time to report."""
        status = InstanceStatus.from_json(
            document["status"], http_loopback=self._ledger.limits.http_loopback
        )
        known = Instance(status, InstanceState(document["wanted"]), 0)
        self._all[uri] = known
        self._uris[instance_id(uri)] = uri
        if known.wanted is not InstanceState.FAILED:
            grace_ms = max(status.ttl_ms, self._ledger.limits.recovery_ms)
            known.expires_ms = now_ms + grace_ms
            self._ledger.timers.set(Key(KIND, uri), known.expires_ms)


def _serves(status: InstanceStatus, compat_id: bytes) -> bool:
    # an instance that does not say what it serves is asked, and can refuse
    return status.compat_ids is None or compat_id in status.compat_ids
