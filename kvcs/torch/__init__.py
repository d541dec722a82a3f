"""Caches of transformers models (torch) over a `kvcs.Client`: published layer by layer as prefill
computes them (`publishing`), and used while later layers are still on the wire (`streaming`).
Needs the extra `torch`; everything else of the project imports without it.

    ids = tokenizer(prompt, return_tensors="pt").input_ids
    cache = PublishingCache(client, ids, model.config)       # on one machine
    model.generate(ids, past_key_values=cache)

    generate_with(model, client, ids)                        # on another one

Stands on `client` and `describing`. Never imports `programs`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcs.client.loading import CacheLost
    from kvcs.torch.layouts import check_model
    from kvcs.torch.publishing import PublishingCache, export
    from kvcs.torch.streaming import StreamedCache, generate_with, load_into

_WHERE = {
    "CacheLost": "kvcs.client.loading",
    "PublishingCache": "kvcs.torch.publishing",
    "StreamedCache": "kvcs.torch.streaming",
    "check_model": "kvcs.torch.layouts",
    "export": "kvcs.torch.publishing",
    "generate_with": "kvcs.torch.streaming",
    "load_into": "kvcs.torch.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers"):
            raise
        raise ImportError(
            f"kvcs.torch.{name} needs torch and transformers 5: pip install 'kvcs[torch]'"
        ) from error


__all__ = [
    "CacheLost",
    "PublishingCache",
    "StreamedCache",
    "check_model",
    "export",
    "generate_with",
    "load_into",
]
