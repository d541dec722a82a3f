"""`kvcs-relay`: the caching MOQT relay on the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer

from moqt.loop_hold import watched_loop
from moqt.quic.backend import VARIABLE, Backend, chosen
from moqt.quic.config import MAX_DATAGRAM_SIZE, QuicConfig
from moqt.quic.congestion.algorithms import Algorithm
from moqt.token_file import TokenFileError, read_token_file
from moqt.values.config import SessionConfig
from moqt.values.errors import MoqtError
from relay.config import Clock, RelayConfig
from relay.disk.threads import DiskUnreadable
from relay.rights.tokens import PrincipalsFileError, TokenPolicy
from relay.scopes import Scopes
from relay.service.certificate import ServedCertificate
from relay.service.checks import (
    PROGRAM,
    Failure,
    Usage,
    cannot_listen,
    check_free,
    check_makeable,
    check_pair,
    check_reset_key,
    disk_in,
    mesh_of,
    upstreams_of,
)
from relay.service.daemon import DaemonConfig, run, show_address
from relay.service.limits import Chosen
from relay.service.options import Sources, parse_address, parse_size, usage
from relay.service.self_signed import self_signed_certificate
from relay.service.settings import Setting, settings_of, text, unknown_variables
from relay.service.told.logs import LogFormat, begin
from relay.service.told.process import version_of
from relay.service.workers.settings import MOST

logger = logging.getLogger("relay")

PREFIX = "KVCS_RELAY"
"""Of the variables that are settings."""
FAILED, USAGE = 1, 2
DISK = "16GiB"
"""What the files of `--cache-dir` may take, unless it is said."""

EPILOG = """
Example: kvcs-relay --listen 127.0.0.1:4443 --self-signed ./relay-cert

Each option can be a variable, as KVCS_RELAY_CACHE_MEMORY is --cache-memory, or stand
in the file of --config. The command line is above the variables, those above the file.

Prints one line when it is ready. SIGTERM or Ctrl-C lets the sessions leave first.
Exit status: 0 done, 1 failed, 2 wrong usage.
"""

_TYPER_USAGE = cast(type[Exception], typer.BadParameter.__mro__[2])
"""ClickException, of whichever click this typer stands on: newer ones bring their own."""


_Option = partial(typer.Option, show_envvar=False)
"""One sentence of the help tells of all variables."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        python = platform.python_version()
        print(
            f"{PROGRAM} {version_of('kvcs')} (Python {python}, aioquic {version_of('aioquic')}, "
            f"QUIC backend {chosen(Backend.AUTO)})"
        )
        raise typer.Exit


def _read_config(ctx: typer.Context, value: Path | None) -> Path | None:
    cast(Sources, ctx.obj).read(ctx, value)
    return value


