"""The place of an engine's page among the blocks of KVSP (KVSP 4.1 to 4.3).

A page of an engine is what a block is: K and V of each layer for some consecutive tokens at the
end of a prefix. So it is stored as one, layer by layer in `kvsp-layout-1`, and all that its
descriptor says of it is true. Only its name cannot be a Block Key as KVSP computes them, since the
engine gives its own hash of the prefix in the place of tokens. Therefore the descriptor has the
member `x-block-keys`, which says whose hashes they are: it is part of the Compatibility ID, so that
no block that is named by tokens, and no page of another engine, is ever taken for this one. The
Block Key is an HMAC of the engine's name by the Scope Key: a holder learns nothing of the prompt,
and who has another scope finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcs.pages.settings import PagesError
from kvsp.names.identity import Descriptor, Scope

NAMES_MEMBER: Final = "x-block-keys"
"""Member of the descriptor: by what the blocks are named, instead of by tokens."""
HEADS_MEMBER: Final = "x-heads"
"""Member of the descriptor: which rank's heads these are, when they are not all."""

_LABEL: Final = b"KVCS-PAGE-1\x00"
_ELEMENT_TYPES: Final = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8-e4m3",
    "float8_e5m2": "fp8-e5m2",
    "int8": "int8",
}


class Order(StrEnum):
    """How K, and after it V, lies in a page."""

    LAYERS = "layers"
    """`[layers, tokens, kv_heads, head_dim]`."""
    TOKENS = "tokens"
    """`[tokens, layers, kv_heads, head_dim]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageForm:
    """What an engine's pages are."""

    named_by: str
    """Whose hashes of prefixes name them, and made how: the same for all that share."""
    layers: int
    kv_heads: int
    """Of this rank."""
    head_dim: int
    page_tokens: int
    dtype: str
    """torch's name of the element type, with or without `torch.`."""
    rank: int = 0
    ranks: int = 1
    order: Order = Order.LAYERS

    def descriptor(self, model: Descriptor) -> Descriptor:
        """The descriptor of these pages. Raises PagesError when the engine's geometry is not that
        of the model that was described."""
        name = self.dtype.removeprefix("torch.")
        element = _ELEMENT_TYPES.get(name)
        if element is None:
            known = ", ".join(_ELEMENT_TYPES)
            raise PagesError(f"the engine's cache has elements of {name}; known are {known}")
        if model.kv_heads % self.ranks and self.ranks % model.kv_heads:
            raise PagesError(
                f"{model.kv_heads} KV heads are not shared out evenly among {self.ranks} ranks"
            )
        pairs = (
            ("layers", self.layers, model.layers),
            ("kv_heads", self.kv_heads, max(1, model.kv_heads // self.ranks)),
            ("head_dim", self.head_dim, model.head_dim),
            ("kv_dtype", element, model.kv_dtype),
        )
        for member, here, described in pairs:
            if here != described:
                raise PagesError(
                    f"{member} is {here} in the engine and {described} in the descriptor: make it "
                    "of the model that the engine runs, with `kvcs-describe` (--kv-dtype)"
                )
        members = model.to_dict() | {
            "kv_heads": self.kv_heads,
            "block_tokens": self.page_tokens,
            NAMES_MEMBER: self.named_by,
        }
        if self.ranks > 1:
            members[HEADS_MEMBER] = f"rank {self.rank} of {self.ranks}"
        return Descriptor.parse(members)


class PagePlace:
    """Names and octets of the pages of one form, model and scope. Safe in any thread."""

    def __init__(self, scope: Scope, model: Descriptor, form: PageForm) -> None:
        """Raises PagesError as `PageForm.descriptor` does."""
        self.scope_id = scope.scope_id
        self.descriptor = form.descriptor(model)
        self._mac = scope.macs(_LABEL + self.descriptor.compat_id)
        self._order = form.order
        self._section = self.descriptor.section_octets()
        self.octets = 2 * form.layers * self._section
        """Of a page."""

    def key(self, name: str) -> bytes:
        """The Block Key of a page, 32 octets."""
        return self._mac(name.encode())

    def sections(self, page: Any) -> Sequence[tuple[memoryview, memoryview]]:
        """K and V of each layer, views of the page where that is possible."""
        k, v = self._layers(page)
        return [(_octets(k[layer]), _octets(v[layer])) for layer in range(len(k))]

    def write(self, page: Any, layer: int, k: memoryview, v: memoryview) -> None:
        """Put the sections of a layer at their places in a page, a writable buffer."""
        for half, octets in zip(self._layers(page), (k, v), strict=True):
            to = half[layer]
            to[...] = np.frombuffer(octets, np.uint8).reshape(to.shape)

    def _layers(self, page: Any) -> NDArray[np.uint8]:
        """A view of a page, `[2, layers, tokens, octets]`."""
        layers, tokens = self.descriptor.layers, self.descriptor.block_tokens
        flat = np.frombuffer(page, np.uint8)
        if self._order is Order.TOKENS:
            return flat.reshape(2, tokens, layers, -1).swapaxes(1, 2)
        return flat.reshape(2, layers, tokens, -1)


def _octets(section: NDArray[np.uint8]) -> memoryview:
    return np.ascontiguousarray(section).reshape(-1).data
