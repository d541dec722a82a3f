"""The controller under random crashes, losses, repetitions and reordering.

Instances are modelled as the draft wants them: they obey epochs, hold what they fetched,
and know nothing of each other. Whatever happens, the rules that keep a session's output
single and a shard map consistent hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import (
    Command,
    Done,
    FindReplicas,
    Key,
    Refused,
    SendReshard,
    SendResume,
    SendState,
    Unreachable,
)
from kvsp.controller.core.limits import ControllerLimits
from kvsp.controller.core.moves import MapState
from kvsp.names.codes import InstanceState
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import SessionCheckpoint
from kvsp.records.sharding import ReshardAbort, ReshardCommit, ReshardPlan, parse_reshard
from tests.kvsp.controller.support import SESSION, A, B, C, checkpoint, instance, shard_map, status

URIS = (A, B, C)
LIMITS = ControllerLimits(
    recovery_ms=1000, resume_ms=700, lookup_ms=300, retry_ms=200, give_up_ms=10**9, min_active=0
)


@dataclass
class Engine:
    """An inference instance: what it serves by which epoch, and its shard maps."""

    epoch: int = 1
    state: InstanceState = InstanceState.ACTIVE
    up: bool = True
    sessions: dict[str, int] = field(default_factory=dict)
    map_version: int | None = None
    prepared: ReshardPlan | None = None
    holds: set[int] = field(default_factory=set)

    def restart(self) -> None:
        self.epoch += 1
        self.state, self.up = InstanceState.ACTIVE, True
        self.sessions.clear()
        self.map_version, self.prepared = None, None
        self.holds.clear()


class ControllerMachine(RuleBasedStateMachine):
    """Rules are what may happen next; `in_flight` holds what the network still carries."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.documents: dict[Key, bytes] = {}
        self.engines = {uri: Engine() for uri in URIS}
        self.in_flight: list[Command] = []
        self.answers: list[tuple[int, Any]] = []
        self.old_checkpoints: list[tuple[str, SessionCheckpoint]] = []
        self.acknowledged: tuple[int, ...] = ()
        self.epoch_seen = 0
        self.versions: list[int] = []
        self.core = Controller(LIMITS)

    # --- the shell -------------------------------------------------------------------

    def call(self, function: Any, *values: Any) -> Any:
        """One call with its effects, in the order the shell keeps."""
        try:
            return function(*values)
        finally:
            effects = self.core.take()
            for key, text in effects.writes.items():
                if text is None:
                    self.documents.pop(key, None)
                else:
                    self.documents[key] = text
            self.in_flight += effects.commands

    @initialize()
    def instances_report(self) -> None:
        for uri in URIS:
            self.report_status(uri)
        self.call(self.core.put_map, shard_map(1, (64, A), (128, B)), 400, self.now)
        for uri, tokens in ((A, range(64)), (B, range(64, 128))):
            self.engines[uri].map_version = 1
            self.engines[uri].holds = set(tokens)
        self.call(self.core.checkpoint, instance(A), checkpoint(1), self.now)
        self.engines[A].sessions[SESSION] = 1
        self.acknowledged = checkpoint(1).generated

    # --- what may happen -------------------------------------------------------------

    @rule(uri=st.sampled_from(URIS))
    def report_status(self, uri: str) -> None:
        engine = self.engines[uri]
        if not engine.up:
            return
        made = status(uri, epoch=engine.epoch, state=engine.state, ttl_ms=1000)
        try:
            engine.state = self.call(self.core.take_status, made, self.now)
        except Problem as problem:
            assert problem.name in (ProblemName.STALE_EPOCH, ProblemName.INSTANCE_FAILED)
            engine.restart()

    @rule(uri=st.sampled_from(URIS), lower=st.integers(1, 2))
    def a_late_status_of_an_old_epoch_arrives(self, uri: str, lower: int) -> None:
        known = self.core.instances.get(uri)
        if known is None or known.status.epoch - lower < 0:
            return
        late = status(uri, epoch=known.status.epoch - lower)
        try:
            self.call(self.core.take_status, late, self.now)
        except Problem as problem:
            assert problem.name is ProblemName.STALE_EPOCH
        else:
            raise AssertionError("a record of a lower epoch was not discarded")

    @rule(uri=st.sampled_from(URIS))
    def an_instance_crashes(self, uri: str) -> None:
        self.engines[uri].up = False

    @rule(uri=st.sampled_from(URIS))
    def an_instance_restarts(self, uri: str) -> None:
        self.engines[uri].restart()

    @rule(ms=st.integers(1, 900), silent=st.sampled_from((*URIS, "", "", "")))
    def time_passes(self, ms: int, silent: str) -> None:
        """Instances that are up report, but for one perhaps."""
        self.now += ms
        for uri in URIS:
            if uri != silent:
                self.report_status(uri)
        self.call(self.core.tick, self.now)

    @rule(silent=st.sampled_from(URIS))
    def an_instance_is_not_heard_for_long(self, silent: str) -> None:
        self.time_passes(900, silent)
        self.time_passes(900, silent)

    @rule(before_write=st.booleans())
    def the_controller_crashes(self, before_write: bool) -> None:
        if not before_write:
            self.call(self.core.tick, self.now)
        self.core = Controller(LIMITS)
        self.answers.clear()
        if not self.documents:
            return
        documents = [(key, msgspec.json.decode(text)) for key, text in self.documents.items()]
        self.call(self.core.restore, documents, self.now)

    @rule(
        uri=st.sampled_from(URIS),
        state=st.sampled_from([InstanceState.ACTIVE, InstanceState.DRAINING]),
    )
    def the_operator_sets_a_state(self, uri: str, state: InstanceState) -> None:
        try:
            self.call(self.core.set_state, uri, state)
        except Problem as problem:
            assert problem.name in (ProblemName.INVALID_TRANSITION, ProblemName.UNKNOWN_RESOURCE)

    @rule(cut=st.sampled_from([16, 48, 64, 96, 128]), first=st.permutations(URIS))
    def a_reshard_is_asked_for(self, cut: int, first: list[str]) -> None:
        version = self.core.maps.get("m").current.version + 1
        ends = [(cut, first[0]), (128, first[1])] if cut < 128 else [(128, first[0])]
        try:
            self.call(self.core.put_map, shard_map(version, *ends), 400, self.now)
        except Problem as problem:
            assert problem.name in (ProblemName.MAP_VERSION, ProblemName.NOT_ACTIVE)

    @rule(uri=st.sampled_from(URIS), more=st.integers(0, 3), hurry=st.booleans())
    def an_instance_checkpoints(self, uri: str, more: int, hurry: bool) -> None:
        epoch = self.engines[uri].sessions.get(SESSION)
        if epoch is None:
            return
        made = checkpoint(len(self.acknowledged) + more, epoch=epoch)
        self.old_checkpoints.append((uri, made))
        if hurry:
            self.deliver_checkpoint(uri, made)

    @precondition(lambda self: self.old_checkpoints)
    @rule(data=st.data(), again=st.booleans())
    def a_checkpoint_arrives_late_or_again(self, data: st.DataObject, again: bool) -> None:
        place = data.draw(st.integers(0, len(self.old_checkpoints) - 1))
        uri, made = self.old_checkpoints[place] if again else self.old_checkpoints.pop(place)
        self.deliver_checkpoint(uri, made)

    def deliver_checkpoint(self, uri: str, made: SessionCheckpoint) -> None:
        session = self.core.sessions.get(SESSION)
        was = session.epoch
        try:
            answer = self.call(self.core.checkpoint, instance(uri), made, self.now)
        except Problem as problem:
            assert problem.name in (
                ProblemName.STALE_EPOCH,
                ProblemName.UNKNOWN_EPOCH,
                ProblemName.FORBIDDEN,
            )
            assert (problem.name is ProblemName.STALE_EPOCH) == (made.epoch < was)
            if problem.name is ProblemName.STALE_EPOCH:
                engine = self.engines[uri]
                if engine.sessions.get(SESSION) == made.epoch:
                    del engine.sessions[SESSION]
            return
        assert made.epoch == was, "a checkpoint of an old epoch was accepted"
        assert session.instance == uri, "another instance's checkpoint was accepted"
        assert self.core.instances.is_live(uri), "a failed instance's checkpoint was accepted"
        assert answer.output_offset >= len(self.acknowledged)
        self.acknowledged = checkpoint(answer.output_offset).generated

    # --- the network -----------------------------------------------------------------

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), fate=st.sampled_from(["", "", "", "again", "late", "lost"]))
    def a_command_arrives(self, data: st.DataObject, fate: str) -> None:
        """In any order; perhaps twice; perhaps its answer is late or lost."""
        place = data.draw(st.integers(0, len(self.in_flight) - 1))
        command = self.in_flight[place]
        if fate != "again":
            del self.in_flight[place]
        answer = self.carry_out(command)
        if fate == "lost":
            answer = Unreachable()
        if fate == "late":
            self.answers.append((command.number, answer))
        else:
            self.deliver_answer(command.number, answer)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def everything_arrives(self, data: st.DataObject) -> None:
        for _ in range(len(self.in_flight)):
            self.a_command_arrives(data, "")

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_command_is_lost(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.in_flight) - 1))
        self.answers.append((self.in_flight.pop(place).number, Unreachable()))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), again=st.booleans())
    def an_answer_arrives(self, data: st.DataObject, again: bool) -> None:
        place = data.draw(st.integers(0, len(self.answers) - 1))
        self.deliver_answer(*(self.answers[place] if again else self.answers.pop(place)))

    def deliver_answer(self, number: int, answer: Any) -> None:
        before = self.core.maps.get("m")
        unsettled = before.state is MapState.PREPARING and len(before.waiting)
        version = before.current.version
        self.call(self.core.report, number, answer, self.now)
        if unsettled and unsettled > 1:
            message = "version v gave way before all members had acknowledged"
            assert self.core.maps.get("m").current.version == version, message

    def carry_out(self, command: Command) -> Any:
        if isinstance(command, FindReplicas):
            return Found()
        engine = self.engines.get(command.instance)
        if engine is None or not engine.up:
            return Unreachable()
        if isinstance(command, SendState):
            engine.state = command.state
            return Done()
        if isinstance(command, SendResume):
            return self.resume(engine, command.body)
        if isinstance(command, SendReshard):
            return self.reshard(engine, command.body)
        return Done()

    def resume(self, engine: Engine, body: Mapping[str, Any]) -> Any:
        if engine.state is not InstanceState.ACTIVE:
            return Refused("kvsp-not-active")
        if body["epoch"] < engine.sessions.get(SESSION, 0):
            return Refused("kvsp-stale-epoch")
        kept = tuple(body["checkpoint"]["generated"])
        if body["epoch"] == engine.sessions.get(SESSION):
            # a resume that comes again, late: the session is served in that epoch already
            return Done({"session": SESSION, "epoch": body["epoch"], "output_offset": len(kept)})
        assert self.acknowledged == kept or body["epoch"] < self.core.sessions.get(SESSION).epoch
        engine.sessions[SESSION] = body["epoch"]
        return Done({"session": SESSION, "epoch": body["epoch"], "output_offset": len(kept)})

    def reshard(self, engine: Engine, body: Mapping[str, Any]) -> Any:
        request = parse_reshard(dict(body))
        if isinstance(request, ReshardPlan):
            if engine.map_version not in (None, request.from_version):
                return Refused("kvsp-map-version")
            for part in request.fetch:
                assert not any(set(part.tokens) & set(kept) for kept in request.retain), (
                    "a retained range was fetched"
                )
            engine.prepared = request
            return Done({"map": "m", "version": request.to_version, "state": "prepared"})
        plan = engine.prepared
        if isinstance(request, ReshardCommit):
            if plan is None or plan.to_version != request.commit:
                known = engine.map_version == request.commit
                return Done() if known else Refused("kvsp-map-version")
            engine.map_version, engine.prepared = request.commit, None
            return Done({"map": "m", "version": request.commit, "state": "committed"})
        assert isinstance(request, ReshardAbort)
        if plan is not None and plan.to_version == request.abort:
            engine.prepared = None
        return Done({"map": "m", "version": request.abort, "state": "aborted"})

    # --- what always holds -----------------------------------------------------------

    @invariant()
    def one_live_epoch_per_session(self) -> None:
        session = self.core.sessions.find(SESSION)
        if session is None:
            return
        assert session.epoch >= self.epoch_seen, "a session's epoch went back"
        self.epoch_seen = session.epoch
        holders = [
            uri
            for uri, engine in self.engines.items()
            if engine.sessions.get(SESSION) == session.epoch
        ]
        assert len(holders) <= 1, "two instances have the current epoch"
        assert all(
            engine.sessions.get(SESSION, 0) <= session.epoch for engine in self.engines.values()
        )

    @invariant()
    def acknowledged_output_is_never_forgotten(self) -> None:
        session = self.core.sessions.find(SESSION)
        if session is not None and self.acknowledged:
            recorded = self.core.sessions.recorded(SESSION)
            assert recorded.generated[: len(self.acknowledged)] == self.acknowledged

    @invariant()
    def what_is_acted_on_is_durable(self) -> None:
        session = self.core.sessions.find(SESSION)
        if session is not None:
            document = msgspec.json.decode(self.documents[Key("session", SESSION)])
            assert document["epoch"] == session.epoch
            assert document["instance"] == session.instance

    @invariant()
    def a_map_never_goes_back_and_no_member_is_ahead_of_it(self) -> None:
        if not len(self.core.maps):
            return
        version = self.core.maps.get("m").current.version
        self.versions.append(version)
        assert self.versions[-2:] == sorted(self.versions[-2:])
        for engine in self.engines.values():
            assert engine.map_version is None or engine.map_version <= version

    @invariant()
    def everything_awaited_has_a_deadline(self) -> None:
        ledger = self.core.ledger
        if self.core.sessions.find(SESSION) and self.core.sessions.get(SESSION).command:
            assert Key("session", SESSION) in ledger.timers
        if len(self.core.maps) and self.core.maps.get("m").state is not MapState.STABLE:
            assert Key("map", "m") in ledger.timers


TestController = ControllerMachine.TestCase
TestController.settings = settings(
    max_examples=75,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
