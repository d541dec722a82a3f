"""Runs sessions: loads their caches, drives the engine, publishes blocks and checkpoints
(KVSP "Session Checkpoints and Migration").

Loading never holds up the engine, and no session another: the engine works off one small
step of each session in turn, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvsp.client.errors import ClientError
from kvsp.instance.callers import PlacementCaller, PlacementRefusedError, PlacementUnavailableError
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.directives import TIMEOUT
from kvsp.instance.core.moves import ServingState
from kvsp.instance.core.sessions import Serving, StartSession
from kvsp.instance.engines.engine import Context, Engine, KvBlock
from kvsp.instance.loading.fetchers import LoadError
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.loading.sources import Wanted
from kvsp.instance.tasks import Tasks, logger
from kvsp.names.codes import DecodeErrorName
from kvsp.names.prefix import usable_blocks
from kvsp.names.uris import BlockId
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    OutputToken,
    ReplicaRecord,
    Resume,
    SessionProgress,
)

T = TypeVar("T")

PREFILL_TOKENS: Final = 64
"""Tokens of one session computed before another session has its turn."""

_LEAST_PATIENCE_S: Final = 0.5
_AGAIN_S: Final = 0.1
_LONGEST_S: Final = 2.0
_NO_SUCH_METHOD: Final = 405


class Lookup(Protocol):
    """Finds replicas."""

    async def __call__(self, blocks: Sequence[BlockId]) -> list[list[ReplicaRecord]]:
        """The replicas of the leading blocks. Raises ClientError."""
        ...


class Run:
    """A session in the engine."""

    def __init__(self, serving: Serving, context: Context) -> None:
        self.serving = serving
        self.context = context
        self.pending: list[int] = []
        """Tokens whose K and V are to be computed next."""
        self.published = 0
        """Blocks, from the first on, that are published (or were loaded)."""
        self.complete = 0
        """Blocks, from the first on, that are computed (or were loaded)."""
        self.made: dict[int, KvBlock] = {}
        """Computed blocks that are not published yet. Only the engine's thread uses the
        context: in the middle of a step, some layers lack what others have."""
        self.began = time.monotonic()
        self.ended = False
        self._news = asyncio.Event()

    @property
    def user(self) -> str:
        return f"session {self.serving.session} {self.serving.epoch}"

    def step(self) -> tuple[int, int | None]:
        """A small step of the engine: how many tokens were computed, and the next token if
        one was drawn. In the engine's thread."""
        now, self.pending = self.pending[:PREFILL_TOKENS], self.pending[PREFILL_TOKENS:]
        self.context.prefill(now)
        complete = self.context.tokens // self.serving.block_tokens
        for place in range(self.complete, complete):
            self.made[place] = self.context.block(place)
        self.complete = complete
        if self.pending:
            return len(now), None
        # on a copy: until the token is taken, a checkpoint has the state before it
        return len(now), self.context.next_token(replace(self.serving.sampler))

    def tell(self) -> None:
        """Wake whoever waits for output."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> None:
        """Wait until something changes."""
        await self._news.wait()


class SessionRunner:
    """Every session of an instance."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        loader: BlockLoader,
        placement: PlacementCaller,
        lookup: Lookup | None,
        clock_ms: Callable[[], int],
    ) -> None:
        """`lookup` asks the Index Service; None without one."""
        self._agent = agent
        self._engine = engine
        self._loader = loader
        self._placement = placement
        self._lookup = lookup
        self._clock_ms = clock_ms
        self._runs: dict[str, Run] = {}
        self._thread = ThreadPoolExecutor(1, "kvsp-engine")
        self._work = asyncio.Event()
        self._tasks = Tasks()

    async def start(self) -> None:
        """Begin to generate."""
        self._tasks.start(self._generate())

    async def stop(self) -> None:
        await self._tasks.stop()
        self._thread.shutdown()

    # --- beginning -------------------------------------------------------------------

    def start_session(self, name: str, request: StartSession) -> bool:
        """Begin a session; False for a repeated request.

        Raises as `Agent.start_session`, and Problem `kvsp-invalid-request` for a token the
        model does not have.
        """
        if max(request.prompt, default=0) >= self._engine.vocabulary:
            raise Problem(
                ProblemName.INVALID_REQUEST,
                f"token ids of this model are below {self._engine.vocabulary}",
                error=str(DecodeErrorName.BAD_TOKEN),
                pointer="/prompt",
            )
        serving = self._agent.start_session(name, request)
        if serving is None:
            return False
        self._enter(serving, None)
        return True

    async def resume_session(self, request: Resume) -> SessionProgress:
        """Take a session over; the answer comes before anything is loaded.

        Raises as `Agent.resume_session`, and Problem `kvsp-cache-miss` when the index says
        that a block nobody can compute again is nowhere.
        """
        serving = self._agent.resume_session(request)
        offset = request.checkpoint.output_offset
        answer = SessionProgress(request.checkpoint.session, request.epoch, offset)
        if serving is None:
            return answer
        found = await self._find(serving, self._agent.limits.lookup_ms / 1000)
        if found is not None and (missing := self._lost(serving, found)):
            self._agent.sessions.drop(serving, "its cache is lost")
            raise Problem(
                ProblemName.CACHE_MISS,
                "blocks of the prompt are held nowhere, and the checkpoint has no prompt",
                block_keys=[key.hex() for key in missing],
            )
        if serving.live:
            self._enter(serving, found)
        return answer

    def _lost(self, serving: Serving, found: Sequence[Sequence[ReplicaRecord]]) -> list[bytes]:
        """Prompt blocks that are neither found, nor here, nor can be computed."""
        if serving.prompt is not None:
            return []
        return [
            key
            for place, key in enumerate(serving.prompt_blocks)
            if place >= len(found) and not self._here(serving, key)
        ]

    def _here(self, serving: Serving, key: bytes) -> bool:
        block = _block(serving, key)
        return block in self._agent.pool or block in self._loader.holder.store

    async def _find(self, serving: Serving, seconds: float) -> list[list[ReplicaRecord]] | None:
        """The replicas of the session's leading blocks; None when they cannot be asked for."""
        if self._lookup is None:
            return None
        blocks = [_block(serving, key) for key in serving.all_keys()]
        if not blocks:
            return []
        try:
            async with asyncio.timeout(seconds):
                return await self._lookup(blocks)
        except (ClientError, TimeoutError):
            return None

    def _enter(self, serving: Serving, found: list[list[ReplicaRecord]] | None) -> None:
        before = self._runs.get(serving.session)
        if before is not None:
            self._leave(before)
        run = Run(serving, self._engine.context())
        self._runs[serving.session] = run
        self._tasks.start(self._guarded(run, self._begin(run, found)))

    async def _guarded(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        """Work of one session: where it fails, the session does, which its reader sees."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  (one session, whatever the engine does)
            self._broken(run, error)

    def _broken(self, run: Run, error: Exception) -> None:
        logger.error("the engine failed in a session", exc_info=error)
        self._agent.sessions.fail(run.serving, "the engine failed", self._clock_ms())
        self._leave(run)

    async def _begin(self, run: Run, found: list[list[ReplicaRecord]] | None) -> None:
        serving, agent = run.serving, self._agent
        if found is None:
            found = await self._find(serving, agent.limits.lookup_ms / 1000) or []
        await self._attach(run, found)
        if not serving.live:
            self._leave(run)
            return
        # after an attachment that is still under way
        tokens = await self._in_engine(lambda: run.context.tokens)
        run.published = run.complete = tokens // serving.block_tokens
        try:
            run.pending = serving.known_tokens(tokens)
        except ValueError:
            agent.sessions.fail(serving, "blocks of the prompt are lost", self._clock_ms())
            logger.warning("a session cannot be resumed: blocks of its prompt are lost")
            self._leave(run)
            return
        agent.sessions.loaded(serving)
        self._tasks.start(self._guarded(run, self._publish(run)))
        self._work.set()

    def _patience(self, serving: Serving) -> float:
        """How many seconds a cache is waited for: where it can be computed instead, not much
        longer than that takes."""
        longest = self._agent.limits.resume_load_ms / 1000
        if serving.prompt is None:
            return longest
        tokens = serving.prompt_length + len(serving.generated)
        computing = tokens / max(self._agent.rates.prefill.per_s, 1.0)
        return min(longest, max(_LEAST_PATIENCE_S, 2 * computing))

    async def _attach(self, run: Run, found: Sequence[Sequence[ReplicaRecord]]) -> None:
        """Load the leading blocks, and attach them up to the first that cannot be had."""
        serving = run.serving
        length = serving.prompt_length + len(serving.generated)
        usable = usable_blocks(length, serving.block_tokens)
        wanted: list[Wanted] = []
        for place, key in enumerate(serving.all_keys()[:usable]):
            replicas = found[place] if place < len(found) else ()
            if not replicas and not self._here(serving, key):
                break
            prior = wanted[-1].block.block_key if wanted else None
            wanted.append(Wanted(_block(serving, key), replicas, prior))
        came: dict[BlockId, KvBlock | LoadError] = {}
        await self._loader.load(wanted, run.user, came.__setitem__, seconds=self._patience(serving))
        for each in wanted:
            held = came[each.block]
            if isinstance(held, LoadError):
                if held.reason == TIMEOUT:
                    logger.warning(
                        "the cache of a session did not come in time; the rest is computed"
                    )
                self._let_go_after(run, wanted, each)
                return
            if not serving.live:
                return
            await self._in_engine(partial(run.context.attach, held))

    def _let_go_after(self, run: Run, wanted: Sequence[Wanted], last: Wanted) -> None:
        """Blocks after one that is missing are of no use to a session."""
        for each in wanted[wanted.index(last) :]:
            self._agent.pool.unpin(each.block, run.user)

    async def _in_engine(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # --- generating ------------------------------------------------------------------

    async def _generate(self) -> None:
        while True:
            self._work.clear()
            ready = [run for run in self._runs.values() if run.serving.can_generate]
            for run in ready:
                if not run.serving.can_generate:
                    continue
                started = time.monotonic()
                try:
                    computed, token = await self._in_engine(run.step)
                except Exception as error:  # noqa: BLE001  (one session, whatever the engine does)
                    self._broken(run, error)
                    continue
                self._stepped(run, computed, token, time.monotonic() - started)
            if not ready:
                await self._work.wait()

    def _stepped(self, run: Run, computed: int, token: int | None, seconds: float) -> None:
        rates = self._agent.rates
        (rates.prefill if computed > 1 else rates.decode).observe(computed, seconds)
        if token is not None:
            run.pending = [token]
            self._agent.sessions.produce(run.serving, token, self._clock_ms())
        run.tell()

    # --- publishing ------------------------------------------------------------------

    async def _publish(self, run: Run) -> None:
        """Publish blocks as they are completed, then the checkpoint that counts on them."""
        serving, every = run.serving, self._agent.limits.checkpoint_tokens
        again_s = _AGAIN_S
        while serving.state in (ServingState.RUNNING, ServingState.FINISHED):
            await self._publish_blocks(run)
            if not self._countable(run) or not serving.checkpoint_due(every):
                if serving.settled:
                    break
                await run.news()
            elif await self._send_checkpoint(run):
                again_s = _AGAIN_S
            else:
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, _LONGEST_S)
        if serving.settled:
            self._agent.rates.served(time.monotonic() - run.began)
        self._agent.pool.unpin_all(run.user)
        run.tell()

    def _countable(self, run: Run) -> bool:
        """Whether a checkpoint can be resumed from: it lists no block that is still to come."""
        return run.serving.keep_prompt or run.published >= len(run.serving.prompt_blocks)

    async def _publish_blocks(self, run: Run) -> None:
        serving = run.serving
        complete = min(serving.blocks, run.complete)
        if run.published >= complete:
            return
        keys = serving.all_keys()
        while run.published < complete:
            place = run.published
            prior = keys[place - 1] if place else None
            await self._loader.computed(_block(serving, keys[place]), run.made[place], prior)
            del run.made[place]
            run.published += 1

    async def _send_checkpoint(self, run: Run) -> bool:
        """Whether it was answered; a session that others have is dropped."""
        serving = run.serving
        checkpoint = serving.checkpoint()
        try:
            progress = await self._placement.checkpoint(checkpoint)
        except PlacementUnavailableError:
            serving.checkpoint_failed()
            return False
        except PlacementRefusedError as error:
            serving.checkpoint_failed()
            if isinstance(checkpoint, CheckpointDelta) and _wants_whole(error):
                # a controller that lost what it acknowledged, or that takes whole ones only
                serving.whole, serving.deltas = True, error.status != _NO_SUCH_METHOD
                return True
            logger.warning("a session is dropped: %s", error.name or "its checkpoint was refused")
            self._drop(run, f"its checkpoint was refused ({error.name})")
            return True
        serving.acknowledge(checkpoint, progress)
        self._work.set()
        run.tell()
        return True

    # --- ending ----------------------------------------------------------------------

    def drop_all(self, dropped: Sequence[Serving]) -> None:
        """These sessions are other instances' now."""
        for serving in dropped:
            run = self._runs.get(serving.session)
            if run is not None and run.serving is serving:
                self._leave(run)

    def _drop(self, run: Run, why: str) -> None:
        self._agent.sessions.drop(run.serving, why)
        self._leave(run)

    def _leave(self, run: Run) -> None:
        if self._runs.get(run.serving.session) is run:
            del self._runs[run.serving.session]
        self._agent.pool.unpin_all(run.user)
        run.tell()

    def end_output(self, name: str) -> None:
        """Nobody wants more output of a session. Raises Problem `kvsp-unknown-resource`."""
        serving = self._agent.sessions.get(name)
        self._agent.sessions.finish(serving, self._clock_ms())
        if (run := self._runs.get(name)) is not None:
            run.tell()

    async def idle(self) -> None:
        """Wait until every session has all its output acknowledged, or has left."""
        for run in list(self._runs.values()):
            while self._runs.get(run.serving.session) is run and not run.serving.settled:
                await run.news()

    def forget_old(self) -> None:
        """Let go of sessions that ended long ago."""
        for serving in self._agent.sessions.forget(self._clock_ms()):
            run = self._runs.get(serving.session)
            if run is not None and run.serving is serving:
                self._end(run)

    def _end(self, run: Run) -> None:
        """Tell the controller, once, that a session is over."""
        if not run.ended:
            run.ended = True
            self._tasks.start(self._tell_end(run.serving))
        self._leave(run)

    async def _tell_end(self, serving: Serving) -> None:
        try:
            await self._placement.end_session(serving.session)
        except (PlacementUnavailableError, PlacementRefusedError) as error:
            logger.warning("the controller was not told that a session is over: %s", error)

    # --- output ----------------------------------------------------------------------

    async def tokens(
        self, name: str, start: int, seconds: float
    ) -> AsyncGenerator[OutputToken, None]:
        """The output from index `start` on, as it may be seen, until it ends here or
        `seconds` are over.

        Raises Problem `kvsp-unknown-resource`.
        """
        serving = self._agent.sessions.get(name)
        run = self._runs.get(name)
        at = start
        ends = asyncio.get_running_loop().time() + seconds
        while True:
            for token in serving.output(at):
                yield token
                at = token.index + 1
            if serving.settled and at >= len(serving.generated):
                if run is not None:
                    self._end_delivered(run)
                return
            if serving.released > at:
                continue
            if run is None or self._runs.get(name) is not run:
                return
            try:
                async with asyncio.timeout_at(ends):
                    await run.news()
            except TimeoutError:
                return

    def _end_delivered(self, run: Run) -> None:
        # the output can still be read for a while; the controller need not keep it
        if not run.ended:
            run.ended = True
            self._tasks.start(self._tell_end(run.serving))


def _wants_whole(error: PlacementRefusedError) -> bool:
    return error.name is ProblemName.CHECKPOINT_CONFLICT or error.status == _NO_SUCH_METHOD


def _block(serving: Serving, key: bytes) -> BlockId:
    return BlockId(serving.descriptor.compat_id, serving.scope.scope_id, key)
