"""Where `kvcs-relay` begins: answering Ctrl-C while the rest is still imported."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import FrameType


def _start(module: str) -> None:
    """Run `main` of `module`; Ctrl-C before it runs is one line and exit status 130.

    Importing takes about a second, and an exception raised there by a signal comes out of
    some libraries as another one. Nothing has been begun then, so the process just ends.
    """
    program = os.path.basename(sys.argv[0])

    def interrupted(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGINT, interrupted)
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def main() -> None:
    """The `kvcs-relay` script."""
    _start("relay.service.cli")
