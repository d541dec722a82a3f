"""`kvcs-publish`: publish the KV cache of a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Protocol, TypeVar

import typer

from kvcs.names.encoding import Encoding
from kvcs.names.refusals import retry_delay
from kvcs.names.tracks import DEFAULT_CACHE_MS
from kvcs.programs.common import (
    EXIT_CODES_HELP,
    Cafile,
    Compat,
    Congestion,
    KeylogFile,
    Mtu,
    QlogDir,
    QuicBackend,
    ScopeKeyFile,
    SessionWindow,
    TokenFile,
    Tokens,
    Url,
    Version,
    check_url,
    exit_code,
    inputs,
    quic_config,
    readable_descriptor,
    run,
    session_config,
)
from kvcs.programs.index_options import (
    KvspAccess,
    KvspCafile,
    KvspHttpLoopback,
    KvspIndex,
    KvspTokenFile,
)
from kvcs.programs.prompt_options import KVCS, Profile, check_profile
from kvcs.publishing.publication import (
    Publication,
    Publishable,
    check_manifest_size,
    max_segments,
    publish,
)
from kvcs.publishing.stepwise import aput_layer
from kvcs.trust.producers import ProducerKey
from kvsp.blocks.kv_files import KvFile, load_tokens
from kvsp.cli.common import (
    ExitCode,
    InputError,
    check_cafile,
    note,
    print_json,
    stopping_signals,
    warnings_noted,
)
from kvsp.cli.plain import PlainCommand, run_app
from kvsp.names.codes import Codec
from kvsp.names.identity import Scope, block_keys
from kvsp.names.prefix import complete_blocks
from moqt.aio import MoqtSession, PublishedNamespace
from moqt.backoff import Backoff
from moqt.client import connect
from moqt.loop_hold import forget_holds, longest_hold
from moqt.publisher import Publisher
from moqt.quic.backend import Backend
from moqt.quic.config import MAX_DATAGRAM_SIZE, SESSION_WINDOW, QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.requests import IncomingFetch, IncomingRequest, IncomingSubscribe, RequestState
from moqt.session import Session
from moqt.values.codes import SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import ConnectError, MoqtError, SessionClosed
from moqt.values.messages import Goaway

if TYPE_CHECKING:
    from kvcs.publishing.replicas import Replicas

PROGRAM: Final = "kvcs-publish"
EXAMPLE: Final = (
    "Example:  kvcs-publish moqt://localhost:4443 --cafile ca.pem --scope-key-file scope.json "
    "--compat compat.json --tokens tokens.json --kv cache.safetensors"
)
TURN_OCTETS: Final = 4 << 20
"""Octets hashed before the sessions have their turn."""
MAX_CACHE_S: Final = 10 * 366 * 86_400
"""Longer than that nobody means it."""
LEAVE_AFTER: Final = 1.0
"""Seconds without a request after which a relay that goes away is left."""

_T = TypeVar("_T")

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


class CountingPublisher(Publisher):
    """A Publisher that knows which requests it is serving."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.sent_away = asyncio.Event()
        """The peer is going to end the session (GOAWAY)."""
        self._served: set[IncomingRequest] = set()

    @property
    def active(self) -> int:
        """Subscriptions and fetches that are not over."""
        self._served = {r for r in self._served if r.state is not RequestState.CLOSED}
        return len(self._served)

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._count(request)
        super().subscribe_received(request)

    def fetch_received(self, request: IncomingFetch) -> None:
        self._count(request)
        super().fetch_received(request)

    def goaway_received(self, session: Session, goaway: Goaway) -> None:
        self.sent_away.set()

    def _count(self, request: IncomingRequest) -> None:
        self.requests += 1
        if len(self._served) > 256:
            _ = self.active
        self._served.add(request)


@dataclass(frozen=True, slots=True)
class Settings:
    url: str
    quic: QuicConfig
    session: SessionConfig
    timeout: float
    live_delay: float
    exit_after_idle: float | None
    json: bool


