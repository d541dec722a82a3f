"""Track Namespace and Track Names ("KVCache Data Model", Naming)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from moqt.values.names import TrackNamespace, printable_namespace

NAMESPACE_TAG: Final = b"moq://kvcache.moq.arpa/v1/"
"""Namespace field 0."""

MAX_LITERAL_PROMPT: Final = 1024
"""Octets of a prompt that stands in the namespace as it is; of a longer one its SHA-256 does.
MOQT allows a Full Track Name 4,096 octets. A decision: the draft has no limit."""

MAX_MODEL_OCTETS: Final = 1024
CHUNK_TOKENS: Final = 128
"""Tokens of a Group, the draft's "typical value"; both ends have to have the same."""

_HASHED: Final = b"\0sha-256:"
_RESERVED: Final = "AC (5x)"


class Compression(StrEnum):
    """The "Compression of KVCache" table: the Track Name, which says how elements are held."""

    FP16 = "FP16"
    BF16 = "BF16"
    FP8 = "FP8"
    """E4M3, with a scale for each head."""
    INT8 = "Int8"
    FP4 = "FP4"
    """E2M1, with a scale for each head."""
    INT4 = "Int4"

    @property
    def track_name(self) -> bytes:
        return self.value.encode("ascii")


def parse_compression(name: str) -> Compression:
    """The compression of a Track Name. Raises ValueError for one that is none, or not defined."""
    if name == _RESERVED:
        raise ValueError(f"{_RESERVED}: the draft does not say how its arithmetic coding is done")
    try:
        return Compression(name)
    except ValueError:
        known = ", ".join(Compression)
        raise ValueError(f"{name!r} is no compression (known: {known})") from None


@dataclass(frozen=True, slots=True)
class PromptNamespace:
    """The three-field namespace of the cache of a prompt: tag, model, prompt.

    Raises ValueError for a prompt or a model's name that is empty or too long, and for a prompt
    that begins as the stand-in of a long one does.
    """

    model: str
    prompt: bytes
    """UTF-8, or whatever octets both ends take for the prompt."""

    def __post_init__(self) -> None:
        if not 0 < len(self.model.encode("utf-8")) <= MAX_MODEL_OCTETS:
            raise ValueError(f"the model's name has to have 1 to {MAX_MODEL_OCTETS} octets")
        if not self.prompt:
            raise ValueError("the prompt is empty")
        if self.prompt.startswith(_HASHED):
            raise ValueError("no prompt begins as the digest of a long one does")

    @property
    def prefix(self) -> TrackNamespace:
        """What all publications for the model begin with: the unit of authorization."""
        return (NAMESPACE_TAG, self.model.encode("utf-8"))

    @property
    def fields(self) -> TrackNamespace:
        return (*self.prefix, _field(self.prompt))

    @property
    def text(self) -> str:
        """The one-to-one text form of MOQT, for people."""
        return printable_namespace(self.fields)

    def best_of(self, listed: Iterable[TrackNamespace]) -> list[TrackNamespace]:
        """The namespaces among `listed` of this prompt or of one that it begins with, the longest
        prompt first. Of long prompts, which are listed by their digest, only the same one is."""
        own = self.fields
        found: dict[TrackNamespace, int] = {}
        for each in listed:
            if len(each) != len(own) or each[:2] != self.prefix:
                continue
            if each == own:
                found[each] = len(self.prompt)
            elif not each[2].startswith(_HASHED) and self.prompt.startswith(each[2]):
                found[each] = len(each[2])
        return sorted(found, key=found.__getitem__, reverse=True)


def _field(prompt: bytes) -> bytes:
    if len(prompt) <= MAX_LITERAL_PROMPT:
        return prompt
    return _HASHED + hashlib.sha256(prompt).hexdigest().encode("ascii")
