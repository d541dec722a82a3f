"""Options, inputs and errors that the `kvsp` commands share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from kvsp.blocks.kv_files import load_descriptor, load_tokens
from kvsp.cli.common import (
    ExitCode,
    InputError,
    check_cafile,
    check_switch,
    note,
    print_json,
    stopping_signals,
)
from kvsp.client import (
    BadAnswerError,
    Client,
    ClientError,
    Fault,
    NotAuthorizedError,
    NotFoundError,
    VerificationError,
)
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.uris import check_base_uri
from kvsp.principals import load_token
from kvsp.records.members import shown_uri

PROGRAM: Final = "kvsp"
_HTTP_LOOPBACK: Final = "--http-loopback"
EXIT_CODES_HELP: Final = (
    "Exit code: 0 done, 1 failed (timeout, unreachable, refused), 2 wrong usage or a malformed "
    "input file, 3 not found, 4 not authorized, 5 verification failed."
)

Index = Annotated[
    str, typer.Argument(metavar="INDEX", help="Base URI of the index service; ends in /.")
]
ScopeKeyFile = Annotated[Path, typer.Option(metavar="FILE", help="Scope file made by kvcs-keygen.")]
Compat = Annotated[Path, typer.Option(metavar="FILE", help="Compatibility Descriptor, JSON.")]
Tokens = Annotated[
    str, typer.Option(metavar="FILE", help="JSON array of token ids; - is standard input.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, help="How long all of it may take.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How servers are reached."""

    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Bearer token, in a file only you may read."),
    ] = None
    cafile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Authorities that sign the servers, PEM.")
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Client certificate, PEM.")
    ] = None
    client_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None
    http_loopback: Annotated[
        bool, typer.Option(_HTTP_LOOPBACK, help="Allow http:// to this machine (development).")
    ] = False

    def client(self, index: str | None) -> Client:
        """A client that is not open yet. Raises InputError."""
        check_cafile(self.cafile)
        if (self.client_cert is None) != (self.client_key is None):
            raise InputError("--client-cert and --client-key go together")
        pair = None
        if self.client_cert is not None and self.client_key is not None:
            pair = (self.client_cert, self.client_key)
        if index is not None:
            self.check("INDEX", index)
        with inputs():
            return Client(
                index,
                token=None if self.token_file is None else load_token(self.token_file),
                cafile=self.cafile,
                client_cert=pair,
                http_loopback=self.http_loopback,
            )

    def check(self, name: str, uri: str) -> None:
        """Raises InputError unless `uri` is a base URI that may be used."""
        check_switch(uri, self.http_loopback, _HTTP_LOOPBACK)
        try:
            check_base_uri(uri, http_loopback=self.http_loopback)
        except KvspError as error:
            text = f"{name}: {shown_uri(uri)}: {error}"
            if not uri.startswith(("https:", "http:")):
                text += f", or http:// to this machine with {_HTTP_LOOPBACK}"
            raise InputError(text) from None


def with_access(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `access` is given by the options of Access, after its own."""
    hints = get_type_hints(Access, include_extras=True)
    options = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in dataclasses.fields(Access)
    ]

    @functools.wraps(command)
    def given(**values: Any) -> None:
        command(Access(**{each.name: values.pop(each.name) for each in options}), **values)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own][1:] + options
    given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    given.__annotations__ = {each.name: each.annotation for each in parameters}
    return given


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input files that name the blocks of a prompt."""

    scope: Scope
    descriptor: Descriptor
    tokens: int
    keys: tuple[bytes, ...]
    """Block Keys of the complete blocks."""

    @classmethod
    def load(cls, scope_key_file: Path, compat: Path, tokens: str, limit: int | None) -> Prompt:
        """Raises InputError."""
        with inputs():
            scope = Scope.load(scope_key_file)
            descriptor = load_descriptor(compat)
            try:
                descriptor.section_octets()
            except DecodeError as error:
                raise error.within(str(compat)) from None
            ids = load_tokens(tokens)
            keys = tuple(block_keys(scope, descriptor, ids)[:limit])
        if not keys:
            raise InputError(
                f"{len(ids)} tokens fill no block of {descriptor.block_tokens}: nothing has a key"
            )
        return cls(scope, descriptor, len(ids), keys)


class Outcome(Exception):
    """How a command ends that is not simply done: a code and a sentence."""

    def __init__(self, code: ExitCode, text: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.result = dict(result or {})


@contextlib.contextmanager
def inputs() -> Iterator[None]:
    """What goes wrong inside is a fault of the arguments or the input files."""
    try:
        yield
    except (KvspError, ValueError) as error:
        raise InputError(str(error)) from None


_FAULTS: Final = {
    Fault.NO_REPLICA: ExitCode.NOT_FOUND,
    Fault.NOT_HELD: ExitCode.NOT_FOUND,
    Fault.CODEC: ExitCode.NOT_FOUND,
    Fault.NOT_AUTHORIZED: ExitCode.NOT_AUTHORIZED,
    Fault.VERIFICATION: ExitCode.VERIFICATION_FAILED,
}


def fault_code(fault: Fault) -> ExitCode:
    """The exit code for layers that are missing."""
    return _FAULTS.get(fault, ExitCode.FAILED)


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that an error ends the program with."""
    match error:
        case Outcome():
            return error.code
        case InputError():
            return ExitCode.USAGE
        case NotFoundError():
            return ExitCode.NOT_FOUND
        case NotAuthorizedError():
            return ExitCode.NOT_AUTHORIZED
        case VerificationError() | BadAnswerError():
            return ExitCode.VERIFICATION_FAILED
    return ExitCode.FAILED


def run(work: Callable[[], Awaitable[Mapping[str, Any]]], *, json: bool) -> None:
    """Run a command; it gives its result, or an error becomes one sentence and a code.

    SIGINT, SIGTERM and SIGHUP cancel it, so that it releases what it holds.
    """
    signals: list[int] = []

    async def guarded() -> Mapping[str, Any]:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            signals.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in stopping_signals():
            loop.add_signal_handler(number, stop, number)
        return await work()

    try:
        result = asyncio.run(guarded())
    except asyncio.CancelledError:
        note(PROGRAM, "interrupted")
        raise typer.Exit(128 + (signals[0] if signals else signal.SIGINT)) from None
    except (KvspError, Outcome, OSError, ValueError) as error:
        text, code = str(error) or type(error).__name__, exit_code(error)
        if json:
            more = error.result if isinstance(error, Outcome) else _problem(error)
            print_json({"ok": False, "error": text, "exit_code": int(code), **more})
        note(PROGRAM, text)
        raise typer.Exit(code) from None
    if json:
        print_json({"ok": True, **result})


def _problem(error: BaseException) -> dict[str, Any]:
    problem = getattr(error, "problem", None) if isinstance(error, ClientError) else None
    return {} if problem is None else {"problem": problem.type, "status": problem.status}


@contextlib.asynccontextmanager
async def deadline(seconds: float) -> Any:
    """What is inside ends after `seconds`, with an Outcome that says so."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise Outcome(ExitCode.FAILED, f"not done within {seconds:g} s") from None
