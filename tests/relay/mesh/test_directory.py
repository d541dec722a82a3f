"""What the directory is told and asked, and when it is left alone."""

from __future__ import annotations

from dataclasses import replace

import relay.mesh.directory
from moqt.values.codes import RequestErrorCode
from moqt.values.names import FullTrackName
from relay.config import Counters, RelayConfig
from relay.mesh.directory import (
    BATCH,
    FOUND_SECONDS,
    MAX_FAILURES,
    NOT_FOUND_SECONDS,
    RESTING_SECONDS,
    Change,
    Circuit,
    Finder,
    Has,
    Registrations,
)
from relay.service.metrics import subscriptions
from tests.relay.star import JOIN, NAME, NAMESPACE, Collector, Star, everything, track

OTHER = (b"other",)


def registrations(**limits):
    return Registrations(RelayConfig(**limits), Counters())


def changes(table, now=0.0):
    due = table.due(now)
    table.told(due, now + 100)
    return [each for each in due if not each.below]


def note(table, scope, namespace, has):
    """Of which nothing is below any prefix."""
    table.note(scope, namespace, has, lambda prefix: False)


def test_a_change_is_told_once_and_what_is_there_again_when_it_is_due():
    table = registrations()
    note(table, "/", NAMESPACE, Has.PUBLISHED)
    note(table, "/", NAMESPACE, Has.PUBLISHED)
    assert changes(table) == [Change("/", NAMESPACE, Has.PUBLISHED)]
    assert changes(table, 99) == []
    assert changes(table, 100) == [Change("/", NAMESPACE, Has.PUBLISHED)]
    note(table, "/", NAMESPACE, Has.NOTHING)
    assert changes(table, 101) == [Change("/", NAMESPACE, Has.NOTHING)]
    assert changes(table, 1000) == [] and len(table) == 0


def test_each_prefix_is_registered_once_for_as_long_as_something_is_below_it():
    table, star = registrations(), Star()
    names = star.relay.namespaces
    names.events.told.append(
        lambda each: table.note(
            "/",
            each,
            Has.PUBLISHED if each in names.published else Has.NOTHING,
            names.any_below,
        )
    )

    def told():
        due = table.due(0.0)
        table.told(due, 100)
        return {each.namespace: each.has for each in due if each.below}

    first = star.publisher()
    assert told() == {(): Has.PUBLISHED, NAMESPACE[:1]: Has.PUBLISHED}
    second = star.publisher(namespace=(*NAMESPACE[:1], b"other"))
    whole = star.publisher(namespace=NAMESPACE[:1])
    assert told() == {} and len(table) == 3
    first.published.cancel()
    star.run()
    assert told() == {}
    second.published.cancel()
    star.run()
    assert told() == {NAMESPACE[:1]: Has.NOTHING}, "it has itself alone"
    whole.published.cancel()
    star.run()
    assert told() == {(): Has.NOTHING} and len(table) == 0


def test_no_more_prefixes_are_registered_than_namespaces_may_be_the_short_ones_first():
    table = registrations(max_registered=2)
    for number in range(2):
        table.note("/", (b"a", b"%d" % number, b"b"), Has.PUBLISHED, lambda prefix: True)
    due = table.due(0.0)
    assert [each.namespace for each in due if each.below] == [(), (b"a",)]
    assert len(due) == 4


def test_what_changes_while_it_is_told_is_told_as_it_is_then():
    table = registrations()
    note(table, "/", NAMESPACE, Has.PUBLISHED)
    due = table.due(0.0)
    note(table, "/", NAMESPACE, Has.NOTHING)
    note(table, "/", NAMESPACE, Has.CACHED)
    table.told(due, 100)
    assert changes(table) == [Change("/", NAMESPACE, Has.CACHED)]
    note(table, "/", NAMESPACE, Has.NOTHING)
    due = table.due(1.0)
    note(table, "/", NAMESPACE, Has.PUBLISHED)
    note(table, "/", NAMESPACE, Has.NOTHING)
    table.told(due, 100)
    assert changes(table, 2.0) == [Change("/", NAMESPACE, Has.NOTHING)] and len(table) == 0


def test_what_did_not_get_through_is_told_first():
    table = registrations()
    note(table, "/", NAMESPACE, Has.PUBLISHED)
    lost = table.due(0.0)
    note(table, "/", OTHER, Has.PUBLISHED)
    table.untold(lost)
    assert [each.namespace for each in changes(table)] == [NAMESPACE, OTHER]


