"""Using a cache while it comes: each layer waits until it is there, when it is needed."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcs.client.client import Client
from kvcs.client.loading import CacheLost, Load
from kvcs.describing.model_folder import ELEMENTS
from kvcs.names.errors import MisuseError
from kvcs.torch.layouts import check_layers, check_model, from_layout, token_ids
from kvcs.torch.publishing import PublishingCache

logger = logging.getLogger("kvcs.torch")


class _Awaited(DynamicLayer):
    """A layer whose first tokens are on the wire."""

    def __init__(self, load: Load, index: int, *, last: bool) -> None:
        super().__init__()
        self._load: Load | None = load
        self._index = index
        self._last = last

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        if self._load is not None:
            return self._load.tokens
        return int(super().get_seq_length(*args, **kwargs))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        load = self._load
        if load is not None:
            there = load.wait_layer(self._index, load.timeout)
            # no token is computed with what the manifest may still take back
            if there and self._last:
                there = load.wait(load.timeout)
            if not there:
                raise load.failure()
            k, v = load.layer(self._index)
            self.lazy_initialization(key_states, value_states)
            # beams, and several samples, begin with the same prompt
            self.keys, self.values = (
                from_layout(array, like).expand(len(like), -1, -1, -1)
                for array, like in ((k, key_states), (v, value_states))
            )
            self._load = None
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, *args, **kwargs
        )
        return updated


class StreamedCache(DynamicCache):
    """A DynamicCache that a `Load` fills: the model computes with the first layers while later ones
    are on the wire.

    The first pass over it raises CacheLost, before any token comes out of it, when a layer will
    not come, or the manifest contradicts what came: then compute the prompt with another cache.
    """

    def __init__(self, client: Client, load: Load, config: Any) -> None:
        """`load` was made without an `on_block`, from block 0 on; `config` is that of the model.
        Raises Unsupported, with the reason, for a model whose caches are not those of the client's
        descriptor, and MisuseError for another load."""
        check_model(config, client.descriptor)
        if load.blocks.start:
            raise MisuseError(
                "a StreamedCache begins with block 0: load all blocks that were found"
            )
        super().__init__(config=config)
        count = client.descriptor.layers
        self.layers = [_Awaited(load, at, last=at + 1 == count) for at in range(count)]


def load_into(cache: DynamicCache, client: Client, load: Load) -> int:
    """Fill an empty cache of a model on the CPU with all of a load, once it has come; returns how
    many tokens. Raises CacheLost when it does not, and Unsupported for a cache of another kind;
    the cache is empty then."""
    check_layers(cache, client.descriptor)
    if cache.get_seq_length():
        raise MisuseError("load_into fills an empty cache")
    if not load.wait(load.timeout):
        raise load.failure()
    empty = torch.empty(0, dtype=getattr(torch, _NAMES[client.descriptor.kv_dtype]))
    for index in range(client.descriptor.layers):
        k, v = load.layer(index)
        cache.update(from_layout(k, empty), from_layout(v, empty), index)
    return load.tokens


_NAMES = {kept: name for name, kept in ELEMENTS.items()}
"""Names of torch, by those of a descriptor's `kv_dtype`."""


def generate_with(
    model: Any, client: Client, ids: torch.Tensor, *, publish: bool = False, **options: Any
) -> Any:
    """`model.generate(ids, **options)` with what others have published of the prompt, as far as
    that goes; all but one token at the most. When it is lost on the way the prompt is computed
    here: the tokens are those that would have been generated anyway, and `client.counters` has
    the reason. `publish`: what is computed here is published.

    `ids` are `[1, tokens]`. A prompt of which an `attention_mask` hides tokens is computed here,
    and not published. Raises MisuseError for several prompts, or `past_key_values` among the
    options, and Unsupported as `StreamedCache`.
    """
    for name in ("past_key_values", "cache"):
        if name in options:
            raise MisuseError(f"generate_with makes the cache itself: leave {name} out")
    tokens = token_ids(ids)
    check_model(model.config, client.descriptor)
    mask = options.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        logger.warning("computed here: tokens are masked, which the name of a cache does not tell")
        return model.generate(ids, **options)
    found = client.directory.longest(tokens)
    if found is not None:
        load = client.load(found)
        cache = StreamedCache(client, load, model.config)
        try:
            return model.generate(ids, past_key_values=cache, **options)
        except CacheLost as lost:
            logger.info("computed here: %s", lost)
        finally:
            load.cancel()
    if publish:
        options["past_key_values"] = PublishingCache(client, tokens, model.config)
    return model.generate(ids, **options)
