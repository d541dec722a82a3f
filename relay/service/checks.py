"""What a relay needs is looked at before it starts; a fault ends the program with one sentence."""

from __future__ import annotations

import os
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
