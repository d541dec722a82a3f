"""`kvcs-subscribe`: retrieve the KV cache of a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcs.finding.candidates import DiscoveryMode
from kvcs.finding.relays import DEFAULT_AFTER, Fallback
from kvcs.keeping.resume_file import ResumeFile
from kvcs.names.errors import RetrievalTimeout
from kvcs.programs.common import (
    EXIT_CODES_HELP,
    IDLE_TIMEOUT,
    Cafile,
    Compat,
    Congestion,
    KeylogFile,
    Mtu,
    QlogDir,
    ScopeKeyFile,
    SessionWindow,
    TokenFile,
    Tokens,
    Url,
    check_logs,
    check_not_input,
    check_url,
    exit_code,
    explained,
    inputs,
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
from kvcs.retrieving.assembly import NOT_NEEDED
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.destinations import FileDestination
from kvcs.retrieving.layers import Layer
from kvcs.retrieving.retrieval import Mode
from kvcs.retrieving.stats import Stats
from kvsp.blocks.kv_files import load_tokens
from kvsp.cli.common import InputError, check_cafile, check_output, note, parse_layers, print_json
from kvsp.cli.plain import PlainCommand, Version, run_app
from kvsp.names.identity import Descriptor, Scope
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.quic.config import MAX_DATAGRAM_SIZE, SESSION_WINDOW, STREAM_WINDOW, QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.values.config import SessionConfig

PROGRAM: Final = "kvcs-subscribe"
EXAMPLE: Final = (
    "Example:  kvcs-subscribe moqt://localhost:4443 --cafile ca.pem --scope-key-file scope.json "
    "--compat compat.json --tokens tokens.json --out received.safetensors"
)
CONNECT_TIMEOUT: Final = 10.0

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
            "--resume", help="Keep what was verified beside --out, and go on from what is there."
        ),
    ] = False,
    layers: Annotated[
        str | None, typer.Option(metavar="A-B", help="Only layers A to B, inclusive.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N blocks.")
    ] = None,
    discovery: Annotated[
        DiscoveryMode,
        typer.Option(
            help="How publications are found; index needs --kvsp and asks the relay nothing."
        ),
    ] = DiscoveryMode.LISTING,
    mode: Annotated[Mode, typer.Option(help="How to ask for the layers.")] = Mode.AUTO,
    require_listed: Annotated[
        bool,
        typer.Option(
            "--require-listed", help="Use no layer before the manifest lists its digests."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long all of it may take.")
    ] = 60,
    mtu: Mtu = MAX_DATAGRAM_SIZE,
    congestion: Congestion = Algorithm.BBR,
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

    def main() -> Coroutine[Any, Any, None]:
        check_profile(profile, KVCS)
        for each in (url, *(relays or ())):
            check_url(each)
        check_cafile(cafile)
        shown = session_config(token_file)
        check_output(out)
        check_not_input(out, scope_key_file, compat, Path(tokens), cafile, token_file)
        access = KvspAccess(kvsp, kvsp_cafile, kvsp_token_file, kvsp_http_loopback)
        access.check()
        if discovery is DiscoveryMode.INDEX and kvsp is None:
            raise InputError("--discovery index finds what an index service names: give --kvsp URI")
        with inputs():
            scope = Scope.load(scope_key_file)
            descriptor = readable_descriptor(compat)
            ids = load_tokens(tokens)
            wanted = parse_layers(layers, descriptor.layers)
        quic = QuicConfig(
            cafile=cafile,
            max_datagram_size=mtu,
            congestion_control_algorithm=congestion,
            stream_window=min(STREAM_WINDOW, session_window),
            session_window=session_window,
            idle_timeout=IDLE_TIMEOUT,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
        )
        check_logs(quic)
        return retrieve(shown, access, scope, descriptor, ids, wanted, quic)

    async def retrieve(
        shown: SessionConfig,
        access: KvspAccess,
        scope: Scope,
        descriptor: Descriptor,
        ids: list[int],
        wanted: range,
        quic: QuicConfig,
    ) -> None:
        deadline = asyncio.get_running_loop().time() + bound
        within = min(bound, CONNECT_TIMEOUT)

        def relay_session(relay: str) -> connect:
            # the token is for the relays that were named here, not for one that a record names
            config = shown if relay in (url, *(relays or ())) else SessionConfig()
            return connect(relay, quic=quic, session=config, timeout=within)

        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(access.client())
            fallback = Fallback(
                client,
                after=kvsp_after,
                relay=url,
                relays=relays or (),
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
                consumer = Consumer(
                    None,
                    scope,
                    descriptor,
                    ids,
                    layers=wanted,
                    blocks=blocks,
                    mode=mode,
                    discovery=discovery,
                    require_listed=require_listed,
                    timeout=left,
                    destination=destination,
                    source=url,
                    fallback=fallback,
                )
                consumer.stats = stats
                try:
                    await _retrieve(consumer, wanted, show=sys.stderr.isatty() and not json)
                except RetrievalTimeout as error:
                    # what was there already was read before
                    option = "--timeout" if bound == timeout else "--recompute-within"
                    raise RetrievalTimeout(
                        f"{stats.layers} of {len(wanted)} layers came within the {bound:g} s "
                        f"of {option}",
                        error.awaited,
                    ) from None
                finally:
                    if isinstance(destination, ResumeFile) and destination.said is not None:
                        note(PROGRAM, destination.said)
                destination.commit()
        if stats.note is not None:
            note(PROGRAM, f"by MOQT alone: {stats.note}")
        if stats.relay_error is not None:
            note(PROGRAM, f"without the relay {url}: {stats.relay_error}")
        if blocks is not None and stats.blocks < blocks:
            note(PROGRAM, f"{stats.blocks} of the {blocks} blocks asked for were to be had")
        _report(stats, out, wanted, json, with_sources=kvsp is not None)

    def failed(error: BaseException) -> None:
        if json:
            print_json(
                {
                    "ok": False,
                    "error": explained(error, token_file),
                    "exit_code": int(exit_code(error)),
                    **stats.as_dict(),
                }
            )

    run(PROGRAM, main, token_file=token_file, failed=failed)


async def _connected(connecting: connect) -> MoqtSession:
    return await connecting


class _Shown(Protocol):
    def __call__(self, layer: Layer) -> None: ...


async def _retrieve(consumer: Consumer, layers: range, *, show: bool) -> None:
    async with consumer:
        with _progress(layers, show) as shown:
            async for layer in consumer.layers():
                shown(layer)


@contextlib.contextmanager
def _progress(layers: range, show: bool) -> Iterator[_Shown]:
    """A bar by layer on standard error, when that is a terminal."""
    if not show:
        yield lambda layer: None
        return
    with Progress(
        TextColumn("layers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("layers", total=len(layers))
        yield lambda layer: progress.update(task, completed=layer.index - layers.start + 1)


def _report(stats: Stats, out: Path, layers: range, json: bool, *, with_sources: bool) -> None:
    if json:
        result: dict[str, Any] = {
            "ok": True,
            "out": str(out),
            "first_layer": layers.start,
            "last_layer": layers.stop - 1,
            **stats.as_dict(),
        }
        print_json(result)
        return
    text = (
        f"{stats.tokens} tokens ({stats.blocks} blocks, layers {layers.start}-{layers.stop - 1}), "
        f"{stats.octets / 1e6:.1f} MB in {stats.seconds:.2f} s "
        f"({stats.megabytes_per_second:.1f} MB/s), first usable layer after "
        f"{stats.first_layer_seconds or 0:.3f} s, {stats.objects_verified} Objects "
        f"{'from relays ' if with_sources else ''}verified, written to {out}"
    )
    # what came beyond the layers and blocks asked for is no fault
    reasons = [f"{name} {n}" for name, n in stats.discarded.items() if name != NOT_NEEDED]
    if reasons or stats.duplicates:
        text += f" (discarded: {', '.join(reasons) or 'none'}; duplicates: {stats.duplicates})"
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
