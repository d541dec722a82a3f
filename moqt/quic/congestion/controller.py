"""What recovery tells a congestion controller, and what the controller answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

INITIAL_WINDOW = 10
"""Packets (RFC 9002 section 7.2): `at_once` has the octets."""

MINIMUM_WINDOW = 2
"""Packets (RFC 9002 section 7.2)."""

ETHERNET = 1472
"""Octets of UDP payload in a packet as most networks have it."""

PACING_TICK = 0.002
"""Seconds. Event loops wake at best every millisecond: what is due in two may go at once."""


def at_once(packets: int, size: int) -> int:
    """Octets of so many packets of `size`; large ones count as few, as in RFC 9002 section 7.2."""
    return min(packets * size, max(2 * size, packets * ETHERNET))


def quantum(rate: float, size: int) -> int:
    """Octets that may leave at once at `rate`, in packets of `size`.

    The initial window at least, as RFC 9002 section 7.7 allows: a request after a pause is not
    worth the wait. It is only what a pause may save up: under way all the time, each train has
    what became due since the one before.
    """
    return max(at_once(INITIAL_WINDOW, size), int(rate * PACING_TICK))


class Departure:
    """What was known of the connection when a train of packets left: one for all of its packets."""

    __slots__ = (
        "app_limited",
        "delivered",
        "delivered_time",
        "first_sent_time",
        "in_flight",
        "lost",
        "sent_time",
    )

    def __init__(
        self,
        sent_time: float,
        delivered: int,
        delivered_time: float,
        first_sent_time: float,
        lost: int,
        app_limited: bool,
    ) -> None:
        self.sent_time = sent_time
        self.delivered = delivered
        self.delivered_time = delivered_time
        self.first_sent_time = first_sent_time
        self.lost = lost
        self.app_limited = app_limited
        self.in_flight = 0
        """Octets under way with the whole train."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one ACK frame, or the timer of loss detection, has shown. Octets and seconds."""

    now: float
    acked: int
    """Octets acknowledged for the first time."""
    lost: int
    """Octets found lost."""
    lost_runs: int
    """Runs of successive packets that begin among them."""
    in_flight: int
    """What is under way after both."""
    delivered: int
    """Octets ever delivered."""
    lost_ever: int
    """Octets ever lost, without those that came after all."""
    departure: Departure | None
    """Of the newest packet acknowledged; None if there is none."""
    newest_loss: Departure | None
    """Of the newest packet found lost."""
    rate: float | None
    """Octets a second that the path delivered; None if this cannot be told."""
    rtt: float | None
    """The round trip of the newest packet, the peer's delay included."""
    rtt_smoothed: float
    window_limited: bool
    """Whether the window has held data back since the sample before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """For metrics and logs. Octets and seconds; None is what an algorithm does not know."""

    phase: str
    window: int
    pacing_rate: float | None
    bandwidth: float | None = None
    rtt_min: float | None = None
    inflight_high: int | None = None
    slow_start_threshold: int | None = None


class Controller(Protocol):
    """A congestion control algorithm. Recovery reads the three values after each call."""

    window: int
    """Octets that may be under way."""
    pacing_rate: float | None
    """Octets a second; None lets all go that the window allows."""
    quantum: int
    """Octets that may leave at once."""

    def on_acks(self, sample: Sample) -> None:
        """Packets were acknowledged or found lost, or both."""

    def on_spurious(self, now: float) -> None:
        """All that was found lost lately had only been late: nothing of it told of congestion."""

    def on_idle_restart(self, now: float) -> None:
        """Something is about to be sent, after nothing was under way."""

    def on_persistent_congestion(self, now: float) -> None:
        """For a long time nothing arrived (RFC 9002 section 7.6)."""

    def resume(self, octets: int, trip: float, delivered: int, now: float) -> None:
        """So many may be under way, says a connection before this one: to be tried with care, at
        most over a round trip of `trip` seconds, when `delivered` octets have arrived."""

    def on_new_size(self, size: int) -> None:
        """Packets have at most `size` octets from now on."""

    @property
    def wants_app_limited(self) -> bool:
        """Whether what is sent now tells nothing of the path, as it is held back on purpose."""

    def state(self) -> ControllerState:
        """What it thinks."""
