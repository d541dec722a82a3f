"""The KVSP vectors and what tests make of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvsp-vectors.json").read_text("utf-8"))
KVCS_VECTORS: dict[str, Any] = json.loads((DATA / "kvcs-vectors.json").read_text("utf-8"))
SEED: dict[str, Any] = VECTORS["compat_id"][0]["descriptor"]


def geometry(**members: Any) -> Descriptor:
    """The seed's descriptor with another geometry."""
    return Descriptor.parse(SEED | members)


def stream(label: str, octets: int) -> bytes:
    """`stream(label, n)` of the conventions of the vectors."""
    blocks = (
        hashlib.sha256(label.encode("ascii") + counter.to_bytes(4)).digest()
        for counter in range(-(-octets // 32))
    )
    return b"".join(blocks)[:octets]


def by_id(vector: dict[str, Any]) -> str:
    return str(vector.get("id", vector.get("text", "")))


def name_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The name of the DecodeError that a call raises."""
    with pytest.raises(DecodeError) as caught:
        call(*args, **kwargs)
    return caught.value.name
