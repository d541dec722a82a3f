"""`kvcs-inspect`: what is in an Object, a manifest, signed or not, a namespace, a container or a KV
file."""

from __future__ import annotations

import base64
import mmap
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NoReturn

import typer

from kvcs.names.codes import (
    MAX_MANIFEST_OCTETS,
    NAMESPACE_TAG,
    PAYLOAD_HEADER_OCTETS,
    PAYLOAD_MAGIC,
    URI_FRAGMENT_TYPE,
    Component,
)
from kvcs.names.manifest import Manifest, SegmentEntry
from kvcs.names.namespace import PublicationNamespace, parse_publication_uri
from kvcs.names.payload import data_digest, decode_header
from kvcs.programs.common import inputs
from kvcs.trust.cose import open_message, read
from kvcs.trust.producers import Algorithm, Producers
from kvsp.blocks.container import ENTRY, ENTRY_OCTETS, FIXED, FIXED_OCTETS, layer_digest
from kvsp.blocks.container import decode as decode_container
from kvsp.blocks.kv_files import MAX_HEADER_OCTETS, load_descriptor, parse_header
from kvsp.cli.common import ExitCode, InputError, note, print_json
from kvsp.cli.plain import PlainCommand, Version, run_app
from kvsp.names.codes import CONTAINER_MAGIC, CONTAINER_VERSION, Codec, DecodeErrorName
from kvsp.names.errors import DecodeError, FileError
from kvsp.names.identity import Descriptor
from kvsp.names.private_files import open_input
from moqt.values.errors import escaped

PROGRAM: Final = "kvcs-inspect"
EXAMPLES: Final = (
    "Examples:  kvcs-inspect cache.safetensors\n\n"
    "           kvcs-inspect --json - < manifest.json\n\n"
    "           kvcs-inspect --compat compat.json block.kvb\n\n"
    "           kvcs-inspect --producers producers.json manifest.cose"
)
MAX_PIPE_OCTETS: Final = 1 << 30
"""What is read of a pipe; a file is mapped, whatever its size."""

_KV_TENSOR: Final = re.compile(r"layers\.(0|[1-9][0-9]{0,9})\.(k|v)")
_NAMESPACE_TEXT: Final = re.compile(rb"[A-Za-z0-9_-]{143}")
_TEXT_OCTETS: Final = 4096
"""More than the text of a namespace, or the URI of a publication, has."""

_ENCODED_NAMESPACE: Final = bytes([5, len(NAMESPACE_TAG)]) + NAMESPACE_TAG
_TAGGED: Final = b"\xd2\x84"
_UNTAGGED: Final = b"\x84"
"""How a COSE_Sign1 message begins."""
_FRAGMENT: Final = f"#{URI_FRAGMENT_TYPE}".encode()
_MOST_SHOWN: Final = 8
"""Layers, tensors or segments of which people are told each."""

app = typer.Typer(
    name=PROGRAM,
    add_completion=True,
    pretty_exceptions_enable=False,
)


class UnknownKindError(InputError):
    """What it is cannot be told."""


@app.command(
    cls=PlainCommand,
    help=(
        "Say what is in an Object payload, a manifest, signed or not, a namespace, a block "
        "container or a safetensors file, and whether it is what it should be.\n\n"
        "Exit code: 0 it is, 2 wrong "
        "usage, or nobody can tell what it is, 5 it is not what it should be."
    ),
    epilog=EXAMPLES,
)
def command(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="- is standard input.")],
    compat: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Descriptor that a container is compared with."),
    ] = None,
    producers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Producers, one of whom has to have signed a signed manifest."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""
    try:
        with inputs():
            descriptor = None if compat is None else load_descriptor(compat)
            accepted = None if producers is None else Producers.load(producers, pipes=True)
        data = _read(file)
        result = describe(data, descriptor, accepted)
    except InputError as error:
        if json:
            print_json({"ok": False, "error": str(error), "exit_code": int(ExitCode.USAGE)})
        note(PROGRAM, f"{'standard input' if file == '-' else file}: {error}")
        raise typer.Exit(ExitCode.USAGE) from None
    if json:
        print_json({"ok": not result["faults"], **result})
    else:
        print("\n".join(_lines(result)), flush=True)
    if result["faults"]:
        raise typer.Exit(ExitCode.VERIFICATION_FAILED)


# --- what it is ------------------------------------------------------------------------

_Members = Iterator[tuple[str, Any]]
"""Name and value of each thing that is read; what is not as it should be is raised."""