@app.command(
    cls=PlainCommand,
    help=f"Publish the KV cache of a prompt.\n\n{EXIT_CODES_HELP}",
    epilog=EXAMPLE,
)
def command(
    url: Url,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    kv: Annotated[
        Path, typer.Option(metavar="FILE", help="KV file: safetensors, layers.<l>.k and .v.")
    ],
    profile: Profile = KVCS,
    cafile: Cafile = None,
    token_file: TokenFile = None,
    live_delay: Annotated[
        float, typer.Option(metavar="MS", min=0, help="Pause between layers: imitate production.")
    ] = 0,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Offer raw, x-zstd, x-q8 (lossy) or x-zlib (slow), or kv. and one of them for K "
            "and V jointly; may be repeated. raw without any.",
        ),
    ] = None,
    cache: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", min=1, max=MAX_CACHE_S, help="How long relays may keep it."
        ),
    ] = DEFAULT_CACHE_MS // 1000,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Promise that whoever publishes these tokens makes the same octets.",
        ),
    ] = False,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Publish N tokens at a time, every layer of them before the next ones: "
            "a segment for each pass, as chunked prefill computes them.",
        ),
    ] = None,
    exit_after_idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Exit when complete and unused so long."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long connecting may take.")
    ] = 10,
    mtu: Mtu = MAX_DATAGRAM_SIZE,
    congestion: Congestion = Algorithm.BBR,
    quic_backend: QuicBackend = Backend.AUTO,
    session_window: SessionWindow = SESSION_WINDOW,
    qlog_dir: QlogDir = None,
    keylog_file: KeylogFile = None,
    sign_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign the manifest (key: kvcs-keygen producer)."),
    ] = None,
    kvsp: KvspIndex = None,
    kvsp_cafile: KvspCafile = None,
    kvsp_token_file: KvspTokenFile = None,
    kvsp_http_loopback: KvspHttpLoopback = False,
    kvsp_keep: Annotated[
        bool,
        typer.Option(
            "--kvsp-keep", help="Leave the records behind, for what the relay has cached."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Announce as a JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""

    def main() -> Coroutine[Any, Any, None]:
        check_profile(profile, KVCS)
        check_url(url)
        check_cafile(cafile)
        shown = session_config(token_file)
        with inputs():
            scope = Scope.load(scope_key_file, sealing=True)
            signer = None if sign_key is None else ProducerKey.load(sign_key)
            descriptor = readable_descriptor(compat)
            ids = load_tokens(tokens)
            encodings = _encodings(codec or [Codec.RAW.label])
            chunks = _chunks(ids, chunk_tokens, descriptor.block_tokens, max_segments(encodings))
            publication = Publication(
                scope,
                descriptor,
                chunks[0],
                growing=len(chunks) > 1,
                signer=signer,
                encodings=encodings,
                cache_ms=cache * 1000,
                deterministic=deterministic,
            )
            file = KvFile.open(kv, descriptor)
        held = complete_blocks(file.tokens, descriptor.block_tokens)
        blocks = complete_blocks(len(ids), descriptor.block_tokens)
        check_manifest_size(descriptor, blocks, encodings)
        if held != blocks:
            raise InputError(
                f"{kv}: holds {file.tokens} tokens ({held} complete blocks), "
                f"but there are {len(ids)} token ids ({blocks} complete blocks)"
            )
        quic = quic_config(
            cafile=cafile,
            mtu=mtu,
            congestion=congestion,
            quic_backend=quic_backend,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
            session_window=session_window,
        )
        settings = Settings(
            url=url,
            quic=quic,
            session=shown,
            timeout=timeout,
            live_delay=live_delay / 1000,
            exit_after_idle=exit_after_idle,
            json=json,
        )
        access = KvspAccess(kvsp, kvsp_cafile, kvsp_token_file, kvsp_http_loopback)
        access.check()
        if kvsp is not None and Encoding(Codec.RAW) not in encodings:
            raise InputError("--kvsp tells the index of raw sections: add --codec raw")
        keys = block_keys(scope, descriptor, ids)
        return serve(publication, chunks, file, settings, access, keys)

    async def serve(
        publication: Publication,
        chunks: list[list[int]],
        file: KvFile,
        settings: Settings,
        access: KvspAccess,
        keys: Sequence[bytes],
    ) -> None:
        async with access.client() as client:
            replicas = None
            if client is not None:
                from kvcs.publishing.replicas import Replicas
                from kvsp.holder.records.publishing import DEFAULT_TTL_MS

                with inputs():
                    replicas = Replicas(
                        client,
                        publication.namespace,
                        keys,
                        publication.descriptor,
                        url,
                        ttl_ms=min(DEFAULT_TTL_MS, cache * 1000),
                        keep=kvsp_keep,
                    )
            with warnings_noted(PROGRAM, "kvsp"):
                await _Program(publication, chunks, file, settings, replicas).run()

    run(PROGRAM, main, token_file=token_file)


class Produced(Publishable, Protocol):
    """A publication, of whichever profile, while it is produced."""

    @property
    def complete(self) -> bool: ...
    def abandon(self, reason: str) -> None: ...


class Serving(ABC):
    """Connect, announce, produce, serve; connect again when the session is lost."""

    def __init__(self, publication: Produced, settings: Settings) -> None:
        self._publication = publication
        self._settings = settings
        self._publisher = CountingPublisher()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._background: list[asyncio.Task[None]] = []
        self._announced = False

    async def run(self) -> None:
        """Raises what the first try to connect raises, and a refusal of the first announcement;
        what is cut off in between, and everything later, is tried again."""
        loop = asyncio.get_running_loop()
        for number in stopping_signals():
            loop.add_signal_handler(number, self._stop.set)
        forget_holds()  # those of reading the inputs
        backoff = Backoff()
        try:
            while not self._stop.is_set():
                began = loop.time()
                lost = await self._session()
                if self._stop.is_set():
                    break
                delay = backoff.next(loop.time() - began)
                note(PROGRAM, f"{lost}; trying again in {delay:.1f} s")
                await self._unless_stopped(asyncio.sleep(delay))
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._publication.abandon("the publisher is going away")
            if self._announced and self._settings.json:
                print_json({"event": "ended", "loop_hold_seconds": longest_hold()})
        if self._failure is not None:
            raise self._failure

    async def _session(self) -> str:
        """One session, to its end; returns why it ended."""
        settings = self._settings
        session: MoqtSession | None = None
        self._publisher.sent_away.clear()
        try:
            session = await self._unless_stopped(self._connect())
            if session is None:
                return "stopped"
            async with asyncio.timeout(settings.timeout):
                announced = await self._unless_stopped(publish(session, self._publication))
            if announced is None:
                return "stopped"
            self._on_announced()
            return await self._unless_stopped(self._serve(announced)) or "stopped"
        except TimeoutError:
            error: MoqtError = ConnectError(
                f"{settings.url} did not accept the namespace within {settings.timeout:g} s"
            )
        except MoqtError as caught:
            error = caught
        finally:
            if session is not None:
                session.close()
                await session.wait_closed()
        again = self._announced or (session is not None and _is_passing(error))
        if not again or exit_code(error) is ExitCode.NOT_AUTHORIZED:
            raise error
        return str(error)

    async def _serve(self, announced: PublishedNamespace) -> str:
        """Serve until the relay ends it, or goes away and uses nothing any more; returns why."""
        ended = asyncio.ensure_future(_result(announced.ended))
        leaving = asyncio.ensure_future(self._leave())
        try:
            await asyncio.wait({ended, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"no longer announced: {ended.result()}"
            return "the relay is going away"
        finally:
            ended.cancel()
            leaving.cancel()

    async def _leave(self) -> None:
        await self._publisher.sent_away.wait()
        await self._until_unused(LEAVE_AFTER)

    async def _connect(self) -> MoqtSession:
        settings = self._settings
        return await connect(
            settings.url,
            quic=settings.quic,
            session=settings.session,
            handler=self._publisher,
            timeout=settings.timeout,
        )

    def _on_announced(self) -> None:
        if self._announced:
            note(PROGRAM, "announced again")
            return
        self._announced = True
        text, members = self._told()
        if self._settings.json:
            print_json({"event": "announced", **members, "url": self._settings.url})
        else:
            print(f"publishing {text}", flush=True)
        self._start(self._produce())
        if self._settings.exit_after_idle is not None:
            self._start(self._watch_idle(self._settings.exit_after_idle))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.append(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._stop.set()

    @abstractmethod
    def _told(self) -> tuple[str, dict[str, Any]]:
        """What is published: in words, and as members of a JSON object."""

    @abstractmethod
    async def _produce(self) -> None:
        """Publish all of it, and let the sessions send in between."""

    async def _watch_idle(self, seconds: float) -> None:
        """Stop once nothing was asked for `seconds` after the publication is complete."""
        await self._until_unused(seconds, lambda: self._publication.complete)
        self._stop.set()

    async def _until_unused(self, seconds: float, ready: Callable[[], bool] = lambda: True) -> None:
        """Wait until nothing was served or asked for `seconds`, all that time being `ready`."""
        publisher, loop = self._publisher, asyncio.get_running_loop()
        since, requests = loop.time(), publisher.requests
        while True:
            busy = publisher.active > 0 or publisher.requests != requests
            if busy or not ready():
                since, requests = loop.time(), publisher.requests
            elif loop.time() - since >= seconds:
                return
            await asyncio.sleep(min(max(seconds / 10, 0.02), 0.5))

    async def _unless_stopped(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The result of `work`, or None when it was cut short by a signal."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, MoqtError):
                    await task


class _Program(Serving):
    """A publication of the profile kvcs."""

    def __init__(
        self,
        publication: Publication,
        chunks: list[list[int]],
        cache: KvFile,
        settings: Settings,
        replicas: Replicas | None = None,
    ) -> None:
        """`publication` is of the first of `chunks`, the tokens of each pass."""
        super().__init__(publication, settings)
        self._produced = publication
        self._chunks = chunks
        self._cache = cache
        self._replicas = replicas

    def _told(self) -> tuple[str, dict[str, Any]]:
        layers, namespace = self._produced.descriptor.layers, self._produced.namespace
        rows, chunks = self._produced.descriptor.block_tokens, len(self._chunks)
        blocks = complete_blocks(sum(map(len, self._chunks)), rows)
        in_chunks = f", {chunks} chunks" if chunks > 1 else ""
        return (
            f"{blocks * rows} tokens ({blocks} blocks, {layers} layers{in_chunks}), "
            f"namespace {namespace.text}",
            {
                "tokens": blocks * rows,
                "blocks": blocks,
                "chunks": chunks,
                "layers": layers,
                "namespace": namespace.text,
                "publication": namespace.publication_id.hex(),
            },
        )

    async def _produce(self) -> None:
        """Put every layer of every chunk, and let the sessions send in between."""
        publication, cache = self._produced, self._cache
        await self._produce_segment()
        for chunk in self._chunks[1:]:
            if publication.extend(chunk):
                await self._pause()
                await self._produce_segment()
        if len(self._chunks) > 1:
            publication.finish()
        if self._replicas is not None:
            every = range(publication.descriptor.layers)
            await self._replicas.run([(cache.k(layer), cache.v(layer)) for layer in every])

    async def _produce_segment(self) -> None:
        publication, cache = self._produced, self._cache
        first = publication.first_token
        for layer in range(publication.descriptor.layers):
            if layer:
                await self._pause()
            await aput_layer(publication, layer, cache.k(layer)[first:], cache.v(layer)[first:])
            # its Objects stay: a full collection would look at every one, seconds for a million
            gc.freeze()

    async def _pause(self) -> None:
        if self._settings.live_delay:
            await asyncio.sleep(self._settings.live_delay)


def _encodings(names: list[str]) -> list[Encoding]:
    """Those named, in their order. Raises InputError."""
    try:
        return [Encoding.parse(name) for name in names]
    except ValueError as error:
        raise InputError(f"--codec: {error}") from None


def _chunks(ids: list[int], tokens: int | None, block_tokens: int, most: int) -> list[list[int]]:
    """The tokens of each pass, `most` at most. Raises InputError when they cannot be segments."""
    if tokens is None or tokens >= len(ids):
        return [ids]
    if tokens < block_tokens:
        raise InputError(
            f"--chunk-tokens {tokens}: a chunk fills at least one block of {block_tokens} tokens"
        )
    chunks = [ids[at : at + tokens] for at in range(0, len(ids), tokens)]
    if len(chunks) > most:
        least = -(-len(ids) // most)
        raise InputError(
            f"--chunk-tokens {tokens}: {len(ids)} tokens are {len(chunks)} chunks, and a "
            f"publication has at most {most} segments: give {least} or more"
        )
    return chunks


async def _result(future: asyncio.Future[_T]) -> _T:
    return await asyncio.shield(future)


def _is_passing(error: MoqtError) -> bool:
    """Whether a relay that was reached may take the announcement the next time: it went away, or
    says so itself."""
    if isinstance(error, SessionClosed):
        return error.transport or error.code == SessionErrorCode.NO_ERROR
    return retry_delay(error) is not None


def main() -> NoReturn:
    """Entry point of the `kvcs-publish` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
