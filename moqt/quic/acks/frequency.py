"""ACK_FREQUENCY from both sides (draft-ietf-quic-ack-frequency-14)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MIN_ACK_DELAY = 0xFF04DE1B
"""The number of the transport parameter (section 3)."""
ACK_FREQUENCY = 0xAF
IMMEDIATE_ACK = 0x1F

OUR_MIN_DELAY = 0.001
"""Seconds: event loops wake no more often."""
MOST_DELAY = 2**14 / 1000
"""Seconds; what is not below is invalid (RFC 9000 section 18.2)."""

EAGER_PACKETS = 256
"""The first packets of a peer are acknowledged by twos (RFC 9000 section 13.2.2): its window is
still smaller than `EVERY`, and each time it would wait for the timer."""
EVERY = 32
"""Packets after which an ACK no longer waits for the ACK timer, where nothing was asked for."""

WINDOW_SHARE = 8
"""ACKs that we ask for in a window."""
TRIP_SHARE = 32
"""Delays that we ask for in a round trip: what ACKs wait, a window that grows waits, too."""
BULK = 64
"""Packets of a window, below which nothing is worth a request."""
LONGEST_DELAY = 0.025
"""Seconds that we ask for at most: what a peer may take without being asked."""
CHANGE = 2
"""Times by which a wish differs from what was asked for, before it is worth a frame."""


class Request(NamedTuple):
    """The fields of an ACK_FREQUENCY frame behind its Sequence Number."""

    threshold: int
    """Packets that elicit an ACK and need not be acknowledged at once."""
    delay: int
    """Microseconds."""
    reordering: int
    """Packets by which another may be ahead before an ACK says so at once; 0 is any number."""


class AckRule:
    """When we acknowledge: as the peer asked, or by a rule of ours."""

    def __init__(self) -> None:
        self.asked: Request | None = None
        self.acked = -1
        """Largest Acknowledged of the last ACK frame that was sent."""
        self._sequence = -1

    def take(self, sequence: int, request: Request) -> bool:
        """A frame came; whether it is news. Raises ValueError for an invalid delay."""
        if not OUR_MIN_DELAY <= request.delay / 1e6 < MOST_DELAY:
            raise ValueError(
                f"a Requested Max Ack Delay of {request.delay} us is not between "
                f"{1e6 * OUR_MIN_DELAY:.0f} and {1e6 * MOST_DELAY:.0f}"
            )
        if sequence <= self._sequence:
            return False
        self._sequence, self.asked = sequence, request
        return True

    def is_due(self, unacknowledged: int, largest: int) -> bool:
        """Whether so many packets, up to the one numbered `largest`, are acknowledged now."""
        if self.asked is not None:
            return unacknowledged > self.asked.threshold
        return unacknowledged >= (2 if largest < EAGER_PACKETS else EVERY)

    def reports(self, gap: bool, received: Iterable[range]) -> bool:
        """Whether an ACK tells at once of what is missing (section 6.2). `gap`: a packet came out
        of order, or after a gap; `received` are the packets there are, in ranges that rise."""
        distance = 1 if self.asked is None else self.asked.reordering
        if distance < 2:
            return gap and distance == 1
        following = self.acked - distance + 1  # what is before has been told of
        missing: int | None = None
        largest = -1
        for run in received:
            if missing is None and largest >= 0 and following < run.start:
                missing = following
            following = max(following, run.stop)
            largest = run.stop - 1
        return missing is not None and largest - missing >= distance


class AckRequests:
    """What we ask of a peer that takes requests: an ACK for each eighth of a window."""

    def __init__(self) -> None:
        self.least: float | None = None
        """The peer's min_ack_delay in seconds; None where it takes no requests."""
        self.pending = False
        """Whether a frame is to be sent."""
        self.sequence = 0
        """The Sequence Number of the next frame."""
        self.wish = Request(1, 25_000, 1)
        """What is asked for; at first what every peer does unasked."""
        self._under_way: dict[int, float] = {}
        """Seconds of delay of frames that are not acknowledged, by Sequence Number."""

    def look(self, packets: int, round_trip: float, reordered: bool, threshold: int) -> None:
        """See whether to ask for something else: so many `packets` fit the window, and packets
        that overtake each other are waited for by time and not by `threshold` packets."""
        if self.least is None or self.pending or self._under_way:
            return
        if packets < BULK and not self.sequence:
            return
        delay = max(self.least, OUR_MIN_DELAY, min(round_trip / TRIP_SHARE, LONGEST_DELAY))
        wish = Request(
            max(1, min(packets // WINDOW_SHARE, EVERY) - 1),
            int(delay * 1e6),
            0 if reordered else threshold,
        )
        now = self.wish
        if (
            wish.reordering != now.reordering
            or _differ(wish.threshold + 1, now.threshold + 1)
            or _differ(wish.delay, now.delay)
        ):
            self.wish, self.pending = wish, True

    def sent(self) -> int:
        """The frame leaves; its Sequence Number."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.pending = False
        self._under_way[sequence] = self.wish.delay / 1e6
        return sequence

    def settled(self, sequence: int, arrived: bool) -> None:
        """The frame was acknowledged, or is lost: then what is wished now is asked for again."""
        self._under_way.pop(sequence, None)
        if not arrived and sequence == self.sequence - 1:
            self.pending = True


def _differ(a: int, b: int) -> bool:
    return a >= CHANGE * b or b >= CHANGE * a
