"""Which Object goes out next (MOQT "Priorities"): priorities, order, fairness, bounds."""

from __future__ import annotations

import itertools

import pytest

from moqt.delivery.scheduler import Delivery, Flow, Progress, Scheduler
from moqt.publisher import Publisher
from moqt.session import WRITE_QUANTUM, SessionConfig
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, ObjectStatus
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import blocked, entries, listeners, nothing_waits
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector, publish

STREAM_IDS = itertools.count()


class Load(Delivery):
    """Writes `amount` pieces; `log` tells the order over all loads."""

    def __init__(self, flow, log, name, amount, rank=(128,)):
        super().__init__(flow)
        self.log, self.name, self.amount, self._rank = log, name, amount, rank
        self.blocked = False
        self.stream_id = next(STREAM_IDS)

    def rank(self):
        return self._rank

    def write(self, limit):
        if self.blocked:
            return Progress.BLOCKED
        if not self.amount:
            return Progress.WAITING
        self.log.append(self.name)
        self.amount -= 1
        return Progress.MORE


def drain(scheduler, limit=1000):
    n = 0
    while scheduler.write_next(1):
        n += 1
        assert n <= limit
    return n


def test_subscriber_priority_goes_before_publisher_priority_before_order():
    scheduler, log = Scheduler(), []
    low, high = Flow(scheduler, 200), Flow(scheduler, 10)
    for load in (
        Load(low, log, "low urgent", 1, (0, 0)),
        Load(high, log, "high idle", 1, (255, 0)),
        Load(high, log, "high second", 1, (7, 2)),
        Load(high, log, "high first", 1, (7, 1)),
    ):
        scheduler.ready(load)
    drain(scheduler)
    assert log == ["high first", "high second", "high idle", "low urgent"]


def test_equal_flows_take_turns():
    scheduler, log = Scheduler(), []
    for name in "abc":
        scheduler.ready(Load(Flow(scheduler, 5), log, name, 10))
    drain(scheduler)
    assert log == ["a", "b", "c"] * 10


def test_of_two_requests_of_one_subscriber_priority_the_smaller_publisher_priority_goes_first():
    scheduler, log = Scheduler(), []
    for name, rank in (("later", (9, 0)), ("first", (8, 5)), ("last", (200, 0))):
        scheduler.ready(Load(Flow(scheduler, 5), log, name, 2, rank))
    drain(scheduler)
    assert log == ["first"] * 2 + ["later"] * 2 + ["last"] * 2


def test_a_request_with_much_to_send_gets_no_more_turns_than_one_with_little():
    scheduler, log = Scheduler(), []
    for name in "ab":
        flow = Flow(scheduler, 5)
        for _ in range(3):
            scheduler.ready(Load(flow, log, name, 2))
    drain(scheduler)
    assert log == ["a", "b"] * 6


def test_a_flow_that_keeps_getting_ready_is_not_sent_to_the_back_each_time():
    scheduler, log = Scheduler(), []
    busy, other = Flow(scheduler, 5), Flow(scheduler, 5)
    scheduler.ready(Load(other, log, "other", 100))
    for _ in range(20):
        scheduler.ready(Load(busy, log, "busy", 1))
        scheduler.ready(Load(busy, log, "busy", 1))
        scheduler.write_next(1)
        scheduler.write_next(1)
    assert 14 <= log.count("busy") <= 26


def test_flows_that_keep_coming_do_not_starve_one_that_waits():
    scheduler, log = Scheduler(), []
    scheduler.ready(Load(Flow(scheduler, 5), log, "first", 100))
    for _ in range(20):
        scheduler.ready(Load(Flow(scheduler, 5), log, "new", 3))
        scheduler.write_next(1)
    assert log.count("first") >= 2


def test_a_priority_change_takes_effect_at_the_next_piece():
    scheduler, log = Scheduler(), []
    a, b = Flow(scheduler, 1), Flow(scheduler, 2)
    scheduler.ready(Load(a, log, "a", 3))
    scheduler.ready(Load(b, log, "b", 3))
    scheduler.write_next(1)
    b.set_priority(0)
    drain(scheduler)
    assert log == ["a", "b", "b", "b", "a", "a"]


