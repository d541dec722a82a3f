"""kvcs as the KV transfer of vLLM: `KvcsConnector`, found by
`"kv_connector_module_path": "kvcs.vllm"`.

`connector` is the shell that vLLM calls, and the one module that imports vllm. What it does is
decided beside it, without vllm and torch, over Protocols of what vLLM hands in: `scheduling` (the
scheduler's side), `working` (the worker's), which share the messages of `plan` and stand on
`transfer` (one retrieval), `gate` (whether a transfer pays), `outcomes` (why something was or was
not loaded), `pages` (an engine's pages and our blocks), `ranks` (heads of tensor parallelism),
`describe` (the descriptor, and what is refused), `starting` (which makes the client) and
`settings`. They may import `kvcs.client`,
`kvcs.describing` and everything below them.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it: nothing else here needs vllm.

    Raises ImportError, in words, where vLLM is not installed.
    """
    if name != "KvcsConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvcs.vllm.connector import KvcsConnector
    except ImportError as error:
        if not (error.name or "").split(".")[0] == "vllm":
            raise
        raise ImportError(
            "kvcs.vllm.KvcsConnector runs inside vLLM, whose connector interface is not here "
            f"({error}): install vLLM, or `pip install 'kvcs[vllm]'`, into this environment",
            name=error.name,
        ) from None
    return KvcsConnector


__all__ = ["KvcsConnector"]
