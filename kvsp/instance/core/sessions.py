"""Sessions at an instance, their checkpoints and when their output may go
(KVSP "Session Checkpoints and Migration"; sans-IO, `now` in ms).

A session is known by its UUID and the epoch the placement controller gave it. A higher
epoch replaces a lower one; whatever still comes of the lower one is refused or dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.moves import SERVING_MOVES, ServingEvent, ServingState
from kvsp.instance.engines.samplers import SamplerState, SamplerUnsupportedError
from kvsp.names.codes import MAX_EPOCH
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.prefix import complete_blocks
from kvsp.records.members import HEX16, HEX32, TOKEN_IDS, Record, integer, record
from kvsp.records.moves import move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    OutputToken,
    Resume,
    Sampler,
    SessionCheckpoint,
    SessionProgress,
)
from kvsp.records.release import TokenGate

_LIVE = (ServingState.LOADING, ServingState.RUNNING)


@dataclass(frozen=True, slots=True)
class StartSession(Record):
    """A request of ours to begin a session: the draft leaves inference requests out.

    `epoch` is what the placement controller answered when it placed the request.
    """

    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    prompt: Annotated[tuple[int, ...], TOKEN_IDS] = field(repr=False)
    max_tokens: Annotated[int, integer(1, MAX_EPOCH)]
    sampler: Annotated[Sampler, record(Sampler)]
    epoch: Annotated[int, integer(1, MAX_EPOCH)] = 1


@dataclass(slots=True, eq=False)
class Serving:
    """One session under one epoch."""

    session: str
    epoch: int
    scope: Scope
    descriptor: Descriptor
    prompt_blocks: tuple[bytes, ...]
    prompt_tail: tuple[int, ...] = field(repr=False)
    prompt: tuple[int, ...] | None = field(repr=False)
    """All prompt tokens; None where only the keys are known, after a resume."""

    generated: list[int] = field(repr=False)
    sampler: SamplerState
    max_tokens: int
    gate: TokenGate
    keep_prompt: bool = False
    """Whether checkpoints carry the prompt."""

    state: ServingState = ServingState.LOADING
    released: int = 0
    """Output tokens that may be seen, from index 0 on."""

    acknowledged: int = -1
    """`output_offset` of the last acknowledged checkpoint; -1 before the first."""

    checkpointed_blocks: int = 0
    """Complete blocks when the last checkpoint was acknowledged."""

    in_flight: bool = False
    whole: bool = True
    """Whether the next checkpoint is sent whole, not as what it adds to the acknowledged one."""

    deltas: bool = True
    """Whether the placement controller takes what a checkpoint adds."""

    finished_ms: int = 0
    why: str = ""
    """Why the session ended without all its output."""

    _keys: list[bytes] = field(default_factory=list, repr=False)

    @property
    def block_tokens(self) -> int:
        return self.descriptor.block_tokens

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_blocks) * self.block_tokens + len(self.prompt_tail)

    @property
    def blocks(self) -> int:
        """Complete blocks whose K and V are computed: the last token's are not yet."""
        computed = self.prompt_length + max(0, len(self.generated) - 1)
        return complete_blocks(computed, self.block_tokens)

    @property
    def can_generate(self) -> bool:
        return self.state is ServingState.RUNNING and not self.gate.full

    @property
    def live(self) -> bool:
        return self.state in _LIVE

    def all_keys(self) -> Sequence[bytes]:
        """The Block Keys of all complete blocks of prompt and output; each is computed once."""
        keys = self._keys
        if not keys:
            keys += self.prompt_blocks
        done = (len(keys) - len(self.prompt_blocks)) * self.block_tokens
        tail = self.prompt_tail[done:]
        rest = (*tail, *self.generated[max(0, done - len(self.prompt_tail)) :])
        keys += block_keys(self.scope, self.descriptor, rest, after=keys[-1] if keys else None)
        return keys

    def known_tokens(self, start: int) -> list[int]:
        """The tokens of prompt and output from position `start` on.

        Raises ValueError for prompt positions of which only the keys are known.
        """
        if self.prompt is not None:
            return [*self.prompt, *self.generated][start:]
        first = len(self.prompt_blocks) * self.block_tokens
        if start < first:
            raise ValueError(f"the tokens before position {first} are not known here")
        return [*self.prompt_tail, *self.generated][start - first :]

    # --- output ----------------------------------------------------------------------

    def produce(self, token: int) -> None:
        """The engine made the next token."""
        self.generated.append(token)
        self.sampler.step += 1
        self._release(self.gate.produce(token))

    def _release(self, tokens: Sequence[OutputToken]) -> None:
        if tokens:
            self.released = tokens[-1].index + 1

    def output(self, start: int) -> list[OutputToken]:
        """The tokens with index `start` and above that may be seen."""
        return [
            OutputToken(self.session, self.epoch, index, self.generated[index])
            for index in range(start, self.released)
        ]

    # --- checkpoints -----------------------------------------------------------------

    def checkpoint_due(self, every: int) -> bool:
        """Whether a checkpoint is to be published now; one at a time is under way.

        Output that waits for its acknowledgement makes one due at once. Otherwise it is
        due when a block was completed, after `every` tokens, and at the end.
        """
        offset = len(self.generated)
        if self.in_flight or self.state not in (ServingState.RUNNING, ServingState.FINISHED):
            return False
        if self.acknowledged < 0:
            # the first one: a prompt of which no token can be computed again needs output
            return bool(offset or self.prompt_tail or self.keep_prompt)
        if offset == self.acknowledged:
            return False
        if not self.sampler.deterministic or self.state is ServingState.FINISHED:
            return True
        return self.blocks > self.checkpointed_blocks or offset - self.acknowledged >= every

    def checkpoint(self) -> SessionCheckpoint | CheckpointDelta:
        """The state as it is now, or what it adds to the acknowledged one; it is under way until
        `acknowledge` or `checkpoint_failed`."""
        self.in_flight = True
        offset = len(self.generated)
        if self.deltas and not self.whole and 0 <= self.acknowledged <= offset:
            return CheckpointDelta(
                session=self.session,
                epoch=self.epoch,
                after=self.acknowledged,
                generated=tuple(self.generated[self.acknowledged :]),
                output_offset=offset,
                sampler=self.sampler.record(),
            )
        return SessionCheckpoint(
            session=self.session,
            epoch=self.epoch,
            compat_id=self.descriptor.compat_id,
            scope_id=self.scope.scope_id,
            prompt_blocks=self.prompt_blocks,
            prompt_tail=self.prompt_tail,
            generated=tuple(self.generated),
            output_offset=offset,
            sampler=self.sampler.record(),
            prompt_tokens=self.prompt if self.keep_prompt else None,
            max_tokens=self.max_tokens,
        )

    def acknowledge(
        self, sent: SessionCheckpoint | CheckpointDelta, progress: SessionProgress
    ) -> None:
        """A checkpoint was answered: tokens it covers may go to the front end."""
        self.in_flight = False
        if progress.epoch != self.epoch:
            return
        self.whole = False
        self.acknowledged = max(self.acknowledged, progress.output_offset)
        covered = self.prompt_length + max(0, sent.output_offset - 1)
        self.checkpointed_blocks = complete_blocks(covered, self.block_tokens)
        self._release(self.gate.acknowledge(progress))

    def checkpoint_failed(self) -> None:
        """No answer came: it is published again."""
        self.in_flight = False

    @property
    def settled(self) -> bool:
        """Whether all output was produced, acknowledged and may be seen."""
        done = self.state is ServingState.FINISHED and not self.in_flight
        return done and self.acknowledged == self.released == len(self.generated)


