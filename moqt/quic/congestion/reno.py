"""NewReno (RFC 9002 section 7), with HyStart++ (RFC 9406) at the end of slow start."""

from __future__ import annotations

from moqt.quic.congestion.careful_resume import Jump, ResumePhase
from moqt.quic.congestion.controller import (
    INITIAL_WINDOW,
    MINIMUM_WINDOW,
    ControllerState,
    Sample,
    at_once,
    quantum,
)
from moqt.quic.congestion.slow_start import SlowStartExit

PACING_GAIN = 1.25
"""RFC 9002 section 7.7: a little faster than the window over a round trip, so that it is used."""
SLOW_START_PACING_GAIN = 2.0

BETA = 0.5


class Reno:
    """A window that halves once for all losses of a round trip."""

    wants_app_limited = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.window = at_once(INITIAL_WINDOW, size)
        self.pacing_rate: float | None = None
        self.quantum = at_once(INITIAL_WINDOW, size)
        self.threshold: int | None = None
        self._recovery_since = 0.0
        self._acked = 0  # octets that have not grown the window yet
        self._exit = SlowStartExit()
        self._before: tuple[int, int | None] | None = None  # window and threshold, for undoing
        self._jump = Jump()

    @property
    def in_slow_start(self) -> bool:
        return self.threshold is None or self.window < self.threshold

    def on_acks(self, sample: Sample) -> None:
        if self._jump.phase is not ResumePhase.NORMAL:
            self._validate(sample)
        loss = sample.newest_loss
        if loss is not None and loss.sent_time > self._recovery_since:
            self._recovery_since = sample.now
            self._before = self.window, self.threshold
            self._reduce(sample)
        departure = sample.departure
        if departure is not None and departure.sent_time > self._recovery_since:
            if self.in_slow_start:
                if self.threshold is None and self._exit.is_due(sample):
                    self.threshold = self.window
                elif not departure.app_limited and self._jump.phase is ResumePhase.NORMAL:
                    self.window += sample.acked
            elif not departure.app_limited:
                self._avoid(sample)
        self._pace(sample.rtt_smoothed)

    def resume(self, octets: int, trip: float, delivered: int, now: float) -> None:
        if self.in_slow_start and octets > self.window:
            self._jump.begin(delivered, now)
            self.window = octets
            self._pace(trip)

    def _validate(self, sample: Sample) -> None:
        """Whether the path carries what was remembered of it: any loss says that it does not."""
        jump = self._jump
        jump.take(sample)
        if jump.on_trial and jump.lost:
            jump.retreat(sample.now)
            self._recovery_since = sample.now
            self.threshold = max(int(jump.arrived * BETA), MINIMUM_WINDOW * self.size)
            self.window = max(jump.arrived // 2, at_once(INITIAL_WINDOW, self.size))

    def _reduce(self, sample: Sample) -> None:
        self.window = self.threshold = max(int(self.window * BETA), MINIMUM_WINDOW * self.size)

    def _avoid(self, sample: Sample) -> None:
        """One packet more for each window that was acknowledged."""
        self._acked += sample.acked
        if self._acked >= self.window:
            self._acked -= self.window
            self.window += self.size

    def _pace(self, rtt: float) -> None:
        if rtt > 0:
            gain = SLOW_START_PACING_GAIN if self.in_slow_start else PACING_GAIN
            if self._jump.on_trial:
                gain = 1.0
            self.pacing_rate = gain * self.window / rtt
            self.quantum = quantum(self.pacing_rate, self.size)

    def on_spurious(self, now: float) -> None:
        if self._before is not None:
            window, threshold = self._before
            self._before = None
            if window > self.window:
                self.window, self.threshold = window, threshold
                self._recovery_since = 0.0

    def on_idle_restart(self, now: float) -> None:
        """Nothing: packets are paced, and the window may not have grown meanwhile."""

    def on_persistent_congestion(self, now: float) -> None:
        self.window = MINIMUM_WINDOW * self.size
        self._recovery_since = 0.0
        self._before = None

    def on_new_size(self, size: int) -> None:
        if self.threshold is None:
            self.window = max(self.window, at_once(INITIAL_WINDOW, size))
        self.size = size
        self.window = max(self.window, MINIMUM_WINDOW * size)

    def state(self) -> ControllerState:
        phase = "slow_start" if self.in_slow_start else "congestion_avoidance"
        if self._jump.phase is not ResumePhase.NORMAL:
            phase = self._jump.phase.value
        return ControllerState(
            phase=phase,
            window=self.window,
            pacing_rate=self.pacing_rate,
            slow_start_threshold=self.threshold,
        )
