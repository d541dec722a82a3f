"""What comes on streams before it can be read: before the handshake is over or SETUP has come."""

from __future__ import annotations

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
        self._pieces: list[Piece] = []
        self.octets = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def hold(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Raises SessionError INTERNAL_ERROR when it is too much."""
        self._pieces.append(Piece(stream_id, data, fin))
        self.octets += len(data)
        if self.octets > self._max_octets or len(self._pieces) > MAX_EARLY:
            raise SessionError(SessionErrorCode.INTERNAL_ERROR, "too much was sent before SETUP")
        if not stream_id & 2 or self.octets > PAUSE_OCTETS:
            self._transport.pause_receiving(stream_id)

    def head(self, stream_id: int, data: bytes) -> bytes:
        """The first octets of a stream, enough for its type when they are there; `data` is what
        has just come and is not held."""
        head = b""
        for piece in self._pieces:
            if piece.stream_id == stream_id:
                head += piece.data[:MAX_STREAM_TYPE]
                if len(head) >= MAX_STREAM_TYPE:
                    break
        return head + data[:MAX_STREAM_TYPE]

    def take(self, stream_id: int) -> bytes:
        """The octets held of one stream."""
        held = b"".join(piece.data for piece in self._pieces if piece.stream_id == stream_id)
        self._pieces = [piece for piece in self._pieces if piece.stream_id != stream_id]
        self.octets -= len(held)
        return held

    def take_all(self) -> list[Piece]:
        pieces, self._pieces, self.octets = self._pieces, [], 0
        return pieces

    def clear(self) -> None:
        self._pieces.clear()
        self.octets = 0
