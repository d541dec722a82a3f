"""Retrieving the KV cache of a token prefix (KVCS "Consumer Procedures").

    async with Consumer(session, scope, descriptor, tokens, timeout=10) as consumer:
        async for layer in consumer.layers():
            use(layer.index, layer.k, layer.v)

The asyncio face of `kvcs.finding.candidates`, `contest`, `retrieval` and, with a `Fallback`, of
`fallback`: every wait ends with the timeout at the latest.

With a fallback there are two ways, side by side. As long as a publication is retrieved,
holders give what is late, bad or beyond its end, into the same layers; when no publication
is left, or none has come in time, everything is taken from holders.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvcs.finding.candidates import Candidate, Candidates, DiscoveryMode, check_publications
from kvcs.finding.listing import failures_of
from kvcs.finding.probing import DEFAULT_PROBES
from kvcs.finding.relays import Fallback, Sessions
from kvcs.keeping.failures import Failures
from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS
from kvcs.names.encoding import Choice
from kvcs.names.errors import (
    MisuseError,
    NotFound,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
    worse_of,
)
from kvcs.names.namespace import PublicationNamespace
from kvcs.retrieving.asking.threads import in_thread
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.contest import DRIPS, Contest, Entrant
from kvcs.retrieving.destinations import Destination, MemoryDestination, Resumable
from kvcs.retrieving.lanes.lanes import Lanes
from kvcs.retrieving.layers import Kept, Layer, LayerBuffer, wanted_layers
from kvcs.retrieving.recovery.again import Again
from kvcs.retrieving.recovery.assisting import assist
from kvcs.retrieving.recovery.awaited import awaited
from kvcs.retrieving.recovery.ends import LateError, ShorterError, StalledError, too_short
from kvcs.retrieving.recovery.patience import Patience
from kvcs.retrieving.recovery.recomputing import or_recomputed
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Mode, Stats
from kvcs.trust.producers import Producers
from kvcs.trust.terms import Terms
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.tokens import Tokens
from moqt.aio import MoqtSession

if TYPE_CHECKING:  # HTTP is loaded by those who use it
    from kvcs.retrieving.fallback import HttpPath

DEFAULT_PATIENCE = 2.0
"""Seconds without anything arriving, after which another publication is tried, if known."""

DEFAULT_TIMEOUT = 60.0
"""Seconds a retrieval may take: choose what recomputing the tokens would take."""


class Consumer:
    """Retrieves the longest published prefix of `tokens`, layer by layer and verified.

    Use it as an async context manager, once. `stats` tells what happened, at any time.
    """

    stats: Stats

    def __init__(
        self,
        session: MoqtSession | None,
        scope: Scope,
        descriptor: Descriptor,
        tokens: Tokens,
        *,
        layers: range | None = None,
        blocks: int | None = None,
        follow: bool = False,
        mode: Mode | str = Mode.AUTO,
        timeout: float = DEFAULT_TIMEOUT,
        destination: Destination | None = None,
        publications: Sequence[PublicationNamespace] | None = None,
        require_listed: bool = False,
        discovery: DiscoveryMode | str = DiscoveryMode.LISTING,
        min_blocks: int = 1,
        grace: float | None = None,
        probes: int = DEFAULT_PROBES,
        patience: float = DEFAULT_PATIENCE,
        source: str | None = None,
        fallback: Fallback | None = None,
        codecs: Sequence[Codec] | None = None,
        allow_lossy: bool = False,
        failures: Failures | None = None,
        producers: Producers | None = None,
        others: Sequence[Awaitable[MoqtSession]] = (),
        max_segments: int = MAX_SEGMENTS,
        max_manifest_octets: int = MAX_MANIFEST_OCTETS,
    ) -> None:
        """`layers` is the range wanted (all by default), `blocks` the most leading blocks wanted.
        With `follow` the retrieval goes on while the publication grows, until all complete blocks
        of the tokens are there or the publication has ended; without it, the segments that have
        begun are retrieved. `timeout` bounds everything, in seconds. `destination` is where layers
        are written (new arrays by default). `publications` are known already, in order of
        preference, and replace discovery. With `require_listed` no layer is handed over before the
        manifest lists its digests. `discovery` says how publications are found; `min_blocks` is the
        shortest prefix worth having, `grace` how long, in seconds, a relay's listing must pause to
        count as whole, `probes` how many prefixes are asked for at a time where it lists nothing.
        After `patience` seconds without anything arriving another publication is tried, if there is
        one, also a shorter one. `source` is what `stats` calls the peer. With `fallback` blocks
        come from holders over HTTP, too; `session` may then be None, and the consumer opens it
        itself. With `producers` only what one of them has signed and listed is handed over, and
        with content keys in `scope` only what is sealed with one of them, and of holders what is
        listed. `codecs` and `allow_lossy` choose among several encodings (`Choice`). What
        `failures`, which a process shares, has seen to fail lately is tried last; it is that of the
        Directory on the session, if there is one, unless it is given. `others`
        are further connections to the same relay, each a `moqt.connect(url)` that was not awaited:
        the consumer opens and closes them, and splits what is complete over all by layers. No
        manifest of more segments or octets than the last two is read.

        Raises DecodeError `bad-token` or `codec-unsupported`; ValueError for layers that do
        not exist, no blocks, an unknown mode, discovery by an index without a fallback, a
        publication of another scope or Compatibility ID, or neither a session nor a way to
        open one.
        """
        layers = wanted_layers(layers, descriptor)
        if blocks is not None and blocks < 1:
            raise ValueError("at least one block is needed")
        if timeout <= 0 or (grace or 0) < 0 or probes < 1 or patience <= 0:
            raise ValueError("timeout, probes and patience are positive, grace is not negative")
        check_publications(publications or (), scope, descriptor)
        discovery = DiscoveryMode(discovery)
        client = fallback.client if fallback is not None else None
        if discovery is DiscoveryMode.INDEX and client is None and publications is None:
            raise ValueError("discovery by an index service needs a fallback that reaches one")
        descriptor.section_octets()
        self.stats = Stats(source=source or (fallback.relay if fallback is not None else None))
        self._source = self.stats.source
        self._scope_id = scope.scope_id
        self._descriptor = descriptor
        self._keys = block_keys(scope, descriptor, tokens)
        self._layers = layers
        self._blocks = blocks
        self._choice = Choice(codecs, allow_lossy)
        self._follow_growth = follow
        self._mode = Mode(mode)
        within = fallback.recompute_within if fallback is not None else None
        self._timeout = min(timeout, within or timeout)
        self._destination = destination or MemoryDestination(descriptor)
        self._terms = Terms(scope.content_keys, producers, max_segments, max_manifest_octets)
        self._require_listed = require_listed or producers is not None
        self._min_blocks = min_blocks
        self._patience = patience
        self._event = asyncio.Event()
        if failures is None and session is not None:
            failures = failures_of(session.session)
        self._sessions = Sessions(session, fallback, self._event.set, others)
        self._connections = 1 + len(others)
        held = destination.publication if isinstance(destination, Resumable) else None
        self._early = not others and held is None  # they have their share, what is held is held
        self._after = fallback.after if client is not None and fallback is not None else 0.0
        self._again_within = fallback.again_within if fallback is not None else 0.0
        self._fallback = fallback
        self._path: HttpPath | None = None
        if client is not None:
            from kvcs.retrieving.fallback import HttpPath

            changed, keys = self._event.set, self._keys[:blocks]
            self._path = HttpPath(client, self._scope_id, descriptor, keys, layers, changed=changed)
        self._candidates = Candidates(
            self._sessions,
            self._scope_id,
            descriptor.compat_id,
            self._keys,
            changed=self._event.set,
            given=publications,
            index=self._path,
            discovery=discovery,
            min_blocks=min_blocks,
            grace=grace,
            probes=probes,
            preferred=held,
            failures=failures,
        )
        self._contest: Contest | None = None
        self._retrieval: Retrieval | None = None
        self._buffer: LayerBuffer | None = None
        self._kept: Kept | None = None
        self._given = 0  # blocks of segments that were given whole, as their manifest lists them
        self._hasty = not self._terms.strict  # to do without one that does not come in time
        self._started = False
        self._patient: Patience | None = None
        self._since = self._deadline = 0.0

    @property
    def octets_held(self) -> int:
        """Octets of the arrays of layers that were begun and not handed over; 0 at the end."""
        buffer = self._retrieval.assembly if self._retrieval is not None else self._buffer
        return buffer.octets_held if buffer is not None else 0

    async def layers(self) -> AsyncGenerator[Layer, None]:
        """The layers of each segment in order, each as soon as it is usable.

        When a publication turns out to be bad or incomplete and another one is there, the layers
        come again from the first, of the other publication (see `Layer.publication`), unless both
        are deterministic; arrays of a destination are then written again. Until the iteration ends
        without an exception, layers may turn out to differ from what the manifest lists; when it
        ends with one, those of the first `stats.whole_blocks` blocks do not.

        Raises NotFound, NotAuthorized, VerificationFailed, PublisherLost, RetrievalTimeout,
        or what the destination raises. Whatever the end, every request is cancelled.
        """
        if self._started:
            raise MisuseError("a Consumer retrieves once: make another one")
        self._started = True
        start = self._since = asyncio.get_running_loop().time()
        self._deadline = start + self._timeout
        try:
            async with aclosing(or_recomputed(self._run(), self._fallback, self._anew)) as run:
                async for layer in run:
                    self.stats.seconds = self._now() - start
                    self.stats.layer_seconds.append(self.stats.seconds)
                    if self.stats.first_layer_seconds is None:
                        self.stats.first_layer_seconds = self.stats.seconds
                    yield layer
        finally:
            self.stats.seconds = self._now() - start
            self.stats.relay_error = self._sessions.failure
            self.stats.connections_error = self._sessions.further_failure
            self.close()
            await self._sessions.close()
            if self._path is not None:
                await self._path.close()

    async def retrieve(self) -> Stats:
        """Run to the end, the layers being written to the destination. Raises as `layers`."""
        async for _ in self.layers():
            pass
        return self.stats

    def close(self) -> None:
        """Cancel every request and let go of the arrays; harmless when repeated."""
        if self._path is not None:
            self._path.stop()
        if self._contest is not None:
            self._contest.close()
        if self._retrieval is not None:
            self._retrieval.close()
        if self._buffer is not None:
            self._buffer.release()
        self._candidates.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------

    def _anew(self, error: RetrievalError) -> tuple[LayerBuffer, int]:
        """A buffer for what is recomputed, and how many blocks that is."""
        self.close()
        self._kept = None
        self.stats.begin_over_http()
        self.stats.note = f"recomputed: {error}"
        self._buffer = LayerBuffer(self._descriptor, self._layers, self._destination, self.stats)
        return self._buffer, len(self._keys[: self._blocks])

    async def _run(self) -> AsyncGenerator[Layer, None]:
        if not self._keys:
            raise NotFound(
                f"the tokens fill no block of {self._descriptor.block_tokens} tokens, "
                f"and only complete blocks are published"
            )
        path = self._path
        if path is None:
            async with aclosing(self._over_moqt()) as run:
                async for layer in run:
                    yield layer
            return
        path.start()
        while True:
            try:
                async with aclosing(self._over_moqt()) as run:
                    async for layer in run:
                        yield layer
                return
            except RetrievalTimeout:
                raise
            except RetrievalError as error:
                failure = error
            finally:
                self.stats.note = path.note
            if self._terms.strict:
                raise failure
            late = isinstance(failure, LateError)
            try:
                async with aclosing(self._over_http(path, shorter=not late)) as run:
                    async for layer in run:
                        yield layer
                return
            except RetrievalError as error:
                if not self._left():
                    raise
                if not late:
                    raise worse_of(failure, error) from None
                self._hasty = False  # holders cannot: publications may take their time

    async def _over_moqt(self) -> AsyncGenerator[Layer, None]:
        while True:
            entrant = await self._choose()
            candidate, retrieval = entrant.candidate, entrant.retrieval
            assert retrieval is not None
            more = 0 if self._terms.strict else self._blocks_held
            useless = too_short(retrieval.assembly, more, given=self._given, least=self._min_blocks)
            if useless is not None:
                retrieval.close()
                self._candidates.failed(useless)
                continue
            self._retrieval = retrieval
            self._spread(retrieval, candidate.url)
            self.stats.begin(candidate.namespace)
            self.stats.source = candidate.url or self._source
            self.stats.codecs = sorted({track.codec for track in retrieval.assembly.tracks})
            try:
                async with aclosing(self._follow(retrieval, candidate.url)) as run:
                    async for layer in run:
                        yield layer
                return
            except LateError:
                self._candidates.allow_again(candidate)
                raise
            except ShorterError:
                self._candidates.allow_again(candidate)
            except RetrievalTimeout:
                raise
            except RetrievalError as error:
                if isinstance(error, StalledError):
                    self._candidates.stalled(candidate, error)
                else:
                    self._candidates.failed(error, candidate)
                # of a publication that failed verification nothing is kept
                bad = isinstance(error, VerificationFailed)
                self._kept = None if bad else retrieval.assembly.keep()
            finally:
                if self._path is not None:
                    self._path.stop()
                retrieval = self._retrieval or retrieval
                if not retrieval.finished:
                    self.stats.whole_blocks = retrieval.assembly.vouched
                    self._given = self.stats.whole_blocks  # what was given before is void
                retrieval.close()
                self.stats.packet_octets = retrieval.session.transport.packet_sizes[1]
                self._retrieval = self._patient = None
                self._since = self._now()

    async def _choose(self) -> Entrant:
        """The publication to retrieve next. Raises why there is none."""
        contest = self._contest = Contest(
            self._candidates,
            self._held,
            wanted=min(len(self._keys), self._blocks or len(self._keys)),
            patience=self._patience,
            settle_by=self._since + (self._after or self._patience),
            early=self._early,
        )
        try:
            while True:
                self._event.clear()
                due = contest.poll(self._now())
                if contest.error is not None:
                    raise contest.error
                if contest.winner is not None:
                    return contest.winner
                await self._wait(due)
        finally:
            contest.close()
            self._contest = None

    def _held(self, candidate: Candidate, session: MoqtSession) -> Retrieval:
        """The retrieval of a candidate, before its data is asked for."""
        self.stats.publications_tried += 1
        assembly = Assembly(
            candidate.namespace,
            self._descriptor,
            self._keys,
            self._layers,
            self._destination,
            self.stats,
            blocks=self._blocks,
            follow=self._follow_growth,
            require_listed=self._require_listed,
            records=candidate.records,
            elsewhere=self._path.has if self._path is not None else None,
            choice=self._choice,
            terms=self._terms,
        )
        return Retrieval(
            session.session,
            assembly,
            self.stats,
            mode=self._mode,
            require_listed=self._require_listed,
            changed=self._event.set,
            hold=True,
            beside=in_thread,
        )

    @property
    def _blocks_held(self) -> int:
        """How many leading blocks holders have."""
        return 0 if self._path is None else self._path.blocks

    def _spread(self, retrieval: Retrieval, url: str | None) -> None:
        """Where there are further connections to the relay, let them bring a part of it."""
        if self._connections > 1 and url is None:
            further, changed, most = self._sessions.further, self._event.set, self._connections
            retrieval.lanes = Lanes(retrieval, further, connections=most, changed=changed)

    async def _follow(self, retrieval: Retrieval, url: str | None) -> AsyncGenerator[Layer, None]:
        """The layers of one publication, with the help of holders."""
        assembly = retrieval.assembly
        # once: whoever begins again with other blocks voids what was kept
        kept, self._kept = self._kept, None
        retrieval.go(self._blocks_held, kept)
        patience = self._patient = Patience(self._patience, self.stats, self._now())
        again = Again(self._again_within, lambda: self._sessions.dial_again(url), self._rest)
        while True:
            times = [retrieval.poll(self._now())]
            if isinstance(retrieval.error, VerificationFailed):
                raise retrieval.error
            while retrieval.ready:
                yield retrieval.ready.popleft()
            if (failure := retrieval.error) is not None:
                if self._path is None or not self._path.can_complete(retrieval):
                    has_others = self._blocks_held or self._candidates.elsewhere(url)
                    others = self._patience if has_others else None
                    self._retrieval = retrieval = await again.go_on(retrieval, others)
                    self._spread(retrieval, url)
                    retrieval.start()
                    continue
                async with aclosing(self._from_holders(assembly)) as run:
                    async for layer in run:
                        yield layer
                if not assembly.whole:
                    raise failure
                return
            if retrieval.finished:
                return
            now = self._now()
            patience.look(now, retrieval.arrivals, caught_up=assembly.caught_up)
            if now >= patience.until and not (self._path is not None and self._path.busy):
                times.append(self._candidates.poll(now))
                if self._candidates.best() is None and not self._candidates.searching:
                    self._candidates.widen()
                lost = patience.is_lost(now)
                if self._candidates.best() is not None or (
                    lost and self._candidates.others_stalled
                ):
                    raise StalledError(
                        f"nothing came of publication {assembly.publication.hex()} "
                        f"for {self._patience:g} s, or no whole Object for {DRIPS} times as long"
                    )
                if lost and self._hasty and self._blocks_held:
                    raise LateError("nothing comes of the publication, and holders have blocks")
                if not self._candidates.searching:
                    patience.renew(now)
            if now < patience.until:
                times.append(patience.until)
            if self._path is not None and assembly.manifest is not None:
                late_at = patience.late_at(self._after)
                late, left = now >= late_at, self._left()
                assist(self._path, retrieval, late=late, hasty=self._hasty, left=left)
                if now < late_at:
                    times.append(late_at)
            if not self._event.is_set():
                await self._wait(min((at for at in times if at is not None), default=None))
            self._event.clear()

    # -- over HTTP -----------------------------------------------------------------------

    async def _from_holders(self, buffer: LayerBuffer) -> AsyncGenerator[Layer, None]:
        """Fill a buffer from holders, until it is whole or they have nothing more."""
        path = self._path
        assert path is not None
        foreign = len(buffer.foreign)
        while True:
            while buffer.ready:
                yield buffer.ready.popleft()
            if path.failure is not None:
                raise path.failure
            if buffer.whole or len(buffer.foreign) > foreign:
                return
            self._event.clear()
            if not path.busy:
                wanted = buffer.from_holders(path.has)
                if not path.begin_round(buffer, wanted, self._left()):
                    return
            await self._wait(None, late=False)

    async def _over_http(self, path: HttpPath, *, shorter: bool) -> AsyncGenerator[Layer, None]:
        """Everything from holders; with `shorter`, fewer blocks when some cannot be had."""
        while not path.looked_up:
            self._event.clear()
            await self._wait(None, late=False)
        if path.error is not None:
            raise path.error
        while path.blocks >= self._min_blocks:
            blocks = path.blocks
            self.stats.begin_over_http()
            buffer = self._buffer = LayerBuffer(
                self._descriptor, self._layers, self._destination, self.stats
            )
            self._kept = None
            buffer.begin([range(blocks)])
            try:
                async with aclosing(self._from_holders(buffer)) as run:
                    async for layer in run:
                        yield layer
                if buffer.whole:
                    return
            finally:
                path.stop()
                buffer.release()
                self._buffer = None
            if not shorter or path.blocks >= blocks:
                break
        raise path.why()

    # -- waiting -------------------------------------------------------------------------

    async def _wait(self, until: float | None, *, late: bool = True) -> None:
        """Wait for something to happen, `until` at the latest. Raises RetrievalTimeout, and
        with `late` LateError when it is time to take everything from holders."""
        if self._now() >= self._deadline:
            raise self._too_late()
        late_at = self._late_at() if late else None
        if late_at is not None:
            if self._now() >= late_at:
                raise LateError(f"no publication came within {self._after:g} s")
            until = late_at if until is None else min(until, late_at)
        when = self._deadline if until is None else min(until, self._deadline)
        try:
            async with asyncio.timeout_at(when):
                await self._event.wait()
        except TimeoutError:
            if self._now() >= self._deadline:
                raise self._too_late() from None

    async def _rest(self, until: float) -> None:
        """Wait for something that has not happened so far; raises as `_wait`."""
        self._event.clear()
        await self._wait(until)

    def _late_at(self) -> float | None:
        """When to do without a publication: as long as none has told of itself, and holders
        have something; a longer one is waited for with patience."""
        if not self._blocks_held or not self._hasty:
            return None
        if self._retrieval is not None and self._retrieval.assembly.manifest is not None:
            return None
        if self._candidates.longest <= self._blocks_held:
            return self._since + self._after
        silent = self._contest is None or self._contest.is_silent(self._now())
        return self._since + max(self._after, self._patience * (1 if silent else DRIPS))

    def _left(self) -> float:
        return max(0.0, self._deadline - self._now())

    def _too_late(self) -> RetrievalTimeout:
        return RetrievalTimeout(
            f"{self.stats.layers} of {len(self._layers)} layers came within {self._timeout:.3g} s",
            awaited(
                self.stats,
                self._source or "the relay",
                self._sessions,
                self._candidates,
                quiet=None if self._patient is None else self._now() - self._patient.arrived,
                over_http=self._buffer is not None,
                asked=0 if (contest := self._contest) is None else contest.asked,
                looked_up=self._path is None or self._path.looked_up,
            ),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
