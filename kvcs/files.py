"""KV files, token files and descriptor files, by the names of `kvsp.blocks.kv_files`."""

from __future__ import annotations

from kvsp.blocks.kv_files import (
    Header,
    KvFile,
    KvFileWriter,
    TensorEntry,
    load_descriptor,
    load_tokens,
    parse_header,
)

__all__ = [
    "Header",
    "KvFile",
    "KvFileWriter",
    "TensorEntry",
    "load_descriptor",
    "load_tokens",
    "parse_header",
]
