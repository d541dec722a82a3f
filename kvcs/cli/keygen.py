"""`kvcs-keygen`: make the keys that producers and consumers of a scope share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvcs.errors import FileError
from kvcs.principals import EVERY_SCOPE, add_principal, check_principals, make_token, record
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


@app.command(
    epilog="Example:  kvcs-keygen token token.txt --scope-key-file scope.json "
    "--principals principals.json"
)
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The token file to make.")],
    scope_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The scope it is good for.")
    ] = None,
    every_scope: Annotated[
        bool, typer.Option("--every-scope", help="Good for every scope, for operators.")
    ] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Good for subscribing, not for publishing.")
    ] = False,
    principal: Annotated[
        str, typer.Option(metavar="NAME", help="Who has it, in the relay's records.")
    ] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="A role at KVSP services; may be repeated."),
    ] = None,
    uri: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI", help="A holder or instance that it speaks for; may be repeated."
        ),
    ] = None,
    principals: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append its record there instead of printing it."),
    ] = None,
) -> None:
    """Make a token file, which programs show to a relay or a KVSP service (--token-file).

    Only its owner may read it (mode 0600), and an existing file is never overwritten. What
    they have to know is no secret: the token's SHA-256 digest and the scope. It is printed,
    or appended to --principals, a file for both kvcs-relay --auth and kvsp-server.

    Exit code: 0 done, 1 a file was not made, 2 wrong usage.
    """
    if (scope_key_file is None) is not every_scope:
        raise typer.BadParameter("give either --scope-key-file FILE or --every-scope")
    try:
        scope = EVERY_SCOPE
        if scope_key_file is not None:
            scope = Scope.load(scope_key_file).scope_id.hex()
        if principals is not None:
            check_principals(principals)
        digest = make_token(file)
        rights = ["read"] if read_only else ["read", "write"]
        entry = record(
            principal or file.stem, digest, scope, rights, roles=role or (), uris=uri or ()
        )
        if principals is not None:
            add_principal(principals, entry)
    except (KvspError, FileError) as error:
        typer.echo(f"kvcs-keygen: {error}", err=True)
        raise typer.Exit(1) from None
    if principals is None:
        typer.echo(json.dumps(entry))


def main() -> None:
    """Entry point of the `kvcs-keygen` script."""
    app(prog_name="kvcs-keygen")


if __name__ == "__main__":
    main()
