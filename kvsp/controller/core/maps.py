"""Shard Maps and how they change (KVSP "Sequence-Sharded Caches and Resharding").

Version v is authoritative until every member has acknowledged the plan for v+1. That
moment is made durable before the first commit is sent, so a controller that restarts
goes on to commit what was decided and aborts everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsp.controller.core.effects import Done, Key, Ledger, Refused, Report, SendReshard
from kvsp.controller.core.instances import InstanceTable
from kvsp.controller.core.moves import MAP_MOVES, MapEvent, MapState
from kvsp.controller.core.planning import plan_members
from kvsp.names.codes import InstanceState, ReshardState
from kvsp.records.moves import move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.sharding import ReshardAbort, ReshardCommit, Shard, ShardMap

KIND = "map"


@dataclass(slots=True)
class MapEntry:
    """One map: `current` is authoritative, `target` is what is being prepared.

    `waiting` are the members whose answer to the running step is missing, `sent` the
    commands of that step.
    """

    current: ShardMap
    state: MapState = MapState.STABLE
    target: ShardMap | None = None
    version: int = 0
    """The version that the running step is about."""

    waiting: set[str] = field(default_factory=set)
    sent: dict[int, str] = field(default_factory=dict)

    def every_shard(self) -> tuple[Shard, ...]:
        """The shards of the current version and of the one being prepared."""
        return self.current.shards + (() if self.target is None else self.target.shards)


class MapTable:
    """Every Shard Map of the controller."""

    def __init__(self, ledger: Ledger, instances: InstanceTable) -> None:
        self._ledger = ledger
        self._instances = instances
        self._all: dict[str, MapEntry] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[MapEntry]:
        return iter(self._all.values())

    def find(self, name: str) -> MapEntry | None:
        return self._all.get(name)

    def get(self, name: str) -> MapEntry:
        """Raises Problem `kvsp-unknown-resource`."""
        entry = self._all.get(name)
        if entry is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "there is no shard map of this name")
        return entry

    def put(self, new: ShardMap, deadline_ms: int, now_ms: int) -> bool:
        """Create a map at any version, or begin to move one to its next; True when created.

        Raises Problem `kvsp-map-version` for another version than the next or while a
        change is under way, `kvsp-not-active` for members that cannot take part,
        `kvsp-invalid-request` for a map that is not of the same context.
        """
        entry = self._all.get(new.map)
        if entry is None:
            if len(self._all) >= self._ledger.limits.maps:
                raise Problem.http(503, "there are as many shard maps as may be", retry_after=10)
            self._need_active({shard.instance for shard in new.shards})
            self._all[new.map] = MapEntry(new)
            self._write(new.map)
            return True
        self._check_successor(entry, new)
        members = _members(new)
        for uri in _members(entry.current) - members:
            if not self._instances.is_live(uri):
                raise _not_active(uri, InstanceState.FAILED)
        self._need_active(members)
        self._plan(entry, new, deadline_ms, now_ms)
        return False

    def _check_successor(self, entry: MapEntry, new: ShardMap) -> None:
        current = entry.current
        if entry.state is not MapState.STABLE or new.version != current.version + 1:
            raise Problem(
                ProblemName.MAP_VERSION,
                f"the map is {entry.state} at version {current.version}; only the next version "
                "of a stable map can be planned",
                version=current.version,
            )
        same = (new.compat_id, new.scope_id, new.block_tokens) == (
            current.compat_id,
            current.scope_id,
            current.block_tokens,
        )
        kept = new.block_keys[: len(current.block_keys)] == current.block_keys
        if not same or not kept or new.shards[-1].tokens.stop < current.shards[-1].tokens.stop:
            raise Problem(
                ProblemName.INVALID_REQUEST,
                "the next version is of the same context, which only grows: same scope, "
                "Compatibility ID, block size and first block keys",
            )

    def _need_active(self, uris: Iterable[str]) -> None:
        for uri in sorted(uris):
            known = self._instances.get(uri)
            state = InstanceState.FAILED if known is None else known.state
            if state is not InstanceState.ACTIVE:
                raise _not_active(uri, state)

    def _plan(self, entry: MapEntry, new: ShardMap, deadline_ms: int, now_ms: int) -> None:
        entry.state = move(MAP_MOVES, entry.state, MapEvent.PLAN)
        entry.target, entry.version = new, new.version
        plans = plan_members(entry.current.shards, new.shards)
        entry.waiting = set(plans)
        entry.sent = {}
        for uri, plan in sorted(plans.items()):
            body = plan.to_record(entry.current, new, deadline_ms).to_dict()
            self._send(entry, uri, body, deadline_ms)
        self._ledger.timers.set(Key(KIND, new.map), now_ms + deadline_ms)
        self._write(new.map)

    def delete(self, name: str) -> None:
        """Forget a stable map. Raises Problem `kvsp-unknown-resource`, `kvsp-map-version`."""
        entry = self.get(name)
        if entry.state is not MapState.STABLE:
            raise Problem(
                ProblemName.MAP_VERSION,
                f"the map is {entry.state}; delete it when that has ended",
                version=entry.current.version,
            )
        del self._all[name]
        self._ledger.write(Key(KIND, name), None)

    # --- answers, deadlines, failures ------------------------------------------------

    def report(self, name: str, number: int, report: Report, now_ms: int) -> None:
        """A member's answer to a plan, a commit or an abort. One of an earlier step is void."""
        entry = self._all.get(name)
        uri = None if entry is None else entry.sent.pop(number, None)
        if entry is None or uri is None:
            return
        if entry.state is MapState.PREPARING:
            if _is(report, ReshardState.PREPARED, entry.version):
                self._acknowledged(entry, uri, now_ms)
            else:
                self._abort(entry, now_ms)
        elif entry.state in (MapState.COMMITTING, MapState.ABORTING):
            settled = isinstance(report, Done) or (
                isinstance(report, Refused) and report.name == ProblemName.MAP_VERSION
            )
            if isinstance(report, Refused) and entry.state is MapState.COMMITTING and settled:
                self._ledger.counters["commits_unknown_to_member"] += 1
            if settled:
                self._acknowledged(entry, uri, now_ms)

    def _acknowledged(self, entry: MapEntry, uri: str, now_ms: int) -> None:
        entry.waiting.discard(uri)
        self._advance(entry, now_ms)

    def _advance(self, entry: MapEntry, now_ms: int) -> None:
        """Go on when nobody is waited for."""
        if entry.waiting:
            return
        if entry.state is MapState.PREPARING:
            self._commit(entry, now_ms)
        elif entry.state is not MapState.STABLE:
            entry.state = move(MAP_MOVES, entry.state, MapEvent.ALL_TOLD)
            entry.target = None
            self._ledger.timers.cancel(Key(KIND, entry.current.map))
            self._write(entry.current.map)

    def _commit(self, entry: MapEntry, now_ms: int) -> None:
        assert entry.target is not None
        entry.state = move(MAP_MOVES, entry.state, MapEvent.ALL_PREPARED)
        members = _members(entry.current) | _members(entry.target)
        entry.current = entry.target
        self._ledger.counters["reshards_committed"] += 1
        self._tell(entry, members, now_ms)

    def _abort(self, entry: MapEntry, now_ms: int) -> None:
        assert entry.target is not None
        entry.state = move(MAP_MOVES, entry.state, MapEvent.FAIL)
        members = _members(entry.current) | _members(entry.target)
        self._ledger.counters["reshards_aborted"] += 1
        self._tell(entry, members, now_ms)

    def _tell(self, entry: MapEntry, members: set[str], now_ms: int) -> None:
        entry.waiting = {uri for uri in members if self._instances.is_live(uri)}
        self._write(entry.current.map)
        self._resend(entry, now_ms)
        self._advance(entry, now_ms)

    def _resend(self, entry: MapEntry, now_ms: int) -> None:
        name = entry.current.map
        body = (
            ReshardCommit(name, entry.version).to_dict()
            if entry.state is MapState.COMMITTING
            else ReshardAbort(name, entry.version).to_dict()
        )
        entry.sent = {}
        for uri in sorted(entry.waiting):
            self._send(entry, uri, body, self._ledger.limits.reshard_retry_ms)
        due_ms = now_ms + self._ledger.limits.reshard_retry_ms
        self._ledger.timers.set(Key(KIND, name), due_ms)

    def due(self, name: str, now_ms: int) -> None:
        """A deadline has come: abort a plan, or say a commit or an abort again."""
        entry = self._all.get(name)
        if entry is None:
            return
        if entry.state is MapState.PREPARING:
            self._abort(entry, now_ms)
        elif entry.state is not MapState.STABLE:
            self._resend(entry, now_ms)

    def instance_lost(self, uri: str, now_ms: int) -> None:
        """An instance failed or restarted: what it held of any map is gone."""
        for entry in list(self._all.values()):
            if entry.state is MapState.PREPARING:
                assert entry.target is not None
                if uri in _members(entry.current) | _members(entry.target):
                    self._abort(entry, now_ms)
            elif uri in entry.waiting:
                self._acknowledged(entry, uri, now_ms)

    def _send(self, entry: MapEntry, uri: str, body: Mapping[str, Any], timeout_ms: int) -> None:
        key = Key(KIND, entry.current.map)
        command = self._ledger.send(
            key, SendReshard, instance=uri, timeout_ms=timeout_ms, body=body
        )
        entry.sent[command.number] = uri

    # --- durability ------------------------------------------------------------------

    def _write(self, name: str) -> None:
        entry = self._all[name]
        document = {
            "current": entry.current.to_dict(),
            "target": entry.target and entry.target.to_dict(),
            "state": entry.state,
            "version": entry.version,
            "waiting": sorted(entry.waiting),
        }
        self._ledger.write(Key(KIND, name), document)

    def restore(self, name: str, document: Mapping[str, Any], now_ms: int) -> None:
        """Take back what was durable; an undecided plan is aborted."""
        loopback = self._ledger.limits.http_loopback
        target = document["target"]
        entry = MapEntry(
            ShardMap.from_json(document["current"], http_loopback=loopback),
            MapState(document["state"]),
            target and ShardMap.from_json(target, http_loopback=loopback),
            document["version"],
            set(document["waiting"]),
        )
        self._all[name] = entry
        if entry.state is MapState.PREPARING:
            self._abort(entry, now_ms)
        elif entry.state is not MapState.STABLE:
            self._resend(entry, now_ms)


def _members(shard_map: ShardMap) -> set[str]:
    return {shard.instance for shard in shard_map.shards}


def _is(report: Report, state: ReshardState, version: int) -> bool:
    return (
        isinstance(report, Done)
        and report.body.get("state") == state
        and report.body.get("version") == version
    )


def _not_active(uri: str, state: InstanceState) -> Problem:
    return Problem(
        ProblemName.NOT_ACTIVE,
        f"{uri} is {state} and cannot take part in a shard map",
        state=state.value,
    )
