"""What a retrieval had waited for when its time was over, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvcs.finding.candidates import Candidates
from kvcs.finding.relays import Sessions
from kvcs.retrieving.stats import Stats

QUIET: Final = 0.5
"""Seconds after which it is said that nothing came."""


def awaited(
    stats: Stats,
    relay: str,
    sessions: Sessions,
    candidates: Candidates,
    *,
    quiet: float | None,
    over_http: bool,
    asked: int,
    looked_up: bool,
) -> str:
    """The causes, the nearest first.

    `quiet` is for how many seconds nothing has come of the publication that is retrieved, None
    when there is none; `over_http`: everything is taken from holders; `asked`: publications whose
    manifests have not come; `looked_up`: the index service has answered.
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
        elif not sessions.there:
            yield f"{relay} has not answered"
        elif asked:
            whose = "its publisher is" if asked == 1 else "their publishers are"
            yield f"no manifest has come of {asked} publication{'s' * (asked > 1)}: {whose} lost"
        elif candidates.searching and looked_up:
            why = f": {candidates.untold}" if candidates.untold else ""
            yield f"{relay} has not said what is published{why}"
        if not looked_up:
            yield "the index service has not answered"
        if candidates.failure is not None:
            yield f"before that, {candidates.failure}"

    return "; ".join(causes())
