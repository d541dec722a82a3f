"""SGLang's HiCache over holders of KVSP: `KvcsStorage`, a backend that SGLang loads by its name.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvcs",
        "module_path": "kvcs.sglang", "class_name": "KvcsStorage", "kvcs": {
            "kvsp": "https://…/kvsp/", "holder": "https://…/kvsp/",
            "scope_key_file": "scope.json", "descriptor": "compat.json"}}'

`form` says what SGLang's pages are, and what is refused; `storage`, which SGLang calls, is the one
module that imports it. Stand on `kvcs.pages`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load the storage when SGLang asks for it: nothing else here needs it.

    Raises ImportError, in words, where SGLang is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module("kvcs.sglang.storage")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("sglang", "torch"):
            raise
        raise ImportError(
            f"kvcs.sglang.{name} runs inside SGLang, which is not here ({error}): "
            "install sglang into this environment",
            name=error.name,
        ) from None
    return getattr(module, name)


__all__ = ["KvcsStorage"]
