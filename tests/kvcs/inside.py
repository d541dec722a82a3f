"""Where tests of kvcs look inside: what no interface of it shows, each named once."""

from __future__ import annotations

from kvcs.retrieving.consumer import Consumer


def asks_over_http(consumer: Consumer) -> bool:
    """Whether a consumer's way over HTTP is asking a holder now."""
    path = consumer._path
    assert path is not None, "it has none"
    return path.busy
