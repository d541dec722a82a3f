"""KV files, token files and descriptor files: this module gives on the names of `kvsp.files`."""

from __future__ import annotations

from kvsp.files import (
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
