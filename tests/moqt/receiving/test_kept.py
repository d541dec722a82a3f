"""What streams bring of Objects that are not whole is billed, however long the rest takes."""

from __future__ import annotations

import logging

import pytest

from moqt.session import SessionConfig, SessionState
from moqt.values.codes import StreamErrorCode
from moqt.wire.objects import SubgroupHeader
from moqt.wire.primitives import encode_octets
from tests.moqt.raw import CODEC, Client

LIMIT = 10_000
PROPERTIES = b"\x0f" + encode_octets(b"x" * 2000)


def beginning(group: int, cut: int) -> bytes:
    """A subgroup stream of alias 7 to the end of an Object's properties, all but `cut` octets."""
    header = CODEC.encode_subgroup_header(SubgroupHeader(7, group, 0, 128), properties=True)
    begun = CODEC.encode_subgroup_object(
        None, 0, properties=PROPERTIES, with_properties=True, length=100
    )
    return header + begun[: len(begun) - cut]


def subscribed() -> Client:
    client = Client(config=SessionConfig(max_held_octets=LIMIT))
    client.collector = client.subscribe()
    client.accept(client.collector, alias=7)
    return client


@pytest.mark.parametrize("cut", [0, 5], ids=["of an Object that grows", "that are not all there"])
def test_properties_are_billed_until_their_object_is_whole_and_beyond_the_limit_a_stream_is_stopped(
    cut, caplog
):
    client = subscribed()
    with caplog.at_level(logging.WARNING):
        streams = [client.send_uni(beginning(group, cut)) for group in range(8)]
    session, each = client.session, len(PROPERTIES) - cut
    assert len(client.stopped) == 4 and client.stopped == streams[4:]
    assert 4 * each <= session.remembered().octets_kept <= LIMIT
    assert session.counters.streams_dropped == 4
    assert [error for _, error in client.collector.streams] == [StreamErrorCode.EXCESSIVE_LOAD] * 4
    assert [r.getMessage() for r in caplog.records if "max_held_octets" in r.getMessage()] == [
        "[0011]: a session is at its limit of 10000 (max_held_octets): what goes beyond is refused"
    ]
    whole = beginning(0, 0)[len(beginning(0, cut)) :] + bytes(100)
    for stream in streams[:4]:
        session.stream_data(stream, whole, False)
    assert session.remembered().octets_kept == 0
    assert client.collector.locations == [(group, 0) for group in range(4)]
    assert session.state is SessionState.ESTABLISHED


@pytest.mark.parametrize("end", ["reset", "cancelled", "closed"])
def test_a_stream_that_ends_takes_what_it_kept_with_it(end):
    client = subscribed()
    streams = [client.send_uni(beginning(group, 3)) for group in range(3)]
    assert client.session.remembered().octets_kept > 3 * len(PROPERTIES)
    if end == "reset":
        for stream in streams:
            client.session.stream_reset(stream, 0)
    elif end == "cancelled":
        client.collector.request.cancel()
    else:
        client.session.close()
    assert client.session.remembered().octets_kept == 0
    assert client.session.data_streams.kept_octets == 0
