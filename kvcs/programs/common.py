"""What `kvcs-publish` and `kvcs-subscribe` share: options, inputs, exit codes, signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvcs.names.errors import (
    KvcsError,
    NotAuthorized,
    NotFound,
    NothingToPublish,
    UnknownKey,
    VerificationFailed,
)
from kvcs.names.refusals import not_authorized
from kvsp.blocks.kv_files import load_descriptor
from kvsp.cli.common import ExitCode, InputError, note, stopping_signals
from kvsp.cli.plain import version_option
from kvsp.names.errors import DecodeError, FileError, KvspError
from kvsp.names.identity import Descriptor
from moqt.loop_hold import longest_hold, longest_work, watched_loop
from moqt.quic.backend import VARIABLE, Backend, chosen
from moqt.quic.config import (
    MAX_DATAGRAM_SIZE,
    MIN_DATAGRAM_SIZE,
    SESSION_WINDOW,
    STREAM_WINDOW,
    QuicConfig,
)
from moqt.quic.congestion.algorithms import Algorithm
from moqt.quic.windows import FIRST_WINDOW
from moqt.token_file import TokenFileError, bearer, read_token_file
from moqt.uri import parse_uri
from moqt.values.codes import SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import MisuseError, MoqtError, SessionClosed

# The options that publishing and subscribing share.
Url = Annotated[
    str, typer.Argument(metavar="URL", help="The relay: moqt://host[:port], or https://.")
]
ScopeKeyFile = Annotated[Path, typer.Option(metavar="FILE", help="Scope file made by kvcs-keygen.")]
Compat = Annotated[Path, typer.Option(metavar="FILE", help="Compatibility Descriptor, JSON.")]
Tokens = Annotated[
    str, typer.Option(metavar="FILE", help="JSON array of token ids; - is standard input.")
]
Cafile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Authorities that sign the relay, PEM.")
]
Mtu = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=MIN_DATAGRAM_SIZE,
        max=MAX_DATAGRAM_SIZE,
        help="The most UDP payload a packet may have; what the path carries is found out.",
    ),
]
Congestion = Annotated[
    Algorithm, typer.Option(help="Congestion control: what to do about loss and delay.")
]
QuicBackend = Annotated[
    Backend,
    typer.Option(
        envvar=VARIABLE,
        help="Who protects packets: the C extension (native) for a third of the CPU time, where "
        "the installation could build it.",
    ),
]
SessionWindow = Annotated[
    int,
    typer.Option(
        metavar="OCTETS",
        min=FIRST_WINDOW,
        max=1 << 40,
        help="What the relay may send at most beyond what was consumed here.",
    ),
]
QlogDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write QUIC and MOQT events to DIR, a .sqlog each."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Show the relay the token in FILE (kvcs-keygen token)."),
]
KeylogFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append TLS secrets to FILE: it opens the traffic."),
]

Version = Annotated[bool, version_option(lambda: f"QUIC backend {chosen(Backend.AUTO)}")]

EXIT_CODES_HELP: Final = (
    "Exit code: 0 done, 1 failed (timeout, publisher lost, unreachable), 2 wrong usage or a "
    "malformed input file, 3 not found, 4 not authorized, 5 verification failed."
)

IDLE_TIMEOUT: Final = 10.0
"""Seconds of silence after which the relay counts as gone: a publisher looks for it again."""

CONNECT_TIMEOUT: Final = 10.0
"""Seconds that connecting may take of a retrieval's."""


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that an error ends a program with."""
    match error:
        case InputError():
            return ExitCode.USAGE
        case NotFound():
            return ExitCode.NOT_FOUND
        case NotAuthorized() | UnknownKey():
            return ExitCode.NOT_AUTHORIZED
        case VerificationFailed():
            return ExitCode.VERIFICATION_FAILED
        case MoqtError() if not_authorized(error):
            return ExitCode.NOT_AUTHORIZED
        case SessionClosed(code=SessionErrorCode.UNAUTHORIZED, transport=False):
            return ExitCode.NOT_AUTHORIZED
    cause = error.__cause__
    return exit_code(cause) if isinstance(cause, MoqtError) else ExitCode.FAILED


@contextlib.contextmanager
def inputs() -> Iterator[None]:
    """What goes wrong inside is a fault of the arguments or the input files."""
    try:
        yield
    except (FileError, NothingToPublish, KvspError, MisuseError, ValueError) as error:
        raise InputError(str(error)) from None


def readable_descriptor(compat: Path) -> Descriptor:
    """A descriptor whose blocks can be read. Raises FileError or KvspError naming the file."""
    descriptor = load_descriptor(compat)
    try:
        descriptor.section_octets()
    except DecodeError as error:
        raise error.within(str(compat)) from None
    return descriptor


def check_url(url: str) -> None:
    """Raises InputError unless `url` is a moqt:// or https:// URI of an endpoint."""
    with inputs():
        parse_uri(url)