@app.command(name=PROGRAM, epilog=EPILOG.strip().replace("\n\n", "\n\n\n"))
def relay_command(
    ctx: typer.Context,
    listen: Annotated[str, _Option(help="Where to listen; port 0 picks one.")],
    cert: Annotated[Path | None, _Option(help="Certificate chain, PEM.")] = None,
    key: Annotated[Path | None, _Option(help="Private key, PEM.")] = None,
    self_signed: Annotated[
        Path | None,
        _Option(
            metavar="DIR",
            help="Use the self-signed certificate in DIR; make it unless there is one for "
            "localhost, this host's name and the address of --listen.",
        ),
    ] = None,
    self_signed_days: Annotated[
        int | None,
        _Option(
            metavar="DAYS",
            min=1,
            max=365,
            help="Let it be valid that long, and renew it in time; browsers that are told its "
            "hash take 14 at most.",
            show_default="365",
        ),
    ] = None,
    reset_key: Annotated[
        Path | None,
        _Option(
            metavar="FILE",
            help="The key of stateless resets, made unless it is there: clients of a relay that "
            "was killed and restarted learn so at once. Each relay needs its own.",
            show_default="reset-PORT.key in the DIR of --self-signed, else none is kept",
        ),
    ] = None,
    cache_memory: Annotated[str, _Option(help="What the cache may hold.")] = "1GiB",
    cache_dir: Annotated[
        Path | None,
        _Option(
            metavar="DIR",
            help="Keep complete tracks in files in DIR, too, which are served again after a "
            "restart. Each relay needs its own.",
            show_default="memory alone",
        ),
    ] = None,
    cache_disk: Annotated[
        str | None, _Option(help="What these files may take.", show_default=DISK)
    ] = None,
    workers: Annotated[
        int,
        _Option(
            metavar="N",
            min=1,
            max=MOST,
            help="Serve clients in N processes on the one port, so that a relay has more than one "
            "core; above 1 another process has the cache.",
        ),
    ] = 1,
    mtu: Annotated[
        int,
        _Option(
            metavar="N",
            help="The most UDP payload a packet may have, 1200 to 16383; what each path carries "
            "is found out.",
        ),
    ] = MAX_DATAGRAM_SIZE,
    congestion: Annotated[
        Algorithm, _Option(help="Congestion control: what to do about loss and delay.")
    ] = Algorithm.BBR,
    quic_backend: Annotated[
        Backend,
        _Option(
            envvar=[f"{PREFIX}_QUIC_BACKEND", VARIABLE],
            help="Who protects packets: the C extension (native) for a third of the CPU time, "
            "where the installation could build it.",
        ),
    ] = Backend.AUTO,
    webtransport: Annotated[
        bool, _Option(help="Take https:// (WebTransport) on the port, too.")
    ] = True,
    qlog_dir: Annotated[
        Path | None,
        _Option(metavar="DIR", help="Write QUIC and MOQT events to DIR, a .sqlog each."),
    ] = None,
    keylog_file: Annotated[
        Path | None,
        _Option(metavar="FILE", help="Append TLS secrets to FILE: it opens the traffic."),
    ] = None,
    auth: Annotated[
        Path | None,
        _Option(
            metavar="FILE",
            help="Principals whose tokens give rights, JSON; read again when it changes.",
            show_default="everybody may",
        ),
    ] = None,
    upstream: Annotated[
        list[str] | None,
        _Option(
            metavar="URL",
            help="Ask this relay for what nobody here publishes under the same path; may be "
            "repeated: the next one is asked for what the one before has not, or does not answer.",
            show_default="none",
        ),
    ] = None,
    upstream_cafile: Annotated[
        Path | None,
        _Option(metavar="FILE", help="Authorities that sign the upstream relays, PEM."),
    ] = None,
    upstream_token_file: Annotated[
        Path | None, _Option(metavar="FILE", help="Show them the token in FILE.")
    ] = None,
    announce_upstream: Annotated[
        bool, _Option(help="Announce there what is published here.")
    ] = False,
    directory: Annotated[
        str | None,
        _Option(
            metavar="URL",
            help="Find what is not here by this directory, Valkey or Redis: redis://, rediss://, "
            "unix:// or, for a cluster, redis+cluster:// (pip install kvcs[directory]).",
        ),
    ] = None,
    directory_password_file: Annotated[
        Path | None, _Option(metavar="FILE", help="The password of its server is in FILE.")
    ] = None,
    directory_cafile: Annotated[
        Path | None, _Option(metavar="FILE", help="Authorities that sign its server, PEM.")
    ] = None,
    reached_as: Annotated[
        str | None,
        _Option(
            metavar="URL",
            help="Where the other relays in the directory reach this one.",
            show_default="moqt:// and the address of --listen, if that is one",
        ),
    ] = None,
    mesh_cafile: Annotated[
        Path | None, _Option(metavar="FILE", help="Authorities that sign the other relays, PEM.")
    ] = None,
    mesh_token_file: Annotated[
        Path | None, _Option(metavar="FILE", help="Show the other relays the token in FILE.")
    ] = None,
    admin: Annotated[
        str | None,
        _Option(
            "--admin",
            "--metrics",
            metavar="HOST:PORT",
            help="Answer over HTTP there: /metrics, /healthz, /readyz; on a loopback address, or "
            "by token /tracks.json, /sessions.json, /upstreams.json.",
            show_default="off",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        _Option(metavar="FILE", help="Who shows the token in FILE there may see all, and purge."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        _Option(
            metavar="NAME=VALUE",
            allow_from_autoenv=False,
            help="Set a limit, e.g. max_requests=50000; may be repeated. docs/limits.md lists "
            "them with their defaults.",
            show_default="as docs/limits.md says",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, _Option(help="Seconds sessions have to leave at the end.")
    ] = 10.0,
    log_level: Annotated[
        str, _Option(help="debug, info, warning or error, on stderr.")
    ] = "warning",
    log_format: Annotated[
        LogFormat, _Option(help="Lines for people, or an object of JSON each.")
    ] = LogFormat.TEXT,
    config_file: Annotated[
        Path | None,
        _Option(
            "--config",
            envvar=f"{PREFIX}_CONFIG",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
            help="Take settings from FILE, TOML: the options by name, limits in [limits]; paths "
            "are beside the file.",
        ),
    ] = None,
    print_config: Annotated[
        bool, _Option("--print-config", help="Print all settings as such a file, and exit.")
    ] = False,
    check_config: Annotated[
        bool,
        _Option("--check-config", help="See whether a relay could start so, and exit."),
    ] = False,
    show_version: Annotated[
        bool,
        _Option(
            "--version", is_eager=True, callback=_show_version, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    """A caching relay for Media over QUIC Transport (draft-22).

    Publishers announce namespaces to it, subscribers get their tracks from it: each
    track is asked for once, whatever the number of subscribers, and kept in memory.
    Clients that dial different paths (not: queries or host names) share no tracks.
    """
    sources = cast(Sources, ctx.obj)
    limits = sources.limits(limit or ())
    chosen = usage(Chosen, [setting for setting, _ in limits], "--limit")
    if print_config:
        names = settings()
        print(
            text(
                {name: ctx.params[name] for name in names},
                {name: sources.of(name) for name in names},
                {**chosen.relay, **chosen.session, **chosen.quic},
                {setting.partition("=")[0].strip(): where for setting, where in limits},
            ),
            end="",
        )
        raise typer.Exit
    host, port = usage(parse_address, listen, "--listen")
    listener = None if admin is None else usage(parse_address, admin, "--admin")
    cache_octets = usage(parse_size, cache_memory, "--cache-memory")
    if cache_dir is None and cache_disk is not None:
        raise Usage("give --cache-dir DIR with --cache-disk")
    disk_octets = usage(parse_size, cache_disk or DISK, "--cache-disk")
    if not 0 <= drain_timeout < 1 << 31:
        raise Usage("--drain-timeout is a number of seconds, and not negative")
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise Usage(f"--log-level: {log_level!r} is none of debug, info, warning, error")
    if self_signed is None and (cert is None or key is None):
        raise Usage("give either --cert and --key, or --self-signed DIR")
    if self_signed is not None and (cert is not None or key is not None):
        raise Usage("--self-signed excludes --cert and --key")
    if self_signed is None and self_signed_days is not None:
        raise Usage("give --self-signed DIR with --self-signed-days")
    if cert is not None and key is not None:
        check_pair(cert, key)
    try:
        relay_config = RelayConfig(
            cache_octets=cache_octets, disk_octets=disk_octets, **chosen.relay
        )
        session = SessionConfig(**chosen.session)
    except (ValueError, MoqtError) as error:
        raise Usage(f"--limit: {error}") from None
    try:
        quic = QuicConfig(
            max_datagram_size=mtu,
            congestion_control_algorithm=congestion,
            quic_backend=quic_backend,
            webtransport=webtransport,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
            **chosen.quic,
        )
        if check_config:
            check_makeable(qlog_dir, "--qlog-dir")
            check_makeable(cache_dir, "--cache-dir")
            check_makeable(None if keylog_file is None else keylog_file.parent, "--keylog-file")
        else:
            quic.prepare_logs()
    except OSError as error:
        raise Usage(f"{error.filename}: {error.strerror or error}") from None
    except ValueError as error:
        raise Usage(str(error).replace("max_datagram_size", "--mtu")) from None

    begin(level, log_format)
    try:
        admin_token = None if admin_token_file is None else read_token_file(admin_token_file)
    except TokenFileError as error:
        raise Usage(f"--admin-token-file: {error}") from None
    try:
        policy = None if auth is None else TokenPolicy(auth)
    except PrincipalsFileError as error:
        raise Usage(f"--auth: {error}") from None
    above = upstreams_of(
        upstream or [],
        (host, port),
        cafile=upstream_cafile,
        token_file=upstream_token_file,
        announce=announce_upstream,
        quic=quic,
        session=session,
    )
    mesh = mesh_of(
        directory,
        host,
        reached_as=reached_as,
        password_file=directory_password_file,
        directory_cafile=directory_cafile,
        cafile=mesh_cafile,
        token_file=mesh_token_file,
        quic=quic,
        session=session,
    )
    for variable in unknown_variables(PREFIX, os.environ, [*settings(), "config", "limit"]):
        logger.warning("the environment has a variable that is no setting: %s", variable)
    if check_config:
        check_makeable(self_signed, "--self-signed")
        if reset_key is not None and reset_key.exists():
            check_reset_key(reset_key)
        print(f"{PROGRAM}: a relay can start with these settings")
        raise typer.Exit
    if workers > 1:
        # their sockets would go along with those of another relay of this user
        check_free(listen, host, port, socket.SOCK_DGRAM)
    if self_signed is not None:
        # Last of all: what ends here must not have taken the certificate of a relay that runs.
        check_free(listen, host, port, socket.SOCK_DGRAM)
        if admin is not None and listener is not None:
            check_free(admin, *listener, socket.SOCK_STREAM)
        served = self_signed_certificate(self_signed, host, self_signed_days)
    else:
        assert cert is not None and key is not None
        served = ServedCertificate(cert, key)
    if reset_key is None and self_signed is not None and port:
        reset_key = self_signed / f"reset-{port}.key"
    if reset_key is not None:
        check_reset_key(reset_key)
    config = DaemonConfig(
        host=host,
        port=port,
        quic=replace(quic, certfile=served.cert, keyfile=served.key, reset_key_file=reset_key),
        session=session,
        admin=listener,
        admin_token=admin_token,
        drain_timeout=drain_timeout,
        policy=policy,
        certificate=served,
        upstreams=above,
        mesh=mesh,
    )

    def ready(real_port: int, admin_port: int | None) -> None:
        line = (
            f"{PROGRAM} ready on moqt://{show_address(host, real_port)} certificate {served.cert}"
        )
        if listener is not None and admin_port is not None:
            line += f" metrics http://{show_address(listener[0], admin_port)}/metrics"
        if self_signed is not None:
            line += f" {served.digest}"
        try:
            print(line, flush=True)
        except OSError as error:
            raise Failure(
                f"cannot write to standard output that it is ready: {error.strerror or error}"
            ) from error

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to look at again
    try:
        with asyncio.Runner(loop_factory=watched_loop) as runner:
            if workers > 1:
                # with it comes an HTTP server: who wants neither starts without
                from relay.service.workers.supervisor import Plan, supervise

                plan = Plan(
                    workers=workers,
                    daemon=config,
                    relay=relay_config,
                    auth=auth,
                    cache_dir=cache_dir,
                    log_level=level,
                    log_format=log_format,
                )
                runner.run(supervise(plan, ready=ready))
            else:
                clock = Clock()
                disk = None if cache_dir is None else disk_in(cache_dir, relay_config, clock)
                scopes = Scopes(relay_config, policy, clock=clock, disk=disk)
                runner.run(run(scopes, config, ready=ready))
    except DiskUnreadable as error:
        raise Failure(f"--cache-dir: {error}") from error
    except OSError as error:
        wanted = f"{listen} or {admin}" if admin else listen
        raise cannot_listen(wanted, error) from error
    except (ValueError, MoqtError) as error:
        raise Failure(f"cannot use {served.cert} with {served.key}: {error}") from error


@cache
def settings() -> dict[str, Setting]:
    """What can be set by option, variable and file alike."""
    without = ("ctx", "config_file", "print_config", "check_config", "show_version", "limit")
    return settings_of(relay_command, without)


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script. Errors are one sentence on stderr."""
    sources = Sources(PREFIX, settings)
    try:
        code = app(
            arguments,
            prog_name=PROGRAM,
            standalone_mode=False,
            auto_envvar_prefix=PREFIX,
            obj=sources,
        )
        sys.stdout.flush()
    except Failure as error:
        code, message = FAILED, str(error)
    except Usage as error:
        code, message = USAGE, f"{sources.told(str(error))} (see {PROGRAM} --help)"
    except _TYPER_USAGE as error:
        said = getattr(error, "format_message", error.__str__)()
        code, message = USAGE, f"{sources.told(said.rstrip('.'))} (see {PROGRAM} --help)"
    except (typer.Abort, KeyboardInterrupt):
        code, message = FAILED, "interrupted"
    except OSError as error:
        # What is wrong with files is said where they are used: this is where the output goes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written goes nowhere
        code = FAILED
        message = f"{error.filename or 'standard output'}: {error.strerror or error}"
        if isinstance(error, BrokenPipeError):
            sys.exit(code)
    else:
        sys.exit(code or 0)
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
