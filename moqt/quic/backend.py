"""Who protects the packets of bulk data: Python, or the C extension where it was built."""

from __future__ import annotations

import functools
import logging
import os
from enum import StrEnum
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)

VARIABLE = "KVCS_QUIC_BACKEND"
"""The environment variable that says what `Backend.AUTO` is otherwise the default of."""


VERSION = 1
"""Of what the extension and the Python around it expect of each other: that of `_packets.c`."""
_NOT_HERE = (
    "the native QUIC backend is not here: installing kvcs builds it where there are a C compiler "
    "and the headers of Python and OpenSSL 3 (Debian: gcc, libssl-dev)"
)


class Backend(StrEnum):
    """What `QuicConfig.quic_backend` may say."""

    AUTO = "auto"
    """The C extension where it is there, Python elsewhere."""
    PYTHON = "python"
    NATIVE = "native"


@functools.cache
def native() -> Any:
    """The C extension `moqt.quic._packets`; None where it was not built or does not load."""
    try:
        found = import_module("moqt.quic._packets")
    except ImportError:
        return None
    if getattr(found, "VERSION", None) != VERSION:
        log.warning("the native QUIC backend here was built from other sources: install kvcs anew")
        return None
    return found


def default() -> str:
    """What the environment says, or `auto`."""
    return os.environ.get(VARIABLE) or Backend.AUTO


def check(wanted: str) -> None:
    """Raises ValueError, in a sentence for people, for a backend that there is not."""
    if wanted not in list(Backend):
        raise ValueError(
            f"quic_backend ({VARIABLE}) must be one of {', '.join(Backend)}, not {wanted!r}"
        )
    if wanted == Backend.NATIVE and native() is None:
        raise ValueError(f"quic_backend ({VARIABLE}): {_NOT_HERE}; `auto` and `python` do without")


def chosen(wanted: str) -> Backend:
    """What `wanted` comes to here: `python` or `native`."""
    if wanted == Backend.AUTO:
        return Backend.PYTHON if native() is None else Backend.NATIVE
    return Backend(wanted)


@functools.cache
def tell(wanted: str) -> None:
    """Write to the log, once for each choice, what protects packets."""
    backend = chosen(wanted)
    if wanted == Backend.AUTO and backend is Backend.PYTHON:
        log.info("packets are protected in Python: %s", _NOT_HERE)
    else:
        log.info("packets are protected by the %s backend", backend)
