"""What command lines share: exit codes, arguments, outputs. Imports no network library."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from kvsp.names.errors import KvspError
from kvsp.names.uris import check_base_uri

_LAYERS = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")


class ExitCode(IntEnum):
    """How the programs of this project end."""

    DONE = 0
    FAILED = 1
    """Timeout, publisher lost, unreachable, output not written."""
    USAGE = 2
    """Wrong usage, or an input file that is not what it should be."""
    NOT_FOUND = 3
    NOT_AUTHORIZED = 4
    VERIFICATION_FAILED = 5


STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that a program is asked to end with; see `stopping_signals`."""


def stopping_signals() -> list[signal.Signals]:
    """Those of `STOPPING` that are not ignored from the start, as nohup(1) has it."""
    return [each for each in STOPPING if signal.getsignal(each) is not signal.SIG_IGN]


class InputError(KvspError):
    """An argument or an input file is wrong; the message is one sentence that says how."""


def check_cafile(path: Path | None) -> None:
    """Raises InputError unless `path` holds PEM certificates."""
    if path is None:
        return
    from cryptography import x509  # it takes long, and most uses have no such file

    if path.is_fifo():
        raise InputError(f"{path}: a pipe, but it is read more than once: name a file")
    try:
        x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"{path}: not a file of PEM certificates") from None


def check_switch(uri: str, allowed: bool, switch: str) -> None:
    """Raises InputError when `uri` is one that only `switch` allows: http to this machine."""
    if allowed or not uri.startswith("http://"):
        return
    try:
        check_base_uri(uri, http_loopback=True)
    except KvspError:
        return  # something else is wrong with it
    raise InputError(f"{uri}: http is for loopback hosts, with {switch}; else use https")


def check_output(path: Path) -> None:
    """Raises InputError when a file can never be written at `path`."""
    if str(path) == "-":
        raise InputError("--out: a KV file cannot go to standard output; name a file")
    path = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):  # no directory: said below
        longest = os.pathconf(path.parent, "PC_NAME_MAX")
        if len(os.fsencode(path.name)) > longest:
            raise InputError(f"{path}: the name has more than {longest} octets")
    if path.is_dir():
        raise InputError(f"{path}: is a directory")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a regular file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the directory {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: the directory {path.parent} is not writable")


def parse_layers(text: str | None, layers: int) -> range:
    """`A-B` or `A`, both inclusive; all `layers` when absent. Raises InputError."""
    if text is None:
        return range(layers)
    match = _LAYERS.fullmatch(text)
    if match is None:
        raise InputError("--layers: write A-B, two layer numbers, for example 0-7")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if first > last or last >= layers:
        raise InputError(f"--layers: {text} is not a range within 0-{layers - 1}")
    return range(first, last + 1)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, on one line of standard output."""
    print(json.dumps(value), flush=True)


def note(program: str, text: str) -> None:
    """One line on standard error."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


class _Notes(logging.Handler):
    """Log records as notes of a program."""

    def __init__(self, program: str) -> None:
        super().__init__(logging.WARNING)
        self._program = program

    def emit(self, record: logging.LogRecord) -> None:
        note(self._program, record.getMessage())


@contextlib.contextmanager
def warnings_noted(program: str, logger: str) -> Iterator[None]:
    """What `logger` warns of meanwhile is said as the program says everything."""
    handler = _Notes(program)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)
