"""What is published in two parts: what takes time, in whatever thread, and what is told to those
who serve it, where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsp.blocks.layout import Octets
from kvsp.names.tokens import Tokens

Data = list[tuple[Octets, bytes]]
"""The Data of an Object of each track, and its digest."""

Payload = tuple[Sequence[Octets], bytes]
"""The parts of an Object's payload, and its properties."""


class Stepped(Protocol):
    """What a step needs of the publication that it is of."""

    def data_of(self, layer: int, block: int, k: memoryview, v: memoryview) -> Data: ...

    def put_data(self, layer: int, block: int, data: Data, *, later: bool = False) -> None: ...

    def open_segment(self, keys: Sequence[bytes]) -> int: ...

    def close_segment(self) -> None: ...

    def version_payload(self) -> Payload: ...

    def begin_segment(
        self, number: int, keys: list[bytes], tokens: Tokens, payload: Payload
    ) -> None: ...


class LayerStep:
    """Some blocks of a layer: `prepare`, in whatever thread, then `put`."""

    def __init__(
        self,
        publication: Stepped,
        layer: int,
        first_block: int,
        sections: list[tuple[memoryview, memoryview]],
    ) -> None:
        self._publication = publication
        self._layer = layer
        self._sections = list(enumerate(sections, first_block))
        self._data: list[Data] = []

    @property
    def section_octets(self) -> int:
        """Octets of K, and of V, of each block."""
        return len(self._sections[0][1][0])

    def prepare(self) -> None:
        """Encode and hash what is to be put. Raises MisuseError for values that a codec lacks."""
        data = self._publication.data_of
        self._data = [data(self._layer, block, *each) for block, each in self._sections]

    def put(self, *, later: bool = False) -> None:
        """Publish the blocks; their Objects can go out at once. Raises MisuseError as
        `Publication.put_block`: the publication may have ended meanwhile. A version of the manifest
        that is due then is published with the last one, or `later` by whoever has said so."""
        for (block, _), data in zip(self._sections, self._data, strict=True):
            self._publication.put_data(self._layer, block, data, later=later)


class SegmentStep:
    """A segment that is about to begin: `prepare`, in whatever thread, then `put`."""

    def __init__(self, publication: Stepped, keys: list[bytes], tokens: Tokens) -> None:
        self._publication = publication
        self._keys = keys
        self._tokens = tokens
        self._payload: Payload | None = None
        self._number = publication.open_segment(keys)

    def prepare(self) -> None:
        """Make the manifest that names it. Raises KvcsError for one that would be too large."""
        self._payload = self._publication.version_payload()

    def put(self) -> int:
        """Begin it; how many blocks it has. Nothing has changed when it raises."""
        try:
            if self._payload is None:
                self.prepare()
            assert self._payload is not None
            self._publication.begin_segment(self._number, self._keys, self._tokens, self._payload)
        except BaseException:
            self.cancel()
            raise
        return len(self._keys)

    def cancel(self) -> None:
        """It does not begin after all."""
        self._publication.close_segment()
