"""What LMCache's chunks are, and what of LMCache does not go together with holders of KVSP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcs.pages.naming import PageForm
from kvcs.pages.settings import PagesError, PageSettings


def settings_of(config: Any) -> PageSettings:
    """The member `kvcs` of LMCache's `extra_config`. Raises PagesError."""
    extra = config.extra_config
    if not isinstance(extra, Mapping) or "kvcs" not in extra:
        raise PagesError('extra_config has no "kvcs": give it the settings of kvcs, an object')
    return PageSettings.parse(extra["kvcs"])


def form_of(config: Any, metadata: Any) -> PageForm:
    """The form of LMCache's full chunks, `[2, layers, tokens, kv_heads * head_dim]`.

    Raises PagesError for what no holder could keep as it is, and for names that are not good
    enough to take another machine's cache by.
    """
    refused = (
        (metadata.use_mla, "multi-head latent attention has no K and V for a holder to keep"),
        (config.use_layerwise, "use_layerwise makes keys of single layers: set it to false"),
        (
            config.remote_serde != "naive",
            f"remote_serde is {config.remote_serde!r}, whose octets nobody else could check: "
            'set it to "naive"',
        ),
        (
            not str(config.pre_caching_hash_algorithm).startswith("sha256"),
            f"pre_caching_hash_algorithm is {config.pre_caching_hash_algorithm!r}, by which "
            'anybody can make two prompts of one name: set it to "sha256_cbor"',
        ),
        (
            len(metadata.get_shapes()) != 1,
            "groups of layers of several shapes cannot be one block of KVSP",
        ),
    )
    for is_so, why in refused:
        if is_so:
            raise PagesError(f"LMCache: {why}")
    layers, _, tokens, kv_heads, head_dim = metadata.kv_shape
    return PageForm(
        named_by=f"lmcache {config.pre_caching_hash_algorithm}",
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=tokens,
        dtype=str(metadata.kv_dtype),
        rank=metadata.worker_id,
        ranks=metadata.world_size,
    )
