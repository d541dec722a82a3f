"""`kvcs-subscribe --profile kvcache`: retrieve the KV cache of a prompt by the second profile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from kvcs.names.errors import RetrievalTimeout
from kvcs.names.limits import MAX_TOKENS, REACHED
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
    TokenFile,
    Url,
    Version,
    check_not_input,
    check_url,
    failure,
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
from kvcs.simple.chunks import Chunk
from kvcs.simple.consumer import PromptConsumer
from kvcs.simple.names import CHUNK_TOKENS, Compression
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.cli.common import check_cafile, check_output, print_json
from kvsp.cli.plain import PlainCommand, run_app
from kvsp.names.identity import Descriptor
from moqt.client import connect
from moqt.quic.backend import Backend
from moqt.quic.config import MAX_DATAGRAM_SIZE, QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.values.config import SessionConfig

PROGRAM: Final = "kvcs-subscribe"
EXAMPLE: Final = (
    "Example:  kvcs-subscribe --profile kvcache moqt://localhost:4443 --cafile ca.pem "
    "--compat compat.json --prompt prompt.txt --out received.safetensors"
)

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(
    cls=PlainCommand,
    help=(
        "Retrieve the KV cache of a prompt, or of the longest prompt published that it begins "
        f"with, into a KV file.\n\n{PROFILE_HELP}\n\n{EXIT_CODES_HELP}"
    ),
    epilog=EXAMPLE,
)
def command(
    url: Url,
    compat: Compat,
    prompt: Prompt,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The KV file to write.")],
    profile: Profile = KVCACHE,
    compression_name: Annotated[
        str,
        typer.Option(
            "--compression",
            metavar="NAME",
            help="The track to retrieve: FP16, BF16, FP8, Int8, FP4 or Int4. The file has the "
            "element type of --compat.",
        ),
    ] = "FP16",
    group_tokens: GroupTokens = CHUNK_TOKENS,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Refuse a cache of more tokens.")
    ] = MAX_TOKENS,
    cafile: Cafile = None,
    token_file: TokenFile = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long all of it may take.")
    ] = 60,
    mtu: Mtu = MAX_DATAGRAM_SIZE,
    congestion: Congestion = Algorithm.BBR,
    quic_backend: QuicBackend = Backend.AUTO,
    qlog_dir: QlogDir = None,
    keylog_file: KeylogFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""

    def main() -> Coroutine[Any, Any, None]:
        check_profile(profile, KVCACHE)
        check_url(url)
        check_cafile(cafile)
        shown = session_config(token_file)
        check_output(out)
        check_not_input(out, compat, Path(prompt), cafile, token_file)
        wanted = compression(compression_name)
        with inputs():
            descriptor = readable_descriptor(compat)
        text = read_prompt(prompt)
        quic = quic_config(
            cafile=cafile,
            mtu=mtu,
            congestion=congestion,
            quic_backend=quic_backend,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
        )
        return retrieve(shown, wanted, descriptor, text, quic)

    async def retrieve(
        shown: SessionConfig,
        wanted: Compression,
        descriptor: Descriptor,
        text: bytes,
        quic: QuicConfig,
    ) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        chunks: list[Chunk] = []
        seconds: list[float] = []
        within = min(timeout, CONNECT_TIMEOUT)
        async with connect(url, quic=quic, session=shown, timeout=within) as session:
            left = timeout - (loop.time() - began)
            if left <= 0:
                raise RetrievalTimeout(f"nothing came within {timeout:g} s")
            asked = loop.time()
            with inputs():
                consumer = PromptConsumer(
                    session,
                    descriptor,
                    text,
                    wanted,
                    chunk_tokens=group_tokens,
                    timeout=left,
                    max_tokens=max_tokens,
                )
            async with consumer:
                async for chunk in consumer.chunks():
                    chunks.append(chunk)
                    seconds.append(loop.time() - asked)
        await asyncio.to_thread(_write, out, descriptor, chunks, consumer.tokens)
        assert consumer.found is not None
        shorter = consumer.found != consumer.wanted.fields
        result = {
            "ok": True,
            "out": str(out),
            "profile": KVCACHE,
            "compression": wanted.value,
            "tokens": consumer.tokens,
            "octets": consumer.octets,
            "whole_prompt": not shorter,
            "seconds": seconds[-1],
            "first_chunk_seconds": seconds[0],
            "chunk_seconds": seconds,
            "limits_reached": dict(REACHED),
        }
        if json:
            print_json(result)
            return
        print(
            f"{consumer.tokens} tokens as {wanted}, {consumer.octets / 1e6:.1f} MB in "
            f"{seconds[-1]:.2f} s, first {group_tokens} after {seconds[0]:.3f} s, not verified, "
            f"{'of a prompt that this one begins with, ' if shorter else ''}written to {out}",
            flush=True,
        )

    def failed(error: BaseException) -> None:
        if json:
            print_json(failure(error, token_file) | {"limits_reached": dict(REACHED)})

    run(PROGRAM, main, token_file=token_file, failed=failed)


def _write(out: Path, descriptor: Descriptor, chunks: list[Chunk], tokens: int) -> None:
    with KvFileWriter(out, descriptor, tokens=tokens) as file:
        for chunk in chunks:
            rows = slice(chunk.first_token, chunk.first_token + chunk.tokens)
            for layer in range(descriptor.layers):
                file.k(layer)[rows] = chunk.k[layer]
                file.v(layer)[rows] = chunk.v[layer]
        file.commit()


def main() -> NoReturn:
    """Entry point, for `kvcs.programs.entry`."""
    run_app(app, PROGRAM)
