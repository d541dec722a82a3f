"""The parts of congestion control by themselves: pacing, rates of delivery, filters, windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.quic.congestion.algorithms import Algorithm, create_controller
from moqt.quic.congestion.bbr import Bbr
from moqt.quic.congestion.bbr_model import BandwidthFilter, ExtraAcked, RoundTrips
from moqt.quic.congestion.controller import PACING_TICK, Controller, Departure, Sample
from moqt.quic.congestion.delivery import Delivery
from moqt.quic.congestion.losses import REMEMBERED, LostPackets
from moqt.quic.congestion.pacer import LATENESS, Pacer

SIZE = 1200
TRIP = 0.1


# ---- the pacer


def paced(rate: float = 1.2e6, quantum: int = 12_000) -> Pacer:
    pacer = Pacer(SIZE)
    pacer.set_rate(rate, quantum, 1.0, TRIP)
    return pacer


def test_without_a_rate_all_may_go() -> None:
    pacer = Pacer(SIZE)
    pacer.spend(10**9)
    assert pacer.next_send_time(1.0) is None
    assert pacer.allowance(1.0) > 10**6


def test_a_pause_saves_up_one_quantum_and_no_more() -> None:
    pacer = paced()
    assert pacer.allowance(50.0) == 10


def test_trains_of_a_millisecond_leave_at_the_rate() -> None:
    pacer = paced()
    now, sent, trains = 1.0, 0, 0
    pacer.spend(12_000)
    while now < 2.0:
        count = pacer.allowance(now)
        pacer.spend(count * SIZE)
        sent += count
        trains += 1
        assert count <= 2
        at = pacer.next_send_time(now)
        assert at is not None and at > now
        now = at
    assert sent * SIZE == pytest.approx(1.2e6, rel=0.01)
    assert trains <= 1001


@given(
    rate=st.floats(1e3, 1e9),
    steps=st.lists(st.floats(0, 0.02), min_size=1, max_size=50),
)
def test_never_more_than_the_rate_and_a_quantum_leaves(rate: float, steps: list[float]) -> None:
    quantum = max(12_000, int(rate * 0.002))
    pacer = paced(rate, quantum)
    now, sent = 1.0, 0
    for step in steps:
        now += step
        count = min(pacer.allowance(now), 1 << 20)
        assert count * SIZE <= quantum + rate * LATENESS + SIZE
        pacer.spend(count * SIZE)
        sent += count * SIZE
        pacer.next_send_time(now)
    assert sent <= quantum + rate * (now - 1.0) + SIZE


def test_a_loop_that_comes_late_makes_up_for_it_and_tells_when_it_is_too_late() -> None:
    for late, told in ((LATENESS / 2, False), (LATENESS * 3, True)):
        pacer = paced()
        pacer.spend(12_000)
        at = pacer.next_send_time(1.0)
        assert at is not None
        due = pacer.allowance(at + late) * SIZE
        assert due >= 1.2e6 * min(late, LATENESS)
        assert pacer.late is told


def test_where_acknowledgements_are_sooner_than_the_next_train_the_window_alone_paces() -> None:
    pacer = paced()
    pacer.spend(12_000)
    assert pacer.allowance(1.0) == 0
    pacer.set_rate(1.2e6, 12_000, 1.0, PACING_TICK / 2)
    assert pacer.allowance(1.0) > 10**6
    assert pacer.next_send_time(1.0) is None
    pacer.set_rate(1.2e6, 12_000, 1.0, PACING_TICK * 2)  # another path
    assert pacer.allowance(1.0) == 10


def test_what_the_window_holds_back_does_not_make_the_pacer_late() -> None:
    pacer = paced()
    pacer.spend(12_000)
    assert pacer.next_send_time(1.0) is not None
    pacer.released()  # then the window was full
    assert pacer.allowance(2.0) == 10
    assert not pacer.late


def test_what_leaves_without_asking_is_owed_no_longer_than_a_quantum_takes() -> None:
    pacer = paced()
    for _ in range(1000):
        pacer.spend(SIZE)  # with ACKs
    at = pacer.next_send_time(1.0)
    assert at is not None and at <= 1.0 + 0.012


# ---- rates of delivery


def test_the_rate_is_what_was_delivered_over_the_round_trip_of_a_packet() -> None:
    delivery = Delivery()
    trains = [delivery.sent(1000, 1.0 + index * 0.01) for index in range(10)]
    for index, train in enumerate(trains):
        delivery.acked(1000, train, 1.1 + index * 0.01)
    later = delivery.sent(1000, 1.2)
    delivery.acked(1000, later, 1.3)
    assert delivery.rate(later, 0.1) == pytest.approx(1000 / 0.11, rel=0.1)
    assert trains[9].delivered == 0
    assert delivery.in_flight == 0


def test_acknowledgements_in_a_heap_do_not_make_the_path_faster() -> None:
    delivery = Delivery()
    trains = [delivery.sent(1000, 1.0 + index * 0.01) for index in range(10)]
    delivery.acked(10_000, trains[-1], 1.1)
    rate = delivery.rate(trains[-1], 0.01)
    assert rate is not None and rate <= 10_000 / 0.09


def test_over_less_than_the_shortest_round_trip_no_rate_is_told() -> None:
    delivery = Delivery()
    train = delivery.sent(1000, 1.0)
    delivery.acked(1000, train, 1.05)
    assert delivery.rate(train, 0.1) is None


def test_what_an_application_did_not_fill_is_marked_until_it_is_delivered() -> None:
    delivery = Delivery()
    first = delivery.sent(1000, 1.0)
    delivery.limited_by_application()
    marked = delivery.sent(1000, 1.01)
    delivery.acked(1000, first, 1.1)
    still = delivery.sent(1000, 1.11)
    delivery.acked(1000, marked, 1.12)
    free = delivery.sent(1000, 1.2)
    assert [each.app_limited for each in (first, marked, still, free)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_train_has_one_record_for_all_of_its_packets() -> None:
    delivery = Delivery()
    first = delivery.sent(1000, 1.0)
    assert delivery.sent(1000, 1.0) is first
    assert first.in_flight == 2000
    assert delivery.sent(1000, 1.1) is not first


def test_a_train_that_leaves_when_nothing_is_under_way_counts_itself() -> None:
    delivery = Delivery()
    train = delivery.sent(0, 1.0)  # it is built and leaves only then
    assert delivery.sent(1000, 1.0) is train
    assert train.in_flight == 1000


# ---- what is remembered


def test_lost_packets_are_remembered_up_to_a_number_and_a_time() -> None:
    lost = LostPackets()
    for number in range(2 * REMEMBERED):
        lost.add(number, SIZE, float(number))
    assert len(lost) == REMEMBERED
    lost.forget(2 * REMEMBERED - 3.0)
    assert len(lost) == 3
    last = 2 * REMEMBERED - 1
    assert lost.came([range(last - 1), range(last, last + 1)]) == [SIZE, SIZE]
    assert len(lost) == 1


def test_the_most_bandwidth_is_that_of_two_cycles() -> None:
    rates = BandwidthFilter()
    rates.take(5.0)
    rates.advance()
    rates.take(3.0)
    assert rates.value == 5.0
    rates.advance()
    assert rates.value == 3.0
    rates.advance()  # nothing was measured meanwhile: that is no reason to forget
    assert rates.value == 3.0


def test_the_shortest_round_trip_is_believed_for_ten_seconds() -> None:
    trips = RoundTrips()
    trips.take(0.02, 1.0)
    for second in range(2, 11):
        trips.take(0.2, float(second))
    assert trips.shortest == 0.02
    trips.take(0.2, 11.5)
    assert trips.shortest == 0.2


def test_a_heap_of_acknowledgements_widens_the_window_for_ten_rounds_and_has_a_bound() -> None:
    extra = ExtraAcked()
    extra.restart(1.0)
    extra.take(1.01, 50_000, 1e6, 1e9, True)
    assert extra.value == 50_000
    extra.take(1.011, 200_000, 1e6, 1e9, False)
    assert extra.value == 1e6 * 0.1
    for index in range(10):
        extra.take(2.0 + index, 0, 1e6, 1e9, True)
    assert extra.value == 0


# ---- windows


def sample(now: float, *, acked: int = 0, lost: int = 0, sent: float = 0.0) -> Sample:
    departure = Departure(sent, 0, 0.0, 0.0, 0, False)
    departure.in_flight = 20 * SIZE
    return Sample(
        now=now,
        acked=acked,
        lost=lost,
        lost_runs=int(lost > 0),
        in_flight=10 * SIZE,
        delivered=acked,
        lost_ever=lost,
        departure=departure if acked else None,
        newest_loss=departure if lost else None,
        rate=None,
        rtt=0.1 if acked else None,
        rtt_smoothed=0.1,
        window_limited=True,
    )


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_each_starts_with_ten_packets_and_doubles_in_a_round_trip(algorithm: str) -> None:
    controller: Controller = create_controller(algorithm, SIZE)
    assert controller.window == 10 * SIZE
    assert controller.pacing_rate is None  # the first flight is not paced
    controller.on_acks(sample(1.1, acked=10 * SIZE, sent=1.0))
    assert controller.window == 20 * SIZE
    assert controller.pacing_rate is not None and controller.pacing_rate >= 20 * SIZE / 0.1


@pytest.mark.parametrize(("algorithm", "left"), [("reno", 0.5), ("cubic", 0.7)])
def test_all_losses_of_a_round_trip_reduce_the_window_once(algorithm: str, left: float) -> None:
    controller = create_controller(algorithm, SIZE)
    for now in (2.0, 2.01, 2.05):
        controller.on_acks(sample(now, lost=SIZE, sent=1.9))
    assert controller.window == pytest.approx(10 * SIZE * left, abs=1)
    controller.on_acks(sample(2.2, lost=SIZE, sent=2.1))
    assert controller.window == pytest.approx(10 * SIZE * left * left, abs=2)


@pytest.mark.parametrize("algorithm", ["reno", "cubic"])
def test_the_window_grows_again_after_a_loss(algorithm: str) -> None:
    controller = create_controller(algorithm, SIZE)
    controller.on_acks(sample(2.0, lost=SIZE, sent=1.9))
    before = controller.window
    for index in range(60):
        now = 2.2 + index / 10
        controller.on_acks(sample(now, acked=controller.window, sent=now - 0.1))
    assert controller.window >= 2 * before


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_the_first_window_grows_with_the_packets_up_to_those_of_ethernet(algorithm: str) -> None:
    for size, window in ((1452, 14_520), (8952, 17_904)):
        controller = create_controller(algorithm, SIZE)
        controller.on_new_size(size)
        assert controller.window == window


def test_bbr_takes_a_few_losses_for_chance_and_many_for_too_many() -> None:
    bbr = Bbr(SIZE)
    thousand = 1000 * SIZE
    assert not bbr.too_many(20 * SIZE, thousand)
    assert not bbr.too_many(30 * SIZE, thousand)
    assert bbr.too_many(40 * SIZE, thousand)
    assert not bbr.too_many(2 * SIZE, 20 * SIZE)
    assert bbr.too_many(4 * SIZE, 20 * SIZE)
