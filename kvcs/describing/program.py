"""`kvcs-describe`: write the Compatibility Descriptor of a model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kvcs.describing.digests import cache_file
from kvcs.describing.model_folder import describe
from kvsp.cli.common import ExitCode, InputError, note
from kvsp.cli.plain import PlainCommand, Version, run_app
from kvsp.files import write_durably
from kvsp.names.errors import KvspError

PROGRAM: Final = "kvcs-describe"

app = typer.Typer(name=PROGRAM, add_completion=True, pretty_exceptions_enable=False)


@app.command(
    cls=PlainCommand,
    help=(
        "Write the Compatibility Descriptor of a model as Hugging Face keeps them: config.json, "
        "weights and tokenizer in a folder. A model whose caches cannot be shared is refused, with "
        "the reason. Digests of weights are kept by name, size and time of change.\n\n"
        "Exit code: 0 done, 1 it could not be written, 2 wrong usage, or no such model."
    ),
    epilog="Example:  kvcs-describe models/SmolLM2-135M-Instruct --out compat.json",
)
def command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_FOLDER", help="The model's folder.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it; standard output by default."),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block, the grain of sharing.")
    ] = 64,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is called.")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Element type of the cache (bf16, fp16, fp32), if not the weights'.",
        ),
    ] = None,
    positional: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Positional encoding, with parameters other than config.json's: rope;factor=4.",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the digest of the weights for later.")
    ] = True,
    version: Version = False,
) -> None:
    """The help is given to the decorator: it holds the exit codes."""
    try:
        if out is not None and out.exists() and not out.is_file():
            raise InputError(f"--out {out}: is not a regular file")
        descriptor = describe(
            folder,
            block_tokens=block_tokens,
            name=name,
            kv_dtype=kv_dtype,
            positional=positional,
            kept=cache_file() if keep else None,
        )
        descriptor.section_octets()
    except KvspError as error:
        note(PROGRAM, str(error))
        raise typer.Exit(ExitCode.USAGE) from None
    text = json.dumps(descriptor.to_dict(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_durably(Path(os.path.realpath(out)), text.encode())
    except OSError as error:
        note(PROGRAM, f"{out}: {error.strerror or error}")
        raise typer.Exit(ExitCode.FAILED) from None


def main() -> NoReturn:
    """Entry point of the `kvcs-describe` script."""
    run_app(app, PROGRAM)


if __name__ == "__main__":
    main()
