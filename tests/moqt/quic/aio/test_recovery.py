"""Loss detection: what is given up and when, what is sent again, and what it costs (RFC 9002)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.tls import Epoch
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.quic.aio.recovery import Recovery
from moqt.quic.congestion.algorithms import Algorithm
from moqt.quic.packets.sent import SentPacket

SIZE = 1200
TRIP = 0.1
ACKED, LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST


class Sender:
    """A connection's sending half in the 1-RTT space: its packets and what became of each."""

    def __init__(self, algorithm: str = "reno") -> None:
        self.probes = 0
        self.recovery = Recovery(
            algorithm=algorithm,
            initial_rtt=TRIP,
            max_datagram_size=SIZE,
            peer_completed_address_validation=True,
            send_probe=self._probe,
        )
        self.recovery.handshake_confirmed = True
        self.space = QuicPacketSpace(is_application_data=True)
        self.recovery.spaces = [self.space]
        self.fates: list[list[QuicDeliveryState]] = []

    def _probe(self) -> None:
        self.probes += 1

    def send(
        self, now: float, count: int = 1, *, eliciting: bool = True, kind: Any = QuicSentPacket
    ) -> None:
        for _ in range(count):
            fate: list[QuicDeliveryState] = []
            packet = kind(
                epoch=Epoch.ONE_RTT,
                in_flight=eliciting,
                is_ack_eliciting=eliciting,
                is_crypto_packet=False,
                packet_number=len(self.fates),
                packet_type=None,
            )
            packet.sent_time, packet.sent_bytes = now, SIZE if eliciting else 40
            packet.delivery_handlers = [(fate.append, ())]
            self.fates.append(fate)
            self.recovery.on_packet_sent(packet=packet, space=self.space)

    def send_train(self, now: float, count: int) -> None:
        """`count` packets alike leave as one run, each with an octet of a stream."""

        def settle(delivery: QuicDeliveryState, start: int, stop: int, fin: bool) -> None:
            assert fin == (stop == last)
            for number in range(start, stop):
                self.fates[number].append(delivery)

        first = len(self.fates)
        last = first + count
        self.fates += [[] for _ in range(count)]
        departure = self.recovery.depart(now)
        handlers = [(settle, (first, last, True))]
        run = SentPacket(first, SIZE * count, handlers, now, departure, count)
        self.recovery.departed([run], count, SIZE * count, now, self.space)

    def ack(self, now: float, *numbers: int) -> None:
        ranges = RangeSet()
        for number in numbers:
            ranges.add(number)
        self.recovery.on_ack_received(ack_rangeset=ranges, ack_delay=0.0, now=now, space=self.space)

    @property
    def timer(self) -> float | None:
        return self.recovery.get_loss_detection_time(amplification_limited=False)

    def wait(self) -> float:
        """Let the timer run off; when that is."""
        at = self.timer
        assert at is not None
        self.recovery.on_loss_detection_timeout(now=at + 1e-6)
        return at

    @property
    def lost(self) -> list[int]:
        return [number for number, fate in enumerate(self.fates) if fate == [LOST]]


def test_a_packet_with_three_acknowledged_after_it_is_lost_where_the_order_is_kept() -> None:
    sender = Sender()
    sender.send(1.0, 5)
    sender.ack(1.1, 0)
    sender.ack(1.1, 3)
    assert sender.lost == []
    sender.ack(1.1, 4)
    assert sender.lost == [1]
    assert sender.recovery.bytes_in_flight == SIZE


def test_where_packets_overtake_each_other_they_are_given_time_and_not_three_packets() -> None:
    sender = Sender()
    sender.send(1.0, 10)
    sender.ack(1.1, 0, 2)
    sender.ack(1.101, 1)  # it was overtaken
    sender.ack(1.102, 9)
    assert sender.lost == []
    assert sender.timer == pytest.approx(1.0 + TRIP * 1.25, abs=0.003)
    sender.wait()
    assert sender.lost == [3, 4, 5, 6, 7, 8]


