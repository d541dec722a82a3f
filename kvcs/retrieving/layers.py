"""Usable layers: what they are, where they are written, and what a retrieval says of itself.

`LayerBuffer` puts layers together from blocks that are verified already, whatever brought
them; `kvcs.retrieving.assembly` adds what a publication has to say.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol, Self

from kvcs.names.codes import Component
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.tensors import LayerAssembly, Tensor, allocate
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.blocks.layout import Octets
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


@dataclass(slots=True)
class Stats:
    """What a retrieval did. Counts of one publication, except where said otherwise."""

    tokens: int = 0
    blocks: int = 0
    layers: int = 0
    """Layers handed over."""

    octets: int = 0
    """Octets of verified Data."""

    seconds: float = 0.0
    """From the start to the end, over all publications tried."""

    first_layer_seconds: float | None = None
    """From the start to the first usable layer."""

    layer_seconds: list[float] = field(default_factory=list)
    """From the start to each usable layer, in order; with a second publication that begins
    anew, its layers follow."""

    objects_verified: int = 0
    objects_confirmed: int = 0
    """Verified Objects whose digest a manifest lists."""

    discarded: Counter[str] = field(default_factory=Counter)
    """Objects and manifests thrown away, by reason, over all publications."""

    duplicates: int = 0
    """Objects that came more often than they were asked for, over all publications."""

    recoveries: int = 0
    """FETCH requests for missing Objects, over all publications."""

    publications_tried: int = 0
    publication: str | None = None
    """Publication ID, hexadecimal."""

    source: str | None = None
    """Whom it came from, as the caller names it."""

    mode: str | None = None
    """`live` or `fetch`; None when no publication was asked for data."""

    first_layer: int = 0
    over_http: dict[tuple[int, int], str] = field(default_factory=dict)
    """The holder that a (block, layer) came from, over HTTP, at least in part."""

    note: str | None = None
    """What is to be said of the index service: that it did not answer, for example."""

    relay_error: str | None = None
    """Why the relay could not be asked, when everything came without it."""

    @property
    def megabytes_per_second(self) -> float:
        return self.octets / self.seconds / 1e6 if self.seconds else 0.0

    def begin(self, namespace: PublicationNamespace) -> None:
        """Another publication is tried."""
        self.publications_tried += 1
        self.publication = namespace.publication_id.hex()
        self._reset()

    def begin_over_http(self) -> None:
        """Everything is taken from holders over HTTP."""
        self.publication = None
        self._reset()

    def _reset(self) -> None:
        self.mode = None
        self.tokens = self.blocks = self.layers = self.octets = 0
        self.objects_verified = self.objects_confirmed = 0

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Where the layers handed over came from: ranges of blocks and layers, inclusive."""
        spans: list[dict[str, Any]] = []
        runs: list[tuple[int, int, str | None]] = []
        for block in range(self.blocks if self.layers else 0):
            previous, runs = runs, self._runs(block)
            if runs == previous:
                for span in spans[-len(runs) :]:
                    span["blocks"][1] = block
                continue
            spans += [
                {"blocks": [block, block], "layers": [first, last], "source": source}
                for first, last, source in runs
            ]
        return spans

    def _runs(self, block: int) -> list[tuple[int, int, str | None]]:
        runs: list[tuple[int, int, str | None]] = []
        for layer in range(self.first_layer, self.first_layer + self.layers):
            source = self.over_http.get((block, layer), self.source)
            if runs and runs[-1][2] == source:
                runs[-1] = (runs[-1][0], layer, source)
            else:
                runs.append((layer, layer, source))
        return runs

    def described_sources(self) -> str:
        """For people: `12 blocks by moqt, 3 by https://h1.example/kvsp/`."""
        layers = range(self.first_layer, self.first_layer + self.layers)
        ways: Counter[str] = Counter()
        for block in range(self.blocks):
            names = {self.over_http.get((block, layer), "moqt"): None for layer in layers}
            ways[" and ".join(sorted(names, key=lambda name: (name != "moqt", name)))] += 1
        parts = [f"{count} by {way}" for way, count in ways.items()]
        if parts:
            first, _, rest = parts[0].partition(" ")
            parts[0] = f"{first} block{'' if first == '1' else 's'} {rest}"
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """A JSON object with every number."""
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "layers": self.layers,
            "octets": self.octets,
            "seconds": round(self.seconds, 6),
            "megabytes_per_second": round(self.megabytes_per_second, 3),
            "layer_seconds": [round(seconds, 6) for seconds in self.layer_seconds],
            "first_layer_seconds": self.first_layer_seconds and round(self.first_layer_seconds, 6),
            "objects_verified": self.objects_verified,
            "objects_confirmed": self.objects_confirmed,
            "discarded": dict(self.discarded),
            "duplicates": self.duplicates,
            "recoveries": self.recoveries,
            "publications_tried": self.publications_tried,
            "publication": self.publication,
            "source": self.source,
            "mode": self.mode,
            "sources": self.sources,
            "note": self.note,
            "relay_error": self.relay_error,
        }


