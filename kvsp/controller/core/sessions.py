"""Sessions, their checkpoints and their moves to other instances
(KVSP "Session Checkpoints and Migration").

A session is fenced the moment its instance is lost: its epoch rises at once, whether or
not another instance can take it, so that nothing from the lost instance is accepted any
more. Every attempt to resume has an epoch of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsp.controller.core.effects import Done, FindReplicas, Key, Ledger, Report, SendResume
from kvsp.controller.core.instances import InstanceTable
from kvsp.controller.core.moves import SESSION_MOVES, SessionEvent, SessionState
from kvsp.controller.core.recorded import OUTPUT, PROMPT, Recorded, restored
from kvsp.records.estimates import Choice, Demand, Found
from kvsp.records.moves import move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import CheckpointDelta, Resume, SessionCheckpoint, SessionProgress

KIND = "session"
FIRST_EPOCH = 1
_OVER = (SessionState.FINISHED, SessionState.LOST)

Choose = Callable[[bytes, Demand, frozenset[str]], Choice | None]
"""Chooses an instance for a Compatibility ID and a demand, some instances left out."""


@dataclass(slots=True)
class Session:
    """One session. `instance` is the base URI it is assigned to, empty for none.

    `checkpoint` is the recorded one: it holds token ids, which are not to be shown.
    """

    epoch: int
    instance: str
    instance_epoch: int
    compat_id: bytes
    scope_id: bytes
    started_ms: int
    state: SessionState = SessionState.RUNNING
    checkpoint: Recorded | None = field(default=None, repr=False)
    waiting_since_ms: int = 0
    command: int = 0
    """The lookup or resume whose report is awaited."""

    tried: set[str] = field(default_factory=set)

    @property
    def output_offset(self) -> int:
        """Output tokens that the recorded checkpoint covers."""
        return 0 if self.checkpoint is None else self.checkpoint.output_offset


class SessionTable:
    """Every session of the controller, by its UUID."""

    def __init__(self, ledger: Ledger, instances: InstanceTable, choose: Choose) -> None:
        self._ledger = ledger
        self._instances = instances
        self._choose = choose
        self._all: dict[str, Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._by_instance: dict[str, set[str]] = {}
        self.checkpoint_octets = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[tuple[str, Session]]:
        return iter(self._all.items())

    def find(self, name: str) -> Session | None:
        return self._all.get(name)

    def get(self, name: str) -> Session:
        """Raises Problem `kvsp-unknown-resource`."""
        session = self._all.get(name)
        if session is None:
            raise _unknown()
        return session

    def at(self, instance: str) -> int:
        """How many sessions are assigned to an instance."""
        return len(self._by_instance.get(instance, ()))

    def recorded(self, name: str) -> SessionCheckpoint:
        """The recorded checkpoint. Raises Problem `kvsp-unknown-resource`."""
        session = self.get(name)
        if session.checkpoint is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "the session has no checkpoint")
        return session.checkpoint.checkpoint()

    # --- creation and end ------------------------------------------------------------

    def assign(
        self, name: str, instance: str, compat_id: bytes, scope_id: bytes, now_ms: int
    ) -> int:
        """Assign a new session to an instance; its epoch.

        A session that is over, or has no checkpoint yet, starts again in a higher epoch.
        Raises Problem `kvsp-checkpoint-conflict` for any other known session, 503 when the
        table is full.
        """
        known = self._all.get(name)
        epoch = FIRST_EPOCH
        if known is not None:
            if known.state not in _OVER and known.checkpoint is not None:
                raise Problem(
                    ProblemName.CHECKPOINT_CONFLICT,
                    "the session is under way; DELETE it first or choose another identifier",
                )
            epoch = known.epoch + 1
            self._forget(name)
        self._make_room()
        started = Session(
            epoch, instance, self._instances.epoch_of(instance), compat_id, scope_id, now_ms
        )
        self._all[name] = started
        self._by_instance.setdefault(instance, set()).add(name)
        self._write(name)
        return epoch

    def _make_room(self) -> None:
        while len(self._all) >= self._ledger.limits.sessions and self._over:
            oldest = next(iter(self._over))
            self._forget(oldest)
            self._ledger.write(Key(KIND, oldest), None)
        if len(self._all) >= self._ledger.limits.sessions:
            raise Problem.http(503, "as many sessions as may be are under way", retry_after=1)

    def _forget(self, name: str) -> None:
        session = self._all.pop(name)
        self._over.pop(name, None)
        self._leave(name, session)

    def end(self, name: str, now_ms: int) -> None:
        """The session is over. Raises Problem `kvsp-unknown-resource`."""
        session = self.get(name)
        if session.state is SessionState.FINISHED:
            raise _unknown()
        known = self._instances.get(session.instance)
        if known is not None and session.state is SessionState.RUNNING:
            known.observe_service(1000.0 * (now_ms - session.started_ms))
        session.state = move(SESSION_MOVES, session.state, SessionEvent.END)
        self._close(name, session)

    def _close(self, name: str, session: Session) -> None:
        """Keep only what tells that the session is over."""
        self._leave(name, session)
        if session.checkpoint is not None:
            for key in session.checkpoint.keys(name):
                self._ledger.write(key, None)
            self._keep(session, None)
        session.tried.clear()
        self._await(name, session, 0, None)
        self._over[name] = None
        self._over.move_to_end(name)
        self._write(name)

    # --- checkpoints -----------------------------------------------------------------

    def check(self, name: str, epoch: int) -> Session | None:
        """The session a checkpoint of that epoch is for, None for one it would create.

        Raises Problem `kvsp-stale-epoch`, `kvsp-unknown-epoch`, `kvsp-unknown-resource`
        for a session that is over.
        """
        session = self._all.get(name)
        if session is None:
            if epoch < FIRST_EPOCH:
                raise _stale(FIRST_EPOCH)
            if epoch > FIRST_EPOCH:
                raise Problem(
                    ProblemName.UNKNOWN_EPOCH,
                    f"the session is not known here; a new one starts in epoch {FIRST_EPOCH}",
                    epoch=FIRST_EPOCH,
                )
            return None
        if epoch < session.epoch:
            raise _stale(session.epoch)
        if epoch > session.epoch or session.state is SessionState.WAITING:
            raise Problem(
                ProblemName.UNKNOWN_EPOCH,
                f"epoch {epoch} of the session was given to no instance yet",
                epoch=session.epoch,
            )
        if session.state in _OVER:
            raise _unknown()
        return session

    def record(self, checkpoint: SessionCheckpoint) -> SessionProgress:
        """Record a checkpoint of the current epoch when it reaches further.

        A lower offset changes nothing. Raises Problem `kvsp-checkpoint-conflict` when it
        contradicts what is recorded, 503 when there is no room.
        """
        name = checkpoint.session
        session = self.get(name)
        if (checkpoint.compat_id, checkpoint.scope_id) != (session.compat_id, session.scope_id):
            raise _conflict("the session has another Compatibility ID or scope")
        known = None if session.checkpoint is None else self.recorded(name)
        if known is None or checkpoint.output_offset >= known.output_offset:
            if known is not None:
                _check_continues(known, checkpoint)
            if known is None or (checkpoint.epoch, checkpoint.output_offset) != (
                known.epoch,
                known.output_offset,
            ):
                self._replace(name, session, Recorded(checkpoint))
        return self._progress(name, session)

    def extend(self, delta: CheckpointDelta) -> SessionProgress:
        """Record what a checkpoint adds to the recorded one, as `record` does.

        Raises Problem `kvsp-checkpoint-conflict` also when the tokens before are not recorded:
        then the whole checkpoint is needed.
        """
        name = delta.session
        session = self._all.get(name)
        known = None if session is None else session.checkpoint
        if session is None or known is None or delta.after > known.output_offset:
            raise _conflict("the tokens before these are not recorded; send the whole checkpoint")
        if delta.output_offset >= known.output_offset:
            fresh = known.output_offset - delta.after
            if delta.generated[:fresh] != known.since(delta.after):
                raise _conflict("output tokens that were acknowledged do not change")
            if (delta.epoch, delta.output_offset) != (known.epoch, known.output_offset):
                self._grow(name, session, known, delta, fresh)
            elif delta.sampler != known.sampler:
                raise _conflict("this epoch and offset are recorded with other content")
        return self._progress(name, session)

    def _progress(self, name: str, session: Session) -> SessionProgress:
        """What is recorded now, which is the acknowledgement."""
        if session.state is SessionState.RESUMING:
            self._resumed(name, session, SessionEvent.CHECKPOINT)
        return SessionProgress(name, session.epoch, session.output_offset)

    def _replace(self, name: str, session: Session, made: Recorded) -> None:
        before = session.checkpoint
        self._check_room(made.octets - (0 if before is None else before.octets))
        offset = session.output_offset
        self._keep(session, made)
        if not made.is_of_same_prompt(before):
            self._ledger.write(Key(PROMPT, name), made.prompt())
        self._write_output(name, session, made, offset)

    def _grow(
        self, name: str, session: Session, known: Recorded, delta: CheckpointDelta, fresh: int
    ) -> None:
        before, offset = known.octets, known.output_offset
        tokens = delta.generated[fresh:]
        self._check_room(4 * len(tokens))
        known.grow(delta.epoch, tokens, delta.sampler)
        self.checkpoint_octets += known.octets - before
        self._write_output(name, session, known, offset)

    def _write_output(self, name: str, session: Session, made: Recorded, offset: int) -> None:
        """The output tokens from `offset` on, and the session."""
        for key, document in made.output(name, offset):
            self._ledger.write(key, document)
        self._write(name)

    def _check_room(self, more: int) -> None:
        if self.checkpoint_octets + more > self._ledger.limits.checkpoint_octets:
            raise Problem.http(
                503, "the checkpoints of all sessions take as much room as they may", retry_after=1
            )

    def _keep(self, session: Session, made: Recorded | None) -> None:
        for each, sign in ((session.checkpoint, -1), (made, 1)):
            self.checkpoint_octets += 0 if each is None else sign * each.octets
        session.checkpoint = made

    # --- moving ----------------------------------------------------------------------

    def instance_lost(self, instance: str, now_ms: int) -> None:
        """Fence every session of an instance and look for others to continue them."""
        for name in sorted(self._by_instance.get(instance, ())):
            self._fence(name, self._all[name], now_ms)

    def _fence(self, name: str, session: Session, now_ms: int) -> None:
        session.state = move(SESSION_MOVES, session.state, SessionEvent.FENCE)
        session.waiting_since_ms = now_ms
        session.tried.clear()
        self._ledger.counters["sessions_fenced"] += 1
        self._release(name, session)
        if session.checkpoint is None:
            self._lose(name, session)
        else:
            self._write(name)
            self._look_up(name, session, now_ms)

    def _release(self, name: str, session: Session) -> None:
        """Take the session from its instance: whatever it still sends is of an old epoch."""
        session.epoch += 1
        self._leave(name, session)

    def _leave(self, name: str, session: Session) -> None:
        mates = self._by_instance.get(session.instance)
        if mates is not None:
            mates.discard(name)
            if not mates:
                del self._by_instance[session.instance]
        session.instance, session.instance_epoch = "", -1

    def _lose(self, name: str, session: Session) -> None:
        session.state = move(SESSION_MOVES, session.state, SessionEvent.GIVE_UP)
        self._ledger.counters["sessions_lost"] += 1
        self._close(name, session)

    def _look_up(self, name: str, session: Session, now_ms: int) -> None:
        checkpoint = self.recorded(name)
        command = self._ledger.send(
            Key(KIND, name),
            FindReplicas,
            instance="",
            timeout_ms=self._ledger.limits.lookup_ms,
            scope_id=session.scope_id,
            compat_id=session.compat_id,
            block_keys=checkpoint.prompt_blocks,
        )
        self._await(name, session, command.number, now_ms + self._ledger.limits.lookup_ms)

    def _resume(self, name: str, session: Session, found: Found, now_ms: int) -> None:
        """Ask the best instance to continue, or wait and try again, or give up."""
        if now_ms - session.waiting_since_ms > self._ledger.limits.give_up_ms:
            self._lose(name, session)
            return
        checkpoint = self.recorded(name)
        demand = Demand(_tokens(checkpoint, found.block_tokens), found)
        choice = self._choose(session.compat_id, demand, frozenset(session.tried))
        if choice is None:
            session.tried.clear()
            self._await(name, session, 0, now_ms + self._ledger.limits.retry_ms)
            return
        session.state = move(SESSION_MOVES, session.state, SessionEvent.SEND)
        session.instance = choice.instance
        session.instance_epoch = self._instances.epoch_of(choice.instance)
        session.tried.add(choice.instance)
        self._by_instance.setdefault(choice.instance, set()).add(name)
        self._send_resume(name, session, checkpoint, now_ms)
        self._write(name)

    def _send_resume(
        self, name: str, session: Session, checkpoint: SessionCheckpoint, now_ms: int
    ) -> None:
        command = self._ledger.send(
            Key(KIND, name),
            SendResume,
            instance=session.instance,
            timeout_ms=self._ledger.limits.resume_ms,
            session=name,
            body=Resume(session.epoch, checkpoint).to_dict(),
        )
        self._await(name, session, command.number, now_ms + self._ledger.limits.resume_ms)

    def _resumed(self, name: str, session: Session, event: SessionEvent) -> None:
        session.state = move(SESSION_MOVES, session.state, event)
        session.tried.clear()
        self._ledger.counters["sessions_resumed"] += 1
        self._await(name, session, 0, None)
        self._write(name)

    def _refused(self, name: str, session: Session, now_ms: int) -> None:
        """The instance will not, or may or may not: another one under another epoch."""
        session.state = move(SESSION_MOVES, session.state, SessionEvent.REFUSED)
        self._ledger.counters["resumes_refused"] += 1
        self._release(name, session)
        self._write(name)
        self._look_up(name, session, now_ms)

    def report(self, name: str, number: int, report: Report, now_ms: int) -> None:
        """The answer to a lookup or a resume. One that is not awaited any more is void."""
        session = self._all.get(name)
        if session is None or session.command != number:
            return
        if session.state is SessionState.WAITING:
            self._await(name, session, 0, None)
            found = report if isinstance(report, Found) else Found()
            self._resume(name, session, found, now_ms)
        elif session.state is SessionState.RESUMING:
            if isinstance(report, Done) and report.body.get("epoch") == session.epoch:
                self._resumed(name, session, SessionEvent.ACCEPTED)
            else:
                self._refused(name, session, now_ms)

    def due(self, name: str, now_ms: int) -> None:
        """A deadline has come: go on without the lookup, or take the resume as refused."""
        session = self._all.get(name)
        if session is None:
            return
        awaited, session.command = session.command, 0
        self._ledger.settle(awaited)
        if session.state is SessionState.RESUMING:
            self._refused(name, session, now_ms)
        elif session.state is SessionState.WAITING and awaited:
            self._resume(name, session, Found(), now_ms)
        elif session.state is SessionState.WAITING:
            self._look_up(name, session, now_ms)

    def _await(self, name: str, session: Session, number: int, due_ms: int | None) -> None:
        self._ledger.settle(session.command)
        session.command = number
        if due_ms is None:
            self._ledger.timers.cancel(Key(KIND, name))
        else:
            self._ledger.timers.set(Key(KIND, name), due_ms)

    # --- durability ------------------------------------------------------------------

    def _write(self, name: str) -> None:
        session = self._all[name]
        document = {
            "epoch": session.epoch,
            "instance": session.instance,
            "instance_epoch": session.instance_epoch,
            "compat_id": session.compat_id.hex(),
            "scope_id": session.scope_id.hex(),
            "state": session.state,
            "checkpoint": session.checkpoint and session.checkpoint.to_dict(),
        }
        self._ledger.write(Key(KIND, name), document)

    def restore(
        self, kinds: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]], now_ms: int
    ) -> None:
        """Take back what was durable, once the instances are back: documents by kind.

        A session whose instance is gone by now is fenced; a resume that was sent is sent
        again with the same epoch, which an instance that accepted it answers alike.
        """
        prompts, outputs = dict(kinds.get(PROMPT, ())), dict(kinds.get(OUTPUT, ()))
        for name, document in kinds.get(KIND, ()):
            session = Session(
                document["epoch"],
                document["instance"],
                document["instance_epoch"],
                bytes.fromhex(document["compat_id"]),
                bytes.fromhex(document["scope_id"]),
                now_ms,
                SessionState(document["state"]),
                waiting_since_ms=now_ms,
            )
            self._all[name] = session
            if document["checkpoint"] is not None:
                self._restore_checkpoint(name, session, document["checkpoint"], prompts, outputs)
            if session.instance:
                self._by_instance.setdefault(session.instance, set()).add(name)
            self._continue(name, session, now_ms)

    def _restore_checkpoint(
        self,
        name: str,
        session: Session,
        document: Mapping[str, Any],
        prompts: Mapping[str, Mapping[str, Any]],
        outputs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        made = restored(name, document, prompts, outputs)
        if name in prompts:
            self._keep(session, made)
        else:  # an older journal had it in one piece
            self._replace(name, session, made)

    def _continue(self, name: str, session: Session, now_ms: int) -> None:
        if session.state in _OVER:
            self._over[name] = None
            return
        if session.state is SessionState.WAITING:
            self._look_up(name, session, now_ms)
            return
        epoch = self._instances.epoch_of(session.instance)
        if epoch != session.instance_epoch or not self._instances.is_live(session.instance):
            self._fence(name, session, now_ms)
        elif session.state is SessionState.RESUMING:
            self._send_resume(name, session, self.recorded(name), now_ms)


def _check_continues(known: SessionCheckpoint, later: SessionCheckpoint) -> None:
    """A later checkpoint keeps the prompt and every output token the earlier one covers."""
    if (later.prompt_blocks, later.prompt_tail) != (known.prompt_blocks, known.prompt_tail):
        raise _conflict("the session has another prompt")
    if later.generated[: known.output_offset] != known.generated:
        raise _conflict("output tokens that were acknowledged do not change")
    same = (later.epoch, later.output_offset) == (known.epoch, known.output_offset)
    if same and later.to_dict() != known.to_dict():
        raise _conflict("this epoch and offset are recorded with other content")


def _tokens(checkpoint: SessionCheckpoint, block_tokens: int) -> int | None:
    if not block_tokens:
        return None
    tail = len(checkpoint.prompt_tail) + len(checkpoint.generated)
    return len(checkpoint.prompt_blocks) * block_tokens + tail


def _stale(epoch: int) -> Problem:
    return Problem(
        ProblemName.STALE_EPOCH,
        f"the session is in epoch {epoch}; drop it, another instance continues it",
        epoch=epoch,
    )


def _conflict(detail: str) -> Problem:
    return Problem(ProblemName.CHECKPOINT_CONFLICT, detail)


def _unknown() -> Problem:
    return Problem(ProblemName.UNKNOWN_RESOURCE, "no such session is under way")
