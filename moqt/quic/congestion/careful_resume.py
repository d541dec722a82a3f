"""What was known of a path is used again, carefully (draft-ietf-tsvwg-careful-resume).

A connection leaves behind what its path to an address held. The next one to that address begins as
any other does; when its handshake has shown that the round trip is the same (the draft's
reconnaissance), half of that may be under way, paced over a round trip: unvalidated, until the
first of it is acknowledged; validating, until all of it is. What is lost of it is a reason for the
safe retreat: to half of what arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from moqt.quic.congestion.controller import Sample

JUMP = 0.5
"""Of what a path held is used at once (section 3.2)."""
LEAST = 64 << 10
"""Octets: a path that held less is not worth remembering."""
SHORTEST, LONGEST = 0.5, 10.0
"""Times the round trip remembered: beyond it is another path (section 3.1)."""
LEAST_TRIP = 0.005
"""Seconds of a round trip below which a path is filled at once anyway."""
MOST_PATHS = 4096
"""Addresses remembered; the one least recently used is forgotten."""


class ResumePhase(Enum):
    """The phases in which a controller acts otherwise than it does by itself."""

    NORMAL = "normal"
    UNVALIDATED = "resume_unvalidated"
    VALIDATING = "resume_validating"
    RETREAT = "resume_retreat"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a path held, in octets, its shortest round trip in seconds, and when that was."""

    octets: int
    trip: float
    at: float

    def jump(self, trip: float) -> int:
        """Octets that may be under way at once where the round trip is `trip`; 0 for none."""
        same = SHORTEST * self.trip <= trip <= LONGEST * self.trip
        return int(self.octets * JUMP) if same else 0


class PathMemory:
    """The paths of a process that are remembered, by the address of the peer alone."""

    def __init__(self) -> None:
        self._paths: OrderedDict[str, Saved] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paths)

    def keep(self, address: str, saved: Saved) -> None:
        """A connection to `address` is over."""
        if saved.octets < LEAST or saved.trip < LEAST_TRIP:
            return
        self._paths[address] = saved
        self._paths.move_to_end(address)
        if len(self._paths) > MOST_PATHS:
            self._paths.popitem(last=False)

    def claim(self, address: str, now: float, lifetime: float) -> Saved | None:
        """What is known of the path to `address`, unless it is older than `lifetime` seconds.

        It is told once: of two connections each would send half, and again if that was wrong.
        """
        saved = self._paths.pop(address, None)
        return saved if saved is not None and now - saved.at <= lifetime else None


class Jump:
    """A controller's use of what was remembered: in which phase it is."""

    def __init__(self) -> None:
        self.phase = ResumePhase.NORMAL
        self.lost = 0
        """Octets lost of what was sent since it began."""
        self.arrived = 0
        """Octets that arrived since (the draft's PipeSize)."""
        self._began = self._since = 0.0  # the jump, and the phase
        self._delivered = 0

    @property
    def on_trial(self) -> bool:
        """What is under way may be more than the path carries: not all of it has arrived."""
        return self.phase in (ResumePhase.UNVALIDATED, ResumePhase.VALIDATING)

    def begin(self, delivered: int, now: float) -> None:
        self.phase = ResumePhase.UNVALIDATED
        self._began = self._since = now
        self._delivered = delivered

    def take(self, sample: Sample) -> None:
        """Take what an ACK frame has shown, and go on to the next phase if it has come."""
        if sample.newest_loss is not None and sample.newest_loss.sent_time >= self._began:
            self.lost += sample.lost
        self.arrived = sample.delivered - self._delivered
        departure = sample.departure
        if departure is None or departure.sent_time < self._since:
            return
        if self.phase is ResumePhase.UNVALIDATED:
            self.phase, self._since = ResumePhase.VALIDATING, sample.now
        else:
            self.phase = ResumePhase.NORMAL

    def retreat(self, now: float) -> None:
        self.phase, self._since = ResumePhase.RETREAT, now
