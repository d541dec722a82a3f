"""The `kvsp-server` program."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from kvsp.cli.common import ExitCode, note
from kvsp.cli.plain import PlainCommand, Version, run_app
from kvsp.http.server import CannotStartError, ServerSettingsError, run
from kvsp.names.errors import KvspError
from kvsp.service.checking import check_start
from kvsp.service.schema import PREFIX, tables
from kvsp.service.server import Assembly
from kvsp.service.settings import ROLES, Settings
from kvsp.service.sources import as_toml, read_settings

_PROGRAM: Final = "kvsp-server"
_EXAMPLE: Final = (
    f"{_PROGRAM} --dev --roles index,controller,holder --listen 127.0.0.1:8080 --data-dir kvsp-data"
)
_EPILOG: Final = "\n\n".join(
    (
        f"Example:  {_EXAMPLE}",
        "Without --dev a --config file is needed: roles and data_dir, then tables for "
        f"{', '.join(name for name in tables() if name and '.' not in name)}; docs/kvsp.md has "
        "a whole one, docs/configuration.md every setting. A variable such as "
        f"{PREFIX}LISTEN_ADDRESS goes before the file, a flag before both.",
        "Exit code: 0 ended by SIGTERM or Ctrl-C, 1 failed at the start, 2 wrong usage, settings "
        "or files.",
    )
)

app = typer.Typer(
    name=_PROGRAM,
    help="Serve KVSP roles: holder, index, controller, instance.",
    add_completion=True,
    # a traceback with local variables would show keys
    pretty_exceptions_enable=False,
)


@app.command(cls=PlainCommand, epilog=_EPILOG)
def serve(
    roles: Annotated[
        str | None, typer.Option(metavar="ROLE,…", help=f"Any of {', '.join(ROLES)}.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keeps records, sessions and blocks (16 GiB, or holder.disk_mib).",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings, TOML; flags go before it.")
    ] = None,
    dev: Annotated[
        bool, typer.Option("--dev", help="Plain HTTP on this machine, without credentials.")
    ] = False,
    index: Annotated[str | None, typer.Option(metavar="URI", help="The index service.")] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="URI,…", help="The placement controller, or each of one journal."),
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Say whether a start could work, and end.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every setting as it is, as TOML, and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each request.")] = False,
    version: Version = False,
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
        "peers": {
            "index": index,
            "placement": placement and [uri.strip() for uri in placement.split(",")],
        },
    }
    try:
        loaded = read_settings(config, flags, os.environ)
        if print_config:
            print(as_toml(loaded), end="", flush=True)
        if check_config:
            check_start(loaded.settings)
            note(_PROGRAM, "the settings are right")
        if not (print_config or check_config):
            _serve(loaded.settings)
    except CannotStartError as error:
        note(_PROGRAM, str(error))
        sys.exit(ExitCode.FAILED)
    except KvspError as error:
        note(_PROGRAM, str(error))
        sys.exit(ExitCode.USAGE)


def _serve(settings: Settings) -> None:
    assembly = Assembly(settings)
    try:
        run(assembly.app, assembly.server)
    except (CannotStartError, ServerSettingsError):
        assembly.undo()
        raise


def main() -> NoReturn:
    """Run the program."""
    run_app(app, _PROGRAM)