# --- where layers are written --------------------------------------------------------


class Destination(Protocol):
    """Where the layers of a cache are written, each Object once, at its place."""

    def begin(self, tokens: int, layers: range) -> None:
        """`layers` of `tokens` tokens will be written; what was written before is void."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of `layer` to fill, `[tokens or more, kv_heads, head_dim]`, writable."""
        ...


class MemoryDestination:
    """New arrays for every layer; held no longer than the application holds them."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._tokens = 0

    def begin(self, tokens: int, layers: range) -> None:
        self._tokens = tokens

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return allocate(self._descriptor, self._tokens), allocate(self._descriptor, self._tokens)


class ArrayDestination:
    """The caller's arrays, by layer; they may have more rows than the cache has tokens."""

    def __init__(self, arrays: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._arrays = arrays

    def begin(self, tokens: int, layers: range) -> None:
        missing = [layer for layer in layers if layer not in self._arrays]
        if missing:
            raise ValueError(f"there are no arrays for layer {missing[0]}")

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._arrays[layer]


class FileDestination:
    """A KV file, written through its memory map; it appears only with `commit`.

    with FileDestination("out.safetensors", descriptor) as out: ...; out.commit()
    """

    def __init__(self, path: str | Path, descriptor: Descriptor) -> None:
        self._path = Path(path)
        self._descriptor = descriptor
        self._writer: KvFileWriter | None = None

    def begin(self, tokens: int, layers: range) -> None:
        """Raises FileError when there is no room for the file."""
        self.abort()
        self._writer = KvFileWriter(self._path, self._descriptor, tokens=tokens, layers=layers)

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._writer is None:
            raise ValueError("the file was not begun")
        return self._writer.k(layer), self._writer.v(layer)

    def commit(self) -> None:
        """Give the file its name. Raises FileError, ValueError when nothing was written."""
        if self._writer is None:
            raise ValueError("the file was not begun")
        self._writer.commit()
        self._writer = None

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


# --- putting layers together ---------------------------------------------------------


class Arrival(Enum):
    """What an Object was when it came."""

    NEW = auto()
    """Needed, good, and written at its place."""
    BAD = auto()
    """Discarded: it is as missing as before."""
    EXTRA = auto()
    """Not needed, or there already."""


class OpenLayer(LayerAssembly):
    """A layer that is not whole, or not handed over yet."""

    def has(self, component: Component, block: int) -> bool:
        if component is not Component.KV:
            return bool(self._written[component][block])
        return all(self._written[half][block] for half in halves(component))

    def is_as(self, component: Component, block: int, data: Octets) -> bool:
        """Whether the octets of a block that is there are these."""
        view = self._views[component]
        return view[block * self._section : (block + 1) * self._section] == memoryview(data)

    def take_back(self, component: Component, block: int) -> None:
        """Block `block` turned out to be wrong: it is to be written again."""
        for half in halves(component):
            if self._written[half][block]:
                self._written[half][block] = 0
                self._left += 1


def halves(component: Component) -> tuple[Component, ...]:
    return (Component.K, Component.V) if component is Component.KV else (component,)


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

    def lacking(self) -> Iterator[tuple[int, int]]:
        """(layer, block) of all that is missing in part or wholly, in order of need."""
        for layer in range(self._next, self.layers.stop):
            held = self._open.get(layer)
            blocks = range(self.total) if held is None else held.missing(Component.KV)
            for block in blocks:
                yield layer, block

    def unproven_blocks(self) -> Iterator[tuple[int, int]]:
        """(layer, block) whose production nothing proves."""
        return iter(())

    def block_received(self, block: int, layer: int, k: Octets, v: Octets, source: str) -> Arrival:
        """K and V of a block's layer, from a holder over HTTP; what is there already stays."""
        if not self.needs(layer) or block >= self.total:
            return Arrival.EXTRA
        held = self._held(layer)
        if held.has(Component.KV, block):
            return Arrival.EXTRA
        for half, data in ((Component.K, k), (Component.V, v)):
            if not held.has(half, block):
                held.write(half, block, data)
                self._stats.octets += len(data)
        self._stats.over_http[block, layer] = source
        if held.complete:
            self._hand_over()
        return Arrival.NEW

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
