"""What is published of a prompt: looked up in what the relays have told, without asking them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from kvcs.client.arriving import Found
from kvcs.client.counters import Counters, Looked
from kvcs.client.links import RelayLink
from kvcs.client.loop import LoopThread
from kvcs.client.settings import ClientSettings
from kvcs.finding.candidates import Candidate, named_by
from kvcs.keeping.failures import Failures
from kvcs.names.namespace import PublicationNamespace
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.prefix import usable_blocks
from kvsp.names.tokens import Tokens

if TYPE_CHECKING:
    from kvsp.client import Client as Index

logger = logging.getLogger("kvcs.client")


class Lookup:
    """A look-up that may take a moment; `ClientDirectory.ask` makes it."""

    def __init__(self, answer: Future[Found | None]) -> None:
        self._answer = answer

    @property
    def done(self) -> bool:
        """Whether it has been answered; it will be within `lookup_timeout`."""
        return self._answer.done()

    @property
    def found(self) -> Found | None:
        """What there is; None when there is nothing, and while it is not `done`."""
        if not self._answer.done() or self._answer.cancelled():
            return None
        return self._answer.result()

    def wait(self, within: float) -> Found | None:
        """`found`, once it is done, or after so many seconds."""
        with contextlib.suppress(TimeoutError, CancelledError):
            self._answer.result(within)
        return self.found


class ClientDirectory:
    """The publications of one scope and model at all relays of a `Client`. Safe in any thread."""

    def __init__(
        self,
        thread: LoopThread,
        links: Sequence[RelayLink],
        scope: Scope,
        descriptor: Descriptor,
        settings: ClientSettings,
        counters: Counters,
        *,
        mine: Callable[[PublicationNamespace], bool],
        index: Callable[[], Index | None],
    ) -> None:
        """`mine` says what this client is computing itself; `index` is the index service, if
        there is one and it is open."""
        self._thread = thread
        self._links = {link.url: link for link in links}
        self._scope = scope
        self._descriptor = descriptor
        self._settings = settings
        self._counters = counters
        self._mine = mine
        self._index = index
        self._lock = threading.Lock()
        self._failures = Failures(settings.failed_seconds)

    # -- for the engine ------------------------------------------------------------------

    def longest(self, tokens: Tokens) -> Found | None:
        """The longest publication that these token ids begin with, at most all tokens but one.

        Without a packet, unless a relay has not told what it has, lists nothing, or an index
        service is to be asked for more: then within `lookup_timeout`. What is being computed by
        this client, and what failed lately, is left out. Raises DecodeError `bad-token`,
        MisuseError after `close` and in a forked process.
        """
        return self.ask(tokens).wait(2 * self._settings.lookup_timeout)

    def ask(self, tokens: Tokens) -> Lookup:
        """`longest`, without waiting. Raises as `longest`."""
        self._thread.check()
        most = usable_blocks(len(tokens), self._descriptor.block_tokens)
        if not most:
            self._counters.add("lookups", Looked.SHORT)
            return _answered(None)
        keys = block_keys(self._scope, self._descriptor, tokens)
        now = self._thread.loop.time()
        found = self._best(self._told(keys), keys, most, now)
        if found is not None and found.blocks == most:
            return self._counted(found)
        ask = [link for link in self._links.values() if self._is_asked(link, now)]
        if not ask and self._index() is None:
            return self._counted(found)
        return Lookup(self._thread.begin(self._search(keys, most, ask)))

    def doubt(self, found: Found, *, everywhere: bool = True) -> None:
        """Do not offer a publication again for `failed_seconds`: it was of no use; or not at that
        relay, when it was not its publisher's fault."""
        what = found.namespace if everywhere else (found.relay, found.namespace)
        with self._lock:
            self._failures.note(what, self._thread.loop.time())

    # -- on the loop ---------------------------------------------------------------------

    def is_silent(self, link: RelayLink) -> None:
        """A relay did not answer in time: it is not asked for `failed_seconds`."""
        link.silent_until = self._thread.loop.time() + self._settings.failed_seconds
        if self._counters.add("silent", link.url) == 1:
            logger.warning(
                "%s does not answer: it is not asked for %g s",
                link.url,
                self._settings.failed_seconds,
            )

    # -- inside --------------------------------------------------------------------------

    def _is_asked(self, link: RelayLink, now: float) -> bool:
        """Whether the relay may have something that it has not told."""
        return now >= link.silent_until and (link.refuses or not link.ready.is_set())

    def _told(self, keys: Sequence[bytes]) -> Iterable[Candidate]:
        """What the relays have told of, each with its URL; none of those that are silent."""
        now = self._thread.loop.time()
        for link in self._links.values():
            if now >= link.silent_until:
                for blocks, namespace in link.known(keys):
                    yield Candidate(link.url, namespace, blocks)

    async def _search(
        self, keys: Sequence[bytes], most: int, ask: Sequence[RelayLink]
    ) -> Found | None:
        """Ask those that have not told, and the index service."""
        loop = asyncio.get_running_loop()
        asking = {asyncio.create_task(self._of_link(link, keys)): link for link in ask}
        indexed = asyncio.create_task(self._named(keys[:most]))
        waiting: set[asyncio.Task[list[Candidate]]] = {*asking, indexed}
        deadline = loop.time() + self._settings.lookup_timeout
        more: list[Candidate] = []
        try:
            while True:
                found = self._best([*self._told(keys), *more], keys, most, loop.time())
                left = deadline - loop.time()
                if not waiting or left <= 0 or (found is not None and found.blocks == most):
                    break
                done, waiting = await asyncio.wait(
                    waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    more += task.result()
        finally:
            for task in waiting:
                task.cancel()
        for task, link in asking.items():
            if task in waiting and loop.time() >= deadline:
                self.is_silent(link)
        self._count(found)
        return found

    async def _of_link(self, link: RelayLink, keys: Sequence[bytes]) -> list[Candidate]:
        """What a relay tells when it is asked: nothing that `_told` does not tell, if it lists."""
        await link.ready.wait()
        if not link.refuses:
            return []
        return [Candidate(link.url, each, blocks) for blocks, each in await link.probe(keys)]

    async def _named(self, keys: Sequence[bytes]) -> list[Candidate]:
        """What the index service names at our relays."""
        index = self._index()
        if index is None:
            return []
        from kvsp.client import ClientError  # HTTP is loaded by those who use it

        try:
            answer = await index.lookup(
                self._scope.scope_id, self._descriptor.compat_id, keys, descriptor=self._descriptor
            )
        except ClientError as error:
            logger.info("the index service does not tell: %s", error)
            return []
        urls = {url.rstrip("/"): url for url in self._links}
        named = []
        for each in named_by(answer):
            url = urls.get((each.url or "").rstrip("/"))
            if url is not None:
                named.append(Candidate(url, each.namespace, each.blocks, each.records))
        return named

    def _best(
        self, candidates: Iterable[Candidate], keys: Sequence[bytes], most: int, now: float
    ) -> Found | None:
        best: Candidate | None = None
        for each in candidates:
            useful = min(each.blocks, most)
            if best is not None and useful <= min(best.blocks, most):
                continue
            with self._lock:
                failed = any(
                    self._failures.holds(what, now)
                    for what in (each.namespace, (each.url, each.namespace))
                )
            if not failed and not self._mine(each.namespace):
                best = each
        if best is None or best.url is None or not best.blocks:
            return None
        blocks = min(best.blocks, most)
        tokens = blocks * self._descriptor.block_tokens
        return Found(blocks, tokens, best.url, best.namespace, most, keys, best.records)

    def _counted(self, found: Found | None) -> Lookup:
        self._count(found)
        return _answered(found)

    def _count(self, found: Found | None) -> None:
        self._counters.add("lookups", Looked.MISS if found is None else Looked.HIT)


def _answered(found: Found | None) -> Lookup:
    answer: Future[Found | None] = Future()
    answer.set_result(found)
    return Lookup(answer)
