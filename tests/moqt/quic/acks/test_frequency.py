"""How often packets are acknowledged: what a peer asks, and what we ask (ack-frequency draft)."""

from __future__ import annotations

import pytest
from aioquic.quic.packet import QuicErrorCode
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.quic.acks.frequency import (
    ACK_FREQUENCY,
    EVERY,
    IMMEDIATE_ACK,
    MIN_ACK_DELAY,
    AckRequests,
    AckRule,
    Request,
)
from moqt.quic.packets.layout import varint
from tests.moqt.probe import announce
from tests.moqt.quic.links import Path, transfer
from tests.moqt.quic_pair import CLIENT, Pair


def ranges(numbers: list[int]) -> list[range]:
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def acked_after(rule: AckRule, numbers: list[int]) -> list[int]:
    """The packets that are acknowledged at once because others are missing."""
    came: list[int] = []
    told = []
    for number in numbers:
        gap = number != max(came, default=-1) + 1
        came.append(number)
        if rule.reports(gap, ranges(came)):
            told.append(number)
            rule.acked = max(came)
    return told


def asking(reordering: int, threshold: int = 9) -> AckRule:
    rule = AckRule()
    assert rule.take(0, Request(threshold, 10_000, reordering))
    return rule


# ---- what a peer asks


def test_with_a_reordering_threshold_of_3_acks_are_those_of_the_drafts_table() -> None:
    assert acked_after(asking(3), [0, 1, 3, 4, 5, 8, 9, 10]) == [5, 9, 10]


def test_with_one_of_5_too() -> None:
    assert acked_after(asking(5), [0, 1, 3, 5, 6, 7, 8, 9]) == [7, 9]


def test_with_one_of_1_and_unasked_each_gap_is_told_of_at_once_and_with_0_none() -> None:
    came = [0, 1, 3, 2, 4, 6]
    assert acked_after(asking(1), came) == acked_after(AckRule(), came) == [3, 2, 6]
    assert acked_after(asking(0), came) == []


def test_more_than_the_threshold_are_acknowledged_and_by_itself_two_then_32() -> None:
    rule = asking(3, threshold=4)
    assert [rule.is_due(count, 1000) for count in (4, 5)] == [False, True]
    assert asking(3, threshold=0).is_due(1, 1000)
    ours = AckRule()
    assert ours.is_due(2, 10) and not ours.is_due(2, 1000) and ours.is_due(EVERY, 1000)


def test_an_older_frame_changes_nothing() -> None:
    rule = AckRule()
    assert rule.take(5, Request(9, 5000, 3))
    assert not rule.take(5, Request(1, 5000, 3)) and not rule.take(4, Request(1, 5000, 3))
    assert rule.asked == Request(9, 5000, 3)


@pytest.mark.parametrize("delay", [0, 999, 2**14 * 1000, 2**62 - 1])
def test_a_delay_that_is_invalid_is_refused(delay: int) -> None:
    with pytest.raises(ValueError, match="Requested Max Ack Delay"):
        AckRule().take(0, Request(1, delay, 1))


# ---- what we ask


def test_an_eighth_of_the_window_and_a_part_of_the_round_trip_are_asked_for() -> None:
    requests = AckRequests()
    requests.look(160, 0.32, False, 3)
    assert not requests.pending, "the peer takes none"
    requests.least = 0.001
    requests.look(160, 0.32, False, 3)
    assert requests.pending and requests.wish == Request(19, 10_000, 3)


def test_bounds_are_the_peers_least_delay_25_ms_and_what_we_do_unasked() -> None:
    requests = AckRequests()
    requests.least = 0.005
    requests.look(100_000, 0.01, True, 3)
    assert requests.wish == Request(EVERY - 1, 5000, 0)
    requests.settled(requests.sent(), True)
    requests.look(2, 3.0, True, 3)
    assert requests.wish == Request(1, 25_000, 0)


def test_small_changes_are_worth_no_frame_and_one_is_under_way_at_a_time() -> None:
    requests = AckRequests()
    requests.least = 0.001
    requests.look(80, 0.08, False, 3)
    first = requests.sent()
    requests.look(400, 0.08, False, 3)
    assert not requests.pending
    requests.settled(first, True)
    requests.look(100, 0.1, False, 3)
    assert not requests.pending
    requests.look(200, 0.08, False, 3)
    assert requests.pending and requests.sent() == first + 1


