"""K and V as transformers has them, `[1, kv_heads, tokens, head_dim]`, and as they are published,
`[tokens, kv_heads, head_dim]`; and which models have nothing else to be published."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvcs.names.errors import MisuseError, Unsupported
from kvsp.blocks.layout import Tensor
from kvsp.blocks.tensors import as_array, to_torch
from kvsp.names.identity import Descriptor


def to_layout(tensor: torch.Tensor, rows: slice) -> Tensor:
    """Some tokens of a layer's K or V, as they are published: a copy, on the CPU. Raises
    MisuseError for a batch of several sequences."""
    if tensor.dim() != 4 or tensor.shape[0] != 1:
        raise MisuseError(
            f"K and V have shape {list(tensor.shape)}: one sequence at a time is published, "
            "[1, kv_heads, tokens, head_dim]"
        )
    part = tensor[0, :, rows].detach().transpose(0, 1)
    # contiguous() gives a tensor that is so already as it is, and its octets may change
    return as_array(part.to("cpu", copy=True).contiguous())


def from_layout(array: Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was received, as the model has it, on the device of `like`. Raises MisuseError for
    another element type than the model computes with."""
    tensor: torch.Tensor = to_torch(array)
    if tensor.dtype != like.dtype:
        raise MisuseError(
            f"the descriptor says {tensor.dtype}, and the model computes with {like.dtype}: load "
            "it in the element type that the descriptor's 'kv_dtype' names"
        )
    return tensor.transpose(0, 1)[None].to(like.device)


def check_layers(cache: Cache, descriptor: Descriptor) -> None:
    """Raises Unsupported, with the reason, unless every layer of a cache keeps K and V of every
    token and nothing else, and there are as many as the descriptor has."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise Unsupported(
                f"layer {index} is a {type(layer).__name__}: only what keeps K and V of all tokens "
                "(DynamicLayer, full attention) can stand for the prefix of another prompt"
            )
    if len(cache.layers) != descriptor.layers:
        raise Unsupported(
            f"the model has {len(cache.layers)} layers of attention, the descriptor "
            f"{descriptor.layers}: it is another model's (kvcs-describe writes it)"
        )


def check_model(config: Any, descriptor: Descriptor) -> None:
    """Raises Unsupported, with the reason, when caches of a model with this configuration cannot
    be published, or are not those of the descriptor."""
    check_layers(DynamicCache(config=config), descriptor)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if (heads, dim) != (descriptor.kv_heads, descriptor.head_dim):
        raise Unsupported(
            f"the model has {heads} KV heads of {dim}, the descriptor {descriptor.kv_heads} of "
            f"{descriptor.head_dim}: it is another model's (kvcs-describe writes it)"
        )


def token_ids(ids: torch.Tensor | list[int]) -> list[int]:
    """The token ids of one prompt, `[tokens]` or `[1, tokens]`. Raises MisuseError for several."""
    if not isinstance(ids, torch.Tensor):
        return list(ids)
    if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise MisuseError(
            f"token ids have shape {list(ids.shape)}: one prompt at a time, [tokens] or [1, tokens]"
        )
    return [int(each) for each in ids.reshape(-1).tolist()]