def test_a_changed_priority_reaches_what_waits_for_a_stream():
    granted, scheduler, log = [], Scheduler(), []

    class NeedsStream(Load):
        def write(self, limit):
            return super().write(limit) if granted else Progress.NO_STREAM

    flows = [Flow(scheduler, priority) for priority in (1, 2, 3)]
    for name, flow in enumerate(flows):
        scheduler.ready(NeedsStream(flow, log, name, 1))
    drain(scheduler)
    flows[2].set_priority(0)
    granted.append(True)
    scheduler.unblock(())
    drain(scheduler)
    assert log == [2, 0, 1] and nothing_waits(scheduler)


def test_what_is_blocked_is_no_candidate_until_credit_comes():
    scheduler, log = Scheduler(), []
    flow = Flow(scheduler, 1)
    load = Load(flow, log, "a", 1)
    load.blocked = True
    scheduler.ready(load)
    scheduler.ready(Load(Flow(scheduler, 9), log, "b", 1))
    assert scheduler.write_next(1) and log == ["b"]
    load.blocked = False
    assert not scheduler.write_next(1)
    scheduler.unblock([load.stream_id + 1])
    assert not scheduler.write_next(1)
    scheduler.unblock([load.stream_id])
    assert scheduler.write_next(1) and log == ["b", "a"]
    load.blocked, load.amount = True, 1
    scheduler.ready(load)
    scheduler.write_next(1)
    scheduler.forget(flow)
    scheduler.unblock([load.stream_id])
    assert not scheduler.write_next(1) and scheduler.idle


def test_void_entries_do_not_pile_up_while_nothing_can_be_sent():
    scheduler, log = Scheduler(), []
    flows = [Flow(scheduler, 1) for _ in range(10)]
    for flow in flows:
        scheduler.ready(Load(flow, log, "x", 1))
    for n in range(10000):
        flows[n % 10].set_priority(n % 251)
    assert len(entries(scheduler)) <= 256
    assert drain(scheduler) == 10


# -- with sessions -----------------------------------------------------------------------


class Order(Collector):
    """Tells the order in which Objects of several receivers came."""

    def __init__(self, log, name):
        super().__init__()
        self.log, self.name = log, name

    def object_received(self, received):
        super().object_received(received)
        if received.status is ObjectStatus.NORMAL:
            self.log.append((self.name, *received.location))


def tracks(count):
    publisher = Publisher()
    for n in range(count):
        publisher.add_track(TrackStore(FullTrackName((b"demo",), b"%d" % n)))
    return publisher


def publish_all(publisher, groups, **objects):
    for store in publisher.tracks.values():
        publish(store, groups, **objects)


def test_a_more_urgent_subscription_gets_everything_first():
    publisher = tracks(2)
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
    log = []
    for n, priority in ((0, 200), (1, 100)):
        pair.client.subscribe(
            FullTrackName((b"demo",), b"%d" % n),
            Order(log, n),
            Parameters(subscriber_priority=priority),
        )
    pair.run()
    publish_all(publisher, 4)
    pair.run()
    assert [name for name, *_ in log] == [1] * 16 + [0] * 16


def test_group_order_decides_inside_a_subscription_of_one_priority():
    for order in GroupOrder:
        publisher = Publisher()
        store = TrackStore(NAME)
        publisher.add_track(store)
        pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
        log = []
        pair.client.subscribe(NAME, Order(log, 0), Parameters(group_order=order))
        pair.run()
        for g in range(5):
            store.append(g, 0, b"x" * 100)
        pair.run()
        groups = [g for _, g, _ in log]
        assert groups == sorted(range(5), reverse=order is GroupOrder.DESCENDING)


def test_a_fill_in_another_order_goes_after_the_subscription_and_one_in_its_order_before():
    for order, first in ((GroupOrder.ASCENDING, 1), (GroupOrder.DESCENDING, 0)):
        publisher = Publisher()
        store = TrackStore(NAME)
        for o in range(3):
            store.append(5, o, b"x" * 100)
        publisher.add_track(store)
        pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
        vias = []

        class Vias(Collector):
            def object_received(self, received, vias=vias):
                vias.append(int(received.via))

        pair.client.subscribe(
            NAME,
            Vias(),
            Parameters(
                location_filter=LocationFilter.next_object(),
                fill_parameters=Parameters(
                    location_filter=LocationFilter.absolute_start(0), group_order=order
                ),
            ),
        )
        pair.client_transport.deliver()
        for o in range(3, 6):
            store.append(5, o, b"x" * 100)
        pair.run()
        assert sorted(vias) == [0, 0, 0, 1, 1, 1]
        assert vias[0] == first


