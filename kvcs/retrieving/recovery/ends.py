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


def too_short(
    assembly: Assembly, over_http: int, *, given: int, least: int
) -> RetrievalError | None:
    """Why a publication is not retrieved of whose blocks its manifest has told; None when it is.
    Holders give `over_http` blocks, `given` were given of another one, `least` are asked for."""
    if assembly.blocks <= given:
        return PublisherLost("no other publication has more")
    if assembly.growing or max(assembly.blocks, over_http) >= least:
        return None
    return NotFound(
        f"publication {assembly.publication.hex()} has {assembly.blocks} blocks of these tokens, "
        f"and at least {least} are asked for"
    )
