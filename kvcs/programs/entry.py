"""Where the console scripts begin."""

from __future__ import annotations

import itertools
import sys

from kvsp.cli.entry import start


def publish() -> None:
    """The `kvcs-publish` script."""
    start("kvcs.programs.prompt_publish" if _of_second_profile() else "kvcs.programs.publish")


def subscribe() -> None:
    """The `kvcs-subscribe` script."""
    start("kvcs.programs.prompt_subscribe" if _of_second_profile() else "kvcs.programs.subscribe")


def inspect() -> None:
    """The `kvcs-inspect` script."""
    start("kvcs.programs.inspect")


def describe() -> None:
    """The `kvcs-describe` script."""
    start("kvcs.describing.program")


def doctor() -> None:
    """The `kvcs-doctor` script."""
    start("kvcs.programs.doctor")


def explain() -> None:
    """The `kvcs-explain` script: `kvcs-doctor`, asked about tokens."""
    start("kvcs.programs.doctor")


def keygen() -> None:
    """The `kvcs-keygen` script."""
    start("kvcs.programs.keygen")


def _of_second_profile() -> bool:
    """Whether the command line says `--profile kvcache`, which has options and a help of its own:
    known before anything is imported."""
    said = sys.argv[1:]
    return "--profile=kvcache" in said or ("--profile", "kvcache") in itertools.pairwise(said)