class ServingTable:
    """Sessions by UUID."""

    def __init__(
        self, limits: InstanceLimits, descriptor: Descriptor, *, bit_identical: bool
    ) -> None:
        self._limits = limits
        self._descriptor = descriptor
        self._bit_identical = bit_identical
        self._all: dict[str, Serving] = {}
        self.counters: Counter[str] = Counter()
        """`started`, `resumed`, `tokens`, and sessions by how they ended."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Serving]:
        return iter(list(self._all.values()))

    @property
    def live(self) -> int:
        """Sessions that are loaded or generate."""
        return sum(each.live for each in self._all.values())

    def get(self, name: str) -> Serving:
        """Raises Problem `kvsp-unknown-resource`."""
        found = self._all.get(name)
        if found is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "no such session is served here")
        return found

    def find(self, name: str) -> Serving | None:
        return self._all.get(name)

    # --- beginning -------------------------------------------------------------------

    def start(
        self, name: str, request: StartSession, scope: Scope, *, keep_prompt: bool
    ) -> Serving | None:
        """Begin a session; None when it is served in that epoch already.

        Raises Problem `kvsp-stale-epoch`, `kvsp-sampler-unsupported`, `kvsp-too-large`, 503
        when the table is full.
        """
        if self._known(name, request.epoch):
            return None
        if not request.prompt:
            raise Problem(ProblemName.INVALID_REQUEST, "the prompt is empty", pointer="/prompt")
        self._check_length(len(request.prompt) + request.max_tokens)
        sampler = _sampler(request.sampler)
        sampler.deterministic = self._bit_identical and sampler.method == "greedy"
        keys = block_keys(scope, self._descriptor, request.prompt)
        tail = len(keys) * self._descriptor.block_tokens
        made = Serving(
            session=name,
            epoch=request.epoch,
            scope=scope,
            descriptor=self._descriptor,
            prompt_blocks=tuple(keys),
            prompt_tail=request.prompt[tail:],
            prompt=request.prompt,
            generated=[],
            sampler=sampler,
            max_tokens=request.max_tokens,
            gate=self._gate(name, request.epoch, 0, sampler),
            keep_prompt=keep_prompt,
        )
        return self._enter(made, "started")

    def resume(self, request: Resume, scope: Scope, *, keep_prompt: bool) -> Serving | None:
        """Take a session over; None when it is served in that epoch already.

        Raises as `start`, and Problem `kvsp-cache-miss` when no token is known from which
        the next one could be computed.
        """
        checkpoint = request.checkpoint
        if self._known(checkpoint.session, request.epoch):
            return None
        sampler = _sampler(checkpoint.sampler)
        if sampler.deterministic and not self._bit_identical:
            raise _unsupported(sampler.method, "the same tokens cannot be made again here")
        prompt = checkpoint.prompt_tokens
        if not (checkpoint.prompt_tail or checkpoint.generated or prompt):
            raise Problem(
                ProblemName.CACHE_MISS,
                "the last prompt token is needed to go on and is not in the checkpoint",
                block_keys=[key.hex() for key in checkpoint.prompt_blocks[-1:]],
            )
        length = len(checkpoint.prompt_blocks) * self._descriptor.block_tokens
        length += len(checkpoint.prompt_tail)
        max_tokens = checkpoint.max_tokens or self._limits.context_tokens - length
        self._check_length(length + max_tokens)
        made = Serving(
            session=checkpoint.session,
            epoch=request.epoch,
            scope=scope,
            descriptor=self._descriptor,
            prompt_blocks=checkpoint.prompt_blocks,
            prompt_tail=checkpoint.prompt_tail,
            prompt=prompt,
            generated=list(checkpoint.generated),
            sampler=sampler,
            max_tokens=max_tokens,
            gate=self._gate(checkpoint.session, request.epoch, checkpoint.output_offset, sampler),
            keep_prompt=keep_prompt and prompt is not None,
            released=checkpoint.output_offset,
        )
        return self._enter(made, "resumed")

    def _known(self, name: str, epoch: int) -> bool:
        """Whether the session is served in that epoch. Raises Problem `kvsp-stale-epoch`."""
        known = self._all.get(name)
        if known is None or epoch > known.epoch:
            return False
        if epoch < known.epoch:
            raise Problem(
                ProblemName.STALE_EPOCH,
                f"the session is in epoch {known.epoch} here",
                epoch=known.epoch,
            )
        return True

    def _gate(self, name: str, epoch: int, offset: int, sampler: SamplerState) -> TokenGate:
        return TokenGate(
            name,
            epoch,
            offset,
            deterministic=sampler.deterministic,
            size=self._limits.checkpoint_tokens,
        )

    def _check_length(self, tokens: int) -> None:
        if tokens > self._limits.context_tokens:
            raise Problem(
                ProblemName.TOO_LARGE,
                f"prompt and output have at most {self._limits.context_tokens} tokens",
                limit=self._limits.context_tokens,
            )

    def _enter(self, made: Serving, how: str) -> Serving:
        replaced = self._all.get(made.session)
        if self.live - (replaced is not None and replaced.live) >= self._limits.sessions:
            raise Problem.http(503, "as many sessions as may be are served here", retry_after=1)
        if replaced is not None:
            self.drop(replaced, "a higher epoch of the session has begun")
        self._all[made.session] = made
        self.counters[how] += 1
        return made

    # --- moving on -------------------------------------------------------------------

    def loaded(self, serving: Serving) -> None:
        """Its cache is there: it generates from now on."""
        if serving.state is ServingState.LOADING:
            serving.state = move(SERVING_MOVES, serving.state, ServingEvent.LOADED)

    def produce(self, serving: Serving, token: int, now_ms: int) -> None:
        """The engine made a token of a session, which may have been dropped meanwhile."""
        if serving.state is not ServingState.RUNNING:
            return
        serving.produce(token)
        self.counters["tokens"] += 1
        if len(serving.generated) >= serving.max_tokens:
            self.finish(serving, now_ms)

    def finish(self, serving: Serving, now_ms: int) -> None:
        """There is no more output: all of it was made, or nobody wants more."""
        if serving.live:
            serving.state = move(SERVING_MOVES, serving.state, ServingEvent.FINISH)
            serving.finished_ms = now_ms
            self.counters["finished"] += 1

    def fail(self, serving: Serving, why: str, now_ms: int) -> None:
        """The session cannot go on here."""
        if serving.live:
            serving.state = move(SERVING_MOVES, serving.state, ServingEvent.BREAK)
            serving.why, serving.finished_ms = why, now_ms
            self.counters["broken"] += 1

    def drop(self, serving: Serving, why: str) -> None:
        """Another instance has the session, or it is over: nothing of it goes out any more."""
        if (serving.state, ServingEvent.DROP) in SERVING_MOVES:
            serving.state = move(SERVING_MOVES, serving.state, ServingEvent.DROP)
            serving.why = why
            self.counters["dropped"] += 1
        if self._all.get(serving.session) is serving:
            del self._all[serving.session]

    def forget(self, now_ms: int) -> list[Serving]:
        """Take out what ended long ago."""
        old = [
            each
            for each in self._all.values()
            if each.state in (ServingState.FINISHED, ServingState.BROKEN)
            and now_ms - each.finished_ms > self._limits.session_kept_ms
        ]
        for each in old:
            del self._all[each.session]
        return old


def _sampler(record: Sampler) -> SamplerState:
    try:
        return SamplerState.of(record)
    except SamplerUnsupportedError as error:
        raise _unsupported(error.method, error.detail) from None


def _unsupported(method: str, detail: str) -> Problem:
    return Problem(ProblemName.SAMPLER_UNSUPPORTED, f"sampler {method!r}: {detail}", method=method)