def test_a_lost_frame_is_asked_again_with_the_next_number() -> None:
    requests = AckRequests()
    requests.least = 0.001
    requests.look(80, 0.08, False, 3)
    requests.settled(requests.sent(), False)
    assert requests.pending and requests.sent() == 1


# ---- on connections


def established() -> Pair:
    pair = Pair()
    pair.run(lambda: pair.client.probe.confirmed and pair.server.probe.confirmed)
    return pair


def frame(sequence: int, *fields: int) -> bytes:
    return b"".join(map(varint, (ACK_FREQUENCY, sequence, *fields)))


def test_both_sides_say_that_they_take_requests_and_each_asks() -> None:
    flow = transfer(2_000_000, Path(latency=0.04, bandwidth=5e6, queue=400_000))
    assert flow.sender is not None and flow.seconds is not None
    connection = flow.sender.connection
    assert connection.ack_requests.least == 0.001
    assert connection.ack_requests.sequence >= 1
    assert connection.recovery.max_ack_delay == connection.ack_requests.wish.delay / 1e6 < 0.025


def test_a_long_path_has_fewer_acknowledgments_than_one_a_millisecond() -> None:
    flow = transfer(4_000_000, Path(latency=0.05, bandwidth=2e6, queue=400_000))
    assert flow.seconds is not None
    assert flow.down.offered < flow.up.offered / 4


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (frame(0, 1, 999, 1), QuicErrorCode.PROTOCOL_VIOLATION),
        (frame(0, 1, 2**14 * 1000, 1), QuicErrorCode.PROTOCOL_VIOLATION),
        (frame(0, 1, 2000), QuicErrorCode.FRAME_ENCODING_ERROR),
        (varint(ACK_FREQUENCY), QuicErrorCode.FRAME_ENCODING_ERROR),
    ],
)
def test_a_malformed_frame_closes_with_the_drafts_code(octets: bytes, code: QuicErrorCode) -> None:
    pair = established()
    pair.server.live.receive([pair.client.probe.seal(octets)], CLIENT, pair.now)
    event = pair.server.probe.connection.close_event
    assert event is not None and event.error_code == code


def test_a_request_is_followed_and_an_immediate_ack_answered_at_once() -> None:
    pair = established()
    pair.run(limit=1.0)
    server = pair.server
    server.live.receive([pair.client.probe.seal(frame(1000, 5, 20_000, 0))], CLIENT, pair.now)
    assert server.probe.connection.ack_rule.asked == Request(5, 20_000, 0)
    server.live.datagrams_to_send(pair.now + 0.1)
    now = pair.now + 0.2
    server.live.receive([pair.client.probe.seal(b"\x01" + bytes(3))], CLIENT, now)
    assert not server.live.datagrams_to_send(now), "nothing is due for 20 ms"
    server.live.receive([pair.client.probe.seal(bytes([IMMEDIATE_ACK, 0, 0, 0]))], CLIENT, now)
    assert server.live.datagrams_to_send(now)


@pytest.mark.parametrize("value", [varint(25_001), b"", b"\x40", b"\x01\x01"])
def test_a_min_ack_delay_that_is_none_is_an_error_of_transport_parameters(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, varint(MIN_ACK_DELAY) + varint(len(value)) + value)
    pair = Pair(connect=False)
    pair.run(limit=1.0)
    event = pair.server.probe.connection.close_event
    assert event is not None and event.error_code == QuicErrorCode.TRANSPORT_PARAMETER_ERROR


@given(
    fields=st.lists(st.integers(0, 2**62 - 1), min_size=0, max_size=5),
    flag=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_whatever_a_frame_says_the_connection_goes_on_or_closes_in_words(
    fields: list[int], flag: bool
) -> None:
    pair = established()
    octets = b"".join(map(varint, (ACK_FREQUENCY, *fields))) + bytes([IMMEDIATE_ACK]) * flag
    pair.server.live.receive([pair.client.probe.seal(octets)], CLIENT, pair.now)
    event = pair.server.probe.connection.close_event
    assert event is None or event.error_code in (
        QuicErrorCode.PROTOCOL_VIOLATION,
        QuicErrorCode.FRAME_ENCODING_ERROR,
    )