def test_a_packet_that_comes_after_it_was_found_lost_gives_the_window_back() -> None:
    sender = Sender()
    sender.send(1.0, 10)
    before = sender.recovery.congestion_window
    sender.ack(1.1, 9)
    assert sender.lost == [0, 1, 2, 3, 4, 5, 6]
    assert sender.recovery.congestion_window < before
    sender.ack(1.11, 0, 1, 2, 3, 4, 5, 6, 9)
    assert sender.recovery.congestion_window >= before
    assert sender.recovery.spurious_losses == 7
    assert sender.recovery.take_news() == (7, 7)
    assert sender.recovery.take_news() == (0, 0)
    assert all(fate == [LOST] for fate in sender.fates[:7])  # its handlers hear nothing twice


def test_one_real_loss_among_spurious_ones_keeps_its_consequence() -> None:
    sender = Sender()
    sender.send(1.0, 10)
    before = sender.recovery.congestion_window
    sender.ack(1.1, 9)
    sender.ack(1.11, 0, 1, 2, 3, 4, 6, 9)
    assert sender.recovery.congestion_window < before


def test_the_time_that_overtaken_packets_get_grows_with_each_round_trip_that_it_was_too_short() -> (
    None
):
    sender = Sender()
    now = 1.0
    delays = []
    for _ in range(3):
        first = len(sender.fates)
        sender.send(now, 10)
        sender.ack(now + TRIP, first + 9)
        at = sender.timer
        if at is not None:
            delays.append(at - now)
            at = sender.wait()
        late = range(first, first + 7)
        sender.ack(max(now + TRIP, at or 0) + 0.001, *late, first + 7, first + 8, first + 9)
        now += 10 * TRIP
    assert delays == sorted(delays)
    assert delays[-1] > delays[0] + TRIP / 8


def test_a_probe_timeout_sends_the_oldest_data_again_and_finds_nothing_lost() -> None:
    sender = Sender()
    sender.send(1.0, 4)
    sender.ack(1.1, 0)
    sender.wait()
    assert sender.probes == 1
    assert sender.fates[1:] == [[LOST], [], []]
    assert sender.recovery.bytes_in_flight == 3 * SIZE
    assert sender.recovery.lost_packets == 0
    window = sender.recovery.congestion_window
    sender.wait()
    assert sender.fates[1:] == [[LOST], [LOST], []]  # the next oldest
    sender.ack(2.0, 1, 2, 3)
    assert sender.fates[1:] == [[LOST], [LOST], [ACKED]]
    assert sender.recovery.bytes_in_flight == 0
    assert sender.recovery.congestion_window >= window


def test_acknowledgements_alone_are_not_what_a_probe_timeout_sends_again() -> None:
    sender = Sender()
    sender.send(1.0)
    sender.ack(1.1, 0)
    sender.send(1.2, 3, eliciting=False)
    sender.send(1.2)
    sender.wait()
    assert sender.fates[1:] == [[], [], [], [LOST]]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_what_went_over_another_path_says_nothing_of_the_new_one(algorithm: str) -> None:
    sender = Sender(algorithm)
    sender.send(1.0, 50)
    sender.ack(1.1, *range(50))
    sender.send(1.2, 10)
    recovery = sender.recovery
    recovery.begin_path(1.25)
    assert (recovery.congestion_window, recovery.bytes_in_flight) == (10 * SIZE, 0)
    assert recovery.state().rtt_min is None and recovery.controller.pacing_rate is None
    sender.ack(1.3, 59)  # seven are lost with it
    sender.wait()
    assert sender.lost == list(range(50, 59))
    assert (recovery.congestion_window, recovery.bytes_in_flight) == (10 * SIZE, 0)
    assert recovery.state().rtt_min is None
    sender.send(2.0, 10)
    sender.ack(2.3, *range(60, 70))
    assert recovery.state().rtt_min == pytest.approx(0.3)
    assert recovery.congestion_window == 20 * SIZE


def test_each_probe_timeout_in_a_row_waits_twice_as_long() -> None:
    sender = Sender()
    sender.send(1.0, 4)
    sender.ack(1.02, 0)
    waits = [sender.wait() - 1.0 for _ in range(3)]
    assert waits[1] == pytest.approx(2 * waits[0])
    assert waits[2] == pytest.approx(4 * waits[0])


def test_however_long_the_silence_the_next_probe_is_a_second_away_at_most() -> None:
    sender = Sender()
    sender.send(1.0, 9)
    sender.ack(1.1, 0)
    for _ in range(8):
        at = sender.wait()
        sender.send(at)
    assert sender.timer is not None and sender.timer - at == pytest.approx(1.0)


