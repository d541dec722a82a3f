"""Why a publication is left for another way, within one retrieval; none reaches the application."""

from __future__ import annotations

from kvcs.names.errors import PublisherLost, RetrievalError


class LateError(RetrievalError):
    """No publication has come in time, and holders have what there is."""


class StalledError(PublisherLost):
    """Nothing comes of a publication, and there are others."""


class ShorterError(RetrievalError):
    """Holders do not have the blocks beyond the publication after all."""