def check_not_input(out: Path, *read: Path | None) -> None:
    """Raises InputError when writing `out` would replace a file that is read."""
    for path in read:
        if path is not None and path.exists() and out.exists() and out.samefile(path):
            raise InputError(f"--out {out}: that is one of the files to read; choose another name")


def quic_config(
    *,
    cafile: Path | None,
    mtu: int,
    congestion: Algorithm,
    quic_backend: Backend,
    qlog_dir: Path | None,
    keylog_file: Path | None,
    session_window: int = SESSION_WINDOW,
) -> QuicConfig:
    """What the options say of QUIC. Raises InputError when a log cannot be made, or when
    `quic_backend` is not here."""
    with inputs():
        quic = QuicConfig(
            cafile=cafile,
            max_datagram_size=mtu,
            congestion_control_algorithm=congestion,
            quic_backend=quic_backend,
            stream_window=min(STREAM_WINDOW, session_window),
            session_window=session_window,
            idle_timeout=IDLE_TIMEOUT,
            qlog_dir=qlog_dir,
            keylog_file=keylog_file,
        )
    try:
        quic.prepare_logs()
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror or error}") from None
    return quic


def session_config(token_file: Path | None) -> SessionConfig:
    """What the session says of us: the token, if there is one. Raises InputError."""
    if token_file is None:
        return SessionConfig()
    try:
        return SessionConfig(setup_tokens=(bearer(read_token_file(token_file, pipes=True)),))
    except TokenFileError as error:
        raise InputError(str(error)) from None


def explained(error: BaseException, token_file: Path | None) -> str:
    """An error in a sentence; a refusal also says which token was shown."""
    text = str(error) or type(error).__name__
    if exit_code(error) is not ExitCode.NOT_AUTHORIZED or isinstance(error, UnknownKey):
        return text
    if token_file is None:
        return f"{text} (no token was shown: see --token-file)"
    return f"{text} (the token shown is that of {token_file})"


def failure(error: BaseException, token_file: Path | None) -> dict[str, Any]:
    """The result for machines of a program that ends with `error`."""
    text = explained(error, token_file)
    return {"ok": False, "error": text, "exit_code": int(exit_code(error))}


def loop_holds() -> dict[str, float | None]:
    """For how long the running loop was held at the most, as members of a JSON object."""
    return {"loop_hold_seconds": longest_hold(), "loop_work_seconds": longest_work()}


def run(
    program: str,
    main: Callable[[], Coroutine[Any, Any, None]],
    *,
    token_file: Path | None = None,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> None:
    """Run an asyncio program; errors are one sentence on standard error and an exit code.

    `main` checks options and reads inputs, which may take as long as who writes a pipe does,
    and returns what is to run. `token_file` holds the token it shows the relay. SIGINT,
    SIGTERM and SIGHUP cancel what runs, so that it cleans up, unless it handles them itself.
    `failed` is told of an error before it is said.
    """
    signals: list[int] = []

    async def guarded(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            signals.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in stopping_signals():
            loop.add_signal_handler(number, stop, number)
        await work

    try:
        work = guarded(main())
        gc.freeze()  # what was imported is no garbage: a look at it takes 40 ms
        with asyncio.Runner(loop_factory=watched_loop) as runner:
            runner.run(work)
    except KeyboardInterrupt:
        note(program, "interrupted")
        raise typer.Exit(128 + signal.SIGINT) from None
    except asyncio.CancelledError:
        note(program, "interrupted")
        raise typer.Exit(128 + (signals[0] if signals else signal.SIGINT)) from None
    except (KvcsError, KvspError, MoqtError, OSError, ValueError) as error:
        failed(error)
        note(program, explained(error, token_file))
        raise typer.Exit(exit_code(error)) from None