def test_probes_of_a_path_with_a_long_round_trip_stay_two_timeouts_apart() -> None:
    sender = Sender()
    sender.send(1.0, 9)
    sender.ack(2.5, 0)
    for _ in range(8):
        at = sender.wait()
        sender.send(at)
    timeout = sender.recovery.get_probe_timeout()
    assert sender.timer is not None and sender.timer - at == pytest.approx(2 * timeout)


def blackout(sender: Sender, length: float, packets: int, spared: int | None = None) -> None:
    """Packets over `length` seconds of which none arrives but `spared`, and one that does."""
    sender.send(1.0)
    sender.ack(1.1, 0)
    for index in range(packets):
        sender.send(2.0 + length * index / (packets - 1))
    sender.send(2.0 + length)
    if spared is not None:
        sender.ack(2.0 + length + TRIP, spared)
    sender.ack(2.0 + length + TRIP, len(sender.fates) - 1)
    if sender.timer is not None and len(sender.lost) < packets - 1:
        sender.wait()


def test_nothing_arriving_for_three_probe_timeouts_is_persistent_congestion() -> None:
    sender = Sender()
    blackout(sender, 2.0, 8)
    assert sender.recovery.congestion_window == 2 * SIZE


def test_a_shorter_silence_is_not() -> None:
    sender = Sender()
    blackout(sender, 0.5, 8)
    assert sender.recovery.congestion_window > 2 * SIZE


def test_one_packet_that_arrives_in_the_middle_breaks_the_silence() -> None:
    sender = Sender()
    blackout(sender, 1.5, 9, spared=5)
    assert sender.recovery.congestion_window > 2 * SIZE


def test_probes_in_a_silence_do_not_hide_it() -> None:
    sender = Sender()
    sender.send(1.0)
    sender.ack(1.1, 0)
    sender.send(2.0, 3)
    for _ in range(4):
        at = sender.wait()
        sender.send(at)
    sender.ack(at + TRIP, len(sender.fates) - 1)
    if sender.lost != list(range(1, len(sender.fates) - 1)):
        sender.wait()
    assert sender.recovery.congestion_window == 2 * SIZE


def test_silence_is_recognised_when_acknowledgements_tell_of_it_piece_by_piece() -> None:
    sender = Sender()
    sender.send(1.0)
    sender.ack(1.1, 0)
    for at in (2.0, 2.5, 2.92, 2.92):
        sender.send(at)
    sender.ack(2.92 + TRIP, 4)
    assert sender.lost == [1, 2]
    assert sender.recovery.congestion_window > 2 * SIZE
    sender.wait()
    assert sender.lost == [1, 2, 3]
    assert sender.recovery.congestion_window == 2 * SIZE


def test_an_acknowledged_packet_of_acknowledgements_alone_settles_the_others_with_it() -> None:
    sender = Sender()
    sender.send(1.0, 3)
    sender.send(1.0, eliciting=False)
    sender.ack(1.1, 0, 1, 2, 3)
    assert sender.recovery.bytes_in_flight == 0


def test_an_acknowledgement_that_comes_late_takes_no_timer_from_what_is_missing() -> None:
    sender = Sender()
    sender.send(1.0, 4)
    sender.ack(1.1, 3)
    assert sender.timer is not None and sender.timer < 1.0 + 2 * TRIP
    sender.ack(1.101, 1)  # sent before 2, which is missing
    assert sender.timer is not None and sender.timer < 1.0 + 2 * TRIP


