"""`PageStore`: pages of an engine at holders of KVSP, for callers that must not be held up.

Everything happens on a thread of its own. What goes wrong is counted, told once, and becomes a
smaller answer; never an exception, and never a page that is not what was put.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Final, TypeVar

from kvcs.client.loop import LoopThread
from kvcs.names.errors import MisuseError
from kvcs.pages.counters import COUNTERS, Doing, Outcome, PageCounters
from kvcs.pages.naming import PageForm, PagePlace
from kvcs.pages.settings import PagesError, PageSettings
from kvsp.blocks.container import Container
from kvsp.blocks.kv_files import load_descriptor
from kvsp.client.client import Client
from kvsp.client.errors import (
    ClientError,
    NotAuthorizedError,
    RequestRefusedError,
    RequestTimeoutError,
)
from kvsp.client.limits import ClientLimits
from kvsp.client.retrieving.receiving import Layer
from kvsp.names.errors import DecodeError, FileError, KvspError
from kvsp.names.identity import Scope
from kvsp.names.uris import BlockId, check_base_uri
from kvsp.principals import load_token
from kvsp.records.records import ReplicaRecord

logger = logging.getLogger("kvcs.pages")

Answer = TypeVar("Answer")
Replicas = Sequence[Sequence[ReplicaRecord]]
"""Of each page, those that give it."""

CLOSE_SECONDS: Final = 2.0
"""Seconds that `close` may take."""
_GRACE: Final = 1.0
"""Seconds beyond its own deadlines that an answer of the thread is waited for."""


class PageStore:
    """Pages of one form at the holders that an index knows.

    `exists`, `get` and `put` return at once; the Future has how many of the pages, from the first
    one on without a gap, are there, came, or are stored now. It never has an exception, and cannot
    be cancelled: it is done when its deadlines are over. All methods may be called in any thread.
    """

    def __init__(
        self, settings: PageSettings, form: PageForm, counters: PageCounters = COUNTERS
    ) -> None:
        """Raises PagesError for what is wrong with a setting, a file or the form. Nothing is
        connected to."""
        self.settings, self.counters = settings, counters
        try:
            scope = Scope.load(settings.scope_key_file)
            self.place = PagePlace(scope, load_descriptor(settings.descriptor), form)
            check_base_uri(settings.holder, http_loopback=settings.http_loopback)
            token = settings.token_file
            self._client = Client(
                settings.kvsp,
                token=None if token is None else load_token(token),
                cafile=settings.cafile,
                http_loopback=settings.http_loopback,
                limits=ClientLimits(
                    request_s=settings.timeout, block_s=settings.timeout, attempts=2
                ),
            )
        except PagesError:
            raise
        except (KvspError, FileError, DecodeError, OSError) as error:
            raise PagesError(str(error)) from None
        self._index = _Circuit(settings.kvsp, settings.failed_seconds)
        self._giving: dict[str, _Circuit] = {}
        """Holders that gave nothing, or refused, for as long as they are not asked."""
        self._taking = _Circuit(settings.holder, settings.failed_seconds)
        self._lock = threading.Lock()
        self._pending = 0
        self._described = False
        self._is_open = False
        self._thread = LoopThread("kvcs.pages")
        counters.register()

    def exists(self, names: Sequence[str]) -> Future[int]:
        """How many leading pages some holder has."""
        return self._begin(Doing.LOOK_UP, len(names), partial(self._exists, list(names)))

    def get(self, names: Sequence[str], pages: Sequence[Any]) -> Future[int]:
        """Fill `pages`, writable buffers of `place.octets` each, which belong to the store until
        the Future is done: those that it counts are whole and verified, others undefined."""
        return self._begin(Doing.GET, len(names), partial(self._get, list(names), list(pages)))

    def put(self, names: Sequence[str], pages: Sequence[Any], *, copy: bool = True) -> Future[int]:
        """Store pages, buffers of `place.octets`, each named after the one before it in a prompt.
        Without `copy` they must stay as they are, whether or not the Future is done."""
        octets = len(names) * self.place.octets
        if any(memoryview(page).nbytes != self.place.octets for page in pages):
            self.counters.add(Doing.PUT, Outcome.FORM, len(names))
            return _done(0)
        with self._lock:
            room = self._pending + octets <= self.settings.pending_octets
            self._pending += octets if room else 0
        if not room:
            if self.counters.add(Doing.PUT, Outcome.FULL, len(names)) == len(names):
                logger.warning(
                    "pages are not stored: %d octets are being put already (pending_octets)",
                    self._pending,
                )
            return _done(0)
        kept = [bytes(page) if copy else page for page in pages]
        put = partial(self._put, list(names), kept)
        return self._begin(Doing.PUT, len(names), put, octets)

    def wait(self, answer: Future[int]) -> int:
        """The answer, for callers without a loop; 0 when even the deadlines are over."""
        try:
            return answer.result(self.settings.lookup_timeout + self.settings.timeout + _GRACE)
        except FutureTimeout:
            logger.warning("the thread of kvcs does not answer; the engine goes on without")
            return 0

    def close(self) -> None:
        """End what is under way and the thread, within two seconds; harmless when repeated."""
        self._thread.stop(self._end, CLOSE_SECONDS)

    # -- between the threads -------------------------------------------------------------

    def _begin(
        self, doing: Doing, pages: int, work: Callable[[], Awaitable[int]], pending: int = 0
    ) -> Future[int]:
        """Run it on the thread. `pending` octets are given back when it is over."""
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it any more

        async def run() -> int:
            return await work()

        def over(running: Future[int]) -> None:
            self._release(pending)
            error = None if running.cancelled() else running.exception()
            if running.cancelled():
                self.counters.add(doing, Outcome.CLOSED, pages)
            elif error is not None:
                self.counters.add(doing, Outcome.FAILED, pages)
                logger.error("kvcs: %s of %d pages has failed", doing, pages, exc_info=error)
            answer.set_result(0 if running.cancelled() or error else running.result())

        try:
            self._thread.begin(run()).add_done_callback(over)
        except MisuseError as error:
            self._release(pending)
            if self.counters.add(doing, Outcome.CLOSED, pages) == pages:
                logger.warning("%s", error)
            answer.set_result(0)
        return answer

    def _release(self, octets: int) -> None:
        with self._lock:
            self._pending -= octets

    # -- on the loop ---------------------------------------------------------------------

    async def _exists(self, names: list[str]) -> int:
        found = await self._look_up(Doing.LOOK_UP, names)
        return 0 if found is None else len(found)

    async def _get(self, names: list[str], pages: list[Any]) -> int:
        found = self._to_ask(await self._look_up(Doing.GET, names) or [])
        if not found:
            return 0
        client = await self._open()
        result = await client.get_blocks(
            found,
            _Into(self.place, pages),
            descriptor=self.place.descriptor,
            by_block=True,
            deadline_s=self.settings.timeout,
        )
        whole = result.complete_blocks
        self.counters.add(Doing.GET, Outcome.DONE, whole, whole * self.place.octets)
        if bad := sum(result.bad_sources.values()):
            self.counters.add(Doing.GET, Outcome.VERIFICATION, bad)
            logger.warning("what holders gave was not what their records say: %s", result.details)
        if lost := len(found) - whole:
            self.counters.add(Doing.GET, Outcome.LOST, lost)
        refusing = {
            error.source
            for error in result.failures.values()
            if isinstance(error, NotAuthorizedError)
        }
        for holder in result.late | refusing:
            circuit = self._giving[holder] = _Circuit(holder, self.settings.failed_seconds)
            circuit.failed(self._now, "; ".join(result.details.values()) or "it gave nothing")
        return whole

    def _to_ask(self, found: Replicas) -> Replicas:
        """The leading pages that some holder may give, with these: one that failed is not asked,
        and hides nothing of what others have."""
        now = self._now
        self._giving = {each: gate for each, gate in self._giving.items() if not gate.passes(now)}
        asked = [[each for each in page if each.holder not in self._giving] for page in found]
        count = next((place for place, page in enumerate(asked) if not page), len(asked))
        if count < len(found):
            self.counters.add(Doing.GET, Outcome.OPEN, len(found) - count)
        return asked[:count]

    async def _put(self, names: list[str], pages: list[Any]) -> int:
        keys = [self.place.key(name) for name in names]
        until = self._now + self.settings.timeout
        gate = asyncio.Semaphore(self.settings.uploads)

        async def store(place: int) -> bool:
            block = BlockId(self.place.descriptor.compat_id, self.place.scope_id, keys[place])
            container = Container.build(self.place.descriptor, self.place.sections(pages[place]))
            prior = keys[place - 1] if place else None
            client = await self._open()
            await client.put(self.settings.holder, block, container, prior=prior)
            return True

        async def one(place: int) -> bool:
            async with gate:
                work = partial(store, place)
                left = until - self._now
                stored = await self._tried(Doing.PUT, self._taking, 1, left, work) is not None
            if stored:
                self.counters.add(Doing.PUT, Outcome.DONE, 1, self.place.octets)
            return stored

        within = self.settings.timeout
        if not self._described and not await self._tried(
            Doing.PUT, self._index, len(keys), within, self._describe
        ):
            return 0
        async with asyncio.TaskGroup() as group:
            puts = [group.create_task(one(place)) for place in range(len(keys))]
        return next((place for place, put in enumerate(puts) if not put.result()), len(puts))

    async def _describe(self) -> bool:
        """Tell the index what the pages are, once."""
        client = await self._open()
        await client.put_descriptor(self.place.descriptor)
        self._described = True
        return True

    async def _look_up(self, doing: Doing, names: list[str]) -> Replicas | None:
        """The replicas of each leading page; None when that could not be asked."""
        keys = [self.place.key(name) for name in names]

        async def ask() -> Replicas:
            client = await self._open()
            descriptor = self.place.descriptor
            answer = await client.lookup(
                self.place.scope_id, descriptor.compat_id, keys, descriptor=descriptor
            )
            return [block.replicas for block in answer.blocks]

        within = self.settings.lookup_timeout
        found = await self._tried(doing, self._index, len(keys), within, ask)
        if found is not None:
            self.counters.add(doing, Outcome.MISSED, len(keys) - len(found))
            if doing is Doing.LOOK_UP:
                self.counters.add(doing, Outcome.DONE, len(found))
        return found

    async def _tried(
        self,
        doing: Doing,
        circuit: _Circuit,
        pages: int,
        within: float,
        work: Callable[[], Awaitable[Answer]],
    ) -> Answer | None:
        """What `work` gives; None, counted, when it fails or was not tried."""
        if not circuit.passes(self._now):
            self.counters.add(doing, Outcome.OPEN, pages)
            return None
        try:
            async with asyncio.timeout(within):
                answer = await work()
        except (TimeoutError, ClientError) as error:
            self._count(doing, circuit, pages, error)
            return None
        circuit.worked()
        return answer

    def _count(
        self, doing: Doing, circuit: _Circuit, pages: int, error: TimeoutError | ClientError
    ) -> None:
        match error:
            case TimeoutError() | RequestTimeoutError():
                outcome = Outcome.TIMEOUT
            case RequestRefusedError():
                outcome = Outcome.REFUSED
            case _:
                outcome = Outcome.UNREACHABLE
        self.counters.add(doing, outcome, pages)
        circuit.failed(self._now, str(error) or "it did not answer in time")

    async def _open(self) -> Client:
        if not self._is_open:
            self._is_open = True
            await self._client.__aenter__()  # which waits for nothing
        return self._client

    async def _end(self) -> None:
        await self._client.close()

    @property
    def _now(self) -> float:
        return self._thread.loop.time()


class _Into:
    """Pages, as a Destination of verified layers."""

    def __init__(self, place: PagePlace, pages: list[Any]) -> None:
        self._place, self._pages = place, pages

    def write(self, layer: Layer) -> None:
        self._place.write(self._pages[layer.block], layer.layer, layer.k, layer.v)


class _Circuit:
    """Whether a service is asked: not for a while after it has failed."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._until = 0.0

    def passes(self, now: float) -> bool:
        return now >= self._until

    def worked(self) -> None:
        self._until = 0.0

    def failed(self, now: float, why: str) -> None:
        if now >= self._until:
            logger.warning("%s is not asked for %g s: %s", self._name, self._seconds, why)
        self._until = now + self._seconds


def _done(count: int) -> Future[int]:
    answer: Future[int] = Future()
    answer.set_result(count)
    return answer
