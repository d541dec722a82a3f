"""A connection in memory, for `examples.relay_in_memory`: what a session wants of its transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from moqt.session import Session, SessionHandler


class Wire:
    """One end: a `moqt.quic.transport.Transport` that loses and delays nothing.

    What the session does here is an event at its peer.
    """

    authority: str | None = None
    path: str | None = None
    qlog = None
    unsent = 0
    peer: Wire

    def __init__(self, handler: SessionHandler, *, is_client: bool) -> None:
        self.is_client = is_client
        self.session = Session(self, handler)
        self._opened = {True: 0, False: 0}
        self._sent: deque[tuple[str, tuple[Any, ...]]] = deque()

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int:
        number = self._opened[bidirectional]
        self._opened[bidirectional] += 1
        return 4 * number + (0 if bidirectional else 2) + (0 if self.is_client else 1)

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        self._sent.append(("stream_data", (stream_id, bytes(data), fin)))

    def reset(self, stream_id: int, code: int) -> None:
        self._sent.append(("stream_reset", (stream_id, code)))

    def stop_receiving(self, stream_id: int, code: int) -> None:
        self._sent.append(("stop_sending", (stream_id, code)))

    def send_datagram(self, data: bytes) -> bool:
        self._sent.append(("datagram", (data,)))
        return True

    def close(self, code: int, reason: str) -> None:
        self._sent.append(("connection_closed", (code, reason, True)))

    # there is always room

    def send_room(self, stream_id: int) -> int:
        return 1 << 20

    def acknowledged(self, stream_id: int) -> bool:
        return True

    def take_credited(self) -> Iterable[int]:
        return ()

    def pause_receiving(self, stream_id: int) -> None: ...

    def resume_receiving(self, stream_id: int) -> None: ...

    packet_sizes = 0, 0
    peer_certificate = None
    connection_id = ""
    peer_address = ""

    def wake(self) -> None: ...

    def deliver(self) -> bool:
        """Tell the peer's session what happened here; whether anything did."""
        self.session.ready_to_send()
        due = len(self._sent)
        for _ in range(due):
            event, arguments = self._sent.popleft()
            getattr(self.peer.session, event)(*arguments)
        return due > 0


def join(client: SessionHandler, server: SessionHandler) -> tuple[Wire, Wire]:
    """A new connection. Its QUIC handshake is over and has chosen the draft."""
    ends = Wire(client, is_client=True), Wire(server, is_client=False)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    for end in ends:
        end.session.connection_established("moqt-22")
    return ends
