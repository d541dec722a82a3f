"""Where the console scripts begin."""

from __future__ import annotations

from kvsp.cli.entry import start


def publish() -> None:
    """The `kvcs-publish` script."""
    start("kvcs.programs.publish")


def subscribe() -> None:
    """The `kvcs-subscribe` script."""
    start("kvcs.programs.subscribe")


def inspect() -> None:
    """The `kvcs-inspect` script."""
    start("kvcs.programs.inspect")


def keygen() -> None:
    """The `kvcs-keygen` script."""
    start("kvcs.programs.keygen")
