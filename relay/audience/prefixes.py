"""Finding things by Track Namespace prefix, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from moqt.values.names import TrackNamespace

T = TypeVar("T")


class PrefixMap(Generic[T]):
    """Items under namespaces.

    A look-up costs the number of fields (at most 32), or of what it finds, never the
    number of all namespaces: a relay is asked for each announcement and each request.
    """

    def __init__(self) -> None:
        self._exact: dict[TrackNamespace, dict[T, None]] = {}
        self._below: dict[TrackNamespace, dict[TrackNamespace, None]] = {}

    def __len__(self) -> int:
        """Namespaces that have an item."""
        return len(self._exact)

    def __contains__(self, namespace: TrackNamespace) -> bool:
        return namespace in self._exact

    def add(self, namespace: TrackNamespace, item: T) -> None:
        items = self._exact.get(namespace)
        if items is None:
            items = self._exact[namespace] = {}
            for length in range(len(namespace) + 1):
                self._below.setdefault(namespace[:length], {})[namespace] = None
        items[item] = None

    def remove(self, namespace: TrackNamespace, item: T) -> None:
        items = self._exact.get(namespace)
        if items is None or item not in items:
            return
        del items[item]
        if items:
            return
        del self._exact[namespace]
        for length in range(len(namespace) + 1):
            below = self._below[namespace[:length]]
            del below[namespace]
            if not below:
                del self._below[namespace[:length]]

    def at(self, namespace: TrackNamespace) -> list[T]:
        """The items of exactly `namespace`."""
        return list(self._exact.get(namespace, ()))

    def above(self, namespace: TrackNamespace) -> Iterator[T]:
        """The items whose namespace is a prefix of `namespace`, the longest first."""
        for length in range(len(namespace), -1, -1):
            yield from self.at(namespace[:length])

    def any_under(self, prefix: TrackNamespace) -> bool:
        """Whether a namespace that begins with `prefix` has an item."""
        return prefix in self._below

    def any_below(self, prefix: TrackNamespace) -> bool:
        """The same, of one that is longer than `prefix`."""
        return len(self._below.get(prefix, ())) > (prefix in self._exact)

    def namespaces_under(self, prefix: TrackNamespace) -> list[TrackNamespace]:
        return list(self._below.get(prefix, ()))

    def under(self, prefix: TrackNamespace) -> list[T]:
        """The items whose namespace begins with `prefix`."""
        return [item for n in self.namespaces_under(prefix) for item in self._exact[n]]
