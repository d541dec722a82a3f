"""What a publisher has said does not exist is not asked for again, as long as it said so."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import Parameters
from moqt.values.names import FullTrackName
from relay.rights.absent import AbsentTracks
from tests.relay.star import NAMESPACE, Star, track

ABSENT = FullTrackName(NAMESPACE, b"absent")
LIVE = Parameters()


class Asked(Publisher):
    """Counts what it is asked for."""

    def __init__(self, retry_after_ms: int | None) -> None:
        super().__init__()
        self.asked = 0
        self.add_track(track(1, ended=False))
        self.set_absent(ABSENT, retry_after_ms)

    def subscribe_received(self, request) -> None:
        self.asked += 1
        super().subscribe_received(request)


def ask(star: Star, parameters: Parameters = LIVE):
    return star.subscribe(star.connect(), parameters, ABSENT).failed


@pytest.mark.parametrize("retry_after_ms, asked", [(None, 3), (0, 3), (60_000, 1)])
def test_a_publisher_is_asked_once_when_it_says_for_how_long(retry_after_ms, asked) -> None:
    star, publisher = Star(), Asked(retry_after_ms)
    star.publisher(handler=publisher)
    for _ in range(3):
        refused = ask(star)
        # a relay that asked remembers it as well
        assert refused.code == RequestErrorCode.DOES_NOT_EXIST
        assert refused.retry_after_ms == retry_after_ms
    assert publisher.asked == asked
    assert star.relay.counters.requests_absent == 3 - asked


def test_another_publisher_may_have_the_track_all_the_same() -> None:
    star, first, second = Star(), Asked(60_000), Asked(60_000)
    star.publisher(handler=first)
    ask(star)
    second.set_absent(ABSENT, None)
    star.publisher(handler=second)
    assert ask(star).code == RequestErrorCode.DOES_NOT_EXIST
    assert (first.asked, second.asked) == (2, 1)


@pytest.mark.parametrize(
    "times", [(None, 60_000), (60_000, None), (1_000, 60_000), (60_000, 1_000)]
)
def test_of_several_publishers_the_one_that_says_it_for_the_shortest_time_counts(times) -> None:
    star, publishers = Star(), [Asked(each) for each in times]
    for publisher in publishers:
        star.publisher(handler=publisher)
    ask(star)
    star.pass_time(2)
    ask(star)
    assert [publisher.asked for publisher in publishers] == [2, 2]


def test_who_was_not_asked_has_said_nothing() -> None:
    star, asked, other = Star(), Asked(60_000), Asked(60_000)
    slow = star.publisher(handler=asked)
    upstream = star.connect(other)
    star.run()
    star.relay.add_upstream(upstream.server)
    star.delay(slow)
    _, waiting = star.subscriber(LIVE, ABSENT)
    slow.published.cancel()
    star.arrive(slow)
    assert waiting.failed is not None and other.asked == 1
    third = Asked(60_000)
    star.relay.add_upstream(star.connect(third).server)
    ask(star)
    assert third.asked == 1


def test_who_waits_for_a_track_is_told_of_it_by_its_publisher() -> None:
    star, publisher = Star(), Asked(60_000)
    star.publisher(handler=publisher)
    ask(star)
    ask(star, Parameters(rendezvous_timeout=50))
    assert publisher.asked == 2


def test_who_offers_the_track_takes_back_that_it_does_not_exist() -> None:
    star, publisher = Star(), Asked(60_000)
    pair = star.publisher(handler=publisher)
    ask(star)
    store = track(1, name=ABSENT)
    offer = pair.client.publish(store)
    star.run()
    assert ask(star) is None
    publisher.set_absent(ABSENT, None)
    publisher.add_track(store)
    offer.withdraw(0x4)
    star.run()
    star.pass_time(1)
    assert ask(star) is None and publisher.asked == 2


def test_it_is_forgotten_in_time_and_the_oldest_when_there_are_too_many() -> None:
    absent, names = AbsentTracks(2), [FullTrackName((b"a",), bytes([n])) for n in range(3)]
    for number, name in enumerate(names):
        absent.add(name, [], 10.0 + number)
    assert [absent.left(name, [], 5.0) for name in names] == [None, 6.0, 7.0]
    assert absent.left(names[1], [], 11.0) is None and len(absent) == 1
    absent.tick(12.0)
    assert len(absent) == 0