def describe(
    data: memoryview, descriptor: Descriptor | None = None, producers: Producers | None = None
) -> dict[str, Any]:
    """What octets are, for people and as JSON: `kind`, `octets`, its members as far as they can
    be read, and `faults`, sentences on what is not as it should be.

    A container is compared with the `descriptor` of its block, the signature of a manifest with
    the keys of `producers`. Raises UnknownKindError.
    """
    kind, members = _recognized(data, descriptor, producers)
    result: dict[str, Any] = {"kind": kind, "octets": len(data), "faults": []}
    try:
        result.update(members)
    except (DecodeError, FileError) as error:
        result["faults"].append(str(error))
    return result


def _recognized(
    data: memoryview, descriptor: Descriptor | None, producers: Producers | None
) -> tuple[str, _Members]:
    start = bytes(data[:_TEXT_OCTETS]).strip()
    short = len(data) < _TEXT_OCTETS
    if data[:4] == PAYLOAD_MAGIC.to_bytes(4):
        return "Object payload", _object(data)
    if data[:4] == CONTAINER_MAGIC:
        return "block container", _container(data, descriptor)
    if short and data[:8] == _ENCODED_NAMESPACE:
        text = base64.urlsafe_b64encode(data[1:]).rstrip(b"=").decode("ascii")
        return "namespace", _namespace(text)
    if short and start.startswith(b"moqt:") and _FRAGMENT in start:
        return "namespace", _publication(start.decode("utf-8", "replace"))
    if short and _NAMESPACE_TEXT.fullmatch(start):
        return "namespace", _namespace(start.decode("ascii"))
    if bytes(data[8:9]) == b"{" and int.from_bytes(data[:8], "little") <= MAX_HEADER_OCTETS:
        return "safetensors file", _safetensors(data)
    if start[:1] == b"{" and b'"kvcs"' in bytes(data[:MAX_MANIFEST_OCTETS]):
        return "manifest", _manifest(data)
    if start.startswith(_TAGGED) or (start.startswith(_UNTAGGED) and _is_message(data)):
        return "signed manifest", _signed(data, producers)
    raise UnknownKindError(
        "neither an Object, a manifest, a namespace, a container nor a safetensors file"
    )


def _object(data: memoryview) -> _Members:
    header = decode_header(data)
    content = data[PAYLOAD_HEADER_OCTETS:]
    yield "component", _named(Component, header.component)
    yield "codec", _codec(header.codec)
    yield "layer", header.layer
    yield "block", header.block_index
    yield "first_token", header.token_start
    yield "tokens", header.token_count
    yield "data_octets", header.data_length
    yield "data_digest", header.data_digest.hex()
    if len(content) != header.data_length:
        name = DecodeErrorName.TRUNCATED
        if len(content) > header.data_length:
            name = DecodeErrorName.TRAILING_OCTETS
        raise DecodeError(name, f"{len(content)} octets of Data instead of {header.data_length}")
    if data_digest(content) != header.data_digest:
        raise DecodeError(DecodeErrorName.DIGEST_MISMATCH, "Data is not what its digest covers")


