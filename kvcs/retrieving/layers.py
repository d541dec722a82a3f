"""Usable layers, put together from verified blocks and handed over in order.

`LayerBuffer` puts layers together from blocks that are verified already, whatever brought
them; `kvcs.retrieving.assembly` adds what a publication has to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvcs.names.codes import Component
from kvcs.names.tracks import DataTrack
from kvcs.retrieving.destinations import Destination
from kvcs.retrieving.open_layer import OpenLayer
from kvcs.retrieving.stats import Stats
from kvsp.blocks.layout import Octets, Tensor
from kvsp.names.identity import Descriptor


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One usable layer: every Object of it came and was verified.

    `k` and `v` are `[tokens, kv_heads, head_dim]`. `publication` is the Publication ID;
    when it changes from one layer to the next, the retrieval has started over.
    """

    index: int
    k: Tensor
    v: Tensor
    publication: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be carried over to another publication of the same prefix, if both are
    deterministic: the layers handed over."""

    deterministic: bool
    anchor_key: bytes
    spans: Sequence[tuple[DataTrack, int, int]]
    total: int
    next_layer: int
    unconfirmed: Mapping[tuple[DataTrack, int], bytearray]
    listed: Mapping[DataTrack, Sequence[bytes]]

    def digests(self, track: DataTrack, layer: int) -> bytes | bytearray | None:
        """Those of the Objects of a layer, listed or as they came."""
        listed = self.listed.get(track, ())
        return listed[layer] if layer < len(listed) else self.unconfirmed.get((track, layer))


class Verdict(Enum):
    """What an Object was when it came."""

    NEW = auto()
    """Needed, good, and written at its place."""
    BAD = auto()
    """Discarded: it is as missing as before."""
    EXTRA = auto()
    """Not needed, or there already."""


class LayerBuffer:
    """Layers that are filled block by block and handed over in order, through `ready`.

    What goes in is verified already. Raises whatever `destination` raises.
    """

    def __init__(
        self, descriptor: Descriptor, layers: range, destination: Destination, stats: Stats
    ) -> None:
        self.descriptor = descriptor
        self.layers = layers
        self.ready: deque[Layer] = deque()
        self.total = 0
        """Blocks of every layer, known from `begin` on."""
        self.foreign: set[int] = set()
        """Blocks that holders have of another production."""
        self._destination = destination
        self._stats = stats
        self._next = layers.start
        self._open: dict[int, OpenLayer] = {}

    @property
    def publication(self) -> bytes:
        """The Publication ID; empty when the layers are of none."""
        return b""

    @property
    def whole(self) -> bool:
        """Whether every layer asked for has been handed over."""
        return self.total > 0 and self._next >= self.layers.stop

    @property
    def octets_held(self) -> int:
        """Octets of the arrays of layers begun and not handed over."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self._open.values()) + sum(
            layer.k.nbytes + layer.v.nbytes for layer in self.ready
        )

    def begin(self, total: int) -> None:
        """Layers of `total` blocks are to come; what the destination had is void."""
        self.total = total
        self._say(total)
        self._stats.over_http.clear()
        self._destination.begin(self._stats.tokens, self.layers)

    def needs(self, layer: int) -> bool:
        """Whether `layer` is asked for and not whole."""
        return self._next <= layer < self.layers.stop

    def is_filled(self, layer: int) -> bool:
        """Whether all of `layer` has come, handed over or not."""
        held = self._open.get(layer)
        return not self.needs(layer) if held is None else held.complete

    def lacking(self) -> Iterator[tuple[int, int]]:
        """(layer, block) of all that is missing in part or wholly, in order of need."""
        for layer in range(self._next, self.layers.stop):
            held = self._open.get(layer)
            blocks = range(self.total) if held is None else held.missing(Component.KV)
            for block in blocks:
                yield layer, block

    def from_holders(self, has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """(layer, block) to ask holders for, in order of need; `has` says what they have."""
        return self.lacking()

    def block_received(self, block: int, layer: int, k: Octets, v: Octets, source: str) -> Verdict:
        """K and V of a block's layer, from a holder over HTTP; what is there already stays."""
        if not self.needs(layer) or block >= self.total:
            return Verdict.EXTRA
        held = self._held(layer)
        if held.has(Component.KV, block):
            return Verdict.EXTRA
        for half, data in ((Component.K, k), (Component.V, v)):
            if not held.has(half, block):
                held.write(half, block, data)
                self._stats.octets += len(data)
        self._stats.over_http[block, layer] = source
        if held.complete:
            self._hand_over()
        return Verdict.NEW

    def release(self) -> None:
        """Let go of every array."""
        self.ready.clear()
        self._open.clear()

    # -- inside --------------------------------------------------------------------------

    def _say(self, total: int) -> None:
        stats = self._stats
        stats.first_layer = self.layers.start
        stats.blocks, stats.tokens = total, total * self.descriptor.block_tokens

    def _held(self, layer: int) -> OpenLayer:
        """A layer to write to, begun if it was not."""
        held = self._open.get(layer)
        if held is None:
            k, v = self._destination.arrays(layer)
            held = self._open[layer] = OpenLayer(self.descriptor, self.total, k=k, v=v)
        return held

    def _may_go(self, layer: int) -> bool:
        """Whether a layer that is whole may be handed over."""
        return True

    def _hand_over(self) -> None:
        """Move every layer that is next and usable to `ready`."""
        while (held := self._open.get(self._next)) is not None and held.complete:
            layer = self._next
            if not self._may_go(layer):
                return
            del self._open[layer]
            self._next += 1
            self._stats.layers += 1
            tokens = self._stats.tokens
            self.ready.append(Layer(layer, held.k[:tokens], held.v[:tokens], self.publication))
