"""What this package raises besides `kvsp.errors.DecodeError` and `FileError`."""

from __future__ import annotations

from kvsp.errors import FileError as FileError


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


class PublisherLost(RetrievalError):
    """The publication cannot be had whole: its publisher, the session or Objects are gone."""


class RetrievalTimeout(RetrievalError):
    """The time allowed for the retrieval is over."""
