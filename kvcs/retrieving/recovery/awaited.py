"""What a retrieval had waited for when its time was over, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvcs.names.errors import RetrievalError
from kvcs.retrieving.stats import Stats

QUIET: Final = 0.5
"""Seconds after which it is said that nothing came."""


def awaited(
    stats: Stats,
    relay: str,
    *,
    quiet: float | None,
    over_http: bool,
    there: bool,
    asked: int,
    searching: bool,
    looked_up: bool,
    failure: RetrievalError | None,
) -> str:
    """The causes, the nearest first.

    `quiet` is for how many seconds nothing has come of the publication that is retrieved, None
    when there is none; `over_http`: everything is taken from holders; `there`: the relay has
    answered; `asked`: publications whose manifests have not come; `searching`: the relay may
    still tell of others; `looked_up`: the index service has answered; `failure`: of those that
    were given up.
    """

    def causes() -> Iterator[str]:
        if quiet is not None and quiet >= QUIET:
            yield (
                f"nothing has come of publication {stats.publication} for {quiet:.1f} s, so its "
                f"publisher or {stats.source or relay} is lost or stands still"
            )
        elif quiet is not None:
            yield f"publication {stats.publication} was still coming"
        elif over_http:
            yield "holders were still giving blocks"
        elif not there:
            yield f"{relay} has not answered"
        elif asked:
            whose = "its publisher is" if asked == 1 else "their publishers are"
            yield f"no manifest has come of {asked} publication{'s' * (asked > 1)}: {whose} lost"
        elif searching and looked_up:
            yield f"{relay} has not said what is published"
        if not looked_up:
            yield "the index service has not answered"
        if failure is not None:
            yield f"before that, {failure}"

    return "; ".join(causes())
