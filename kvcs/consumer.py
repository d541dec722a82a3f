"""Retrieving the KV cache of a token prefix (KVCS "Consumer Procedures").

    async with Consumer(session, scope, descriptor, tokens, timeout=10) as consumer:
        async for layer in consumer.layers():
            use(layer.index, layer.k, layer.v)

The asyncio face of `kvcs.discovery` and `kvcs.retrieval`: it has no task of its own, and
every wait ends with the timeout at the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from kvcs.assembly import Assembly, Destination, Kept, Layer, MemoryDestination, Stats
from kvcs.discovery import DEFAULT_GRACE, DEFAULT_PROBES, Discovery
from kvcs.errors import (
    MisuseError,
    NotFound,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.namespace import PublicationNamespace
from kvcs.retrieval import Mode, Retrieval
from kvsp.identity import Descriptor, Scope, Tokens, block_keys
from moqt.aio import MoqtSession
from moqt.errors import SessionClosed

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
        session: MoqtSession,
        scope: Scope,
        descriptor: Descriptor,
        tokens: Tokens,
        *,
        layers: range | None = None,
        blocks: int | None = None,
        mode: Mode | str = Mode.AUTO,
        timeout: float = DEFAULT_TIMEOUT,
        destination: Destination | None = None,
        publications: Sequence[PublicationNamespace] | None = None,
        require_listed: bool = False,
        min_blocks: int = 1,
        grace: float = DEFAULT_GRACE,
        probes: int = DEFAULT_PROBES,
        patience: float = DEFAULT_PATIENCE,
        source: str | None = None,
    ) -> None:
        """`layers` is the range wanted (all by default), `blocks` the most leading blocks
        wanted. `timeout` bounds everything, in seconds. `destination` is where layers are
        written (new arrays by default). `publications` are known already, in order of
        preference, and replace discovery. With `require_listed` no layer is handed over
        before the manifest lists its digests. `min_blocks` is the shortest prefix worth
        having; `grace` and `probes` are those of `kvcs.discovery`. After `patience` seconds
        without anything arriving another publication is tried, if one is known. `source` is
        what `stats` calls the peer.

        Raises DecodeError `bad-token` or `codec-unsupported`; ValueError for layers that do
        not exist, no blocks, an unknown mode, or a publication of another scope or
        Compatibility ID.
        """
        layers = range(descriptor.layers) if layers is None else layers
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > descriptor.layers:
            raise ValueError(
                f"layers {layers.start}-{layers.stop - 1} are not within "
                f"0-{descriptor.layers - 1}, the layers of the model"
            )
        if blocks is not None and blocks < 1:
            raise ValueError("at least one block is needed")
        if timeout <= 0 or grace < 0 or probes < 1 or patience <= 0:
            raise ValueError("timeout, probes and patience are positive, grace is not negative")
        for publication in publications or ():
            if (publication.scope_id, publication.compat_id) != (
                scope.scope_id,
                descriptor.compat_id,
            ):
                raise ValueError("a publication is of another scope or Compatibility ID")
        descriptor.section_octets()
        self.stats = Stats(source=source)
        self._session = session
        self._scope_id = scope.scope_id
        self._descriptor = descriptor
        self._keys = block_keys(scope, descriptor, tokens)
        self._layers = layers
        self._blocks = blocks
        self._mode = Mode(mode)
        self._timeout = timeout
        self._destination = destination or MemoryDestination(descriptor)
        self._publications = publications
        self._require_listed = require_listed
        self._min_blocks = min_blocks
        self._grace = grace
        self._probes = probes
        self._patience = patience
        self._event = asyncio.Event()
        self._discovery: Discovery | None = None
        self._retrieval: Retrieval | None = None
        self._started = False
        self._deadline = 0.0

    @property
    def octets_held(self) -> int:
        """Octets of the arrays of layers that were begun and not handed over; 0 at the end."""
        return self._retrieval.assembly.octets_held if self._retrieval is not None else 0

    async def layers(self) -> AsyncGenerator[Layer, None]:
        """The layers in order, each as soon as it is usable.

        When a publication turns out to be bad or incomplete and another one is there, the
        layers come again from the first, of the other publication (see
        `Layer.publication`), unless both are deterministic; arrays of a destination are then
        written again. Until the iteration ends
        without an exception, layers may turn out to differ from what the manifest lists.

        Raises NotFound, NotAuthorized, VerificationFailed, PublisherLost, RetrievalTimeout,
        or what the destination raises. Whatever the end, every request is cancelled.
        """
        if self._started:
            raise MisuseError("a Consumer retrieves once: make another one")
        self._started = True
        start = asyncio.get_running_loop().time()
        self._deadline = start + self._timeout
        try:
            async with aclosing(self._run()) as run:
                async for layer in run:
                    self.stats.seconds = self._now() - start
                    self.stats.layer_seconds.append(self.stats.seconds)
                    if self.stats.first_layer_seconds is None:
                        self.stats.first_layer_seconds = self.stats.seconds
                    yield layer
        finally:
            self.stats.seconds = self._now() - start
            self.close()

    async def retrieve(self) -> Stats:
        """Run to the end, the layers being written to the destination. Raises as `layers`."""
        async for _ in self.layers():
            pass
        return self.stats

    def close(self) -> None:
        """Cancel every request and let go of the arrays; harmless when repeated."""
        if self._retrieval is not None:
            self._retrieval.close()
        if self._discovery is not None:
            self._discovery.close()

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

    async def _run(self) -> AsyncGenerator[Layer, None]:
        if not self._keys:
            raise NotFound(
                f"the tokens fill no block of {self._descriptor.block_tokens} tokens, "
                f"and only complete blocks are published"
            )
        await self._established()
        tried: set[PublicationNamespace] = set()
        failure: RetrievalError | None = None
        kept: Kept | None = None
        while True:
            namespace = await self._next_publication(tried, failure)
            tried.add(namespace)
            retrieval = self._begin(namespace, kept)
            arrivals, patient_until = 0, self._now() + self._patience
            try:
                while True:
                    due = retrieval.poll(self._now())
                    if isinstance(retrieval.error, VerificationFailed):
                        raise retrieval.error
                    while retrieval.ready:
                        yield retrieval.ready.popleft()
                    if retrieval.error is not None:
                        raise retrieval.error
                    if retrieval.finished:
                        return
                    if retrieval.arrivals != arrivals:
                        arrivals, patient_until = retrieval.arrivals, self._now() + self._patience
                    elif self._now() >= patient_until:
                        if self._known(tried) is not None:
                            raise PublisherLost(
                                f"nothing came of publication {namespace.publication_id.hex()} "
                                f"for {self._patience:g} s"
                            )
                        patient_until = self._now() + self._patience
                    if not self._event.is_set():
                        await self._wait(patient_until if due is None else min(due, patient_until))
                    self._event.clear()
            except (VerificationFailed, PublisherLost) as error:
                # that a cache is bad is worth knowing, even when the next one is only gone
                if not isinstance(failure, VerificationFailed):
                    failure = error
                # of a publication that failed verification nothing is kept
                kept = None if isinstance(error, VerificationFailed) else retrieval.assembly.keep()
            finally:
                retrieval.close()

    async def _established(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._session.wait_established()
        except TimeoutError:
            raise self._too_late() from None
        except SessionClosed as error:
            raise PublisherLost(str(error)) from error

    def _begin(self, namespace: PublicationNamespace, kept: Kept | None) -> Retrieval:
        self.stats.begin(namespace)
        assembly = Assembly(
            namespace,
            self._descriptor,
            self._keys,
            self._layers,
            self._destination,
            self.stats,
            blocks=self._blocks,
            require_listed=self._require_listed,
            kept=kept,
        )
        retrieval = self._retrieval = Retrieval(
            self._session.session,
            assembly,
            self.stats,
            mode=self._mode,
            require_listed=self._require_listed,
            changed=self._event.set,
        )
        retrieval.start()
        return retrieval

    async def _next_publication(
        self, tried: set[PublicationNamespace], failure: RetrievalError | None
    ) -> PublicationNamespace:
        """The next publication to try; raises `failure`, or NotFound, when there is none."""
        if failure is not None and self._session.closed is not None:
            raise failure
        known = self._known(tried)
        if known is not None:
            return known
        if self._publications is not None:
            raise failure or _not_found()
        discovery = self._discovery
        if discovery is None:
            discovery = self._discovery = Discovery(
                self._session.session,
                self._scope_id,
                self._descriptor.compat_id,
                self._keys,
                min_blocks=self._min_blocks,
                grace=self._grace,
                probes=self._probes,
                changed=self._event.set,
            )
        while True:
            self._event.clear()
            due = discovery.poll(self._now())
            if discovery.done:
                chosen = discovery.choose(tried)
                if chosen is not None:
                    return chosen
                # others of the same prefix may be about to be told of
                due = discovery.settled_at()
                if failure is None or due is None or due <= self._now():
                    raise failure or _not_found()
            elif discovery.error is not None:
                raise discovery.error
            await self._wait(due)

    def _known(self, tried: set[PublicationNamespace]) -> PublicationNamespace | None:
        """A publication that is known already and was not tried."""
        if self._publications is not None:
            return next((known for known in self._publications if known not in tried), None)
        return self._discovery.choose(tried) if self._discovery is not None else None

    async def _wait(self, until: float | None) -> None:
        """Wait for something to happen, `until` at the latest. Raises RetrievalTimeout."""
        if self._now() >= self._deadline:
            raise self._too_late()
        when = self._deadline if until is None else min(until, self._deadline)
        try:
            async with asyncio.timeout_at(when):
                await self._event.wait()
        except TimeoutError:
            if self._now() >= self._deadline:
                raise self._too_late() from None

    def _too_late(self) -> RetrievalTimeout:
        return RetrievalTimeout(
            f"{self.stats.layers} of {len(self._layers)} layers came within {self._timeout:.3g} s"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _not_found() -> NotFound:
    # one sentence for every reason, so that it tells nothing about scopes
    return NotFound(
        "no publication of these tokens, or of a shorter prefix of them, was found; one is found "
        "only when all of its tokens are the first of these"
    )
