"""What a supervisor and one of its workers say to each other: objects of JSON over a socket pair.

The first thing said is the worker's settings, pickled: nobody but its parent can write there.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections.abc import AsyncIterator
from typing import Any

from relay.service.workers.settings import WorkerSettings

_LENGTH = 4
MAX_MESSAGE = 64 << 20


def send_settings(sock: socket.socket, settings: WorkerSettings) -> None:
    """From the parent, before the worker reads: it fits into the socket's buffer, or waits."""
    data = pickle.dumps(settings)
    sock.sendall(len(data).to_bytes(_LENGTH, "big") + data)


def receive_settings(sock: socket.socket) -> WorkerSettings:
    """In the worker. Raises EOFError when the parent is gone."""
    data = _exactly(sock, int.from_bytes(_exactly(sock, _LENGTH), "big"))
    settings = pickle.loads(data)
    assert isinstance(settings, WorkerSettings)
    return settings


def _exactly(sock: socket.socket, octets: int) -> bytes:
    found = b""
    while len(found) < octets:
        part = sock.recv(octets - len(found))
        if not part:
            raise EOFError("the supervisor is gone")
        found += part
    return found


class Channel:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: dict[str, Any]) -> None:
        """What cannot be sent any more is not missed: the other end is gone."""
        if not self._writer.is_closing():
            data = json.dumps(message).encode()
            self._writer.write(len(data).to_bytes(_LENGTH, "big") + data)

    async def flush(self) -> None:
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Until the other end is gone."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                if length > MAX_MESSAGE:
                    raise ValueError(f"a message of {length} octets between processes of a relay")
                yield json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
