"""LMCache's remote storage over holders of KVSP: `KvcsAdapter`, a plugin of LMCache's that makes
`KvcsConnector`s.

    remote_storage_plugins: ["kvcs"]
    extra_config:
      remote_storage_plugin.kvcs.module_path: kvcs.lmcache
      remote_storage_plugin.kvcs.class_name: KvcsAdapter
      kvcs: {kvsp: "https://…/kvsp/", holder: "https://…/kvsp/",
             scope_key_file: scope.json, descriptor: compat.json}

`form` says what LMCache's chunks are, and what is refused; `connector`, which LMCache calls, is the
one module that imports it. Stand on `kvcs.pages`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load the connector when LMCache asks for it: nothing else here needs it.

    Raises ImportError, in words, where LMCache is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module("kvcs.lmcache.connector")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("lmcache", "torch"):
            raise
        raise ImportError(
            f"kvcs.lmcache.{name} runs inside LMCache, which is not here ({error}): "
            "install lmcache into this environment",
            name=error.name,
        ) from None
    return getattr(module, name)


__all__ = ["KvcsAdapter", "KvcsConnector"]
