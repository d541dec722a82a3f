"""A stand-in for `kvcs.Client` in memory: what is published can be loaded by every client of the
same `World`, as far and as fast as the test lets it. The loads are real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from kvcs.client.counters import Ended
from kvcs.client.loading import Load
from kvcs.names.errors import MisuseError, PublisherLost, VerificationFailed
from kvcs.retrieving.layers import Layer


@dataclass
class Published:
    """A publication: K and V of each layer, `[tokens, heads, dim]`, as far as they were put."""

    tokens: list[int]
    first_chunk: int
    layers: list[list[tuple[np.ndarray, np.ndarray]]]
    due: tuple[int, int] = (0, 0)
    aborted: bool = False
    puts: list[tuple[int, int, int]] = field(default_factory=list)
    """First block, layer and blocks of each call."""

    @property
    def complete(self) -> bool:
        return bool(self.layers[-1]) and sum(map(len, self._k(-1))) == len(self.tokens)

    def blocks_of(self, tokens, rows) -> int:
        """Leading blocks that it has begun and that are of these tokens."""
        count = max(
            (first + count for first, _, count in self.puts), default=len(self.tokens) // rows
        )
        blocks = 0
        while blocks < count and (
            tokens[: (blocks + 1) * rows] == self.tokens[: (blocks + 1) * rows]
            and len(tokens) >= (blocks + 1) * rows
        ):
            blocks += 1
        return blocks

    def _k(self, layer: int) -> list[np.ndarray]:
        return [k for k, _ in self.layers[layer]]

    def kv(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.concatenate(each) for each in zip(*self.layers[layer], strict=True))


class Save:
    """What `publish` returns; as strict about the order as the real one."""

    def __init__(self, published: Published, rows: int) -> None:
        self.published = published
        self._rows = rows

    def put_chunk(self, first_block, layer, k, v) -> bool:
        held = self.published
        if held.aborted:
            return False
        if (first_block, layer) != held.due:
            raise MisuseError(f"{(first_block, layer)} came and {held.due} is due")
        assert k.flags.c_contiguous and v.flags.c_contiguous and len(k) % self._rows == 0
        if layer == 0 and not first_block:
            assert len(k) == held.first_chunk
        held.puts.append((first_block, layer, len(k) // self._rows))
        held.layers[layer].append((k, v))
        last = layer + 1 == len(held.layers)
        held.due = (first_block + len(k) // self._rows, 0) if last else (first_block, layer + 1)
        return True

    def abort(self, why="") -> None:
        self.published.aborted = True


class World:
    """What is published, by anybody."""

    def __init__(self, rows: int, layers: int) -> None:
        self.rows, self.layers = rows, layers
        self.publications: list[Published] = []

    def put(self, tokens, cache) -> Published:
        """Publish a whole cache."""
        whole = len(tokens) // self.rows * self.rows
        layers = [[(k[:whole], v[:whole])] for k, v in cache]
        held = Published(list(tokens[:whole]), whole, layers)
        self.publications.append(held)
        return held


class MemoryClient:
    """One engine's client. `layers` of a load come at once, the others by `deliver`."""

    def __init__(self, world: World, descriptor) -> None:
        self.world = world
        self.descriptor = descriptor
        self.directory = self
        self.asked = 0
        self.layers = descriptor.layers
        """Layers that a load brings at once; what was there already when it is put aside."""
        self.ends = True
        """Whether a load that has every layer is confirmed."""
        self.pending = False
        """Whether look-ups stay out."""
        self.producing = False
        self.corrupt: int | None = None
        """A layer that turns out not to be what the manifest lists, at the end."""
        self.loads: list[tuple[Load, Published]] = []
        self.closed = False

    # -- the directory ----------------------------------------------------------------------

    def ask(self, tokens):
        self.asked += 1
        return _Lookup(self, self._longest(list(tokens)))

    def _longest(self, tokens):
        """By its first segment, as publications are named."""
        rows, best = self.world.rows, None
        most = (len(tokens) - 1) // rows
        for each in self.world.publications:
            named = each.tokens[: each.first_chunk]
            blocks = min(len(named) // rows, most)
            if tokens[: len(named)] != named or each.aborted or not blocks:
                continue
            if best is None or blocks > best.blocks:
                best = SimpleNamespace(
                    blocks=blocks, tokens=blocks * rows, published=each, most=most, asked=tokens
                )
        return best

    # -- the client -------------------------------------------------------------------------

    def publish(self, tokens, *, first_chunk):
        held = Published(list(tokens), first_chunk, [[] for _ in range(self.descriptor.layers)])
        self.world.publications.append(held)
        return Save(held, self.world.rows)

    def load(self, found, *, blocks):
        assert blocks.stop <= found.most
        load = Load(self.descriptor, blocks, None, lambda load: None, 60.0)
        published = found.published.blocks_of(found.asked, self.world.rows)
        load.told(published, producing=self.producing)
        self.loads.append((load, found.published))
        self.deliver(self.layers)
        return load

    def close(self) -> None:
        self.closed = True

    # -- what the network does ----------------------------------------------------------------

    def deliver(self, layers: int) -> None:
        """Every load has so many layers now."""
        for load, published in self.loads:
            for layer in range(load.layers, layers):
                if load.over or not published.layers[layer]:
                    break
                k, v = published.kv(layer)
                stop = load.blocks.stop * self.world.rows
                if len(k) < stop:
                    break
                into = load.arrays(layer, stop)
                for array, rows in zip(into, (k, v), strict=True):
                    array[:] = rows[:stop]
                if self.corrupt == layer:
                    into[0][:] = 3
                load.came(Layer(layer, *into, b"", 0, 0), load.blocks.start)
            if load.layers == self.descriptor.layers and self.ends and not load.over:
                if self.corrupt is None:
                    load.end(Ended.LOADED, None, load.blocks)
                else:
                    self.fail(Ended.VERIFICATION)

    def fail(self, outcome: Ended = Ended.STALLED) -> None:
        """Every load that is not over fails."""
        kind = VerificationFailed if outcome is Ended.VERIFICATION else PublisherLost
        for load, _ in self.loads:
            load.end(outcome, kind("it was made to fail"), range(load.blocks.start, 0))


class _Lookup:
    def __init__(self, client: MemoryClient, found) -> None:
        self._client = client
        self._found = found

    @property
    def done(self) -> bool:
        return not self._client.pending

    @property
    def found(self):
        return self._found if self.done else None
