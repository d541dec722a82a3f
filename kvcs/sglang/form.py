"""What SGLang's pages are, and what of SGLang does not go together with holders of KVSP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvcs.pages.naming import Order, PageForm
from kvcs.pages.settings import PagesError, PageSettings

ORDERS: Final = {
    "layer_first": Order.LAYERS,
    "page_first_direct": Order.LAYERS,
    "page_first": Order.TOKENS,
}
"""How a flat page lies, by `--hicache-mem-layout`."""


def settings_of(config: Any) -> PageSettings:
    """The member `kvcs` of SGLang's extra configuration. Raises PagesError."""
    extra = config.extra_config
    if not isinstance(extra, Mapping) or "kvcs" not in extra:
        raise PagesError(
            '--hicache-storage-backend-extra-config has no "kvcs": give it the settings of kvcs, '
            "an object"
        )
    if extra.get("interface_v1"):
        raise PagesError(
            '"interface_v1" hands out addresses of memory instead of pages: leave it out'
        )
    return PageSettings.parse(extra["kvcs"])


def form_of(config: Any, pool: Any) -> PageForm:
    """The form of the pages of SGLang's host pool, of which K and V of one size each layer are.

    Raises PagesError for what no holder could keep as it is.
    """
    missing = [
        name
        for name in ("layout", "layer_num", "head_num", "head_dim", "page_size", "dtype")
        if not hasattr(pool, name)
    ]
    refused = (
        (
            config.is_mla_model or missing,
            "only K and V of every layer make a block, as in multi-head and grouped-query "
            f"attention; this pool is {type(pool).__name__}",
        ),
        (config.pp_size > 1, "pipeline parallelism: no stage has all layers"),
        (config.attn_cp_size > 1, "context parallelism: no rank has all tokens of a page"),
        (config.dcp_size > 1, "context parallelism in decode: no rank has all tokens of a page"),
    )
    for is_so, why in refused:
        if is_so:
            raise PagesError(f"SGLang: {why}")
    if pool.layout not in ORDERS:
        raise PagesError(
            f"SGLang: --hicache-mem-layout is {pool.layout}; known are {', '.join(ORDERS)}"
        )
    if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        raise PagesError("SGLang: K and V have heads of several sizes, which no block of KVSP has")
    return PageForm(
        named_by="sglang sha-256",
        layers=pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        page_tokens=pool.page_size,
        dtype=str(pool.dtype),
        rank=config.tp_rank,
        ranks=config.tp_size,
        order=ORDERS[pool.layout],
    )
