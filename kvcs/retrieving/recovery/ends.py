"""Why a publication is left for another way, within one retrieval; none reaches the application."""

from __future__ import annotations

from kvcs.names.errors import NotFound, PublisherLost, RetrievalError
from kvcs.retrieving.assembly import Assembly


class LateError(RetrievalError):
    """No publication has come in time, and holders have what there is."""


class StalledError(PublisherLost):
    """Nothing comes of a publication, and there are others."""


class ShorterError(RetrievalError):
    """Holders do not have the blocks beyond the publication after all."""


def too_short(assembly: Assembly, given: int, least: int) -> RetrievalError | None:
    """Why a publication is not worth its retrieval, by its manifest: it has no more blocks than
    the `given` ones, or less than `least` and does not grow. None when it is."""
    if assembly.blocks <= given:
        return PublisherLost("no other publication has more")
    if assembly.blocks < least and not assembly.growing:
        return NotFound(f"a publication has {assembly.blocks} usable blocks, {least} are needed")
    return None