def _container(data: memoryview, descriptor: Descriptor | None) -> _Members:
    if len(data) < FIXED_OCTETS:
        raise DecodeError(
            DecodeErrorName.TRUNCATED, f"{len(data)} octets, but the header has {FIXED_OCTETS}"
        )
    _, version, flags, codec, first, layers, tokens = FIXED.unpack_from(data)
    if version != CONTAINER_VERSION:
        raise DecodeError(
            DecodeErrorName.BAD_VERSION, f"version {version} instead of {CONTAINER_VERSION}"
        )
    yield "codec", _codec(codec)
    yield "flags", flags
    yield "first_layer", first
    yield "layers", layers
    yield "tokens", tokens
    at = FIXED_OCTETS + layers * ENTRY_OCTETS
    table = data[FIXED_OCTETS:at]
    lengths = list(ENTRY.iter_unpack(table[: len(table) // ENTRY_OCTETS * ENTRY_OCTETS]))
    if at > len(data) or at + sum(map(sum, lengths)) != len(data):
        due = "more" if at > len(data) else at + sum(map(sum, lengths))
        raise DecodeError(
            DecodeErrorName.TRUNCATED, f"{len(data)} octets where its table asks for {due}"
        )
    digests = []
    for number, (k, v) in enumerate(lengths, first):
        digest = layer_digest(data[at : at + k], data[at + k : at + k + v])
        digests.append({"layer": number, "k_octets": k, "v_octets": v, "digest": digest.hex()})
        at += k + v
    yield "sections", digests
    if descriptor is not None:
        decode_container(data, descriptor)
        yield "compat_id", descriptor.compat_id.hex()


def _publication(uri: str) -> _Members:
    endpoint, namespace = parse_publication_uri(uri)
    yield "endpoint", endpoint
    yield from _namespace(namespace.text)


def _namespace(text: str) -> _Members:
    namespace = PublicationNamespace.from_text(text)
    yield "scope_id", namespace.scope_id.hex()
    yield "compat_id", namespace.compat_id.hex()
    yield "anchor_key", namespace.anchor_key.hex()
    yield "publication", namespace.publication_id.hex()
    yield "text", namespace.text


def _manifest(data: memoryview) -> _Members:
    manifest = Manifest.parse(data)
    compat = manifest.compat
    yield "publication", None if manifest.publication is None else manifest.publication.hex()
    yield "scope_id", None if manifest.scope_id is None else manifest.scope_id.hex()
    yield "compat_id", compat.compat_id.hex()
    yield "compat", compat.to_dict()
    yield "deterministic", manifest.deterministic
    yield "blocks", manifest.blocks
    yield "tokens", manifest.blocks * compat.block_tokens
    yield "segments", [_segment(entry) for entry in manifest.segments]


def _is_message(data: memoryview) -> bool:
    try:
        read(data)
    except DecodeError:
        return False
    return True


def _signed(data: memoryview, producers: Producers | None) -> _Members:
    message = read(data)
    known = message.alg in tuple(Algorithm)
    yield "signed_by", None if message.kid is None else message.kid.hex()
    yield "algorithm", Algorithm(message.alg).label if known else message.alg
    yield from _manifest(message.payload)
    if producers is None:
        yield "signature", "not verified: --producers FILE says who may have signed it"
        return
    open_message(data, producers)
    yield "signature", "verified"


def _segment(entry: SegmentEntry) -> dict[str, Any]:
    return {
        "segment": entry.segment,
        "first_block": entry.first_block,
        "blocks": entry.blocks,
        "complete": entry.complete,
        "block_keys_sha256": entry.block_keys_sha256.hex(),
        "tracks": {str(track): entry.listed_groups(track) for track in entry.tracks},
        "other_tracks": list(entry.other_tracks),
    }


def _safetensors(data: memoryview) -> _Members:
    end = 8 + int.from_bytes(data[:8], "little")
    header = parse_header(data[:end], len(data))
    yield "metadata", dict(header.metadata)
    layers = [found for name in header.tensors if (found := _KV_TENSOR.fullmatch(name))]
    shapes = {each.shape for each in header.tensors.values()}
    if layers and len(layers) == len(header.tensors) and len(shapes) == 1:
        (shape,) = shapes
        numbers = sorted({int(each[1]) for each in layers})
        yield "kv_layers", [numbers[0], numbers[-1]]
        if len(shape) == 3:
            yield from zip(("tokens", "kv_heads", "head_dim"), shape, strict=True)
    yield (
        "tensors",
        [
            {"name": name, "dtype": each.dtype, "shape": list(each.shape)}
            for name, each in header.tensors.items()
        ],
    )


def _named(registry: type[Component], value: int) -> str | int:
    return registry(value).label if value in tuple(registry) else value


def _codec(value: int) -> str | int:
    return Codec(value).label if value in tuple(Codec) else value


# --- in and out ------------------------------------------------------------------------


def _read(name: str) -> memoryview:
    """All of a file, mapped, or of a pipe. Raises InputError, without the name."""
    try:
        if name == "-":
            return _piped(sys.stdin.buffer)
        with open_input(name) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _piped(file)
            if not status.st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise InputError(error.strerror or str(error)) from None
    except FileError as error:
        raise InputError(str(error)) from None


def _piped(file: BinaryIO) -> memoryview:
    data = file.read(MAX_PIPE_OCTETS + 1)
    if len(data) > MAX_PIPE_OCTETS:
        raise InputError(f"more than {MAX_PIPE_OCTETS} octets through a pipe: name a file")
    return memoryview(data)


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    faults = result["faults"]
    yield f"{result['kind']}, {result['octets']} octets"
    for name, value in result.items():
        if name not in ("kind", "octets", "faults"):
            yield from _shown(name, value, "  ")
    for fault in faults:
        yield f"  NOT AS IT SHOULD BE: {escaped(fault)}"


def _shown(name: str, value: Any, indent: str) -> Iterator[str]:
    label = f"{indent}{escaped(name.replace('_', ' '))}:"
    if isinstance(value, dict) and value:
        yield label
        for member, each in value.items():
            yield from _shown(member, each, indent + "  ")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield label
        for each in value[:_MOST_SHOWN]:
            yield f"{indent}  {escaped(', '.join(f'{k} {v}' for k, v in each.items()))}"
        if len(value) > _MOST_SHOWN:
            yield f"{indent}  and {len(value) - _MOST_SHOWN} more (see --json)"
    elif value is not None and value != [] and value != {}:
        yield f"{label} {escaped(str(value))}"


def main() -> NoReturn:
    """Entry point of the `kvcs-inspect` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
