"""BBR, version 3 (draft-ietf-ccwg-bbr): a model of the path instead of a reaction to losses.

The model is what the path delivers at most and its shortest round trip; the phases of the algorithm
send more than that for a moment to find more, and less to find it empty. Losses bound what may be
under way when there are too many of them. Where this is not the draft's:

- "too many" is more than the draft's 2 % by so much that chance does not explain it, and losses
  below that change nothing, the short-term bounds included: a path that loses 1 % at any rate is
  filled (`too_many`);
- `extra_acked` is at most what the path delivers in 100 ms, as in Linux;
- on paths shorter than the event loop's tick the pacer leaves room, so that timers do not bind;
- the window of such a path holds a few trains (the draft's offload budget) of our pacer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt
from random import random as system_random

from moqt.quic.congestion.bbr_model import (
    BandwidthFilter,
    ExtraAcked,
    Feedback,
    Phase,
    RoundTrips,
)
from moqt.quic.congestion.careful_resume import Jump, ResumePhase
from moqt.quic.congestion.controller import (
    INITIAL_WINDOW,
    PACING_TICK,
    ControllerState,
    Departure,
    Sample,
    at_once,
    quantum,
)

STARTUP_GAIN = 2.77
"""4 ln 2: the rate that doubles what is delivered each round trip."""
PACING_GAINS = {
    Phase.STARTUP: STARTUP_GAIN,
    Phase.DRAIN: 0.35,
    Phase.PROBE_DOWN: 0.9,
    Phase.PROBE_CRUISE: 1.0,
    Phase.PROBE_REFILL: 1.0,
    Phase.PROBE_UP: 1.25,
    Phase.PROBE_RTT: 1.0,
}
WINDOW_GAINS = dict.fromkeys(Phase, 2.0) | {Phase.PROBE_UP: 2.25, Phase.PROBE_RTT: 0.5}

PROBING = (Phase.PROBE_DOWN, Phase.PROBE_CRUISE, Phase.PROBE_REFILL, Phase.PROBE_UP)

MARGIN = 0.99
"""Of the bandwidth is used, so that queues drain."""
LOSS_THRESHOLD = 0.02
"""Of what was under way, lost: more is too much."""
CHANCE = 3.0
"""Standard deviations that a count of random losses is thought to stay within ..."""
CHANCE_IN_QUEUE = 1.0
"""... and while packets wait in a queue, which is what congestion looks like."""
QUEUE = 1.25
"""Times the shortest round trip."""
STARTUP_LOSSES = 6
"""Runs of packets lost in a round, below which it says nothing about a full pipe: a queue that is
full drops here and there, a path that fades drops one run."""
BETA = 0.7
"""What is left of a short-term bound after a round of losses."""
HEADROOM = 0.15
"""Of the bound that is left to other flows while cruising."""
GROWTH = 1.25
"""Bandwidth grown by this is a reason to look for more."""
FULL_ROUNDS = 3
"""Rounds without such growth say that the pipe is full."""
MINIMUM_WINDOW = 4
"""Packets, so that a peer that acknowledges every second one keeps the flow going."""
PROBE_WAIT = 2.0
"""Seconds between probes for bandwidth, up to a second more by chance."""
MOST_ROUNDS = 63
"""Round trips between probes, so that Reno and CUBIC flows keep their share of short paths."""
TRAINS = 3
"""Trains of the pacer that the window holds at least: one here, one there, one under way."""
SHORT_PATH = 0.001
"""Seconds of a round trip below which timers are slower than ACKs."""
SHORT_PATH_GAIN = 2.0


class Bbr:
    """One connection's model, phase and bounds. `random` draws from [0, 1)."""

    def __init__(self, size: int, random: Callable[[], float] = system_random) -> None:
        self.size = size
        self.window = at_once(INITIAL_WINDOW, size)
        self.pacing_rate: float | None = None
        self.quantum = self.window
        self.phase = Phase.STARTUP
        self._random = random
        self._round_trips = RoundTrips()
        self._max_bandwidth = BandwidthFilter()
        self._extra_acked = ExtraAcked()
        # Long-term bound, from probing; short-term bounds, from losses since the last probe.
        self._inflight_high = inf
        self._inflight_low = inf
        self._bandwidth_low = inf
        self._pipe_was_full = False
        self._pipe_full_now = False
        self._left_by_loss = False
        """Whether losses ended STARTUP, and no probe has shown more since."""
        self._full_bandwidth = 0.0
        self._full_rounds = 0
        # A round ends with the ACK of a packet that left after it began: octets delivered.
        self._round_ends = 0
        self._round_started = False
        self._loss_round_ends = 0
        self._lost_in_round = 0
        self._lost_runs = 0
        self._lost_before = 0
        self._acked_in_round = 0
        self._latest_bandwidth = 0.0
        self._latest_inflight = 0
        self._latest_trip = 0.0
        self._window_limited = False
        self._limited_in_round = False
        # Probing for bandwidth.
        self._feedback = Feedback.NONE
        self._probe_counts = False  # samples and losses are of the probe
        self._cycle_began = 0.0
        self._wait = PROBE_WAIT
        self._rounds_since_probe = 0
        self._up_rounds = 0
        self._up_acked = 0
        self._up_octets = inf  # acknowledged, for which the bound grows by a packet
        # Probing for the round trip.
        self._idle_restart = False
        self._jump = Jump()
        self._saved_window = 0
        self._undo: tuple[float, float, float] | None = None

    # ---- the interface of recovery

    def on_acks(self, sample: Sample) -> None:
        self._window_limited = self._window_limited or sample.window_limited
        if sample.rtt is not None:
            self._latest_trip = sample.rtt
        if sample.newest_loss is not None:
            self._lost(sample, sample.newest_loss)
        if sample.departure is not None:
            self._acknowledged(sample, sample.departure)
        if self._jump.phase is not ResumePhase.NORMAL:
            self._validate(sample)
        self._set_pace()
        self._set_window(sample)

    def on_spurious(self, now: float) -> None:
        self._lost_in_round = 0
        if self._left_by_loss:
            # There was none: what the path can do has not been found out yet.
            self._left_by_loss = self._pipe_was_full = self._pipe_full_now = False
            self._full_rounds = 0
            self._inflight_high = inf
            self._enter(Phase.STARTUP)
        if self._undo is not None:
            bandwidth, low, high = self._undo
            self._undo = None
            self._bandwidth_low = max(self._bandwidth_low, bandwidth)
            self._inflight_low = max(self._inflight_low, low)
            self._inflight_high = max(self._inflight_high, high)

    def on_idle_restart(self, now: float) -> None:
        if self.phase is Phase.STARTUP:
            return
        self._idle_restart = True
        self._extra_acked.restart(now)
        if self.phase in PROBING:
            self._set_pace(1.0)
        elif self.phase is Phase.PROBE_RTT:
            self._check_probe_rtt_done(now)

    def on_persistent_congestion(self, now: float) -> None:
        """Nothing came for long: begin with little, and believe the model again as ACKs come.

        In STARTUP that little is what bounds the rate then: that it does not grow beyond the one of
        before says nothing of the path.
        """
        self.window = at_once(MINIMUM_WINDOW, self.size)
        if not self._pipe_was_full:
            self._look_for_more(0.0)

    def resume(self, octets: int, trip: float, delivered: int, now: float) -> None:
        if self._pipe_was_full or octets <= self.window:
            return
        self._jump.begin(delivered, now)
        self.window = octets
        self.pacing_rate = max(self.pacing_rate or 0.0, octets / trip)
        self.quantum = quantum(self.pacing_rate, self.size)

    def on_new_size(self, size: int) -> None:
        if not self._pipe_was_full:
            self.window = max(self.window, at_once(INITIAL_WINDOW, size))
        self.size = size
        self.window = max(self.window, at_once(MINIMUM_WINDOW, size))

    @property
    def wants_app_limited(self) -> bool:
        return self.phase is Phase.PROBE_RTT

    @property
    def bandwidth(self) -> float:
        """Octets a second that are thought safe now."""
        return min(self._max_bandwidth.value, self._bandwidth_low)

    def state(self) -> ControllerState:
        trip, resumed = self._round_trips.shortest, self._jump.phase
        return ControllerState(
            phase=self.phase.value if resumed is ResumePhase.NORMAL else resumed.value,
            window=self.window,
            pacing_rate=self.pacing_rate,
            bandwidth=self.bandwidth or None,
            rtt_min=None if trip == inf else trip,
            inflight_high=None if self._inflight_high == inf else int(self._inflight_high),
        )

    # ---- the model

    def _acknowledged(self, sample: Sample, departure: Departure) -> None:
        self._acked_in_round += sample.acked
        rate = sample.rate
        if rate is not None:
            self._latest_bandwidth = max(self._latest_bandwidth, rate)
        self._latest_inflight = max(self._latest_inflight, sample.delivered - departure.delivered)
        self._round_started = departure.delivered >= self._round_ends
        if self._round_started:
            self._start_round(sample)
            self._rounds_since_probe += 1
            self._limited_in_round, self._window_limited = self._window_limited, False
        if rate is not None and (not departure.app_limited or rate >= self._max_bandwidth.value):
            self._max_bandwidth.take(rate)
        loss_round = departure.delivered >= self._loss_round_ends
        if loss_round:
            self._loss_round_ends = sample.delivered
            self._close_loss_round(sample.lost_ever)
        self._extra_acked.take(
            sample.now, sample.acked, self.bandwidth, self.window, self._round_started
        )
        self._check_full(rate, departure)
        if self.phase is Phase.STARTUP and self._pipe_was_full:
            self._enter(Phase.DRAIN)
        if self.phase is Phase.DRAIN and sample.in_flight <= self._inflight(1.0):
            self._probe_down(sample)
        if self._pipe_was_full:
            self._adapt_upper_bounds(sample, departure)
            if self.phase in PROBING:
                self._turn_cycle(sample, rate)
        if sample.rtt is not None:
            self._round_trips.take(sample.rtt, sample.now)
        self._check_probe_rtt(sample)
        if loss_round:
            self._latest_bandwidth = rate or 0.0
            self._latest_inflight = sample.delivered - departure.delivered

    def _start_round(self, sample: Sample) -> None:
        self._round_ends = sample.delivered

    def _check_full(self, rate: float | None, departure: Departure) -> None:
        """Whether the bandwidth has stopped growing (section 5.3.1.2)."""
        if self._pipe_full_now or departure.app_limited or rate is None:
            return
        if rate >= self._full_bandwidth * GROWTH:
            self._look_for_more(rate)
        elif self._round_started:
            self._full_rounds += 1
            self._pipe_full_now = self._full_rounds >= FULL_ROUNDS
            self._pipe_was_full = self._pipe_was_full or self._pipe_full_now

    def _look_for_more(self, rate: float) -> None:
        self._pipe_full_now = False
        self._full_rounds = 0
        self._full_bandwidth = rate

    # ---- losses

    def too_many(self, lost: float, of: float) -> bool:
        """Whether so many octets lost are more than the threshold and chance make of a volume.

        The count of losses that come at random with the threshold's probability is thought to
        stay within `CHANCE` standard deviations; that of a volume of few packets says little.
        """
        expected = LOSS_THRESHOLD * of / self.size
        queued = self._latest_trip > QUEUE * self._round_trips.shortest
        chance = CHANCE_IN_QUEUE if queued else CHANCE
        return lost / self.size > expected + chance * sqrt(expected)

    def _lost(self, sample: Sample, newest: Departure) -> None:
        if self._lost_in_round == 0:
            self._loss_round_ends = max(self._loss_round_ends, sample.delivered)
            self._undo = self._bandwidth_low, self._inflight_low, self._inflight_high
            self._lost_before = sample.lost_ever - sample.lost
            self._lost_runs = 0
        self._lost_in_round += sample.lost
        self._lost_runs += sample.lost_runs
        if self._probe_counts and self.too_many(sample.lost_ever - newest.lost, newest.in_flight):
            self._inflight_too_high(sample, newest)

    def _inflight_too_high(self, sample: Sample, departure: Departure) -> None:
        """A probe has shown what is too much (section 5.5.10.2)."""
        self._probe_counts = False
        if not departure.app_limited:
            target = min(self._bdp(1.0), self.window)
            self._inflight_high = max(departure.in_flight, target * BETA)
        if self.phase is Phase.PROBE_UP:
            self._probe_down(sample)

    def _close_loss_round(self, lost_ever: int) -> None:
        """A round trip is over: did it lose too much for what is under way (section 5.5.10.3)?"""
        # What was only late meanwhile is not lost.
        lost = min(self._lost_in_round, max(0, lost_ever - self._lost_before))
        acked = self._acked_in_round
        self._lost_in_round = self._acked_in_round = 0
        if not self.too_many(lost, acked + lost):
            return
        if not self._pipe_was_full:
            if self.phase is Phase.STARTUP and self._lost_runs >= STARTUP_LOSSES:
                # As many losses as in a full pipe (section 5.3.1.3).
                self._pipe_was_full = self._left_by_loss = True
                self._inflight_high = max(self._bdp(1.0), self._latest_inflight)
            return
        if self.phase in (Phase.PROBE_REFILL, Phase.PROBE_UP):
            return
        if self._bandwidth_low == inf:
            self._bandwidth_low = self._max_bandwidth.value
        if self._inflight_low == inf:
            self._inflight_low = self.window
        self._bandwidth_low = max(self._latest_bandwidth, BETA * self._bandwidth_low)
        self._inflight_low = max(self._latest_inflight, BETA * self._inflight_low)

    def _validate(self, sample: Sample) -> None:
        """Whether the path carries what was remembered of it; at once, as too much is under way."""
        jump = self._jump
        jump.take(sample)
        if jump.on_trial and self.too_many(jump.lost, jump.arrived + jump.lost):
            jump.retreat(sample.now)
            self._pipe_was_full = True
            self._inflight_high = max(self._bdp(1.0), jump.arrived)
            self.window = max(jump.arrived // 2, at_once(INITIAL_WINDOW, self.size))
            self._enter(Phase.DRAIN)

    def _forget_short_term(self) -> None:
        self._bandwidth_low = self._inflight_low = inf

    def _adapt_upper_bounds(self, sample: Sample, departure: Departure) -> None:
        if self._feedback is Feedback.STARTING and self._round_started:
            self._feedback = Feedback.COMING
        if self._feedback is Feedback.STOPPING and self._round_started:
            self._probe_counts = False
            self._feedback = Feedback.NONE
            if self.phase in PROBING and not departure.app_limited:
                self._max_bandwidth.advance()
        if self.too_many(sample.lost_ever - departure.lost, departure.in_flight):
            if self._probe_counts:
                self._inflight_too_high(sample, departure)
            return
        if self._inflight_high == inf:
            return
        self._inflight_high = max(self._inflight_high, departure.in_flight)
        if self.phase is Phase.PROBE_UP:
            self._raise_bound(sample)

    def _raise_bound(self, sample: Sample) -> None:
        """Slowly at first, then twice as fast each round, while the bound is what binds."""
        if self._round_started:
            self._steepen()
        if not self._bound_binds():
            return
        self._up_acked += sample.acked
        if self._up_acked >= self._up_octets:
            steps = int(self._up_acked // self._up_octets)
            self._up_acked -= int(steps * self._up_octets)
            self._inflight_high += steps * self.size

    def _steepen(self) -> None:
        packets = 1 << self._up_rounds
        self._up_rounds = min(self._up_rounds + 1, 30)
        self._up_octets = max(self.window / packets, self.size)

    def _bound_binds(self) -> bool:
        limited = self._window_limited or self._limited_in_round
        return limited and self.window >= self._inflight_high

    # ---- the cycle of probes for bandwidth

    def _turn_cycle(self, sample: Sample, rate: float | None) -> None:
        now, phase = sample.now, self.phase
        if phase is Phase.PROBE_DOWN:
            if self._is_time_to_probe(now):
                self._refill(sample)
            elif sample.in_flight <= min(self._with_headroom(), self._inflight(1.0)):
                self._enter(Phase.PROBE_CRUISE)
        elif phase is Phase.PROBE_CRUISE:
            if self._is_time_to_probe(now):
                self._refill(sample)
        elif phase is Phase.PROBE_REFILL:
            if self._round_started:
                self._probe_counts = True
                self._probe_up(sample, rate)
        elif self._bound_binds():
            self._look_for_more(rate or 0.0)
        elif self._pipe_full_now:
            self._probe_down(sample)

    def _is_time_to_probe(self, now: float) -> bool:
        rounds = min(min(self._bdp(1.0), self.window) / self.size, MOST_ROUNDS)
        return now > self._cycle_began + self._wait or self._rounds_since_probe >= rounds

    def _probe_down(self, sample: Sample) -> None:
        self._lost_in_round = self._acked_in_round = 0
        self._latest_bandwidth, self._latest_inflight = 0.0, 0
        self._up_octets = inf
        self._rounds_since_probe = int(self._random() * 2)
        self._wait = PROBE_WAIT + self._random()
        self._cycle_began = sample.now
        self._feedback = Feedback.STOPPING
        self._start_round(sample)
        self._enter(Phase.PROBE_DOWN)

    def _refill(self, sample: Sample) -> None:
        self._left_by_loss = False
        self._forget_short_term()
        self._up_rounds = self._up_acked = 0
        self._feedback = Feedback.REFILLING
        self._start_round(sample)
        self._enter(Phase.PROBE_REFILL)

    def _probe_up(self, sample: Sample, rate: float | None) -> None:
        self._feedback = Feedback.STARTING
        self._start_round(sample)
        self._look_for_more(rate or 0.0)
        self._steepen()
        self._enter(Phase.PROBE_UP)

    # ---- probing for the round trip

    def _check_probe_rtt(self, sample: Sample) -> None:
        trips = self._round_trips
        if trips.due and self.phase is not Phase.PROBE_RTT and not self._idle_restart:
            self._saved_window = self.window
            trips.begin_probe()
            self._feedback = Feedback.STOPPING
            self._start_round(sample)
            self._enter(Phase.PROBE_RTT)
        if self.phase is Phase.PROBE_RTT:
            if not trips.probing:
                if sample.in_flight <= self._probe_rtt_window():
                    trips.hold(sample.now)
                    self._start_round(sample)
            elif self._round_started:
                trips.round_done = True
            self._check_probe_rtt_done(sample.now, sample)
        if sample.acked:
            self._idle_restart = False

    def _check_probe_rtt_done(self, now: float, sample: Sample | None = None) -> None:
        if not self._round_trips.is_done(now):
            return
        self._round_trips.end_probe(now)
        self.window = max(self.window, self._saved_window)
        self._forget_short_term()
        if not self._pipe_was_full:
            self._enter(Phase.STARTUP)
            return
        if sample is not None:
            self._probe_down(sample)
        self._enter(Phase.PROBE_CRUISE)

    # ---- what follows from the model

    def _enter(self, phase: Phase) -> None:
        self.phase = phase

    def _bdp(self, gain: float) -> float:
        """Octets that fill the path, times `gain`."""
        trip = self._round_trips.shortest
        bandwidth = self.bandwidth
        if trip == inf or not bandwidth:
            return gain * at_once(INITIAL_WINDOW, self.size)
        return gain * bandwidth * trip

    def _inflight(self, gain: float, more: float = 0.0) -> float:
        """Octets under way for `gain` of the path's volume, with what batches need."""
        octets = max(
            self._bdp(gain) + more,
            TRAINS * int((self.pacing_rate or 0.0) * PACING_TICK),
            at_once(MINIMUM_WINDOW, self.size),
        )
        return octets + 2 * self.size if self.phase is Phase.PROBE_UP else octets

    def _with_headroom(self) -> float:
        high = self._inflight_high
        if high == inf:
            return inf
        return max(high - max(self.size, HEADROOM * high), at_once(MINIMUM_WINDOW, self.size))

    def _probe_rtt_window(self) -> float:
        return max(self._bdp(WINDOW_GAINS[Phase.PROBE_RTT]), at_once(MINIMUM_WINDOW, self.size))

    def _set_pace(self, gain: float | None = None) -> None:
        if gain is None:
            gain = PACING_GAINS[self.phase]
        trip = self._round_trips.shortest
        if trip < SHORT_PATH:
            gain = max(gain, SHORT_PATH_GAIN)
        rate = gain * self.bandwidth * MARGIN
        if trip < inf and not self._pipe_was_full:
            # Before the first rate is measured: the window over the round trip.
            rate = max(rate, self.pacing_rate or STARTUP_GAIN * self.window / trip)
        if rate:
            self.pacing_rate = rate
            self.quantum = quantum(rate, self.size)

    def _set_window(self, sample: Sample) -> None:
        most = self._inflight(WINDOW_GAINS[self.phase], self._extra_acked.value)
        if self._pipe_was_full:
            window = min(self.window + sample.acked, most)
        elif self._jump.phase is ResumePhase.NORMAL and (
            self.window < most or sample.delivered < at_once(INITIAL_WINDOW, self.size)
        ):
            window = self.window + sample.acked
        else:
            window = self.window
        bound = inf
        if self.phase is Phase.PROBE_RTT:
            window = min(window, self._probe_rtt_window())
            bound = self._with_headroom()
        elif self.phase is Phase.PROBE_CRUISE:
            bound = self._with_headroom()
        elif self.phase in PROBING:
            bound = self._inflight_high
        bound = min(bound, self._inflight_low)
        self.window = int(max(min(window, bound), at_once(MINIMUM_WINDOW, self.size)))
