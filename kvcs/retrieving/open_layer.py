"""One layer while it is put together from blocks."""

from __future__ import annotations

from kvcs.names.codes import Component
from kvsp.blocks.layout import Octets, Tensor, check_tensor, octets_of
from kvsp.names.identity import Descriptor


class OpenLayer:
    """K and V of one layer, filled block by block, every block exactly once.

    A layer is usable when every block of both tensors is there.
    """

    def __init__(self, descriptor: Descriptor, blocks: int, *, k: Tensor, v: Tensor) -> None:
        """`k` and `v` are the arrays to fill, `[blocks * block_tokens or more, …]`. Raises
        ValueError when they do not fit the descriptor, are too short or read-only, and for
        less than one block.
        """
        if blocks < 1:
            raise ValueError(f"a layer of {blocks} blocks is no layer")
        tokens = blocks * descriptor.block_tokens
        self.k = k
        self.v = v
        self.blocks = blocks
        self._section = descriptor.section_octets()
        self._views: dict[Component, memoryview] = {}
        self._written: dict[Component, bytearray] = {}
        for component, tensor in ((Component.K, k), (Component.V, v)):
            check_tensor(tensor, descriptor)
            if tensor.shape[0] < tokens:
                raise ValueError(f"{tensor.shape[0]} rows cannot hold {tokens} tokens")
            if not tensor.flags.writeable:
                raise ValueError("the array to fill is read-only")
            self._views[component] = octets_of(tensor)
            self._written[component] = bytearray(blocks)
        self._left = 2 * blocks

    def write(self, component: Component, block: int, *data: Octets) -> None:
        """Put the raw Data of one Object at its place; `kv` is a K then a V section.

        `data` is one buffer or several that follow each other. `block` counts from the
        layer's first row. Raises ValueError for Data of another length or a block that
        was written before, IndexError for a block outside.
        """
        parts = [memoryview(part).cast("B") for part in data]
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        section = self._section
        due = 2 * section if component is Component.KV else section
        if length != due:
            raise ValueError(f"{length} octets instead of {due} for {component.label} of a block")
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} is outside the {self.blocks} blocks of this layer")
        if component is not Component.KV:
            if self._written[component][block]:
                raise _written_before(component, block)
            self._put(component, block, parts)
            return
        for half in halves(component):
            if self._written[half][block]:
                raise _written_before(half, block)
        whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        self._put(Component.K, block, [whole[:section]])
        self._put(Component.V, block, [whole[section:]])

    def _put(self, half: Component, block: int, parts: list[memoryview]) -> None:
        view, start = self._views[half], block * self._section
        for part in parts:
            stop = start + len(part)
            view[start:stop] = part
            start = stop
        self._written[half][block] = 1
        self._left -= 1

    @property
    def complete(self) -> bool:
        """Whether every block of K and of V is there."""
        return not self._left

    def has(self, component: Component, block: int) -> bool:
        """Whether block `block` is there: of K, of V, or of both for `kv`."""
        if component is not Component.KV:
            return bool(self._written[component][block])
        return all(self._written[half][block] for half in halves(component))

    def missing(self, component: Component) -> list[int]:
        """The blocks still to be written: of K, of V, or of either for `kv`."""
        return [block for block, there in enumerate(self.written(component)) if not there]

    def written(self, component: Component) -> bytes | bytearray:
        """An octet for each block, 1 where it is there: of K, of V, or of both for `kv`."""
        if component is not Component.KV:
            return self._written[component]
        k, v = (int.from_bytes(self._written[half]) for half in halves(component))
        return (k & v).to_bytes(self.blocks)

    def sections(self, block: int) -> tuple[memoryview, memoryview]:
        """The raw K and V of block `block`, as far as they are written."""
        at = slice(block * self._section, (block + 1) * self._section)
        return self._views[Component.K][at], self._views[Component.V][at]

    def adopt(self, component: Component, block: int) -> None:
        """Block `block` is in the array already, and verified. Raises ValueError as `write`."""
        for half in halves(component):
            if self._written[half][block]:
                raise _written_before(half, block)
            self._written[half][block] = 1
            self._left -= 1

    def take_back(self, component: Component, block: int) -> None:
        """Block `block` turned out to be wrong: it is to be written again."""
        for half in halves(component):
            if self._written[half][block]:
                self._written[half][block] = 0
                self._left += 1


def halves(component: Component) -> tuple[Component, ...]:
    """The tensors that an Object of `component` fills."""
    return (Component.K, Component.V) if component is Component.KV else (component,)


def _written_before(half: Component, block: int) -> ValueError:
    return ValueError(f"block {block} of {half.label} was written before")
