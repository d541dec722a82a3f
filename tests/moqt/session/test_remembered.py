"""What a session keeps of its peer's doing is one value, with the size of every table."""

from __future__ import annotations

from dataclasses import fields

from moqt.session import Remembered, SessionConfig, SessionHandler
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from tests.moqt.memory import Pair
from tests.moqt.peers import Collector

NAME = FullTrackName((b"demo",), b"t")


class Holds(SessionHandler):
    """Answers nothing."""

    def __init__(self):
        self.requests = []

    def subscribe_received(self, request):
        self.requests.append(request)

    fetch_received = subscribe_namespace_received = subscribe_received


def test_a_new_session_remembers_nothing():
    pair = Pair()
    assert pair.client.remembered() == pair.server.remembered() == Remembered()


def test_open_requests_and_their_updates_are_counted_at_both_ends_and_gone_with_the_session():
    handler = Holds()
    pair = Pair(server=handler, server_config=SessionConfig(max_request_updates=8))
    fill = Parameters(fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)))
    subscribed = pair.client.subscribe(NAME, Collector(), fill)
    pair.client.fetch(
        NAME,
        Collector(),
        Parameters(location_filter=LocationFilter.range(Location(0, 0), Location(1, 0))),
    )
    for priority in range(3):
        subscribed.update(Parameters(subscriber_priority=priority), lambda answer: None)
    pair.run()
    ours, theirs = pair.client.remembered(), pair.server.remembered()
    assert (ours.requests_outgoing, theirs.requests_incoming) == (2, 2)
    assert (ours.updates, theirs.updates) == (3, 3)
    assert ours.streams_expected == 2 and ours.deadlines > 0
    pair.client.close()
    pair.run()
    for session in (pair.client, pair.server):
        assert not any(session.remembered().of_requests.values())


def test_a_session_that_ends_when_a_time_is_up_does_nothing_more_of_what_was_due_with_it():
    pair = Pair(client_config=SessionConfig(request_timeout=5.0), server=Holds())
    session = pair.client
    failed = Collector()
    session.subscribe(NAME, failed)
    session.send_goaway(timeout_ms=1000)
    told = []
    session.clock.after(5.0, lambda: told.append("due"))
    session.tick(6.0)
    assert session.closed is not None and failed.failed is session.closed and not told
    assert session.remembered() == Remembered()


def test_what_two_sessions_remember_adds_up_field_by_field():
    one = Remembered(**{each.name: 1 for each in fields(Remembered)})
    assert one + one == Remembered(**{each.name: 2 for each in fields(Remembered)})


def test_only_what_outlives_requests_is_left_out_of_what_is_theirs():
    lasting = {each.name for each in fields(Remembered)} - set(Remembered().of_requests)
    assert lasting == {
        "aliases_ended",
        "shared_objects",
        "tokens",
        "token_octets",
        "request_id_gaps",
        "malformed_tracks",
    }
