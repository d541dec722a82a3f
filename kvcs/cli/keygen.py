"""`kvcs-keygen`: make the keys that producers and consumers of a scope share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsp.errors import KvspError
from kvsp.identity import Scope

app = typer.Typer(
    name="kvcs-keygen",
    help="Make the keys that the producers and consumers of a scope share.",
    epilog="Example:  kvcs-keygen scope scope.json",
    no_args_is_help=True,
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.callback()
def _program() -> None:
    """Make the keys that the producers and consumers of a scope share."""


@app.command(epilog="Example:  kvcs-keygen scope scope.json")
def scope(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The scope file to make.")],
) -> None:
    """Make a scope file with a fresh random scope key.

    Only its owner may read it (mode 0600), and an existing file is never overwritten.
    Prints the Scope ID, which is not a secret. Hand the file itself to every member of
    the scope, and to nobody else.

    Exit code: 0 done, 1 the file was not made, 2 wrong usage.
    """
    fresh = Scope.generate()
    try:
        fresh.save(file)
    except KvspError as error:
        typer.echo(f"kvcs-keygen: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(fresh.scope_id.hex())


def main() -> None:
    """Entry point of the `kvcs-keygen` script."""
    app(prog_name="kvcs-keygen")


if __name__ == "__main__":
    main()