def test_a_directory_that_has_forgotten_is_told_everything_in_batches():
    table = registrations()
    for number in range(2 * BATCH + 1):
        note(table, "/", (b"%d" % number,), Has.PUBLISHED)
    assert [len(changes(table)) for _ in range(4)] == [BATCH, BATCH, 1, 0]
    table.tell_all()
    assert [len(changes(table)) for _ in range(4)] == [BATCH, BATCH, 1, 0]


def test_no_more_is_registered_than_the_limit_says_which_the_log_says_once(caplog):
    table = registrations(max_registered=2)
    for number in range(4):
        note(table, "/", (b"%d" % number,), Has.PUBLISHED)
    assert len(changes(table)) == 2
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "max_registered" in caplog.text
    note(table, "/other", (b"0",), Has.PUBLISHED)
    assert changes(table) == [Change("/other", (b"0",), Has.PUBLISHED)], "the limit is each scope's"
    note(table, "/", (b"0",), Has.NOTHING)
    changes(table)
    note(table, "/", (b"3",), Has.PUBLISHED)
    assert changes(table) == [Change("/", (b"3",), Has.PUBLISHED)]


def test_a_directory_that_fails_again_and_again_is_left_alone_for_a_while():
    circuit = Circuit()
    assert [circuit.failed(0.0) for _ in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [
        True
    ]
    assert not circuit.allows(RESTING_SECONDS - 0.1) and circuit.allows(RESTING_SECONDS)
    assert not circuit.failed(RESTING_SECONDS), "it is told once"
    assert not circuit.allows(RESTING_SECONDS + 0.1)
    assert circuit.succeeded() and not circuit.succeeded()


class Mesh:
    """A relay, a second one that a directory may name, and what the directory was asked."""

    def __init__(self, **settings):
        self.star, self.other = Star(**settings), Star()
        self.other.pairs = self.star.pairs
        self.asked = []
        self.finder = Finder(self.star.relay, self.asked.append)
        self.star.relay.askable.finder = self.finder

    def answer(self, *relays):
        while self.asked:
            self.finder.answered(self.asked.pop(), relays)
        self.star.run()

    def connect(self, name="other"):
        link = self.other.connect(self.star.relay)
        self.star.run()
        self.finder.sessions[name] = link.client
        return link


def test_a_track_that_is_not_here_comes_from_the_relay_that_the_directory_names():
    mesh = Mesh()
    mesh.other.publisher(track(1))
    _, collector = mesh.star.subscriber(JOIN)
    assert mesh.asked == [NAMESPACE] and collector.failed is None
    mesh.connect()
    mesh.answer("other")
    assert collector.payloads == everything(1)
    _, again = mesh.star.subscriber(JOIN, NAME._replace(name=b"another"))
    assert again.failed is not None and mesh.asked == [], "what was said holds for a moment"


def test_many_that_want_one_namespace_have_the_directory_asked_once():
    mesh = Mesh()
    collectors = [
        mesh.star.subscriber(JOIN, NAME._replace(name=b"%d" % each))[1] for each in range(20)
    ]
    assert mesh.asked == [NAMESPACE]
    mesh.answer()
    assert all(each.failed.code == RequestErrorCode.DOES_NOT_EXIST for each in collectors)


def test_what_the_directory_says_holds_for_a_while_and_then_it_is_asked_again():
    mesh = Mesh()
    for seconds, relays in ((NOT_FOUND_SECONDS, ()), (FOUND_SECONDS, ("gone",))):
        mesh.finder.look_up(NAMESPACE, lambda: None)
        mesh.answer(*relays)
        mesh.star.pass_time(seconds - 0.5)
        assert mesh.finder.known(NAMESPACE)
        mesh.star.pass_time(0.5)
        assert not mesh.finder.known(NAMESPACE)


def test_while_the_directory_does_not_answer_nothing_is_said_not_to_exist():
    mesh = Mesh()
    _, collector = mesh.star.subscriber(JOIN)
    mesh.finder.answered(mesh.asked.pop(), None)
    mesh.star.run()
    assert collector.failed.code == RequestErrorCode.INTERNAL_ERROR
    assert collector.failed.retry_after_ms == 1000


def test_a_request_does_not_wait_for_the_directory_for_ever():
    mesh = Mesh(upstream_timeout=5)
    _, collector = mesh.star.subscriber(JOIN)
    mesh.star.pass_time(6)
    assert collector.failed.code == RequestErrorCode.TIMEOUT


def test_who_has_a_publisher_here_is_served_without_the_directory():
    mesh = Mesh()
    mesh.star.publisher(track(1))
    _, collector = mesh.star.subscriber(JOIN)
    assert collector.payloads == everything(1) and mesh.asked in ([], [NAMESPACE])


def test_what_a_publisher_here_refuses_the_directory_is_asked_for():
    mesh = Mesh()
    mesh.star.publisher(track(1, name=NAME._replace(name=b"another")))
    mesh.other.publisher(track(1))
    mesh.connect()
    _, collector = mesh.star.subscriber(JOIN)
    mesh.answer("other")
    assert collector.payloads == everything(1)


def test_readers_who_lost_their_source_get_the_one_that_the_directory_finds():
    mesh = Mesh(publisher_linger=5)
    store = track(1)
    publisher = mesh.star.publisher(store)
    _, collector = mesh.star.subscriber(JOIN)
    mesh.answer()
    mesh.star.kill(publisher)
    mesh.connect()
    mesh.other.publisher(store)
    mesh.star.pass_time(1.5)
    assert mesh.asked == [NAMESPACE]
    mesh.answer("other")
    mesh.star.pass_time(1)
    assert collector.done is None and subscriptions(mesh.other.relay) == 1


def test_who_waits_for_a_publisher_gets_one_that_comes_elsewhere():
    mesh = Mesh()
    patient = replace(JOIN, rendezvous_timeout=20_000)
    _, collector = mesh.star.subscriber(patient)
    mesh.answer()
    assert collector.failed is None
    mesh.star.pass_time(NOT_FOUND_SECONDS)
    mesh.finder.look_for_waiting()
    assert mesh.asked == [NAMESPACE]
    mesh.answer()
    assert collector.failed is None
    mesh.other.publisher(track(1))
    mesh.connect()
    mesh.star.pass_time(NOT_FOUND_SECONDS)
    mesh.finder.look_for_waiting()
    mesh.answer("other")
    assert collector.payloads == everything(1)


def test_who_waits_with_many_others_is_looked_for_as_they_are():
    mesh = Mesh()
    for number in range(BATCH + 88):
        if not number % 100:
            pair = mesh.star.connect()
            mesh.star.run()
        wait, name = replace(JOIN, rendezvous_timeout=20_000), (b"%d" % number,)
        pair.client.subscribe(FullTrackName(name, b""), Collector(), wait)
    mesh.star.run()
    mesh.answer()
    mesh.star.pass_time(NOT_FOUND_SECONDS)
    mesh.finder.look_for_waiting()
    assert len(mesh.asked) == len(set(mesh.asked)) == BATCH + 88


def test_a_request_that_may_not_wait_has_nothing_looked_up():
    mesh = Mesh(max_pending=4)  # half of them are for one session
    pair = mesh.star.connect()
    mesh.star.run()
    collectors = [
        mesh.star.subscribe(pair, JOIN, FullTrackName((b"%d" % each,), b"")) for each in range(5)
    ]
    assert [each.failed and each.failed.code for each in collectors] == [
        None,
        None,
        *[RequestErrorCode.EXCESSIVE_LOAD] * 3,
    ]
    assert len(mesh.asked) == 2


def test_who_asks_and_goes_again_and_again_has_no_more_looked_up_than_the_limit(monkeypatch):
    monkeypatch.setattr(relay.mesh.directory, "MAX_LOOKED_UP", 3)
    mesh = Mesh()
    pair = mesh.star.connect()
    mesh.star.run()
    for each in range(10):
        name = FullTrackName((b"%d" % each,), b"")
        asked = pair.client.subscribe(name, Collector(), JOIN)
        mesh.star.run()
        asked.cancel()
        mesh.star.run()
    assert len(mesh.asked) == len(mesh.finder.waited_for) == 3
    refused = mesh.star.subscribe(pair, JOIN)
    assert refused.failed.code == RequestErrorCode.INTERNAL_ERROR
    assert refused.failed.retry_after_ms == 1000
    assert len(mesh.asked) == 3
