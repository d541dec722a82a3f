"""Where tests of kvcs look inside: what no interface of it shows, each named once."""

from __future__ import annotations

import pytest

from kvcs.names.manifest_text import ManifestReader
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.retrieval import Retrieval


def asks_over_http(consumer: Consumer) -> bool:
    """Whether a consumer's way over HTTP is asking a holder now."""
    path = consumer._path
    assert path is not None, "it has none"
    return path.busy


def looks_at_manifests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, the octets of each look that readers of manifests take at what has come."""
    looks: list[int] = []
    look = ManifestReader._look

    def counted(self: ManifestReader, *, last: bool) -> None:
        looks.append(len(self._rest))
        look(self, last=last)

    monkeypatch.setattr(ManifestReader, "_look", counted)
    return looks


def retrieval_of(consumer: Consumer) -> Retrieval:
    """That of the publication that a consumer retrieves now."""
    assert consumer._retrieval is not None, "it has none"
    return consumer._retrieval
