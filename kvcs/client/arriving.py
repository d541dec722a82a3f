"""Loading one publication on one session: verified layers, until it is whole or has stalled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvcs.client.counters import Ended
from kvcs.client.loading import Load
from kvcs.client.stalls import Line, Stall
from kvcs.names.errors import (
    NotAuthorized,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.names.manifest import Manifest
from kvcs.names.namespace import PublicationNamespace
from kvcs.retrieving.asking.threads import in_thread
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.retrieval import Retrieval
from kvcs.retrieving.stats import Stats
from kvcs.trust.terms import Terms
from kvsp.blocks.layout import Tensor
from kvsp.names.identity import Descriptor
from moqt.aio import MoqtSession

if TYPE_CHECKING:
    from kvsp.records.records import ReplicaRecord

WATCH: Final = 4
"""Times that a load looks whether it has stalled, in the time after which it has."""

logger = logging.getLogger("kvcs.client")


@dataclass(frozen=True, slots=True)
class Found:
    """The longest publication that begins a prompt, as far as it is of use.

    `blocks` leading blocks, `tokens` tokens: never all tokens of the prompt, as one at least has
    to be computed. A publication in several segments may turn out to have more.
    """

    blocks: int
    tokens: int
    relay: str
    """The URL of the relay that has announced it."""
    namespace: PublicationNamespace
    most: int
    """Leading blocks of the prompt that could be used, if it has them."""
    keys: Sequence[bytes] = field(repr=False, compare=False)
    records: tuple[ReplicaRecord, ...] = field(default=(), repr=False, compare=False)


class StalledError(PublisherLost):
    """Nothing has come for longer than there is reason to wait."""


class ShortError(PublisherLost):
    """The publication has fewer blocks than were asked for."""


class _Into:
    """The destination of a Load: its arrays."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tokens = 0

    def begin(self, tokens: int, layers: range) -> None:
        self._tokens = tokens

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._load.arrays(layer, self._tokens)


class Arriving:
    """One retrieval into a `Load`. `run` it on the loop."""

    def __init__(
        self,
        load: Load,
        found: Found,
        session: MoqtSession,
        descriptor: Descriptor,
        *,
        stall: float,
        terms: Terms,
        ending: Callable[[Ended], None],
        require_listed: bool = False,
        line: Line | None = None,
    ) -> None:
        """`ending` is told how it ends, unless it is cancelled, before anybody who waits for the
        Load. `line` is that of all loads on the session. Whether a layer waits for the manifest to
        list it or not (`require_listed`), the load has not finished before."""
        self.stats = Stats(source=found.relay)
        self.silent = False
        """It has stalled, and nothing at all had come."""
        self._ending = ending
        self._load = load
        self._keys = found.keys
        self._stall = stall
        self._line = line
        self._changed = asyncio.Event()
        blocks = load.blocks
        self._assembly = Assembly(
            found.namespace,
            descriptor,
            found.keys,
            range(descriptor.layers),
            _Into(load),
            self.stats,
            blocks=blocks.stop,
            follow=blocks.stop > found.blocks,
            require_listed=require_listed,
            records=found.records,
            terms=terms,
            skip=blocks.start,
        )
        self._retrieval = Retrieval(
            session.session,
            self._assembly,
            self.stats,
            require_listed=True,
            changed=self._changed.set,
            beside=in_thread,
        )

    async def run(self) -> None:
        """Load it, and tell the Load how that has ended."""
        start = self._load.blocks.start
        try:
            await self._retrieve()
        except RetrievalError as error:
            bad = isinstance(error, VerificationFailed)
            whole = start if bad else max(start, self._assembly.vouched)
            there = range(start, min(whole, self._load.blocks.stop))
            outcome = outcome_of(error)
            self._ending(outcome)
            self._load.end(outcome, error, there)
        except Exception as error:  # the callback's, for example: the engine recomputes
            logger.exception("a load has failed")
            self._ending(Ended.FAILED)
            self._load.end(Ended.FAILED, error)
        else:
            self._ending(Ended.LOADED)
            self._load.end(Ended.LOADED, None, self._load.blocks)
        finally:
            self._load.end(Ended.CANCELLED, PublisherLost("the client was closed"))
            self._retrieval.close()

    async def _retrieve(self) -> None:
        loop, retrieval, load = asyncio.get_running_loop(), self._retrieval, self._load
        now = loop.time()
        stall, deadline = Stall(self._stall, now, self._line), now + load.timeout
        told: Manifest | None = None
        # of what follows other blocks, only the manifest tells where it begins
        retrieval.start(early=not load.blocks.start)
        while True:
            self._changed.clear()
            due = retrieval.poll(loop.time())
            manifest = self._assembly.manifest
            if manifest is not told and manifest is not None:
                told = manifest
                # of one that goes on with other tokens only the index service tells what is ours
                ours = max(manifest.continued(self._keys, 0), self._assembly.blocks)
                load.told(ours, producing=not self._assembly.complete)
            while retrieval.ready:
                load.came(retrieval.ready.popleft(), load.blocks.start)
                await asyncio.sleep(0)
            if retrieval.error is not None:
                raise retrieval.error
            if retrieval.finished:
                break
            now = loop.time()
            stall.producing = not self._assembly.complete
            stall.look(now, retrieval.arrivals + retrieval.manifest_arrivals, load.layers)
            # of what has come and takes time to read nothing more is to be expected
            until = deadline if retrieval.reading else min(stall.until, deadline)
            if now >= deadline:
                raise RetrievalTimeout(
                    f"{load.layers} layers of {self._publication} came within {load.timeout:g} s"
                )
            if now >= until and not self._changed.is_set():
                self.silent = stall.silent
                raise StalledError(
                    f"nothing came of {self._publication} for {stall.limit:.3g} s"
                    + (", nor any answer" if stall.silent else "")
                    + (", and its manifest has not listed all" if self._assembly.whole else "")
                )
            # what comes in between wakes nobody: it is looked at now and then
            look = min(until, now + stall.limit / WATCH)
            when = look if due is None else min(due, look)
            try:
                async with asyncio.timeout_at(when):
                    await self._changed.wait()
            except TimeoutError:
                stall.overslept(loop.time() - when)
        if self._assembly.blocks < load.blocks.stop:
            raise ShortError(
                f"{self._publication} has {self._assembly.blocks} blocks of these tokens, and "
                f"{load.blocks.stop} were asked for"
            )

    @property
    def _publication(self) -> str:
        return f"publication {self._assembly.publication.hex()}"


def outcome_of(error: RetrievalError) -> Ended:
    """How a load ended that raised this."""
    match error:
        case StalledError():
            return Ended.STALLED
        case ShortError():
            return Ended.SHORT
        case VerificationFailed():
            return Ended.VERIFICATION
        case RetrievalTimeout():
            return Ended.TIMEOUT
        case NotAuthorized():
            return Ended.REFUSED
    return Ended.LOST
