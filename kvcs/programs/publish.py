"""`kvcs-publish`: publish the KV cache of a prompt."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS
from kvcs.names.encoding import Encoding
from kvcs.names.limits import REACHED
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
from kvcs.programs.serving import PROGRAM, Serving, Settings
from kvcs.publishing.limits import check_manifest_size, manifests_octets
from kvcs.publishing.limits import max_segments as most_segments
from kvcs.publishing.publication import Publication
from kvcs.publishing.pushing import Push, StoredIn
from kvcs.publishing.stepwise import aextend, afinish, aput_layer
from kvcs.trust.producers import ProducerKey
from kvsp.blocks.kv_files import KvFile, load_tokens
from kvsp.cli.common import (
    InputError,
    check_cafile,
    note,
    print_json,
    warnings_noted,
)
from kvsp.cli.plain import PlainCommand, run_app
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.prefix import complete_blocks
from moqt.quic.backend import Backend
from moqt.quic.config import MAX_DATAGRAM_SIZE, SESSION_WINDOW
from moqt.quic.congestion.algorithms import Algorithm

if TYPE_CHECKING:
    from kvcs.publishing.replicas import Replicas

EXAMPLE: Final = (
    "Example:  kvcs-publish moqt://localhost:4443 --cafile ca.pem --scope-key-file scope.json "
    "--compat compat.json --tokens tokens.json --kv cache.safetensors"
)
LEFT_OUT_EVERY: Final = 0.02
"""Seconds in which no more Objects are put than a collection looks at in some milliseconds."""
MAX_CACHE_S: Final = 10 * 366 * 86_400
"""Longer than that nobody means it."""

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


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
    max_segments: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Chunks there may be; consumers have to read as many."
        ),
    ] = MAX_SEGMENTS,
    max_manifest: Annotated[
        int,
        typer.Option(
            metavar="OCTETS", min=1, help="That a manifest may have; consumers have to read it."
        ),
    ] = MAX_MANIFEST_OCTETS,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Hand it to the relay and exit: with 0 when all of it is stored there and found "
            "without the publisher; says whether on disk or in memory alone. Takes the right to "
            "read, too.",
        ),
    ] = False,
    durable: Annotated[
        bool,
        typer.Option(
            "--durable",
            help="With --push: fail (exit code 1) unless all of it is on the relay's disk, where "
            "it outlives a crash; memory alone is not enough.",
        ),
    ] = False,
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
            signer = None if sign_key is None else ProducerKey.load(sign_key, pipes=True)
            descriptor = readable_descriptor(compat)
            ids = load_tokens(tokens)
            encodings = _encodings(codec or [Codec.RAW.label])
            most = most_segments(encodings, max_segments)
            chunks = _chunks(ids, chunk_tokens, descriptor.block_tokens, most)
            publication = Publication(
                scope,
                descriptor,
                chunks[0],
                growing=len(chunks) > 1,
                signer=signer,
                encodings=encodings,
                cache_ms=cache * 1000,
                deterministic=deterministic,
                max_segments=max_segments,
                max_manifest_octets=max_manifest,
            )
            file = KvFile.open(kv, descriptor)
        held = complete_blocks(file.tokens, descriptor.block_tokens)
        blocks = complete_blocks(len(ids), descriptor.block_tokens)
        check_manifest_size(descriptor, blocks, encodings, max_manifest)
        _tell_cost(descriptor, chunks, blocks, encodings)
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
        if push and (exit_after_idle is not None or kvsp is not None):
            raise InputError(
                "--push exits by itself and leaves no publisher: it excludes --exit-after-idle and "
                "--kvsp"
            )
        if durable and not push:
            raise InputError("--durable says how --push stores it: give --push, too")
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
                from kvsp.holder.records.index import DEFAULT_TTL_MS

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
                program = _Program(publication, chunks, file, settings, replicas)
                await (program.push(durable=durable) if push else program.run())

    run(PROGRAM, main, token_file=token_file)


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

    async def push(self, *, durable: bool) -> None:
        """Hand it to the relay instead of serving it. Raises as `Push.run`."""
        await self._produce()
        push = Push(self._produced, self.connect, durable=durable)
        where = await push.run()
        text, members = self._told()
        if self._settings.json:
            told = {"event": "stored", "stored": where, **members, "url": self._settings.url}
            print_json({**told, "why_memory": push.why_memory} if push.why_memory else told)
        elif where is StoredIn.DISK:
            print(f"stored on the relay's disk: {text}", flush=True)
        else:
            print(
                f"stored in the relay's memory alone ({push.why_memory}), until that restarts or "
                f"needs the room: {text}",
                flush=True,
            )

    async def _produce(self) -> None:
        """Put every layer of every chunk, and let the sessions send in between."""
        leaving_out = asyncio.create_task(_leave_out())
        try:
            await self._put()
        finally:
            leaving_out.cancel()
        if self._replicas is not None:
            every = range(self._produced.descriptor.layers)
            layers = [(self._cache.k(layer), self._cache.v(layer)) for layer in every]
            await self._replicas.run(layers)

    async def _put(self) -> None:
        publication = self._produced
        for number, chunk in enumerate(self._chunks):
            if number and not await aextend(publication, chunk):
                continue
            if number:
                await self._pause()
            await self._produce_segment(more=len(self._chunks) > 1)
        if len(self._chunks) > 1:
            await afinish(publication)

    async def _produce_segment(self, *, more: bool) -> None:
        publication, cache = self._produced, self._cache
        first = publication.first_token
        for layer in range(publication.descriptor.layers):
            if layer:
                await self._pause()
            k, v = cache.k(layer)[first:], cache.v(layer)[first:]
            await aput_layer(publication, layer, k, v, more=more)

    def _ended(self) -> dict[str, Any]:
        octets = self._produced.manifest_octets
        return {"manifest_octets": octets, "limits_reached": dict(REACHED)}

    async def _pause(self) -> None:
        if self._settings.live_delay:
            await asyncio.sleep(self._settings.live_delay)


async def _leave_out() -> None:
    """Leave the Objects that were put out of garbage collections: they stay, and a full one would
    look at each, seconds for a million."""
    while True:
        gc.freeze()
        await asyncio.sleep(LEFT_OUT_EVERY)


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
            f"publication has at most {most} segments: give {least} or more (--max-segments)"
        )
    return chunks


def _tell_cost(
    descriptor: Descriptor, chunks: list[list[int]], blocks: int, encodings: list[Encoding]
) -> None:
    """Say so when the versions of the manifest have more octets than the cache itself."""
    ends = [end // descriptor.block_tokens for end in accumulate(map(len, chunks))]
    octets = manifests_octets(descriptor, [b - a for a, b in pairwise([0, *ends])], encodings)
    if len(chunks) > 1 and octets > 2 * descriptor.layers * blocks * descriptor.section_octets():
        note(
            PROGRAM,
            f"each of {len(chunks)} chunks has a version of the manifest, {octets / 1e6:.0f} MB "
            "together, more than the cache: a larger --chunk-tokens costs less",
        )


def main() -> NoReturn:
    """Entry point of the `kvcs-publish` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
