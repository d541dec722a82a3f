"""`kvsp get`, `put`, `lookup`, `explain` and `lease`: blocks of a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsp.blocks.codecs import encode_section
from kvsp.blocks.container import Container
from kvsp.blocks.kv_files import KvFile, KvFileWriter
from kvsp.blocks.layout import block_section, octets_of
from kvsp.cli.common import ExitCode, InputError, check_output, note, parse_layers
from kvsp.cli.session import (
    PROGRAM,
    Access,
    Compat,
    Index,
    Json,
    Outcome,
    Prompt,
    ScopeKeyFile,
    Timeout,
    Tokens,
    deadline,
    fault_code,
    inputs,
    run,
    with_access,
)
from kvsp.client import ArrayDestination, Client, Fault, Layer, NotFoundError, RetrievalResult
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor
from kvsp.names.prefix import complete_blocks
from kvsp.names.uris import BlockId, is_moqt
from kvsp.records.records import LookupResponse

Holder = Annotated[
    str | None,
    typer.Option(metavar="URI", help="Base URI of the holder; else that of the index's host."),
]


@with_access
def lookup(
    access: Access,
    index: Index,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="URI", help="Estimate for this instance, too; may be repeated."),
    ] = None,
    timeout: Timeout = 30,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        prompt = Prompt.load(scope_key_file, compat, tokens, None)
        for uri in target or ():
            access.check("--target", uri)
        async with access.client(index) as client, deadline(timeout):
            found = await _look_up(client, prompt, target or None)
        at = Counter(record.holder for block in found.blocks for record in block.replicas)
        result = {
            "blocks": len(prompt.keys),
            "matched": found.matched,
            "tokens": found.matched * prompt.descriptor.block_tokens,
            "holders": dict(at),
            "targets": [estimate.to_dict() for estimate in found.targets or ()],
        }
        text = (
            f"{found.matched} of {len(prompt.keys)} blocks are cached "
            f"({result['tokens']} of {prompt.tokens} tokens)"
        )
        if not found.matched:
            raise Outcome(ExitCode.NOT_FOUND, f"{text}; kvsp explain says why", result)
        if not json:
            print("\n".join([text, *(f"  {count} at {holder}" for holder, count in at.items())]))
            for each in found.targets or ():
                print(
                    f"  {each.target}: fetch {each.fetch_us} us, recompute {each.recompute_us} us"
                )
        return result

    run(main, json=json)


@with_access
def explain(
    access: Access,
    index: Index,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    timeout: Timeout = 30,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        prompt = Prompt.load(scope_key_file, compat, tokens, None)
        async with access.client(index) as client, deadline(timeout):
            why = await client.explain(
                prompt.scope.scope_id, prompt.descriptor.compat_id, prompt.keys
            )
        text = f"{why.matched} of {len(prompt.keys)} blocks match"
        stop = f"; block {why.matched} does not: {why.reason}: {why.detail}"
        text += stop if why.reason else ", which is all of them"
        key = None if why.block_key is None else why.block_key.hex()
        result = {
            "blocks": len(prompt.keys),
            "matched": why.matched,
            "block_key": key,
            "reason": why.reason,
            "detail": why.detail,
        }
        if not why.matched:
            raise Outcome(ExitCode.NOT_FOUND, text, result)
        if not json:
            print(text)
        return result

    run(main, json=json)


@with_access
def get(
    access: Access,
    index: Index,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The KV file to write.")],
    layers: Annotated[
        str | None, typer.Option(metavar="A-B", help="Only layers A to B, inclusive.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N blocks.")
    ] = None,
    codec: Annotated[
        str | None, typer.Option(metavar="NAME", help="raw, x-zlib or x-q8; else the replica's.")
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Take replicas in a lossy codec, too.")
    ] = False,
    timeout: Timeout = 60,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        check_output(out)
        prompt = Prompt.load(scope_key_file, compat, tokens, blocks)
        wanted = parse_layers(layers, prompt.descriptor.layers)
        number = None if codec is None else int(_codec(codec))
        ends = asyncio.get_running_loop().time() + timeout
        async with access.client(index) as client:
            async with deadline(timeout):
                found = await _look_up(client, prompt, None)
            if not found.matched:
                raise Outcome(
                    ExitCode.NOT_FOUND, "no block of this prompt is cached; kvsp explain says why"
                )
            size = found.matched * prompt.descriptor.block_tokens
            with KvFileWriter(out, prompt.descriptor, tokens=size, layers=wanted) as writer:
                show = sys.stderr.isatty() and not json
                total = found.matched * len(wanted) * 2 * prompt.descriptor.section_octets()
                with _progress(total, show) as advance:
                    result = await client.get_blocks(
                        [block.replicas for block in found.blocks],
                        _Counted(ArrayDestination(prompt.descriptor, _tensors(writer)), advance),
                        descriptor=prompt.descriptor,
                        layers=wanted,
                        codec=number,
                        allow_lossy=allow_lossy,
                        deadline_s=max(0.0, ends - asyncio.get_running_loop().time()),
                    )
                _commit(writer, result, out, prompt.descriptor, found)
        report = {
            "out": str(out),
            "tokens": result.complete_blocks * prompt.descriptor.block_tokens,
            "first_layer": wanted.start,
            "last_layer": wanted.stop - 1,
            **result.to_dict(),
        }
        if not json:
            print(
                f"{report['tokens']} tokens ({result.complete_blocks} blocks, layers "
                f"{wanted.start}-{wanted.stop - 1}), verified, written to {out}"
            )
        if not result.complete:
            note(PROGRAM, f"shorter than the index promised: {_gap(result, found)}")
        return report

    run(main, json=json)


@with_access
def put(
    access: Access,
    index: Index,
    kv: Annotated[Path, typer.Option(metavar="FILE", help="KV file with all layers.")],
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    holder: Holder = None,
    codec: Annotated[
        str, typer.Option(metavar="NAME", help="Store as raw, x-zlib or x-q8 (lossy).")
    ] = "raw",
    timeout: Timeout = 300,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        prompt = Prompt.load(scope_key_file, compat, tokens, None)
        descriptor, stored_as = prompt.descriptor, _codec(codec)
        with inputs(), KvFile.open(kv, descriptor) as file:
            count = min(len(prompt.keys), complete_blocks(file.tokens, descriptor.block_tokens))
            if not count:
                raise InputError(f"{kv}: holds no complete block of the prompt")
        async with access.client(index) as client, deadline(timeout):
            to = await _holder(client, access, index, holder)
            await client.put_descriptor(descriptor)
            created = 0
            with KvFile.open(kv, descriptor) as file:
                octets = count * descriptor.layers * 2 * descriptor.section_octets()
                with _progress(octets, sys.stderr.isatty() and not json) as advance:
                    for number, key in enumerate(prompt.keys[:count]):
                        made = await asyncio.to_thread(
                            _container, file, descriptor, number, stored_as
                        )
                        block = BlockId(descriptor.compat_id, prompt.scope.scope_id, key)
                        prior = prompt.keys[number - 1] if number else None
                        created += (await client.put(to, block, made, prior=prior)).created
                        advance(octets // count)
        if not json:
            there = f", {count - created} were there already" if created < count else ""
            print(f"{created} blocks stored at {to}{there}")
        if not created and stored_as is not Codec.RAW:
            note(PROGRAM, f"the stored copies keep their codec: --codec {codec} changed nothing")
        return {"holder": to, "blocks": count, "created": created, "existing": count - created}

    run(main, json=json)


@with_access
def lease(
    access: Access,
    index: Index,
    scope_key_file: ScopeKeyFile,
    compat: Compat,
    tokens: Tokens,
    holder: Holder = None,
    ttl: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long without a renewal.")
    ] = 10,
    hold: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Release after this; else on Ctrl-C."),
    ] = None,
    json: Json = False,
) -> None:
    async def main() -> Mapping[str, Any]:
        prompt = Prompt.load(scope_key_file, compat, tokens, None)
        async with access.client(index) as client:
            at = await _holder(client, access, index, holder)
            held = client.lease(
                at,
                prompt.scope.scope_id,
                prompt.descriptor.compat_id,
                prompt.keys,
                ttl_ms=round(ttl * 1000),
            )
            async with held:
                result = {
                    "holder": at,
                    "lease": held.grant.lease,
                    "leased": len(held.leased),
                    "missing": len(held.missing),
                }
                how = "until Ctrl-C" if hold is None else f"for {hold:g} s"
                note(PROGRAM, f"{len(held.leased)} blocks leased at {at} {how}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(hold):
                        await held.lost.wait()
        return result

    run(main, json=json)


# --- helpers -------------------------------------------------------------------------


async def _look_up(client: Client, prompt: Prompt, targets: Sequence[str] | None) -> LookupResponse:
    return await client.lookup(
        prompt.scope.scope_id,
        prompt.descriptor.compat_id,
        prompt.keys,
        targets=targets,
        descriptor=prompt.descriptor,
    )


async def _holder(client: Client, access: Access, index: str, holder: str | None) -> str:
    if holder is not None:
        access.check("--holder", holder)
        return holder
    with contextlib.suppress(NotFoundError):
        found = (await client.discover(index)).services.get("holder")
        if found is not None:
            return found
    raise InputError("the host of the index is no holder: name one with --holder")


def _codec(label: str) -> Codec:
    codec = Codec.from_label(label)
    if codec is None:
        known = ", ".join(each.label for each in Codec)
        raise InputError(f"--codec: {label} is not known (known: {known})")
    return codec


def _container(file: KvFile, descriptor: Descriptor, block: int, codec: Codec) -> Container:
    """One block of a KV file, encoded."""

    def section(tensor: Any) -> memoryview:
        raw = block_section(tensor, block, descriptor.block_tokens)
        return encode_section(codec, raw, descriptor)

    sections = [(section(file.k(each)), section(file.v(each))) for each in file.layers]
    return Container.build(descriptor, sections, codec=codec)


def _tensors(writer: KvFileWriter) -> dict[int, tuple[Any, Any]]:
    return {layer: (writer.k(layer), writer.v(layer)) for layer in writer.layers}


def _commit(
    writer: KvFileWriter,
    result: RetrievalResult,
    out: Path,
    descriptor: Descriptor,
    found: LookupResponse,
) -> None:
    """Give the file its name; a shorter one when only leading blocks came whole."""
    if result.complete:
        writer.commit()
        return
    size = result.complete_blocks * descriptor.block_tokens
    if not size:
        reason = result.missing[0].reason
        raise Outcome(fault_code(reason), f"no block came: {_gap(result, found)}", result.to_dict())
    with KvFileWriter(out, descriptor, tokens=size, layers=writer.layers) as shorter:
        for layer in writer.layers:
            octets_of(shorter.k(layer))[:] = octets_of(writer.k(layer)[:size])
            octets_of(shorter.v(layer))[:] = octets_of(writer.v(layer)[:size])
        shorter.commit()


def _gap(result: RetrievalResult, found: LookupResponse) -> str:
    gap = result.missing[0]
    text = f"block {gap.block}, layers {gap.layers.start}-{gap.layers.stop - 1}: {gap.reason}"
    holders = sorted({record.holder for record in found.blocks[gap.block].replicas})
    if gap.reason is Fault.NO_REPLICA and all(map(is_moqt, holders)):
        return f"{text} (only at {', '.join(holders)}; kvcs-subscribe gets it from there)"
    detail = result.details.get(gap.reason)
    return f"{text} ({detail})" if detail else text


class _Counted:
    """Tells the progress bar what goes through to a destination."""

    def __init__(self, to: ArrayDestination, advance: Callable[[int], None]) -> None:
        self._to = to
        self._advance = advance

    def write(self, layer: Layer) -> None:
        self._to.write(layer)
        self._advance(len(layer.k) + len(layer.v))


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar by octets on standard error, when that is a terminal."""
    if not show:
        yield lambda octets: None
        return
    from rich import console  # they take long, and few uses have a terminal
    from rich import progress as bars

    with bars.Progress(
        bars.TextColumn("blocks"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        console=console.Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("blocks", total=total)
        yield lambda octets: progress.advance(task, octets)
