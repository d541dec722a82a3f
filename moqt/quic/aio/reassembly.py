"""The receiving part of a stream: what comes out of order waits as it came."""

from __future__ import annotations

import bisect

from aioquic.quic.stream import FinalSizeError, QuicStreamReceiver

PIECE_OVERHEAD = 128
"""What a piece that waits counts beyond its octets."""


class StreamReceiver(QuicStreamReceiver):
    """Pieces that do not overlap, in order, and what they count.

    aioquic's own receiver fills the gaps with zeros: one octet at the end of the window costs a
    window of memory. Here a gap costs nothing and a piece what was received.
    """

    def __init__(self, stream_id: int, readable: bool) -> None:
        super().__init__(stream_id=stream_id, readable=readable)
        self.held = 0
        self._starts: list[int] = []
        self._pieces: list[bytes] = []

    @property
    def waiting(self) -> int:
        """Pieces that wait for a gap to close."""
        return len(self._pieces)

    def take(self, offset: int, data: bytes, fin: bool) -> tuple[bytes, bool] | None:
        """The octets that are in order now and whether they end the stream; None for neither.

        Raises FinalSizeError when the frame contradicts the final size (RFC 9000 section 4.5).
        """
        stop = offset + len(data)
        if self._final_size is not None:
            if stop > self._final_size:
                raise FinalSizeError("Data received beyond final size")
            if fin and stop != self._final_size:
                raise FinalSizeError("Cannot change final size")
        if fin:
            if stop < self.highest_offset:
                raise FinalSizeError("Data received beyond final size")
            self._final_size = stop
        self.highest_offset = max(self.highest_offset, stop)
        if self.is_finished:
            return None
        ready = b""
        if offset > self._buffer_start:
            self._insert(offset, data)
        elif stop > self._buffer_start:
            ready = self._drain(data[self._buffer_start - offset :])
        ended = self._buffer_start == self._final_size
        if ended:
            self.is_finished = True
        return (ready, ended) if ready or ended else None

    def clear(self) -> None:
        """Let go what waits."""
        self._starts.clear()
        self._pieces.clear()
        self.held = 0

    def _drain(self, data: bytes) -> bytes:
        """`data` and the pieces that follow it without a gap."""
        parts = [data]
        position = self._buffer_start + len(data)
        used = 0
        for start, piece in zip(self._starts, self._pieces, strict=True):
            if start > position:
                break
            used += 1
            self.held -= len(piece) + PIECE_OVERHEAD
            if start + len(piece) > position:
                parts.append(piece[position - start :])
                position = start + len(piece)
        del self._starts[:used], self._pieces[:used]
        self._buffer_start = position
        return b"".join(parts) if used else data

    def _insert(self, offset: int, data: bytes) -> None:
        """Keep what of `data` is not here yet."""
        index = bisect.bisect_right(self._starts, offset)
        if index:
            end = self._starts[index - 1] + len(self._pieces[index - 1])
            if end > offset:
                data, offset = data[end - offset :], end
        while data:
            start = self._starts[index] if index < len(self._starts) else offset + len(data)
            if fresh := data[: start - offset]:
                self._starts.insert(index, offset)
                self._pieces.insert(index, fresh)
                self.held += len(fresh) + PIECE_OVERHEAD
                index += 1
            if start >= offset + len(data):
                return
            end = start + len(self._pieces[index])
            data, offset = data[end - offset :], end
            index += 1
