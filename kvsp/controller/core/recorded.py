"""A recorded Session Checkpoint that grows, and the documents it is kept in
(KVSP "Session Checkpoints and Migration").

A checkpoint adds a few output tokens to the one before it and moves the sampler on. So the
prompt is written once, output tokens in pieces of a bounded size, of which only the last ones
change: a checkpoint costs the same after 20,000 tokens as after 100.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvsp.controller.core.effects import Key
from kvsp.records.members import encode_json
from kvsp.records.records import Sampler, SessionCheckpoint

PROMPT: Final = "prompt"
"""Documents of what a session's checkpoints have in common, by session."""

OUTPUT: Final = "output"
"""Documents of output tokens, by session and number of the piece."""

PIECE: Final = 256
"""Output tokens of one document."""

_GROWING: Final = ("epoch", "generated", "output_offset", "sampler")


class Recorded:
    """The checkpoint of one session. Token ids are in no repr.

    Output tokens take four octets each; everything that does not grow is kept as JSON, which
    takes the least room.
    """

    __slots__ = ("_generated", "_same", "epoch", "sampler")

    def __init__(self, checkpoint: SessionCheckpoint) -> None:
        tree = checkpoint.to_dict()
        for member in _GROWING:
            del tree[member]
        self._same = encode_json(tree)
        self._generated = array("I", checkpoint.generated)
        self.epoch = checkpoint.epoch
        self.sampler = checkpoint.sampler

    @property
    def output_offset(self) -> int:
        return len(self._generated)

    @property
    def octets(self) -> int:
        """What it takes in memory, about."""
        return len(self._same) + len(self._generated) * self._generated.itemsize

    def checkpoint(self) -> SessionCheckpoint:
        """The whole."""
        return _whole(msgspec.json.decode(self._same), self.to_dict(), self._generated.tolist())

    def since(self, offset: int) -> tuple[int, ...]:
        """The output tokens from index `offset` on."""
        return tuple(self._generated[offset:])

    def grow(self, epoch: int, tokens: Sequence[int], sampler: Sampler) -> None:
        """Take over a later checkpoint, which adds `tokens`."""
        self.epoch, self.sampler = epoch, sampler
        self._generated.extend(tokens)

    def is_of_same_prompt(self, other: Recorded | None) -> bool:
        """Whether all that does not grow is the same."""
        return other is not None and other._same == self._same

    # --- documents -------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What stands in the session's own document."""
        return {
            "epoch": self.epoch,
            "output_offset": self.output_offset,
            "sampler": self.sampler.to_dict(),
        }

    def prompt(self) -> Mapping[str, Any]:
        """The document of what does not grow."""
        return {"checkpoint": msgspec.Raw(self._same)}

    def output(self, name: str, offset: int) -> Iterator[tuple[Key, Mapping[str, Any]]]:
        """The documents of output tokens that changed when it grew beyond `offset`."""
        for first in range(offset - offset % PIECE, self.output_offset, PIECE):
            tokens = self._generated[first : first + PIECE].tolist()
            yield output_key(name, first), {"tokens": tokens}

    def keys(self, name: str) -> Iterator[Key]:
        """Every document of it but the session's own."""
        yield Key(PROMPT, name)
        for first in range(0, self.output_offset, PIECE):
            yield output_key(name, first)


def output_key(name: str, first: int) -> Key:
    return Key(OUTPUT, f"{name}/{first // PIECE}")


def restored(
    name: str,
    document: Mapping[str, Any],
    prompts: Mapping[str, Mapping[str, Any]],
    outputs: Mapping[str, Mapping[str, Any]],
) -> Recorded:
    """The checkpoint of a session again, `document` being what the session's own has of it.

    Raises DecodeError when a document is missing. An older journal has it in one piece.
    """
    if "generated" in document:
        return Recorded(SessionCheckpoint.from_json(document))
    tokens: list[int] = []
    for first in range(0, document["output_offset"], PIECE):
        tokens += outputs.get(output_key(name, first).name, {}).get("tokens", ())
    same = prompts.get(name, {}).get("checkpoint", {})
    return Recorded(_whole(same, document, tokens))


def _whole(
    same: Mapping[str, Any], growing: Mapping[str, Any], generated: Sequence[int]
) -> SessionCheckpoint:
    return SessionCheckpoint.from_json({**same, **growing, "generated": generated})
