"""`kvcs-publish --profile kvcache`: publish the KV cache of a prompt by the second profile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from kvcs.programs.common import (
    EXIT_CODES_HELP,
    Cafile,
    Compat,
    Congestion,
    KeylogFile,
    Mtu,
    QlogDir,
    QuicBackend,
    TokenFile,
    Url,
    Version,
    check_url,
    inputs,
    quic_config,
    readable_descriptor,
    run,
    session_config,
)
from kvcs.programs.prompt_options import (
    KVCACHE,
    PROFILE_HELP,
    GroupTokens,
    Profile,
    Prompt,
    check_profile,
    compression,
    read_prompt,
)
from kvcs.programs.serving import PROGRAM, Serving, Settings
from kvcs.simple.elements import token_octets
from kvcs.simple.names import CHUNK_TOKENS, Compression
from kvcs.simple.publication import PromptPublication, aput_tokens
from kvsp.blocks.kv_files import KvFile
from kvsp.cli.common import check_cafile
from kvsp.cli.plain import PlainCommand, run_app
from moqt.quic.backend import Backend
from moqt.quic.config import MAX_DATAGRAM_SIZE
from moqt.quic.congestion.algorithms import Algorithm

EXAMPLE: Final = (
    "Example:  kvcs-publish --profile kvcache moqt://localhost:4443 --cafile ca.pem "
    "--compat compat.json --prompt prompt.txt --kv cache.safetensors"
)
TURN_OCTETS: Final = 4 << 20
"""Octets of a step, after which the sessions have their turn."""

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(
    cls=PlainCommand,
    help=f"Publish the KV cache of a prompt.\n\n{PROFILE_HELP}\n\n{EXIT_CODES_HELP}",
    epilog=EXAMPLE,
)
def command(
    url: Url,
    compat: Compat,
    prompt: Prompt,
    kv: Annotated[
        Path, typer.Option(metavar="FILE", help="KV file: safetensors, layers.<l>.k and .v.")
    ],
    profile: Profile = KVCACHE,
    compression_names: Annotated[
        list[str] | None,
        typer.Option(
            "--compression",
            metavar="NAME",
            help="A track to publish: FP16, BF16, FP8, Int8, FP4 or Int4; may be repeated. "
            "FP16 without any.",
        ),
    ] = None,
    group_tokens: GroupTokens = CHUNK_TOKENS,
    cafile: Cafile = None,
    token_file: TokenFile = None,
    live_delay: Annotated[
        float, typer.Option(metavar="MS", min=0, help="Pause between Groups: imitate production.")
    ] = 0,
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
    qlog_dir: QlogDir = None,
    keylog_file: KeylogFile = None,
    json: Annotated[bool, typer.Option("--json", help="Announce as a JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""

    def main() -> Coroutine[Any, Any, None]:
        check_profile(profile, KVCACHE)
        check_url(url)
        check_cafile(cafile)
        shown = session_config(token_file)
        compressions = [compression(name) for name in compression_names or (Compression.FP16,)]
        with inputs():
            descriptor = readable_descriptor(compat)
            publication = PromptPublication(
                descriptor, read_prompt(prompt), compressions, chunk_tokens=group_tokens
            )
            cache = KvFile.open(kv, descriptor)
        quic = quic_config(
            cafile=cafile,
            mtu=mtu,
            congestion=congestion,
            quic_backend=quic_backend,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
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
        return serve(publication, cache, settings)

    async def serve(publication: PromptPublication, cache: KvFile, settings: Settings) -> None:
        # what it waits on belongs to the loop
        await _PromptProgram(publication, cache, settings).run()

    run(PROGRAM, main, token_file=token_file)


class _PromptProgram(Serving):
    """A publication of the profile kvcache."""

    def __init__(self, publication: PromptPublication, cache: KvFile, settings: Settings) -> None:
        super().__init__(publication, settings)
        self._produced = publication
        self._cache = cache

    def _told(self) -> tuple[str, dict[str, Any]]:
        publication, tracks = self._produced, [s.name.name.decode() for s in self._produced.tracks]
        namespace = publication.namespace.text
        return (
            f"{self._cache.tokens} tokens as {', '.join(tracks)}, the prompt in clear, "
            f"namespace {namespace}",
            {
                "profile": KVCACHE,
                "tokens": self._cache.tokens,
                "layers": publication.descriptor.layers,
                "tracks": tracks,
                "namespace": namespace,
            },
        )

    async def _produce(self) -> None:
        publication, cache = self._produced, self._cache
        descriptor, group = publication.descriptor, publication.chunk_tokens
        step = max(1, min(group, TURN_OCTETS // token_octets(Compression.FP16, descriptor)))
        for start in range(0, cache.tokens, group):
            if start and self._settings.live_delay:
                await asyncio.sleep(self._settings.live_delay)
            stop = min(start + group, cache.tokens)
            for first in range(start, stop, step):
                rows = slice(first, min(first + step, stop))
                layers = range(descriptor.layers)
                await aput_tokens(
                    publication, [(cache.k(each)[rows], cache.v(each)[rows]) for each in layers]
                )
        publication.finish()


def main() -> NoReturn:
    """Entry point, for `kvcs.programs.entry`."""
    run_app(app, PROGRAM)
