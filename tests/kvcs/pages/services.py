"""The files that an engine is configured with, and the form of its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcs.pages.naming import PageForm
from kvsp.names.identity import Descriptor, Scope

FORM = PageForm(
    named_by="engine sha-256", layers=3, kv_heads=2, head_dim=4, page_tokens=8, dtype="float16"
)
MODEL = {
    "model": "test/pages",
    "model_digest": "sha-256:" + 64 * "1",
    "tokenizer_digest": "sha-256:" + 64 * "2",
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 4,
    "kv_dtype": "fp16",
    "positional": "rope",
    "block_tokens": 64,
    "layout": "kvsp-layout-1",
}


def settings(folder: Path, base: str, holder: str | None = None, **more: Any) -> dict[str, Any]:
    """The settings of kvcs in an engine's configuration; the files are made once. Members of the
    model's descriptor are other ones when they are `more`."""
    folder.mkdir(exist_ok=True)
    model = {name: more.pop(name) for name in list(more) if name in MODEL}
    scope, compat = folder / "scope.json", folder / "compat.json"
    if not scope.exists():
        Scope.generate().save(scope)
    compat.write_bytes(Descriptor.parse(MODEL | model).jcs)
    return {
        "kvsp": base,
        "holder": holder or base,
        "scope_key_file": str(scope),
        "descriptor": str(compat),
        "http_loopback": True,
        "lookup_timeout": 10.0,  # of a busy machine
        "timeout": 30.0,
        **more,
    }
