"""`kvcs-subscribe`: retrieve the KV cache of a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, Protocol

import typer

from kvcs.finding.candidates import DiscoveryMode
from kvcs.finding.relays import DEFAULT_AFTER, DEFAULT_AGAIN, Fallback
from kvcs.keeping.resume_file import ResumeFile
from kvcs.names.codes import MAX_MANIFEST_OCTETS, MAX_SEGMENTS
from kvcs.names.errors import RetrievalError, RetrievalTimeout, VerificationFailed
from kvcs.names.limits import REACHED
from kvcs.programs.common import (
    CONNECT_TIMEOUT,
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
    check_not_input,
    check_url,
    failure,
    inputs,
    loop_holds,
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
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.destinations import FileDestination
from kvcs.retrieving.layers import Layer
from kvcs.retrieving.stats import NOT_NEEDED, Mode, Stats
from kvcs.trust.producers import Producers
from kvsp.blocks.kv_files import load_tokens
from kvsp.cli.common import InputError, check_cafile, check_output, note, parse_layers, print_json
from kvsp.cli.plain import PlainCommand, run_app
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor, Scope
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.loop_hold import forget_holds
from moqt.quic.backend import Backend
from moqt.quic.config import MAX_DATAGRAM_SIZE, SESSION_WINDOW, QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.values.config import SessionConfig

PROGRAM: Final = "kvcs-subscribe"
EXAMPLE: Final = (
    "Example:  kvcs-subscribe moqt://localhost:4443 --cafile ca.pem --scope-key-file scope.json "
    "--compat compat.json --tokens tokens.json --out received.safetensors"
)
MAX_CONNECTIONS: Final = 16
"""More than fill any path whose policers count by flow, and than a relay should have to keep."""
_NO_HOLDS: Final = {"loop_hold_seconds": None, "loop_work_seconds": None}
GROWTH: Final = 1.25
"""How many times the tokens of the last file a new one has at the least, while it grows."""

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.command(
    cls=PlainCommand,
    help=(
        "Retrieve the KV cache of a prompt, or of the longest prefix of it that is published, "
        f"verified, into a KV file.\n\n{EXIT_CODES_HELP}"
    ),
    epilog=EXAMPLE,
)
def command(
    url: Url,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The KV file to write.")],
    profile: Profile = KVCS,
    cafile: Cafile = None,
    token_file: TokenFile = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep what was verified beside --out, and go on from what is there. Not with "
            "--follow.",
        ),
    ] = False,
    layers: Annotated[
        str | None, typer.Option(metavar="A-B", help="Only layers A to B, inclusive.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N blocks.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Go on while the publication grows; FILE is replaced as more of it is whole. Not "
            "with --resume.",
        ),
    ] = False,
    discovery: Annotated[
        DiscoveryMode,
        typer.Option(
            help="How publications are found; index needs --kvsp and asks the relay nothing."
        ),
    ] = DiscoveryMode.LISTING,
    mode: Annotated[Mode, typer.Option(help="How to ask for the layers.")] = Mode.AUTO,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Take one of these encodings, the first that is offered: raw, x-zstd, x-zlib, "
            "and with --lossy x-q8; may be repeated. Without, raw before other lossless ones.",
        ),
    ] = None,
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="Take a lossy encoding, too: smaller, and not the same."),
    ] = False,
    connections: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MAX_CONNECTIONS,
            help="Connections that a complete cache comes over, split by layers.",
        ),
    ] = 1,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long all of it may take.")
    ] = 60,
    producers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take only what a producer in FILE has signed."),
    ] = None,
    require_listed: Annotated[
        bool,
        typer.Option(
            "--require-listed", help="Take a layer only once the manifest lists its digests."
        ),
    ] = False,
    max_segments: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="A publication of more segments is refused."),
    ] = MAX_SEGMENTS,
    max_manifest: Annotated[
        int,
        typer.Option(metavar="OCTETS", min=1, help="One with a longer manifest is refused."),
    ] = MAX_MANIFEST_OCTETS,
    mtu: Mtu = MAX_DATAGRAM_SIZE,
    congestion: Congestion = Algorithm.BBR,
    quic_backend: QuicBackend = Backend.AUTO,
    session_window: SessionWindow = SESSION_WINDOW,
    qlog_dir: QlogDir = None,
    keylog_file: KeylogFile = None,
    kvsp: KvspIndex = None,
    kvsp_cafile: KvspCafile = None,
    kvsp_token_file: KvspTokenFile = None,
    kvsp_http_loopback: KvspHttpLoopback = False,
    relays: Annotated[
        list[str] | None,
        typer.Option(
            "--relay",
            metavar="URL",
            help="Another relay, asked when those before do not answer or have nothing more; may "
            "be repeated.",
        ),
    ] = None,
    recompute_within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="What recomputing would take: retrieval is given up then.",
            show_default="as --timeout",
        ),
    ] = None,
    again_within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long a relay is tried again whose session was lost; once when there are "
            "other ways.",
        ),
    ] = DEFAULT_AGAIN,
    kvsp_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="What MOQT owes for so long is taken over HTTP."
        ),
    ] = DEFAULT_AFTER,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""
    stats = Stats(source=url)
    bound = min(timeout, recompute_within or timeout)
    holds: dict[str, float | None] = {}

    def main() -> Coroutine[Any, Any, None]:
        check_profile(profile, KVCS)
        if resume and follow:
            raise InputError(
                "--resume and --follow do not go together: what --follow has written is whole, and "
                "what --resume keeps beside it is of one publication that has its length; leave "
                "one of them out"
            )
        for each in (url, *(relays or ())):
            check_url(each)
        check_cafile(cafile)
        shown = session_config(token_file)
        check_output(out)
        check_not_input(out, scope_key_file, compat, Path(tokens), cafile, token_file, producers)
        access = KvspAccess(kvsp, kvsp_cafile, kvsp_token_file, kvsp_http_loopback)
        access.check()
        if discovery is DiscoveryMode.INDEX and kvsp is None:
            raise InputError("--discovery index finds what an index service names: give --kvsp URI")
        with inputs():
            scope = Scope.load(scope_key_file, sealing=True)
            accepted = None if producers is None else Producers.load(producers, pipes=True)
            descriptor = readable_descriptor(compat)
            ids = load_tokens(tokens)
            codecs = _codecs(codec, lossy)
            wanted = parse_layers(layers, descriptor.layers)
        quic = quic_config(
            cafile=cafile,
            mtu=mtu,
            congestion=congestion,
            quic_backend=quic_backend,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
            session_window=session_window,
        )
        return retrieve(shown, access, scope, accepted, descriptor, ids, codecs, wanted, quic)

    async def retrieve(
        shown: SessionConfig,
        access: KvspAccess,
        scope: Scope,
        accepted: Producers | None,
        descriptor: Descriptor,
        ids: list[int],
        codecs: list[Codec] | None,
        wanted: range,
        quic: QuicConfig,
    ) -> None:
        deadline = asyncio.get_running_loop().time() + bound
        forget_holds()  # those of reading the inputs
        within = min(bound, CONNECT_TIMEOUT)

        def relay_session(relay: str) -> connect:
            # the token is for the relays that were named here, not for one that a record names
            config = shown if relay in (url, *(relays or ())) else SessionConfig()
            return connect(relay, quic=quic, session=config, timeout=within)

        async with contextlib.AsyncExitStack() as stack:
            stack.callback(lambda: holds.update(loop_holds()))
            client = await stack.enter_async_context(access.client())
            fallback = Fallback(
                client,
                after=kvsp_after,
                relay=url,
                relays=relays or (),
                again_within=again_within,
                connect=lambda relay: _connected(relay_session(relay)),
            )
            target: ResumeFile | FileDestination = FileDestination(out, descriptor)
            if resume:
                target = ResumeFile(
                    out,
                    descriptor,
                    scope_id=scope.scope_id,
                    layers=wanted,
                    most_tokens=len(ids),
                )
            with target as destination:
                if isinstance(destination, ResumeFile):
                    await asyncio.to_thread(destination.load)
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    raise RetrievalTimeout(
                        f"nothing came within {bound:g} s",
                        f"reading {destination.partial} took all of it"
                        if isinstance(destination, ResumeFile)
                        else "",
                    )
                consumer = await asyncio.to_thread(  # it makes a key for each of our blocks
                    Consumer,
                    None,
                    scope,
                    descriptor,
                    ids,
                    layers=wanted,
                    blocks=blocks,
                    follow=follow,
                    # what is written before the end is never taken back
                    require_listed=require_listed or follow,
                    mode=mode,
                    discovery=discovery,
                    timeout=left,
                    destination=destination,
                    source=url,
                    fallback=fallback,
                    codecs=codecs,
                    allow_lossy=lossy,
                    producers=accepted,
                    max_segments=max_segments,
                    max_manifest_octets=max_manifest,
                    others=[relay_session(url) for _ in range(connections - 1)],
                )
                consumer.stats = stats
                grow = None
                if follow and isinstance(destination, FileDestination):
                    grow = _Growth(destination, stats, json=json)
                show = sys.stderr.isatty() and not json
                try:
                    await _retrieve(consumer, wanted, grow, show=show)
                except RetrievalTimeout as error:
                    # what was there already was read before
                    option = "--timeout" if bound == timeout else "--recompute-within"
                    of_segment = f" of segment {stats.segments - 1}" if stats.segments > 1 else ""
                    late = RetrievalTimeout(
                        f"{stats.layers} of {len(wanted)} layers{of_segment} came within the "
                        f"{bound:g} s of {option}",
                        error.awaited,
                    )
                    raise await _with_what_is_whole(late, destination, stats, out) from None
                except RetrievalError as error:
                    whole = await _with_what_is_whole(error, destination, stats, out)
                    raise whole from error.__cause__
                finally:
                    if isinstance(destination, ResumeFile) and destination.said is not None:
                        note(PROGRAM, destination.said)
                await destination.acommit(stats.tokens)
        if stats.note is not None:
            note(PROGRAM, f"by MOQT alone: {stats.note}")
        if stats.relay_error is not None:
            note(PROGRAM, f"without the relay {url}: {stats.relay_error}")
        if stats.connections_error is not None:
            came = len(stats.layers_by_connection) or 1
            note(PROGRAM, f"{came} of {connections} connections: {stats.connections_error}")
        if blocks is not None and stats.blocks < blocks:
            note(PROGRAM, f"{stats.blocks} of the {blocks} blocks asked for were to be had")
        _report(stats, out, wanted, json, with_sources=kvsp is not None)

    def failed(error: BaseException) -> None:
        if json:
            print_json(failure(error, token_file) | _said_of(stats) | (holds or _NO_HOLDS))

    run(PROGRAM, main, token_file=token_file, failed=failed)


def _said_of(stats: Stats) -> dict[str, Any]:
    return stats.as_dict() | {"limits_reached": dict(REACHED)}


def _codecs(names: list[str] | None, lossy: bool) -> list[Codec] | None:
    """Those named, in their order. Raises InputError."""
    codecs = []
    for name in names or ():
        codec = Codec.from_label(name)
        if codec is None:
            known = ", ".join(each.label for each in Codec)
            raise InputError(f"--codec: {name!r} is none of {known}")
        if not codec.lossless and not lossy:
            raise InputError(f"--codec {name}: it is lossy; --lossy allows that")
        codecs.append(codec)
    return codecs or None


async def _connected(connecting: connect) -> MoqtSession:
    return await connecting


class _Growth:
    """Writes a file of what is whole so far, while a publication grows."""

    def __init__(self, destination: FileDestination, stats: Stats, *, json: bool) -> None:
        self._destination = destination
        self._stats = stats
        self._json = json
        self._written = 0

    async def segment_whole(self, last: Layer) -> None:
        """Every layer of a segment came: the file is replaced when it has grown enough, so that
        all that is written is a few times the last of it at the most."""
        tokens = last.first_token + len(last.k)
        # of all tokens there is one at the end anyway
        if GROWTH * self._written <= tokens < self._destination.tokens:
            await asyncio.to_thread(self._destination.save, tokens)
            self._written = tokens
        if self._json:
            print_json(
                {
                    "event": "segment",
                    "segment": last.segment,
                    "tokens": tokens,
                    "written_tokens": self._written,
                    "seconds": round(self._stats.seconds, 6),
                }
            )


async def _with_what_is_whole(
    error: RetrievalError, destination: FileDestination | ResumeFile, stats: Stats, out: Path
) -> RetrievalError:
    """The error, once the segments that are whole are written, if there are any."""
    if isinstance(error, VerificationFailed) or not stats.whole_blocks:
        return error
    if isinstance(destination, ResumeFile):  # it goes on from there
        return error
    tokens = stats.whole_blocks * (stats.tokens // stats.blocks)
    await destination.acommit(tokens)
    return type(error)(f"{error}; the first {tokens} tokens are whole and in {out}")


class _Shown(Protocol):
    def __call__(self, layer: Layer) -> None: ...


async def _retrieve(
    consumer: Consumer, layers: range, growth: _Growth | None, *, show: bool
) -> None:
    async with consumer:
        with _progress(layers, show) as shown:
            async for layer in consumer.layers():
                shown(layer)
                if growth is not None and layer.index == layers.stop - 1:
                    await growth.segment_whole(layer)


@contextlib.contextmanager
def _progress(layers: range, show: bool) -> Iterator[_Shown]:
    """A bar by layer on standard error, when that is a terminal."""
    if not show:
        yield lambda layer: None
        return
    from rich import console  # they take long, and few uses have a terminal
    from rich import progress as bars

    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        console=console.Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("layers", total=len(layers))
        yield lambda layer: progress.update(
            task,
            completed=layer.index - layers.start + 1,
            description=f"layers of segment {layer.segment}" if layer.segment else "layers",
        )


def _report(stats: Stats, out: Path, layers: range, json: bool, *, with_sources: bool) -> None:
    if json:
        result: dict[str, Any] = {
            "ok": True,
            "out": str(out),
            "first_layer": layers.start,
            "last_layer": layers.stop - 1,
            **_said_of(stats),
            **loop_holds(),
        }
        print_json(result)
        return
    text = (
        f"{stats.tokens} tokens ({stats.blocks} blocks"
        f"{f' in {stats.segments} segments' if stats.segments > 1 else ''}"
        f", layers {layers.start}-{layers.stop - 1}), "
        f"{stats.octets / 1e6:.1f} MB in {stats.seconds:.2f} s "
        f"({stats.megabytes_per_second:.1f} MB/s), first usable layer after "
        f"{stats.first_layer_seconds or 0:.3f} s, {stats.objects_verified} Objects "
        f"{'from relays ' if with_sources else ''}verified, written to {out}"
    )
    # what came beyond the layers and blocks asked for is no fault
    reasons = [f"{name} {n}" for name, n in stats.discarded.items() if name != NOT_NEEDED]
    if reasons or stats.duplicates:
        text += f" (discarded: {', '.join(reasons) or 'none'}; duplicates: {stats.duplicates})"
    if stats.codecs not in ([], [Codec.RAW.label]):
        text += f"; decoded from {', '.join(stats.codecs)}"
    if stats.objects_resumed:
        text += f", {stats.objects_resumed} of an earlier retrieval were there already"
    if with_sources:
        text += f"; {stats.described_sources()}"
    print(text, flush=True)


def main() -> NoReturn:
    """Entry point of the `kvcs-subscribe` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
