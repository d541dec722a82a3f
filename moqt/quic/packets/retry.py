"""Address validation with Retry packets (RFC 9000 section 8.1.2), without any state."""

from __future__ import annotations

import os
from typing import Any

from aioquic.quic.packet import encode_quic_retry
from aioquic.quic.retry import QuicRetryTokenHandler

from moqt.quic.packets.layout import CID_LENGTH


def parse_long_header(data: bytes) -> tuple[int, int, bytes, bytes] | None:
    """`(version, packet type bits, destination cid, source cid)` (RFC 8999 section 5.1)."""
    if len(data) < 7 or data[0] & 0x80 == 0:
        return None
    end = 6 + data[5]
    if end >= len(data):
        return None
    source_end = end + 1 + data[end]
    if source_end > len(data) or data[5] > 20 or data[end] > 20:
        return None
    return (
        int.from_bytes(data[1:5], "big"),
        (data[0] & 0x30) >> 4,
        data[6:end],
        data[end + 1 : source_end],
    )


def _initial_token(data: bytes) -> bytes:
    """The Token of an Initial packet whose header `parse_long_header` could read."""
    at = 6 + data[5]
    at += 1 + data[at]
    size = 1 << (data[at] >> 6)
    length = int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1)
    return data[at + size : at + size + length]


class Retries:
    """Makes Retry packets and reads the tokens that come back within half a minute."""

    def __init__(self) -> None:
        self._tokens = QuicRetryTokenHandler()

    def packet(
        self, version: int, addr: tuple[Any, ...], destination: bytes, source: bytes, now: float
    ) -> bytes:
        """The answer to an Initial from `source` to `destination`."""
        cid = os.urandom(CID_LENGTH)
        token = self._tokens.create_token(
            address=addr,
            original_destination_connection_id=destination,
            retry_source_connection_id=cid,
            now=now,
        )
        return encode_quic_retry(
            version=version,
            source_cid=cid,
            destination_cid=source,
            original_destination_cid=destination,
            retry_token=token,
        )

    def original(
        self, data: bytes, addr: tuple[Any, ...], destination: bytes, now: float
    ) -> bytes | None:
        """The first destination connection id, if the Initial's token proves `addr`."""
        token = _initial_token(data)
        if not token:
            return None
        try:
            return self._tokens.validate_token(
                address=addr, destination_cid=destination, token=token, now=now
            )
        except ValueError:
            return None  # another server's, or too old: as if there were none
