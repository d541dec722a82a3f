"""WebTransport streams that came before the session they belong to ("Buffering Incoming
Streams and Datagrams"). Their credit is held back meanwhile."""

from __future__ import annotations

MAX_HELD = 256 << 10
"""Octets held of streams that came before their session."""
MAX_HELD_STREAMS = 64


class HeldStream:
    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.data = bytearray()
        self.fin = False
        self.reset: int | None = None
        self.stop: int | None = None
        """HTTP/3 codes, as they came."""


class HeldStreams:
    """At most `MAX_HELD` octets of at most `MAX_HELD_STREAMS` streams."""

    def __init__(self) -> None:
        self.octets = 0
        self._streams: dict[int, HeldStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, stream_id: int) -> HeldStream | None:
        return self._streams.get(stream_id)

    def add(self, stream_id: int, session_id: int) -> bool:
        """False when there is no room for one more."""
        if len(self._streams) >= MAX_HELD_STREAMS:
            return False
        self._streams[stream_id] = HeldStream(session_id)
        return True

    def feed(self, stream_id: int, data: bytes, fin: bool) -> bool:
        """False when the stream does not fit any more: it is forgotten then."""
        stream = self._streams[stream_id]
        if self.octets + len(data) > MAX_HELD:
            self.octets -= len(self._streams.pop(stream_id).data)
            return False
        stream.data += data
        stream.fin = fin
        self.octets += len(data)
        return True

    def take(self) -> dict[int, HeldStream]:
        """All of them; none is held afterwards."""
        taken, self._streams, self.octets = self._streams, {}, 0
        return taken
