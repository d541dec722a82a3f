"""The Data Digests of one data track: those that the manifest lists and those that came (KVCS
"Manifest Track", "Verification and Recovery")."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcs.names.encoding import EncodedForm, payload_form
from kvcs.names.manifest import SegmentEntry
from kvcs.names.payload import PayloadForm
from kvcs.names.tracks import DataTrack
from kvsp.blocks.layout import Octets
from kvsp.names.codes import HASH_OCTETS
from kvsp.names.identity import Descriptor


def differing(some: Octets, others: Octets, there: Octets | None = None) -> list[int]:
    """Where two strings of digests, equally long, differ: the numbers of those digests; with
    `there`, an octet for each, only of those for which it is not 0."""
    if some == others:
        return []
    words = HASH_OCTETS // 8
    one, other = (np.frombuffer(each, np.uint64).reshape(-1, words) for each in (some, others))
    differ = (one != other).any(axis=1)
    if there is not None:
        differ &= np.frombuffer(there, np.uint8, len(differ)) != 0
    found: list[int] = np.flatnonzero(differ).tolist()
    return found


@dataclass(slots=True)
class TrackDigests:
    """What is known of every Object of one track, as far as it is needed."""

    form: PayloadForm | EncodedForm
    first: int
    """The first block of its segment."""
    blocks: int
    """Blocks needed of it, Objects 0 to `blocks` - 1 of every Group."""
    listed: tuple[bytes, ...] = ()
    """The digests of each layer that the manifest lists."""
    came: dict[int, bytearray] = field(default_factory=dict)
    """The digests of layers that the manifest does not list so far, as they came."""

    @classmethod
    def of(
        cls, descriptor: Descriptor, track: DataTrack, entry: SegmentEntry, blocks: int
    ) -> TrackDigests:
        """For the first `blocks` Objects of every Group of a track whose codec is known."""
        first = entry.first_block
        return cls(payload_form(descriptor, track, first), first, blocks)

    @property
    def span(self) -> range:
        """The blocks needed, as they count in the context."""
        return range(self.first, self.first + self.blocks)

    def digest(self, layer: int, number: int) -> bytes | None:
        """The digest that is listed for an Object."""
        if layer >= len(self.listed):
            return None
        return self.listed[layer][number * HASH_OCTETS : (number + 1) * HASH_OCTETS]

    def known(self, layer: int, number: int, *, came: bool) -> bytes | None:
        """The digest of an Object that is listed, else, if it `came`, its own."""
        listed, digests = self.digest(layer, number), self.came.get(layer)
        if listed is not None or digests is None or not came:
            return listed
        return bytes(digests[number * HASH_OCTETS : (number + 1) * HASH_OCTETS])

    def remember(self, layer: int, number: int, digest: bytes) -> None:
        """Keep a digest until a manifest lists it."""
        digests = self.came.get(layer)
        if digests is None:
            digests = self.came[layer] = bytearray(HASH_OCTETS * self.blocks)
        digests[number * HASH_OCTETS : (number + 1) * HASH_OCTETS] = digest

    def take_listed(self) -> list[tuple[int, bytearray, bytes]]:
        """Layers that came and are listed now: the digests that came, and those listed."""
        octets = self.blocks * HASH_OCTETS
        layers = [layer for layer in self.came if layer < len(self.listed)]
        return [(layer, self.came.pop(layer), self.listed[layer][:octets]) for layer in layers]

    def contradicts(self, other: TrackDigests, layers: range) -> bool:
        """Whether of these layers, as far as they are listed here and known there, any differs."""
        octets = self.blocks * HASH_OCTETS
        for layer in layers[: max(0, len(self.listed) - layers.start)]:
            listed = layer < len(other.listed)
            known = other.listed[layer] if listed else other.came.get(layer)
            if known is not None and known[:octets] != self.listed[layer][:octets]:
                return True
        return False
