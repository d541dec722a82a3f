"""Usable layers, put together from verified blocks and handed over in order.

`LayerBuffer` puts layers together from blocks that are verified already, whatever brought
them; `kvcs.retrieving.assembly` adds what a publication has to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Final

from kvcs.keeping.resume_file import Origin, key_of
from kvcs.names.codes import Component
from kvcs.names.digests import TrackDigests
from kvcs.names.tracks import DataTrack, raw_octets
from kvcs.retrieving.destinations import Destination, Resumable
from kvcs.retrieving.open_layer import OpenLayer
from kvcs.retrieving.stats import OTHER_PRODUCTION, Stats
from kvsp.blocks.layout import Octets, Tensor
from kvsp.names.identity import Descriptor

TAKEN_UP_AT_ONCE: Final = 2048
"""Objects of an earlier retrieval that are looked at in one turn of an event loop."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One usable layer of one segment: every Object of it came and was verified.

    `k` and `v` are `[tokens, kv_heads, head_dim]`, those of the segment, of which row 0 is that of
    token `first_token` of the context. `publication` is the Publication ID;
    when it changes from one layer to the next, the retrieval has started over.
    """

    index: int
    k: Tensor
    v: Tensor
    publication: bytes
    segment: int = 0
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """What may be carried over to another publication of the same prefix, if both are
    deterministic: the layers handed over."""

    deterministic: bool
    anchor_key: bytes
    spans: Sequence[range]
    segment: int
    next_layer: int
    digests: Mapping[DataTrack, TrackDigests]


class Verdict(Enum):
    """What an Object was when it came."""

    NEW = auto()
    """Needed, good, and written at its place."""
    BAD = auto()
    """Discarded: it is as missing as before."""
    EXTRA = auto()
    """Not needed, or there already."""


def wanted_layers(layers: range | None, descriptor: Descriptor) -> range:
    """All layers when none are named. Raises ValueError for some that the model lacks."""
    layers = range(descriptor.layers) if layers is None else layers
    if layers.step != 1 or not layers or layers.start < 0 or layers.stop > descriptor.layers:
        raise ValueError(
            f"layers {layers.start}-{layers.stop - 1} are not within "
            f"0-{descriptor.layers - 1}, the layers of the model"
        )
    return layers


class LayerBuffer:
    """Layers that are filled block by block and handed over in order, through `ready`: every
    layer of a segment, then those of the next one.

    What goes in is verified already. Raises whatever `destination` raises.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        layers: range,
        destination: Destination,
        stats: Stats,
        skip: int = 0,
    ) -> None:
        """Of the blocks the first `skip` are not wanted: nothing is written there."""
        self.descriptor = descriptor
        self.skip = skip
        self.layers = layers
        self.ready: deque[Layer] = deque()
        self.total = 0
        """Blocks of all segments so far, known from `begin` on."""
        self.segment = 0
        """The first segment that is not whole."""
        self.growing = False
        """Whether further segments may come."""
        self.foreign: set[int] = set()
        """Blocks that holders have of another production."""
        self._destination = destination
        self._notes: Resumable | None = None
        self._unlisted: dict[tuple[DataTrack, int], set[int]] = {}
        """Objects of an earlier retrieval that no manifest listed when they were taken up: their
        blocks, by track and layer."""
        self._given: dict[int, set[int]] = {}
        """The blocks that holders gave, at least in part, by layer."""
        self._taking_up: Iterator[None] | None = None
        """What is left of taking up those of an earlier retrieval."""
        self._stats = stats
        self._spans: list[range] = []
        """The blocks of each segment."""
        self._starts: list[int] = []
        self._next = layers.start
        self._open: dict[tuple[int, int], OpenLayer] = {}
        """Those begun, by segment and layer."""
        self._arrays: dict[int, tuple[Tensor, Tensor]] = {}
        """Those of every layer begun, as long as another segment may need them."""

    @property
    def publication(self) -> bytes:
        """The Publication ID; empty when the layers are of none."""
        return b""

    @property
    def caught_up(self) -> bool:
        """Whether every layer asked for of the segments so far has been handed over."""
        return self.total > 0 and self.segment >= len(self._spans)

    @property
    def whole(self) -> bool:
        """Whether every layer asked for has been handed over, and none is still to come."""
        return not self.growing and self.caught_up

    @property
    def octets_held(self) -> int:
        """Octets of the arrays of layers begun and not handed over."""
        arrays = self._arrays
        single = [(held.k, held.v) for (_, n), held in self._open.items() if n not in arrays]
        waiting = [(layer.k, layer.v) for layer in self.ready if layer.index not in arrays]
        return sum(k.nbytes + v.nbytes for k, v in (*arrays.values(), *single, *waiting))

    def begin(self, spans: Sequence[range], room: int | None = None) -> None:
        """Layers of the segments `spans`, blocks that follow each other, are to come; what the
        destination had is void. There is to be room for `room` blocks, when more may follow."""
        first = sum(span.stop <= self.skip for span in spans)
        self._go_on(spans, first, self.layers.start)
        self._stats.over_http.clear()
        self._given.clear()
        room = self.total if room is None else room
        self._destination.begin(room * self.descriptor.block_tokens, self.layers)

    def needs(self, layer: int, segment: int = 0) -> bool:
        """Whether `layer` of a segment is asked for and not whole."""
        if segment != self.segment:
            return segment > self.segment and layer in self.layers
        return self._next <= layer < self.layers.stop

    def is_filled(self, layer: int, segment: int = 0) -> bool:
        """Whether all of `layer` of a segment has come, handed over or not."""
        held = self._open.get((segment, layer))
        return not self.needs(layer, segment) if held is None else held.complete

    def segment_of(self, block: int) -> int:
        """The segment that a block is in."""
        return bisect_right(self._starts, block) - 1

    def lacking(self) -> Iterator[tuple[int, int]]:
        """(layer, block) of all that is missing in part or wholly, in order of need."""
        first = self._next
        for segment in range(self.segment, len(self._spans)):
            span = self._spans[segment]
            for layer in range(first, self.layers.stop):
                held = self._open.get((segment, layer))
                numbers: Sequence[int] = range(max(0, self.skip - span.start), len(span))
                if held is not None:
                    numbers = held.missing(Component.KV)
                for number in numbers:
                    yield layer, span.start + number
            first = self.layers.start

    def from_holders(self, has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """(layer, block) to ask holders for, in order of need; `has` says what they have."""
        return self.lacking()

    def block_received(self, block: int, layer: int, k: Octets, v: Octets, source: str) -> Verdict:
        """K and V of a block's layer, from a holder over HTTP; what is there already stays."""
        segment = self.segment_of(block)
        if block >= self.total or not self.needs(layer, segment):
            return Verdict.EXTRA
        held = self._held(segment, layer)
        number = block - self._spans[segment].start
        if held.has(Component.KV, number):
            return Verdict.EXTRA
        for half, data in ((Component.K, k), (Component.V, v)):
            if not held.has(half, number):
                held.write(half, number, data)
                self._stats.octets += len(data)
        self._stats.over_http[block, layer] = source
        self._given.setdefault(layer, set()).add(block)
        if held.complete:
            self._hand_over()
        return Verdict.NEW

    def release(self) -> None:
        """Let go of every array."""
        self.ready.clear()
        self._open.clear()
        self._arrays.clear()
        self._taking_up = None

    # -- inside --------------------------------------------------------------------------

    def _go_on(self, spans: Sequence[range], segment: int, layer: int) -> None:
        """The same, but what stands before `layer` of `segment` was handed over already."""
        self._spans, self._starts = list(spans), [span.start for span in spans]
        self._given.clear()
        for block, number in self._stats.over_http:
            self._given.setdefault(number, set()).add(block)
        self.total = spans[-1].stop
        self._say(self.total)
        self.segment, self._next = segment, layer
        self._stats.layers = layer - self.layers.start
        self._stats.whole_blocks = spans[segment].start if segment < len(spans) else self.total

    def _say(self, total: int) -> None:
        stats = self._stats
        stats.first_layer = self.layers.start
        stats.blocks, stats.tokens = total, total * self.descriptor.block_tokens

    def _add(self, span: range) -> None:
        """A further segment is to come."""
        self._spans.append(span)
        self._starts.append(span.start)
        self.segment += span.stop <= self.skip  # all before it are skipped, too
        self.total = span.stop
        self._say(self.total)

    def _held(self, segment: int, layer: int) -> OpenLayer:
        """A layer of a segment to write to, begun if it was not."""
        held = self._open.get((segment, layer))
        if held is None:
            arrays = self._arrays.get(layer) or self._destination.arrays(layer)
            if self.growing or segment + 1 < len(self._spans):
                self._arrays[layer] = arrays
            span, rows = self._spans[segment], self.descriptor.block_tokens
            at = slice(span.start * rows, span.stop * rows)
            held = self._open[segment, layer] = OpenLayer(
                self.descriptor, len(span), k=arrays[0][at], v=arrays[1][at]
            )
            for number in range(min(self.skip - span.start, len(span))):
                held.adopt(Component.KV, number)
        return held

    def _take_up(self, origin: Origin, digests: Mapping[DataTrack, TrackDigests]) -> None:
        """Objects that an earlier retrieval left are there already, where they are those of
        `origin` as far as anybody can tell; `take_up_more` until none is left."""
        if not isinstance(self._destination, Resumable):
            return
        kept = self._destination.take_up(origin)
        self._notes = self._destination
        if kept and digests:
            self._taking_up = self._taken_up(kept, digests)

    @property
    def taking_up(self) -> bool:
        """Whether Objects of an earlier retrieval are still to be taken up, before anything is
        asked for."""
        return self._taking_up is not None

    def take_up_more(self) -> None:
        """Take up the next of them, some milliseconds' worth; then hand over what is usable."""
        if self._taking_up is not None and next(self._taking_up, self) is self:
            self._taking_up = None
            self._hand_over()

    def _taken_up(
        self,
        kept: Mapping[tuple[int, int, int], bytes],
        digests: Mapping[DataTrack, TrackDigests],
    ) -> Iterator[None]:
        looked_at = 0
        for track, known in digests.items():
            name, first, unlisted = key_of(track, 0, 0)[0], known.first, self._unlisted
            for layer, number in product(self.layers, range(known.blocks)):
                looked_at += 1
                if not looked_at % TAKEN_UP_AT_ONCE:
                    yield
                block = first + number
                digest, listed = kept.get((name, layer, block)), known.digest(layer, number)
                if digest is None or listed not in (None, digest):
                    continue
                held = self._held(track.segment, layer)
                if held.has(track.component, number):
                    continue  # it has come since
                held.adopt(track.component, number)
                self._stats.objects_resumed += 1
                self._stats.resumed.add((block, layer))
                if listed is None:
                    known.remember(layer, number, digest)
                    unlisted.setdefault((track, layer), set()).add(block)
                self._check_bound(layer, block, held, number)

    def _elsewhere(self, track: DataTrack, layer: int) -> set[int]:
        """The blocks of a layer of which a holder, or an earlier retrieval that nothing lists, has
        given what an Object of `track` would have brought here."""
        return self._given.get(layer, set()) | self._unlisted.get((track, layer), set())

    def _resumed_no_more(
        self, track: DataTrack, layer: int, block: int, tracks: Sequence[DataTrack]
    ) -> bool:
        """Forget that an Object was there from an earlier retrieval; whether it was. `tracks` are
        those of its segment."""
        unlisted = self._unlisted
        if block not in unlisted.get((track, layer), ()):
            return False
        unlisted[track, layer].discard(block)
        self._stats.objects_resumed -= 1
        if not any(block in unlisted.get((each, layer), ()) for each in tracks):
            self._stats.resumed.discard((block, layer))
        return True

    def _void(
        self,
        track: DataTrack,
        layer: int,
        number: int,
        held: OpenLayer,
        tracks: Sequence[DataTrack],
    ) -> bool:
        """An Object that is there is not the one it has to be, and is to come again: whether it
        came here and is bad. `tracks` are those of its segment."""
        stats, block = self._stats, self._spans[track.segment].start + number
        held.take_back(track.component, number)
        if self._resumed_no_more(track, layer, block, tracks):
            stats.discarded[OTHER_PRODUCTION] += 1
            return False
        stats.octets -= raw_octets(self.descriptor, track.component)
        if (block, layer) in stats.over_http:
            stats.discarded[OTHER_PRODUCTION] += 1
            self.foreign.add(block)
            return False
        stats.objects_verified -= 1
        return True

    def _check_bound(self, layer: int, block: int, held: OpenLayer, number: int) -> None:
        """Raises VerificationFailed for a block that is not the one it has to be."""

    def _may_go(self, segment: int, layer: int) -> bool:
        """Whether a layer that is whole may be handed over."""
        return True

    def _hand_over(self) -> None:
        """Move every layer that is next and usable to `ready`."""
        while (held := self._open.get((self.segment, self._next))) is not None and held.complete:
            segment, layer = self.segment, self._next
            if not self._may_go(segment, layer):
                return
            del self._open[segment, layer]
            self._next += 1
            if not self.growing and segment + 1 == len(self._spans):
                self._arrays.pop(layer, None)
            first = self._spans[segment].start * self.descriptor.block_tokens
            self.ready.append(Layer(layer, held.k, held.v, self.publication, segment, first))
            self._stats.layers = self._next - self.layers.start
            self._stats.segments = segment + 1
            if self._next == self.layers.stop:
                self.segment, self._next = segment + 1, self.layers.start
                self._stats.whole_blocks = self._spans[segment].stop
