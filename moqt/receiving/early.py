"""What comes on streams before it can be read: before the handshake is over or SETUP has come."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from moqt.quic.transport import Transport
from moqt.values.codes import SessionErrorCode
from moqt.values.errors import SessionError

MAX_EARLY = 4096
"""Pieces of streams held before the peer's SETUP."""
MAX_STREAM_TYPE = 9
"""Octets that the type of a unidirectional stream takes at most."""
PAUSE_OCTETS = 64 * 1024
"""Octets held beyond which every stream that brings more is paused; request streams always are."""


class Piece(NamedTuple):
    stream_id: int
    data: bytes
    fin: bool


class EarlyStreams:
    """The pieces of streams that came too early, in order, at most `max_octets` of them.

    A stream of which pieces are held may be paused; who takes them resumes it.
    """

    def __init__(self, transport: Transport, max_octets: int) -> None:
        self._transport = transport
        self._max_octets = max_octets
        self._pieces: dict[int, Piece] = {}
        """By the order in which they came."""
        self._of: defaultdict[int, list[int]] = defaultdict(list)
        """Which are a stream's."""
        self._count = 0
        self.octets = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def hold(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Raises SessionError INTERNAL_ERROR when it is too much."""
        self._of[stream_id].append(self._count)
        self._pieces[self._count] = Piece(stream_id, data, fin)
        self._count += 1
        self.octets += len(data)
        if self.octets > self._max_octets or len(self._pieces) > MAX_EARLY:
            raise SessionError(SessionErrorCode.INTERNAL_ERROR, "too much was sent before SETUP")
        if not stream_id & 2 or self.octets > PAUSE_OCTETS:
            self._transport.pause_receiving(stream_id)

    def head(self, stream_id: int, data: bytes) -> bytes:
        """The first octets of a stream, enough for its type when they are there; `data` is what
        has just come and is not held."""
        first = self._of.get(stream_id, ())[:MAX_STREAM_TYPE]
        head = b"".join(self._pieces[number].data[:MAX_STREAM_TYPE] for number in first)
        return head + data[:MAX_STREAM_TYPE]

    def take(self, stream_id: int) -> bytes:
        """The octets held of one stream."""
        numbers = self._of.pop(stream_id, ())
        held = b"".join(self._pieces.pop(number).data for number in numbers)
        self.octets -= len(held)
        return held

    def take_all(self) -> list[Piece]:
        pieces = list(self._pieces.values())
        self.clear()
        return pieces

    def clear(self) -> None:
        self._pieces.clear()
        self._of.clear()
        self.octets = 0
