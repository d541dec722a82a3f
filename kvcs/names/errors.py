"""What this package raises, besides the DecodeError and FileError of `kvsp.names.errors`."""

from __future__ import annotations

from typing import Final


class KvcsError(Exception):
    """Base of every exception this package raises itself."""


class MisuseError(KvcsError):
    """The local application used the API wrongly; the message says how."""


class NothingToPublish(KvcsError):
    """The tokens fill no complete block, and only complete blocks have keys (KVSP 4.2)."""


class RetrievalError(KvcsError):
    """A cache could not be retrieved; base of the reasons below."""


class NotFound(RetrievalError):
    """No publication of the prefix or of a shorter one.

    Says the same whether nothing is published or the scope key is another one.
    """


class NotAuthorized(RetrievalError):
    """The peer refuses this scope to us."""


class VerificationFailed(RetrievalError):
    """What came is not what the publication must hold, and no other publication was left."""


class Unsupported(RetrievalError):
    """The publication is offered only in codecs or components that are not known here."""


class UnknownKey(RetrievalError):
    """The publication is sealed with a content key that is not here."""


class PublisherLost(RetrievalError):
    """The publication cannot be had whole: its publisher, the session or Objects are gone."""


class RetrievalTimeout(RetrievalError):
    """The time allowed for the retrieval is over."""


_RANKS: Final = (
    NotFound,
    RetrievalError,
    PublisherLost,
    RetrievalTimeout,
    Unsupported,
    UnknownKey,
    NotAuthorized,
    VerificationFailed,
)
"""Of two failures the one that stands later here tells more."""


def worse_of(moqt: RetrievalError, http: RetrievalError) -> RetrievalError:
    """One failure of two ways: of the kind that tells more."""
    worse = max((moqt, http), key=lambda error: _rank(error))
    if isinstance(moqt, NotFound) and isinstance(http, NotFound):
        return NotFound(f"{moqt}; and no holder of them is known to the index service")
    error = type(worse)(f"{moqt}; over HTTP: {http}")
    error.__cause__ = worse.__cause__
    return error


def tells_more(new: RetrievalError, known: RetrievalError | None) -> bool:
    """Whether `new` is of a kind that tells more than what is known already."""
    return known is None or _rank(new) > _rank(known)


def _rank(error: RetrievalError) -> int:
    return next((i for i, kind in enumerate(_RANKS) if type(error) is kind), 1)
