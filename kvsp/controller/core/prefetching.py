"""Prefetch directives that are under way (KVSP "Prefetch Directives")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsp.controller.core.effects import Done, Key, Ledger, ReadPrefetch, Report, SendPrefetch
from kvsp.controller.core.requests import PlaceRequest
from kvsp.names.codes import NAMESPACE_FRAGMENT, DirectiveState
from kvsp.records import costs
from kvsp.records.estimates import Found
from kvsp.records.records import DirectiveBlock, InstanceStatus, PrefetchDirective, ReplicaRecord

KIND = "directive"
_READ_AFTER_MS = 100
"""How long after its deadline a directive is asked how far it came."""


@dataclass(slots=True)
class Directive:
    """A directive that was sent. `accepted` tells that the instance answered 202."""

    instance: str
    deadline_ms: int
    command: int
    accepted: bool = False


class DirectiveTable:
    """Directives by identifier, a bounded number per instance; none is durable."""

    def __init__(self, ledger: Ledger, new_id: Callable[[], str]) -> None:
        self._ledger = ledger
        self._new_id = new_id
        self._all: dict[str, Directive] = {}
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def send(
        self, status: InstanceStatus, request: PlaceRequest, found: Found, now_ms: int
    ) -> str | None:
        """Send an active instance the blocks it does not hold yet; the directive's identifier.

        None when nothing is to be loaded or the instance has as many directives as it may.
        """
        limits = self._ledger.limits
        blocks = _blocks_to_load(status, found)
        if not blocks:
            return None
        instance = status.instance
        if self._at.get(instance, 0) >= limits.directives_per_instance:
            self._ledger.counters["directives_over_limit"] += 1
            return None
        name = self._new_id()
        directive = PrefetchDirective(
            directive=name,
            scope_id=request.scope_id,
            compat_id=request.compat_id,
            blocks=tuple(blocks),
            deadline_ms=request.deadline_ms or limits.prefetch_deadline_ms,
            lease_ms=request.lease_ms or limits.prefetch_lease_ms,
            request_ref=request.request_ref,
        )
        key = Key(KIND, name)
        command = self._ledger.send(
            key,
            SendPrefetch,
            instance=instance,
            timeout_ms=limits.command_ms,
            directive=directive.to_dict(),
        )
        self._all[name] = Directive(instance, directive.deadline_ms, command.number)
        self._at[instance] = self._at.get(instance, 0) + 1
        self._ledger.counters["directives_sent"] += 1
        self._ledger.timers.set(key, now_ms + limits.command_ms + directive.deadline_ms)
        return name

    def report(self, name: str, number: int, report: Report, now_ms: int) -> None:
        """The answer to a directive, or its state after the deadline."""
        directive = self._all.get(name)
        if directive is None or directive.command != number:
            return
        if directive.accepted or not isinstance(report, Done):
            state = report.body.get("state") if isinstance(report, Done) else None
            self._finish(name, state if state in set(DirectiveState) else None)
            return
        directive.accepted, directive.command = True, 0
        due_ms = now_ms + directive.deadline_ms + _READ_AFTER_MS
        self._ledger.timers.set(Key(KIND, name), due_ms)

    def due(self, name: str, now_ms: int) -> None:
        """Ask how far a directive came, or stop waiting for an answer."""
        directive = self._all.get(name)
        if directive is None:
            return
        if not directive.accepted or directive.command:
            self._ledger.settle(directive.command)
            self._finish(name, None)
            return
        timeout_ms = self._ledger.limits.command_ms
        key = Key(KIND, name)
        command = self._ledger.send(
            key,
            ReadPrefetch,
            instance=directive.instance,
            timeout_ms=timeout_ms,
            directive=name,
        )
        directive.command = command.number
        self._ledger.timers.set(key, now_ms + timeout_ms)

    def _finish(self, name: str, state: str | None) -> None:
        directive = self._all.pop(name)
        self._at[directive.instance] -= 1
        if not self._at[directive.instance]:
            del self._at[directive.instance]
        self._ledger.timers.cancel(Key(KIND, name))
        self._ledger.counters[f"directives_{state or 'unanswered'}"] += 1

    def instance_lost(self, instance: str) -> None:
        """Nothing of a failed or restarted instance is waited for."""
        for name in [n for n, known in self._all.items() if known.instance == instance]:
            self._ledger.settle(self._all[name].command)
            self._finish(name, None)


def _blocks_to_load(status: InstanceStatus, found: Found) -> list[DirectiveBlock]:
    """The blocks the instance does not hold whole, each with its sources, the best first."""
    layers = range(found.layers)
    absent = []
    for replicas in found.blocks:
        whole = [replica for replica in replicas if replica.holds(layers, found.layers)]
        if whole and all(replica.holder != status.instance for replica in whole):
            absent.append(whole)
    links = {link.holder: link for link in status.links}
    best = costs.assign_sources(absent, links, found.layers)
    blocks = []
    for place, replicas in enumerate(absent):
        ordered = replicas if best is None else [best[place], *replicas]
        sources = tuple(dict.fromkeys(_source(replica) for replica in ordered))
        blocks.append(DirectiveBlock(replicas[0].block_key, sources))
    return blocks


def _source(replica: ReplicaRecord) -> str:
    """How a directive names the replica's holder."""
    if replica.moqt_namespace is None:
        return replica.holder
    return f"{replica.holder}#{NAMESPACE_FRAGMENT}{replica.moqt_namespace}"
