"""What both programs share in the second profile, `--profile kvcache`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvcs.programs.common import inputs
from kvcs.simple.names import Compression, parse_compression
from kvsp.cli.common import InputError

PROFILE_HELP: Final = (
    "The profile kvcache is KVCache over MoQT, for those who speak nothing else. It protects "
    "nothing: prompt and model stand in the names, in clear, before every relay on the way. "
    "Nothing says which weights, tokenizer or adapters a cache is of, and there is no digest: "
    "nothing of what comes is checked but its length, so that a wrong cache looks like a right "
    "one. Use the profile kvcs, the default, unless the other end cannot."
)

Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="kvcs, or kvcache for KVCache over MoQT: see --profile kvcache --help.",
    ),
]
Prompt = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="The prompt, every octet as it is, a newline at the end too; - is standard input.",
    ),
]
GroupTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Tokens of a Group; both ends need the same.")
]

MAX_PROMPT_OCTETS: Final = 64 << 20
KVCS: Final = "kvcs"
KVCACHE: Final = "kvcache"


def check_profile(name: str, expected: str) -> None:
    """Raises InputError for a profile that is not the one a command is for."""
    if name != expected:
        raise InputError(f"--profile: {name!r} is not one of {KVCS} and {KVCACHE}")


def read_prompt(file: str) -> bytes:
    """The octets of a prompt. Raises InputError."""
    try:
        if file == "-":
            prompt = sys.stdin.buffer.read(MAX_PROMPT_OCTETS + 1)
        else:
            with Path(file).open("rb") as source:
                prompt = source.read(MAX_PROMPT_OCTETS + 1)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    if not prompt:
        raise InputError(f"{file}: the prompt is empty")
    if len(prompt) > MAX_PROMPT_OCTETS:
        raise InputError(f"{file}: a prompt of more than {MAX_PROMPT_OCTETS} octets")
    return prompt


def compression(name: str) -> Compression:
    """The compression of that name. Raises InputError."""
    with inputs():
        return parse_compression(name)
