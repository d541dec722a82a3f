"""The `kvsp` program: its commands, their help and examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import typer

from kvsp.cli import blocks, operations
from kvsp.cli.plain import PlainCommand, PlainGroup, Version, run_app
from kvsp.cli.session import EXIT_CODES_HELP, PROGRAM

_INDEX: Final = "https://is.example/kvsp/"
_INSTANCE: Final = "https://ii7.example/kvsp/"
_PROMPT: Final = "--scope-key-file scope.json --compat compat.json --tokens tokens.json"
_TOKEN: Final = "--token-file token"

app = typer.Typer(
    name=PROGRAM,
    cls=PlainGroup,
    help="Store, find and retrieve the KV caches of language models (KVSP).",
    epilog=f"Example:  kvsp lookup {_INDEX} {_PROMPT} {_TOKEN}",
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.callback()
def root(version: Version = False) -> None:
    """Options of the program itself."""


_COMMANDS: Final[tuple[tuple[Callable[..., None], str, str], ...]] = (
    (
        blocks.get,
        "Retrieve the cached prefix of a prompt, verified, from all holders into a KV file.",
        f"get {_INDEX} {_PROMPT} --out received.safetensors {_TOKEN}",
    ),
    (
        blocks.put,
        "Store the blocks of a prompt from a KV file at a holder.",
        f"put {_INDEX} --kv kv.safetensors {_PROMPT} {_TOKEN}",
    ),
    (
        blocks.lookup,
        "Say how many leading blocks of a prompt are cached, and where.",
        f"lookup {_INDEX} {_PROMPT} {_TOKEN}",
    ),
    (
        blocks.explain,
        "Say why a lookup stops where it does.",
        f"explain {_INDEX} {_PROMPT} {_TOKEN}",
    ),
    (
        blocks.lease,
        "Keep the blocks of a prompt from being evicted, while this program runs.",
        f"lease {_INDEX} {_PROMPT} --hold 60 {_TOKEN}",
    ),
    (
        operations.prefetch,
        "Let an instance load the cached blocks of a prompt.",
        f"prefetch {_INDEX} {_INSTANCE} {_PROMPT} {_TOKEN}",
    ),
    (
        operations.sessions,
        "Show a session, or the instances, of a placement controller.",
        f"sessions https://pc.example/kvsp/ {_TOKEN}",
    ),
    (
        operations.doctor,
        "Find out what keeps caches from being found and retrieved.",
        f"doctor {_INDEX} {_PROMPT} {_TOKEN}",
    ),
)

for _command, _help, _example in _COMMANDS:
    app.command(
        cls=PlainCommand,
        help=f"{_help}\n\n{EXIT_CODES_HELP}",
        epilog=f"Example:  {PROGRAM} {_example}",
    )(_command)


def main() -> NoReturn:
    """Entry point of the `kvsp` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
