"""Publishing the cache of a prompt: while prefill computes it, or afterwards."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvcs.client.client import Client
from kvcs.client.saving import Save
from kvcs.names.errors import MisuseError
from kvcs.torch.layouts import check_layers, check_model, to_layout, token_ids

logger = logging.getLogger("kvcs.torch")


class PublishingCache(DynamicCache):
    """A DynamicCache of which each layer is published as soon as prefill has computed it.

    Give it to `model(…)` or `model.generate(…)` as `past_key_values`, empty. What goes wrong with
    publishing never stops the model: `save.failed` says what it was. When prefill takes several
    passes, a layer goes out with the last of them.
    """

    def __init__(self, client: Client, tokens: torch.Tensor | list[int], config: Any) -> None:
        """Announces it. `tokens` are the prompt's ids, `config` is that of the model. Raises
        Unsupported, with the reason, for a model whose caches cannot be published, or are not
        those of the client's descriptor."""
        check_model(config, client.descriptor)
        super().__init__(config=config)
        ids = token_ids(tokens)
        self.save: Save = client.publish(ids)
        """What is published: `save.failed` says why it is not (any more)."""
        self._rows = slice(len(ids))
        self._next = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._next and keys.shape[-2] >= self._rows.stop:
            self._next += 1
            _put(self.save, layer_idx, keys, values, self._rows)
        return keys, values


def export(cache: Cache, client: Client, tokens: torch.Tensor | list[int]) -> Save:
    """Publish the cache of a prompt that was computed already; it may have more tokens.

    Raises Unsupported, with the reason, for one that cannot be published, and MisuseError for one
    that has fewer tokens than are given.
    """
    check_layers(cache, client.descriptor)
    ids = token_ids(tokens)
    if cache.get_seq_length() < len(ids):
        raise MisuseError(
            f"the cache has {cache.get_seq_length()} tokens, and {len(ids)} are to be published"
        )
    save = client.publish(ids)
    for index, layer in enumerate(cache.layers):
        _put(save, index, layer.keys, layer.values, slice(len(ids)))
    return save


def _put(save: Save, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: slice) -> None:
    """Hand a layer over; what does not fit ends the publication, not the model."""
    if save.failed is not None:
        return
    try:
        save.put_layer(layer, to_layout(keys, rows), to_layout(values, rows))
    except MisuseError as error:
        logger.warning("a prompt is not published: %s", error)
        save.abort(str(error))
