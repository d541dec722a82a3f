"""What a relay needs is looked at before it starts; a fault ends the program with one sentence."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from moqt.private_files import PrivateFileError, read_private
from moqt.quic.certificates import check_key_pair
from moqt.quic.packets.reset import load_key
from moqt.values.errors import MoqtError

PROGRAM = "kvcs-relay"


class Usage(Exception):
    """The settings cannot be meant; the message is the sentence to show."""


class Failure(Exception):
    """The relay cannot run; the message is the sentence to show."""


def check_pair(cert: Path, key: Path) -> None:
    try:
        check_key_pair(cert, key)
        read_private(key, 1)  # who can read it can be this relay
    except OSError as error:
        raise Usage(f"cannot read {error.filename}: {error.strerror or error}") from None
    except (ValueError, PrivateFileError) as error:
        raise Usage(str(error)) from None


def check_makeable(folder: Path | None, option: str) -> None:
    """See that a folder is there or can be made, and can be written to, without making it."""
    if folder is None:
        return
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise Usage(f"{option}: {place} is no folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise Usage(f"{option}: {place} cannot be written to")


def check_reset_key(path: Path) -> None:
    try:
        load_key(path)
    except OSError as error:
        raise Usage(f"--reset-key: {path}: {error.strerror or error}") from None
    except (ValueError, MoqtError) as error:
        raise Usage(f"--reset-key: {error}") from None


def cannot_listen(wanted: str, error: OSError) -> Failure:
    return Failure(f"cannot listen on {wanted}: {error.strerror or error}")


def check_free(wanted: str, host: str, port: int, kind: socket.SocketKind) -> None:
    """Raises Failure when no socket can be bound there."""
    failure: OSError | None = None
    try:
        places = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        for family, *_, address in places:
            try:
                with socket.socket(family, kind) as probe:
                    if kind is socket.SOCK_STREAM:  # as the server of the metrics does
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                return
            except OSError as error:
                failure = failure or error
    except UnicodeError:
        raise Failure(f"cannot listen on {wanted}: no host can have that name") from None
    except OSError as error:
        failure = error
    if failure is not None:
        raise cannot_listen(wanted, failure) from None
