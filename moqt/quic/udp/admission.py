"""Who may begin a connection with a server: how many in all, of one address, and half-open."""

from __future__ import annotations

from collections.abc import Hashable

from moqt.quic.config import QuicConfig
from moqt.quic.packets.layout import Address, origin_of


class Admission:
    """The connections that clients have begun, by where they came from.

    What stands for a connection is the caller's to choose: it is a key here, and no more.
    """

    def __init__(self, config: QuicConfig) -> None:
        self.half_open: set[Hashable] = set()
        """Those whose handshake is not complete."""
        self.closed = ""
        """Why no connection at all may be begun; empty when some may."""
        self._config = config
        self._origins: dict[Hashable, str] = {}
        self._per_origin: dict[str, int] = {}

    def is_full(self, addr: Address, connections: int) -> bool:
        """Whether one more from `addr`, with `connections` there are, would be too many."""
        config = self._config
        return (
            bool(self.closed)
            or connections >= config.max_connections
            or self._of(addr) >= config.max_connections_per_address
        )

    def why_full(self, addr: Address, connections: int) -> str:
        """Which limit `is_full` has met, for the log."""
        config = self._config
        if self.closed:
            return self.closed
        if connections >= config.max_connections:
            return f"there are {connections} connections already (max_connections)"
        return (
            f"{origin_of(addr)} has {self._of(addr)} connections already "
            "(max_connections_per_address)"
        )

    def needs_proof(self, addr: Address) -> bool:
        """Whether a client must show that it is at `addr` first.

        Who forges an address must not use up what the one at that address may have.
        """
        config = self._config
        return len(self.half_open) >= config.retry_threshold or (
            2 * self._of(addr) >= config.max_connections_per_address
        )

    def add(self, connection: Hashable, addr: Address) -> None:
        origin = origin_of(addr)
        self.half_open.add(connection)
        self._origins[connection] = origin
        self._per_origin[origin] = self._per_origin.get(origin, 0) + 1

    def discard(self, connection: Hashable) -> None:
        self.half_open.discard(connection)
        origin = self._origins.pop(connection, None)
        if origin is not None:
            self._per_origin[origin] -= 1
            if not self._per_origin[origin]:
                del self._per_origin[origin]

    def _of(self, addr: Address) -> int:
        return self._per_origin.get(origin_of(addr), 0)
