"""A network between a client and a server, in which the address of the client changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class Network:
    """Between a client and the port: it sends from another address when it is told."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._client: tuple[str, int] | None = None
        self._inside = self._socket(self._from_client)
        self._inside.bind(("127.0.0.1", 0))
        self.port = self._inside.getsockname()[1]
        self._outside = self._socket(self._from_server)

    def _socket(self, reader: Callable[[], None]) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        asyncio.get_running_loop().add_reader(made.fileno(), reader)
        return made

    def _from_client(self) -> None:
        data, self._client = self._inside.recvfrom(1 << 16)
        self._outside.sendto(data, self._to)

    def _from_server(self) -> None:
        data = self._outside.recv(1 << 16)
        assert self._client is not None
        self._inside.sendto(data, self._client)

    def rebind(self) -> None:
        self.close(self._outside)
        self._outside = self._socket(self._from_server)

    def close(self, *sockets: socket.socket) -> None:
        for each in sockets or (self._inside, self._outside):
            asyncio.get_running_loop().remove_reader(each.fileno())
            each.close()
