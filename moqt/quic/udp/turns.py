"""How much is done in one turn of the event loop: as much as takes some milliseconds of CPU."""

from __future__ import annotations

from moqt.quic.udp.socket import MAX_BATCH, RECEIVE_OCTETS

TURN_SECONDS = 0.005
"""Seconds of CPU that receiving, and sending, may take in one turn: then there is less of it."""


class Receiving:
    """The octets that are received in a turn: small Objects take a hundred times as long as large
    ones of as many octets."""

    def __init__(self) -> None:
        self.octets = MAX_BATCH

    def took(self, seconds: float) -> None:
        """So long was the turn that is over."""
        if seconds > TURN_SECONDS:
            self.octets = max(1, self.octets // 2)
        elif seconds < TURN_SECONDS / 4:
            self.octets = min(RECEIVE_OCTETS, 2 * self.octets)