def test_a_request_update_of_the_priority_takes_effect():
    publisher = tracks(2)
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
    log = []
    requests = [
        pair.client.subscribe(
            FullTrackName((b"demo",), b"%d" % n),
            Order(log, n),
            Parameters(subscriber_priority=n),
        )
        for n in range(2)
    ]
    pair.run()
    publish_all(publisher, 10, size=WRITE_QUANTUM)
    for _ in range(8):
        pair.server.ready_to_send()
        pair.client_transport.deliver()
        pair.server_transport.deliver()
    assert {name for name, *_ in log} == {0}
    before = len(log)
    assert before < 30
    requests[0].update(Parameters(subscriber_priority=9), lambda answer: None)
    pair.run()
    names = [name for name, *_ in log[before + 2 :]]
    assert names == sorted(names, reverse=True)


def test_at_most_one_quantum_of_a_large_object_goes_out_before_a_more_urgent_one():
    publisher = tracks(1)
    big, urgent = publisher.tracks[FullTrackName((b"demo",), b"0")], TrackStore(NAME)
    publisher.add_track(urgent)
    budget = 100_000
    pair = Pair(
        server=publisher,
        server_config=SessionConfig(send_budget=budget),
        stream_window=1 << 30,
    )
    got = Collector()
    pair.client.subscribe(big.name, Collector())
    pair.client.subscribe(NAME, got, Parameters(subscriber_priority=1))
    pair.run()
    big.append(0, 0, bytes(8 << 20))
    for _ in range(3):
        pair.client_transport.deliver()
        pair.server.ready_to_send()
    urgent.append(0, 0, b"now")
    pair.server.ready_to_send()
    assert budget <= pair.server_transport.unsent <= budget + WRITE_QUANTUM + 200
    before = len(got.objects)
    pair.server_transport.deliver()  # what was in QUIC already
    pair.server.ready_to_send()
    pair.server_transport.deliver()
    assert (before, len(got.objects)) == (0, 1)


def test_a_peer_that_never_reads_costs_the_send_budget_and_one_quantum_for_1_gib():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)
    pair = Pair(server=publisher, stream_window=1 << 40)
    pair.client.subscribe(NAME, Collector())
    pair.run()
    chunk = bytes(16 << 20)
    for g in range(64):
        store.append(g, 0, chunk)  # by reference: 1 GiB of payload, 16 MiB of memory
    assert store.octets == 1 << 30
    for _ in range(1000):
        pair.server.ready_to_send()
    config = pair.server.config
    most = pair.server_transport.max_unsent
    assert config.send_budget <= most <= config.send_budget + WRITE_QUANTUM + 1000
    pair.client.close()
    pair.client_transport.deliver()
    assert_clean(pair.server)
    assert not listeners(store)


@pytest.mark.parametrize("fetched", [False, True])
def test_a_turn_hands_over_as_many_small_objects_as_its_quantum_holds(fetched):
    publisher = tracks(1)
    (store,) = publisher.tracks.values()
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=0))
    got = Collector()
    if fetched:
        publish(store, 1, objects=100, size=1000)
        pair.client.fetch(store.name, got)
    else:
        pair.client.subscribe(store.name, got)
    pair.run()
    if not fetched:
        publish(store, 1, objects=100, size=1000)
    assert pair.server.scheduler.write_next(WRITE_QUANTUM)
    pair.server_transport.deliver()
    assert 60 <= len(got.objects) <= WRITE_QUANTUM // 1000


def test_a_turn_that_has_handed_something_over_is_the_last_before_the_budget_is_looked_at():
    publisher = tracks(8)
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=0))
    log = []
    for n, name in enumerate(publisher.tracks):
        pair.client.subscribe(name, Order(log, n))
    pair.run()
    for store in publisher.tracks.values():
        store.append(0, 0, b"all there is")
    for turns in range(1, 9):
        assert pair.server.scheduler.write_next(WRITE_QUANTUM)
        pair.server_transport.deliver()
        assert len(log) == turns
    assert not pair.server.scheduler.write_next(WRITE_QUANTUM)


