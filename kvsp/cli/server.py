"""The `kvsp-server` program."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsp.cli.common import ExitCode, note
from kvsp.errors import KvspError
from kvsp.http.server import run
from kvsp.server import Assembly
from kvsp.server_settings import ROLES, load_settings

_PROGRAM = "kvsp-server"

app = typer.Typer(
    name=_PROGRAM,
    help="Serve KVSP roles: holder, index, controller, instance.",
    epilog=f"Example:  {_PROGRAM} --dev --roles index,controller,holder --listen 127.0.0.1:8080",
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    roles: Annotated[
        str | None, typer.Option(metavar="ROLE,…", help=f"Any of {', '.join(ROLES)}.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What is to survive a restart.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings, TOML; flags go before it.")
    ] = None,
    dev: Annotated[
        bool, typer.Option("--dev", help="Plain HTTP on this machine, without credentials.")
    ] = False,
    index: Annotated[str | None, typer.Option(metavar="URI", help="The index service.")] = None,
    placement: Annotated[
        str | None, typer.Option(metavar="URI", help="The placement controller.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each request.")] = False,
) -> None:
    """Serve roles until SIGTERM or Ctrl-C; replicas are withdrawn first."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    flags = {
        "roles": None if roles is None else [role.strip() for role in roles.split(",")],
        "data_dir": None if data_dir is None else str(data_dir),
        "dev": dev or None,
        "listen": {"address": listen},
        "peers": {"index": index, "placement": placement},
    }
    try:
        assembly = Assembly(load_settings(config, flags))
        run(assembly.app, assembly.server)
    except KvspError as error:
        note(_PROGRAM, str(error))
        sys.exit(ExitCode.USAGE)


def main() -> None:
    """Run the program."""
    app()
