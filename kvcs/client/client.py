"""`kvcs.Client`: KV caches for an inference engine, which waits for nobody.

client = kvcs.Client("moqt://relay:4443", cafile="cert.pem", scope_keys="scope.json",
                     descriptor="compat.json")
save = client.publish(tokens)                     # where a prompt is computed
for layer in range(layers):
    save.put_layer(layer, k, v)

found = client.directory.longest(tokens)          # where it is needed
if found is not None:
    load = client.load(found)
    for layer in range(layers):
        if not load.wait_layer(layer, within=0.5):
            break                                 # compute the tokens: load.lost
        k, v = load.layer(layer)
    load.wait(within=0.5)                         # the manifest says nothing else
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kvcs.client.arriving import Arriving, Found
from kvcs.client.counters import Counters, Dropped, Ended
from kvcs.client.directory import ClientDirectory
from kvcs.client.kept import Kept
from kvcs.client.links import RelayLink
from kvcs.client.loading import CacheLost, Load, OnBlock
from kvcs.client.loop import LoopThread
from kvcs.client.saving import Save
from kvcs.client.settings import ClientSettings
from kvcs.names.errors import MisuseError, NothingToPublish
from kvcs.names.namespace import PublicationNamespace
from kvcs.publishing.announcing import Publishable
from kvcs.publishing.publication import Publication
from kvcs.publishing.standing import CountingPublisher
from kvcs.trust.producers import ProducerKey, Producers
from kvcs.trust.terms import Terms
from kvsp.blocks.kv_files import load_descriptor
from kvsp.names.errors import FileError
from kvsp.names.identity import Descriptor, Scope
from kvsp.names.prefix import complete_blocks
from kvsp.names.tokens import Tokens, token_list
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.quic.config import QuicConfig
from moqt.token_file import TokenFileError, bearer, read_token_file
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from moqt.values.names import TrackNamespace

if TYPE_CHECKING:
    from kvsp.client import Client as Index

logger = logging.getLogger("kvcs.client")

IDLE_TIMEOUT: Final = 10.0
"""Seconds of silence after which a relay counts as gone, and is connected to again."""
CLOSE_SECONDS: Final = 2.0
"""Seconds that `close` may take."""

_SWEEPS: Final = 8
"""Times that is looked for what has expired, in the time it is kept for."""

_REASONS: Final = {
    Dropped.BUDGET: "what is kept leaves no room for it (keep_octets, keep_publications)",
    Dropped.EVICTED: "another publication needed its room",
    Dropped.EXPIRED: "it was of no use for so long (keep_seconds)",
}


class Client:
    """One scope and model at one or more relays, for an engine that must not wait.

    Made in the process that uses it, after any fork. All methods may be called in any thread, and
    return at once, but those with a time to wait in their arguments and `directory.longest`. What
    the network does is never an exception: a publication is dropped, a load fails, both are
    counted (`counters`). `close` it, or use it in a `with`.
    """

    directory: ClientDirectory
    """What others have published."""

    counters: Counters
    """What became of everything: a Collector for a registry of prometheus_client."""

    def __init__(
        self,
        relays: str | Sequence[str],
        *,
        scope_keys: Scope | str | os.PathLike[str],
        descriptor: Descriptor | str | os.PathLike[str],
        cafile: str | os.PathLike[str] | None = None,
        token: str | os.PathLike[str] | None = None,
        kvsp: str | None = None,
        kvsp_cafile: str | os.PathLike[str] | None = None,
        kvsp_token: str | os.PathLike[str] | None = None,
        kvsp_http_loopback: bool = False,
        lookup_timeout: float = ClientSettings.lookup_timeout,
        stall: float = ClientSettings.stall,
        timeout: float = ClientSettings.timeout,
        keep_octets: int = ClientSettings.keep_octets,
        keep_seconds: float = ClientSettings.keep_seconds,
        settings: ClientSettings | None = None,
        producers: Producers | None = None,
        signer: ProducerKey | None = None,
        require_listed: bool = False,
        quic: QuicConfig | None = None,
        session: SessionConfig | None = None,
    ) -> None:
        """`relays` are the URLs of relays: what is published is announced at each, the nearest
        stands first. `scope_keys` is the scope, or its file; `descriptor` what is computed with,
        or its file. `cafile` has the authorities of the relays' certificates, `token` is the file
        of a bearer token that they are shown. `kvsp` is the URI of an index service, which also
        names publications that go on with other tokens. The others are those of `ClientSettings`,
        which are given by `settings` instead where there are more, and, as for a `Consumer` and
        a `Publication`, `producers`, `signer` and `require_listed`.

        Nothing is connected to before this returns. Raises what is wrong with a file (FileError,
        DecodeError, TokenFileError), a URL (MisuseError) or a setting (ValueError).
        """
        self._settings = settings or ClientSettings(
            lookup_timeout=lookup_timeout,
            stall=stall,
            timeout=timeout,
            keep_octets=keep_octets,
            keep_seconds=keep_seconds,
        )
        urls = [relays] if isinstance(relays, str) else list(relays)
        if not urls:
            raise MisuseError("a Client needs the URL of a relay")
        for url in urls:
            parse_uri(url)
        self.scope = (
            scope_keys if isinstance(scope_keys, Scope) else Scope.load(scope_keys, sealing=True)
        )
        self.descriptor = (
            descriptor if isinstance(descriptor, Descriptor) else load_descriptor(descriptor)
        )
        self.descriptor.section_octets()
        self._token = None if token is None else Path(token)
        if self._token is not None:
            read_token_file(self._token)  # what is wrong is said here
        self._quic = quic or QuicConfig(
            cafile=None if cafile is None else Path(cafile), idle_timeout=IDLE_TIMEOUT
        )
        _check_authorities(self._quic.cafile)
        self._session = session or SessionConfig()
        self._shown: dict[str, bytes] = {}
        """The token that each relay was shown last."""
        self._signer = signer
        self._require_listed = require_listed or producers is not None
        self._terms = Terms(self.scope.content_keys, producers)
        self._index: Index | None = None
        opening_index = self._index_opener(kvsp, kvsp_cafile, kvsp_token, kvsp_http_loopback)
        self.counters = Counters(self._gauges)
        self._kept: Kept[Save] = Kept(
            self._settings.keep_octets,
            self._settings.keep_publications,
            self._settings.keep_seconds,
        )
        self._saves: dict[TrackNamespace, Save] = {}
        """Those that are served, by namespace."""
        self._offered: set[TrackNamespace] = set()
        self._lock = threading.Lock()
        self._pending = 0
        self._loads: dict[Load, asyncio.Task[None] | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("kvcs.Client")
        self._links = {
            url: RelayLink(
                url,
                self._open,
                self.scope,
                self.descriptor,
                asked=self._asked,
                offered=self._announced,
                exchanged=self._is_exchanged,
            )
            for url in urls
        }
        self.directory = ClientDirectory(
            self._thread,
            tuple(self._links.values()),
            self.scope,
            self.descriptor,
            self._settings,
            self.counters,
            mine=self._is_computed_here,
            index=lambda: self._index,
        )
        self._thread.soon(self._begin, opening_index)
        atexit.register(self.close)

    # -- for the engine ------------------------------------------------------------------

    def publish(self, tokens: Tokens, *, first_chunk: int | None = None) -> Save:
        """Offer the cache of a prompt, from now on, as it is computed: give what is returned every
        layer. `first_chunk` says of how many tokens the first pass of a prefill in chunks is.

        A prompt that fills no block, or for which there is no room, is `failed` from the
        beginning. Raises DecodeError `bad-token`, MisuseError for a first chunk without a whole
        block, after `close` and in a forked process.
        """
        self._thread.check()
        ids, rows = token_list(tokens), self.descriptor.block_tokens
        blocks = complete_blocks(len(ids), rows)
        first = blocks if first_chunk is None else min(blocks, complete_blocks(first_chunk, rows))
        if blocks and not first:
            raise MisuseError(
                f"a first chunk of {first_chunk} tokens fills no block of {rows} tokens"
            )
        make = partial(
            Publication,
            self.scope,
            self.descriptor,
            ids[: first * rows],
            growing=first < blocks,
            signer=self._signer,
        )
        save = Save(self, self.descriptor, make, ids, first)
        if not blocks:
            save.failed = str(NothingToPublish(f"{len(ids)} tokens fill no block of {rows} tokens"))
            self.counters.add("dropped", Dropped.FAILED)
        elif save.octets > self._settings.keep_octets:
            save.failed = (
                f"{save.octets} octets are more than the {self._settings.keep_octets} "
                "that are kept (keep_octets)"
            )
            self._count_dropped(Dropped.BUDGET, save.failed)
        else:
            self._thread.soon(self._keep, save)
        return save

    def load(
        self,
        found: Found,
        blocks: range | None = None,
        *,
        on_block: OnBlock | None = None,
        timeout: float | None = None,
    ) -> Load:
        """Load `blocks` of a publication, all that were found by default; of one in production more
        can be asked for, `found.most` at the most. With `on_block` each block is given to that, on
        the client's thread, layer by layer in order, instead of being kept: it must not wait for
        anything, and copy what it needs. `timeout` replaces the one of the client.

        Raises ValueError for blocks that there cannot be, MisuseError after `close` and in a
        forked process.
        """
        self._thread.check()
        blocks = range(found.blocks) if blocks is None else blocks
        if blocks.step != 1 or not blocks or blocks.start < 0 or blocks.stop > found.most:
            raise ValueError(
                f"blocks {blocks.start} to {blocks.stop - 1} are not within 0 to {found.most - 1}, "
                "those of the prompt that can be used"
            )
        within = self._settings.timeout if timeout is None else timeout
        load = Load(self.descriptor, blocks, on_block, self._stop_loading, within)
        with self._lock:
            room = len(self._loads) < self._settings.most_loads
            if room:
                self._loads[load] = None
        if room:
            self._thread.soon(self._load, load, found)
        else:
            why = f"{self._settings.most_loads} loads are under way (most_loads)"
            load.end(Ended.REFUSED, CacheLost(why, blocks))
            if self.counters.add("loads", Ended.REFUSED) == 1:
                logger.warning("a load was refused: %s", why)
        return load

    def close(self) -> None:
        """Withdraw what is published, end every load, leave the relays: within two seconds.
        Harmless when repeated, and in a forked process."""
        atexit.unregister(self.close)
        self._thread.stop(self._end, CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- for its saves -------------------------------------------------------------------

    def soon(self, call: Callable[..., None], *args: object) -> None:
        self._thread.soon(call, *args)

    def reserve(self, octets: int) -> bool:
        with self._lock:
            room = self._pending + octets <= self._settings.pending_octets
            self._pending += octets if room else 0
            return room

    def release(self, octets: int) -> None:
        with self._lock:
            self._pending -= octets

    def offer(self, save: Save, publication: Publication) -> None:
        self._saves[publication.namespace.fields] = save
        for link in self._links.values():
            link.add(publication)

    def progressed(self, save: Save) -> None:
        self._kept.use(save, self._now)

    def let_go(self, save: Save, reason: Dropped, why: str) -> None:
        if save in self._kept:
            self._kept.drop(save)
            self._withdraw(save, reason, why)

    def _withdraw(self, save: Save, reason: Dropped, why: str) -> None:
        self._count_dropped(reason, why)
        save.end(why)
        publication = save.publication
        if publication is not None:
            for link in self._links.values():
                link.remove(publication)
            self._saves.pop(publication.namespace.fields, None)
            self._offered.discard(publication.namespace.fields)

    # -- on the loop ---------------------------------------------------------------------

    def _begin(self, opening_index: Callable[[], Awaitable[Index]] | None) -> None:
        for link in self._links.values():
            self._start(link.stand())
        self._start(self._sweep())
        if opening_index is not None:
            self._start(self._open_index(opening_index))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the client has failed", exc_info=task.exception())

    async def _open(self, url: str, publisher: CountingPublisher) -> MoqtSession:
        session = self._session
        if self._token is not None:  # read each time: it may have been exchanged
            self._shown[url] = token = read_token_file(self._token)
            session = replace(session, setup_tokens=(bearer(token),))
        return await connect(url, quic=self._quic, session=session, handler=publisher)

    def _is_exchanged(self, url: str) -> bool:
        """Whether there is another token by now than the one that a relay was shown."""
        try:
            return self._token is not None and read_token_file(self._token) != self._shown.get(url)
        except TokenFileError:
            return False  # it is about to be written

    async def _sweep(self) -> None:
        """Let go of what has expired."""
        while True:
            await asyncio.sleep(self._settings.keep_seconds / _SWEEPS)
            for save in self._kept.expired(self._now):
                if self._is_used(save):
                    self._kept.use(save, self._now)
                else:
                    self.let_go(save, Dropped.EXPIRED, _REASONS[Dropped.EXPIRED])

    def _keep(self, save: Save) -> None:
        gone = self._kept.admit(save, save.octets, self._now, self._is_spare)
        if gone is None:
            self._count_dropped(Dropped.BUDGET, _REASONS[Dropped.BUDGET])
            save.end(_REASONS[Dropped.BUDGET])
            return
        for each in gone:
            self._withdraw(each, Dropped.EVICTED, _REASONS[Dropped.EVICTED])
        self._start(save.run())

    def _load(self, load: Load, found: Found) -> None:
        if load.over:
            self._loaded(load, found, None)
            return
        link = self._links.get(found.relay)
        session = None if link is None else link.session
        if link is None or session is None:
            why = f"there is no session to {found.relay}"
            load.end(Ended.LOST, CacheLost(why, load.blocks))
            self._loaded(load, found, None)
            return

        def ending(outcome: Ended) -> None:
            if not load.over:  # else it was cancelled meanwhile
                self._loading_ends(found, link, outcome, arriving)

        arriving = Arriving(
            load,
            found,
            session,
            self.descriptor,
            stall=self._settings.stall,
            terms=self._terms,
            ending=ending,
            require_listed=self._require_listed,
            line=link.line,
        )
        link.line.loads += 1
        task = self._start(arriving.run())
        self._loads[load] = task
        task.add_done_callback(lambda _: self._loaded(load, found, link))

    def _loaded(self, load: Load, found: Found, link: RelayLink | None) -> None:
        """A load is over; `link` is where it was under way."""
        with self._lock:
            self._loads.pop(load, None)
        if link is not None:
            link.line.loads -= 1
        if load.outcome is Ended.CANCELLED or link is None:
            self.counters.add("loads", load.outcome or Ended.CANCELLED)
        if load.error is not None:
            logger.info("%s: %s: %s", found.relay, load.outcome, load.error)

    def _loading_ends(
        self, found: Found, link: RelayLink, outcome: Ended, arriving: Arriving
    ) -> None:
        """What failed is not offered again for a while; nor is its relay asked, if that is what
        did not answer."""
        self.counters.add("loads", outcome)
        self.counters.add("octets_loaded", found.relay, arriving.stats.octets)
        if outcome is Ended.LOADED:
            return
        gone = link.session is None or link.session.closed is not None
        self.directory.doubt(found, everywhere=not (arriving.silent or gone))
        if arriving.silent and not gone:
            self.directory.is_silent(link)
            self._start(self._unless_it_answers(link, found))

    async def _unless_it_answers(self, link: RelayLink, found: Found) -> None:
        """It was the publisher that did not answer, when the relay does."""
        if await link.answers(self._settings.stall):
            link.silent_until = 0.0
            self.directory.doubt(found)

    def _stop_loading(self, load: Load) -> None:
        def stop() -> None:
            task = self._loads.get(load)
            if task is not None:
                task.cancel()

        with contextlib.suppress(MisuseError):  # after `close` everything was ended
            self._thread.soon(stop)

    def _asked(self, namespace: TrackNamespace) -> None:
        save = self._saves.get(namespace)
        if save is not None:
            self._kept.use(save, self._now)

    def _announced(self, link: RelayLink, publication: Publishable) -> None:
        fields = publication.namespace.fields
        if fields not in self._offered:
            self._offered.add(fields)
            self.counters.add("offered", link.url)

    async def _end(self) -> None:
        for save in list(self._saves.values()):
            save.end("the client was closed")
        for load in list(self._loads):
            load.end(Ended.CANCELLED, CacheLost("the client was closed", load.blocks))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._index is not None:
            await self._index.__aexit__(None, None, None)

    # -- the index service ---------------------------------------------------------------

    def _index_opener(
        self,
        uri: str | None,
        cafile: str | os.PathLike[str] | None,
        token: str | os.PathLike[str] | None,
        http_loopback: bool,
    ) -> Callable[[], Awaitable[Index]] | None:
        """What opens the index service, on the loop. Raises what is wrong with it."""
        if uri is None:
            return None
        from kvsp.client import Client as Index  # it takes a while, and not everybody needs it
        from kvsp.principals import load_token

        make = partial(
            Index,
            uri,
            token=None if token is None else load_token(Path(token)),
            cafile=None if cafile is None else Path(cafile),
            http_loopback=http_loopback,
        )
        make()  # what is wrong is said here

        async def open_it() -> Index:
            return await make().__aenter__()

        return open_it

    async def _open_index(self, opening: Callable[[], Awaitable[Index]]) -> None:
        self._index = await opening()

    # -- inside --------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._thread.loop.time()

    def _is_used(self, save: Save) -> bool:
        """Whether somebody is retrieving it now."""
        publication = save.publication
        return publication is not None and any(
            link.publisher.serves(publication.namespace.fields) for link in self._links.values()
        )

    def _is_spare(self, save: Save) -> bool:
        """Whether it may give way to another one."""
        return save.complete and not self._is_used(save)

    def _is_computed_here(self, namespace: PublicationNamespace) -> bool:
        """Whether this client offers it and it is not complete: who waits for that would wait for
        itself."""
        save = self._saves.get(namespace.fields)
        return save is not None and not save.complete

    def _count_dropped(self, reason: Dropped, why: str) -> None:
        if self.counters.add("dropped", reason) == 1:
            limits = (Dropped.BUDGET, Dropped.PENDING, Dropped.EVICTED)
            level = logging.WARNING if reason in limits else logging.INFO
            logger.log(level, "a publication is not offered any more: %s", why)

    def _gauges(self) -> dict[str, tuple[str, float]]:
        standing = sum(link.session is not None for link in self._links.values())
        return {
            "kept_publications": ("Publications kept.", len(self._kept)),
            "kept_octets": ("Octets of K and V that they have.", self._kept.octets),
            "pending_octets": ("Octets handed over and not hashed so far.", self._pending),
            "loading": ("Loads under way.", len(self._loads)),
            "relays": ("Relays with a session that stands.", standing),
        }


def _check_authorities(path: str | Path | None) -> None:
    """Raises FileError unless it holds certificates: later, every session would fail for that."""
    if path is None:
        return
    from cryptography import x509  # it takes long, and not everybody has such a file

    try:
        x509.load_pem_x509_certificates(Path(path).read_bytes())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise FileError(f"{path}: not a file of PEM certificates") from None