def test_a_fetch_is_ranked_anew_before_an_object_of_another_priority():
    publisher = tracks(2)
    for store in publisher.tracks.values():
        for group, priority in ((0, 1), (1, 9)):
            store.append(group, 0, b"x", priority=priority)
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=0))
    log = []
    for n, name in enumerate(publisher.tracks):
        pair.client.fetch(name, Order(log, n))
    pair.run()
    while pair.server.scheduler.write_next(WRITE_QUANTUM):
        pair.server_transport.deliver()
    assert [group for _, group, _ in log] == [0, 0, 1, 1]


def test_a_stream_without_credit_does_not_hold_up_the_others():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)

    class Pausing(Collector):
        def stream_opened(self, stream):
            if stream.subgroup.group == 0:
                pair.client_transport.pause_receiving(stream.stream_id)
                self.paused = stream.stream_id

    pair = Pair(server=publisher, stream_window=100_000)
    collector = Pausing()
    pair.client.subscribe(NAME, collector)
    pair.run()
    store.append(0, 0, bytes(1 << 20))
    for g in range(1, 4):
        store.append(g, 0, b"small")
    pair.run()
    assert sorted(collector.locations) == [Location(g, 0) for g in (1, 2, 3)]
    pair.client_transport.resume_receiving(collector.paused)
    pair.run()
    assert len(collector.locations) == 4


class Streamless(Load):
    """Needs a stream for its first piece; `streams` counts what is left, `tries` the asking."""

    streams = tries = 0

    def write(self, limit):
        if self.amount == 1:
            Streamless.tries += 1
            if not Streamless.streams:
                return Progress.NO_STREAM
            Streamless.streams -= 1
        return super().write(limit)


def test_of_many_that_need_a_stream_one_asks_for_it_and_the_most_urgent_gets_it():
    Streamless.streams = Streamless.tries = 0
    scheduler, log = Scheduler(), []
    loads = [Streamless(Flow(scheduler, 200 - i), log, i, 1) for i in range(100)]
    for load in loads:
        scheduler.ready(load)
    assert drain(scheduler) == 0
    assert Streamless.tries == 100
    for _ in range(50):
        scheduler.unblock([])
        assert drain(scheduler) == 0
    assert Streamless.tries == 150
    Streamless.streams = 3
    scheduler.unblock([])
    assert drain(scheduler) == 3
    assert log == [99, 98, 97]
    scheduler.forget(loads[96].flow)
    Streamless.streams = 1000
    scheduler.unblock([])
    assert drain(scheduler) == 96
    assert 96 not in log
    assert len(log) == 99


class Counting(Load):
    """Counts how often somebody asks whose it is."""

    asked = 0

    @property
    def flow(self):
        Counting.asked += 1
        return self._flow

    @flow.setter
    def flow(self, flow):
        self._flow = flow

    def write(self, limit):
        return self.answer


@pytest.mark.parametrize("answer", [Progress.BLOCKED, Progress.UNFLUSHED, Progress.NO_STREAM])
def test_the_end_of_many_flows_does_not_look_at_what_the_others_wait_for(answer):
    Counting.answer = answer
    scheduler = Scheduler()
    flows = [Flow(scheduler, 1) for _ in range(1000)]
    for flow in flows:
        scheduler.ready(Counting(flow, [], "", 1))
    assert drain(scheduler) == 0
    Counting.asked = 0
    for flow in flows[:999]:
        scheduler.forget(flow)
    assert Counting.asked < 4 * 1000
    Counting.answer = Progress.MORE
    streams = list(blocked(scheduler))
    scheduler.unblock(streams)
    assert scheduler.write_next(1) and flows[999].heap
    scheduler.forget(flows[999])
    scheduler.unblock(streams)
    assert not scheduler.write_next(1)
    assert nothing_waits(scheduler)


def test_credit_on_one_stream_wakes_the_one_delivery_that_waits_for_it():
    scheduler, log = Scheduler(), []
    loads = [Load(Flow(scheduler, 1), log, number, 1) for number in range(1000)]
    for load in loads:
        load.blocked = True
        scheduler.ready(load)
    assert drain(scheduler) == 0
    for load in loads:
        load.blocked = False
    scheduler.unblock([loads[500].stream_id, 123_456])
    assert drain(scheduler) == 1
    assert log == [500]
    scheduler.unblock([])
    assert scheduler.idle
    scheduler.stream_over(loads[3].stream_id)
    scheduler.unblock([load.stream_id for load in loads])
    assert drain(scheduler) == 998
    assert 3 not in log
