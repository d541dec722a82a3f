"""What a path delivers, as draft-ietf-ccwg-bbr section 4.1 measures it."""

from __future__ import annotations

from moqt.quic.congestion.controller import Departure


class Delivery:
    """Counts octets sent, delivered and lost over a connection, and derives rates from them.

    Packets that leave at one time share a `Departure`, so that a packet costs one reference.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.delivered = 0
        self.lost = 0
        self._delivered_time = 0.0
        self._first_sent_time = 0.0
        self._limited_until = 0  # `delivered` from which on the application no longer limits
        self._departure: Departure | None = None

    @property
    def last_at(self) -> float:
        """When something was acknowledged last, or the first of what is under way left."""
        return self._delivered_time

    def sent(self, octets: int, now: float) -> Departure:
        """So many octets leave: what their packets are to remember."""
        if self.in_flight == 0:
            self._first_sent_time = self._delivered_time = now
        departure = self._departure
        if departure is None or departure.sent_time != now:
            departure = self._departure = Departure(
                now,
                self.delivered,
                self._delivered_time,
                self._first_sent_time,
                self.lost,
                self._limited_until > 0,
            )
        self.in_flight += octets
        departure.in_flight = self.in_flight
        return departure

    def acked(self, octets: int, newest: Departure, now: float) -> None:
        """So many octets were acknowledged, the newest of which left as `newest` says."""
        self.in_flight -= octets
        self.delivered += octets
        self._delivered_time = now
        self._first_sent_time = newest.sent_time
        self._departure = None
        if self._limited_until and self.delivered > self._limited_until:
            self._limited_until = 0

    def found_lost(self, octets: int) -> None:
        self.in_flight -= octets
        self.lost += octets
        self._departure = None

    def came_late(self, octets: int) -> None:
        """So many octets that were found lost have arrived."""
        self.lost -= octets
        self.delivered += octets
        self._departure = None

    def expired(self, octets: int) -> None:
        """So many octets are no longer waited for, and nobody knows what became of them."""
        self.in_flight -= octets
        self._departure = None

    def limited_by_application(self) -> None:
        """What is under way is all there is to send: it shows less than the path can do."""
        self._limited_until = max(1, self.delivered + self.in_flight)
        self._departure = None

    def rate(self, newest: Departure, shortest: float) -> float | None:
        """Octets a second, after `acked`; None over less than the `shortest` round trip.

        The slower of the rates of sending and of acknowledging: ACKs come in heaps.
        """
        interval = max(
            newest.sent_time - newest.first_sent_time, self._delivered_time - newest.delivered_time
        )
        if interval <= 0 or interval < shortest:
            return None
        return (self.delivered - newest.delivered) / interval
