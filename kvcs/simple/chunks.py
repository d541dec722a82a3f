"""Tokens as they arrive, put together chunk by chunk: pure logic.

A Group is a chunk of tokens, an Object a token. All Groups but the last are full; how many
tokens there are, End of Group and End of Track tell, or a FETCH to the end of the track.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvcs.names.errors import VerificationFailed
from kvcs.names.limits import MAX_TOKENS, reached
from kvcs.simple.elements import decode_tokens, token_octets
from kvcs.simple.names import CHUNK_TOKENS, Compression
from kvsp.blocks.layout import Tensor
from kvsp.names.identity import Descriptor
from moqt.track.stored import Buffer
from moqt.values.codes import ObjectStatus
from moqt.values.names import Location


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some tokens, of all layers; `k` and `v` are `[layers, tokens, kv_heads, head_dim]`."""

    first_token: int
    k: Tensor
    v: Tensor

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class HeldChunk:
    """A whole chunk, its tokens as they came."""

    first_token: int
    payloads: list[Buffer]

    def decode(self, descriptor: Descriptor, compression: Compression) -> Chunk:
        """It takes some 10 ms for each 10 MB: best done in a thread."""
        octets = np.frombuffer(b"".join(self.payloads), np.uint8)
        values = decode_tokens(compression, octets.reshape(len(self.payloads), -1), descriptor)
        k, v = (np.ascontiguousarray(values[:, :, half].swapaxes(0, 1)) for half in (0, 1))
        return Chunk(self.first_token, k, v)


class Chunks:
    """The chunks of one track. Whole ones come in `ready`, in order.

    Methods raise VerificationFailed for what cannot be a track of this geometry, or is larger
    than `max_tokens`: nothing else of it can be checked.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        compression: Compression,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.ready: deque[HeldChunk] = deque()
        self.tokens = 0
        """Tokens handed over through `ready`."""
        self.received = 0
        """Objects that came and were needed."""
        self.octets = 0
        self.total: int | None = None
        """Tokens of the whole cache, once that is known."""
        self.token_octets = token_octets(compression, descriptor)
        """Octets of the payload of each."""
        self._compression = compression
        self._chunk = chunk_tokens
        self._max_tokens = max_tokens
        self._open: dict[int, dict[int, Buffer]] = {}
        self._ends: dict[int, int] = {}
        self._next = 0
        self._groups: int | None = None
        """Groups of the track, once End of Track has come."""

    @property
    def whole(self) -> bool:
        """Whether every token has been handed over."""
        return self.total is not None and self.tokens == self.total

    @property
    def behind(self) -> bool:
        """Whether something is missing of which something later is here."""
        if self._groups is not None:
            return not self.whole
        held = self._open.get(self._next, {})
        return max(self._open, default=self._next) > self._next or max(held, default=-1) >= len(
            held
        )

    @property
    def first_missing(self) -> Location:
        """The Location of the first token that is not here."""
        held = self._open.get(self._next, {})
        return Location(self._next, next(i for i in range(len(held) + 1) if i not in held))

    def object_received(self, location: Location, payload: Buffer) -> None:
        """An Object: one token. What is here already stays as it is."""
        group, number = location
        if group * self._chunk + number >= self._max_tokens:
            reached("max_tokens", f"a cache is refused that has over {self._max_tokens} tokens")
            raise VerificationFailed(
                f"the cache has more than {self._max_tokens} tokens, and no more are taken: allow "
                "more (max_tokens, --max-tokens) if its publisher is to be trusted with that"
            )
        if number >= self._chunk:
            raise VerificationFailed(
                f"token {number} of chunk {group} is not one of a chunk of {self._chunk}"
            )
        if len(payload) != self.token_octets:
            raise VerificationFailed(
                f"token {number} of chunk {group} has {len(payload)} octets where "
                f"{self._compression} has {self.token_octets}"
            )
        if group < self._next or number in self._open.get(group, ()):
            return
        self._open.setdefault(group, {})[number] = payload
        self.received += 1
        self.octets += len(payload)
        self._check_end(group, number)
        self._go_on()

    def ended(self, status: ObjectStatus, location: Location) -> None:
        """End of Group or End of Track, at the Location after the last Object."""
        group, number = location
        if status is ObjectStatus.END_OF_TRACK:
            # it may stand in the last Group, too
            self._groups = group + (number > 0)
            if number:
                self._ends[group] = number
        elif group < self._max_tokens:
            self._ends[group] = number
        # what lies beyond the end of the track is looked for once: what comes later is as it comes
        for each in (group, *(self._open if status is ObjectStatus.END_OF_TRACK else ())):
            self._check_end(each, max(self._open.get(each, ()), default=-1))
        self._go_on()

    def fetched_to_the_end(self) -> None:
        """All that there is of the track, to its end, has come: what is not here does not exist."""
        last = max(self._open, default=self._next - 1)
        held = self._open.get(last)
        if held is not None:
            self._ends[last] = max(held) + 1
        self._groups = last + 1
        self._go_on()
        if not self.whole:
            group, number = self.first_missing
            raise VerificationFailed(f"there is no token {number} of chunk {group}, but later ones")

    # -- inside --------------------------------------------------------------------------

    def _check_end(self, group: int, last: int) -> None:
        """Nothing may lie at or beyond an end; `last` is an Object of a Group, -1 for none."""
        beyond = self._groups is not None and group >= self._groups and last >= 0
        if beyond or last >= self._due(group):
            raise VerificationFailed(f"chunk {group} has tokens beyond the end of it, or of all")

    def _due(self, group: int) -> int:
        """The tokens of a Group, as far as is known."""
        return self._ends.get(group, self._chunk)

    def _go_on(self) -> None:
        while (held := self._open.get(self._next)) is not None and len(held) == self._due(
            self._next
        ):
            last = self._next + 1 == self._groups
            if len(held) < self._chunk and not last:
                if self._groups is None:
                    return  # the last one, or it is wrong: End of Track will tell
                raise VerificationFailed(f"chunk {self._next} is not full and not the last one")
            payloads = [held[number] for number in range(len(held))]
            self.ready.append(HeldChunk(self._next * self._chunk, payloads))
            self.tokens += len(held)
            del self._open[self._next]
            self._next += 1
        if self._groups is not None and self._next >= self._groups:
            self.total = self.tokens