class Counted(QuicSentPacket):
    """A packet that counts how often its number is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "packet_number":
            Counted.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("flight", [100, 10_000])
def test_an_acknowledgement_costs_what_it_acknowledges_and_not_what_is_under_way(
    flight: int,
) -> None:
    sender = Sender()
    sender.send(1.0, flight, kind=Counted)
    Counted.looks = 0
    for number in range(0, 50, 2):
        sender.ack(1.1, number, number + 1)
    assert Counted.looks <= 25 * 10


def test_a_run_is_one_entry_until_an_acknowledgement_parts_it() -> None:
    sender = Sender()
    sender.send_train(1.0, 10)
    sender.send_train(1.0, 10)
    assert len(sender.space.sent_packets) == 2
    sender.ack(1.1, *range(10), 11, 12)
    assert [fate == [ACKED] for fate in sender.fates] == [
        number < 10 or number in (11, 12) for number in range(20)
    ]
    assert [(p.packet_number, p.count) for p in sender.space.sent_packets] == [(10, 1), (13, 7)]
    assert sender.recovery.bytes_in_flight == 8 * SIZE
    assert sender.space.ack_eliciting_in_flight == 8


def test_of_a_run_those_packets_are_lost_that_three_acknowledged_ones_overtook() -> None:
    sender = Sender()
    sender.send(1.0)
    sender.send_train(1.0, 10)
    sender.ack(1.1, 0)
    sender.ack(1.1, 8)
    assert sender.lost == [1, 2, 3, 4, 5]
    assert sender.recovery.lost_packets == 5
    assert sender.timer is not None and sender.timer < 1.0 + 2 * TRIP
    sender.wait()
    assert sender.lost == [1, 2, 3, 4, 5, 6, 7]
    sender.ack(1.2, 3)  # it was late
    assert sender.recovery.take_news() == (7, 1)


def test_a_probe_has_the_oldest_packet_of_a_run_and_the_run_stays_under_way() -> None:
    sender = Sender()
    sender.send_train(1.0, 10)
    sender.wait()
    assert sender.probes == 1
    assert sender.lost == [0]
    assert sender.recovery.bytes_in_flight == 10 * SIZE
    sender.wait()
    assert sender.lost == [0, 1]


def test_under_a_peer_that_acknowledges_every_second_packet_what_is_kept_is_what_is_missing() -> (
    None
):
    sender = Sender()
    sender.send_train(1.0, 2)
    sender.ack(1.1, 1)
    sender.ack(1.1, 0)  # overtaken: those missing are given time from now on
    sender.send_train(1.1, 1000)
    sender.ack(1.2, *range(2, 1002, 2))
    assert sender.lost == []
    assert len(sender.space.sent_packets) == sender.space.ack_eliciting_in_flight == 500
    sender.wait()
    assert sender.lost == list(range(3, 1001, 2))  # the last was overtaken by none
    assert len(sender.space.sent_packets) == 1


STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 5)),
    st.tuples(st.just("train"), st.integers(1, 20)),
    st.tuples(st.just("ack"), st.sets(st.integers(0, 40), min_size=1, max_size=12)),
    st.tuples(st.just("timer"), st.just(0)),
    st.tuples(st.just("time"), st.floats(0.0, 0.3)),
)


@given(steps=st.lists(STEPS, max_size=40), algorithm=st.sampled_from(list(Algorithm)))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_each_packet_is_settled_once_and_the_flight_is_what_was_not(
    steps: list[tuple[str, Any]], algorithm: str
) -> None:
    sender = Sender(algorithm)
    recovery, now = sender.recovery, 1.0
    for kind, value in steps:
        if kind == "send":
            sender.send(now, value)
        elif kind == "train":
            sender.send_train(now, value)
        elif kind == "ack":
            known = [number for number in value if number < len(sender.fates)]
            if known:
                sender.ack(now, *known)
        elif kind == "timer":
            if sender.timer is not None:
                now = max(now, sender.wait())
        else:
            now += value
        entries: Any = sender.space.sent_packets
        under_way = sum(packet.count for packet in entries)
        assert all(packet.sent_bytes == SIZE * packet.count for packet in entries)
        assert recovery.bytes_in_flight == SIZE * under_way >= 0
        assert recovery.congestion_window >= 2 * SIZE
        assert sender.space.ack_eliciting_in_flight == under_way
        assert all(len(fate) <= 1 for fate in sender.fates)
        pace = recovery.controller.pacing_rate
        assert pace is None or pace > 0
    # Until all is settled there is a timer; an ACK of everything settles the rest.
    if sender.space.sent_packets:
        assert sender.timer is not None
    if sender.fates:
        sender.ack(now + 0.1, *range(len(sender.fates)))
        assert recovery.bytes_in_flight == 0
        assert Counter(map(len, sender.fates)) == {1: len(sender.fates)}
