"""Who lists at a relay of a mesh hears of what the others have, that the directory names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moqt.requests import RequestState
from moqt.values.codes import RequestErrorCode
from moqt.values.config import SessionConfig
from moqt.values.names import FullTrackName
from relay.mesh import listings
from relay.mesh.directory import FOUND_SECONDS, NOT_FOUND_SECONDS
from relay.mesh.interests import UNWANTED_SECONDS, UPSTREAM_PATIENCE
from relay.mesh.listings import Listings
from relay.mesh.told import FADING_SECONDS
from tests.relay.peers import Listing
from tests.relay.star import NAMESPACE, Star

PREFIX = NAMESPACE[:1]
OTHER = (*PREFIX, b"other")


class Mesh:
    """Relays by name, of which `a` finds the others by a directory that knows what is set."""

    def __init__(self, *others, **settings):
        self.relays = {name: Star(**settings) for name in ("a", *others)}
        self.a = self.relays["a"]
        for star in self.relays.values():
            star.pairs = self.a.pairs
        self.asked, self.sessions = [], {}
        self.listings = Listings(self.a.relay, self.asked.append, self.sessions)
        self.links = {}

    def number(self, name):
        return 100 + list(self.relays).index(name)

    def reach(self, name):
        """A session from `a` to that relay."""
        link = self.relays[name].connect(
            self.a.relay,
            client_config=SessionConfig(relay_id=self.number("a"), first_hand=True),
            server_config=SessionConfig(relay_id=self.number(name)),
        )
        self.a.run()
        self.links[name], self.sessions[name] = link, link.client
        return link

    def lose(self, name):
        link = self.links.pop(name)
        self.relays[name].kill(link)
        link.client.connection_closed(0, "idle time-out", False)
        del self.sessions[name]
        self.listings.lost(name)
        self.a.run()

    def answer(self, *names):
        """The directory names these for all that it was asked."""
        while self.asked:
            self.listings.answered(self.asked.pop(), names)
        self.a.run()

    def fail(self):
        while self.asked:
            self.listings.answered(self.asked.pop(), None)
        self.a.run()

    def list(self, prefix=PREFIX, at="a"):
        return Listing(self.a, self.relays[at].connect(), prefix)

    def pass_time(self, seconds, step=0.5):
        until = self.a.now + seconds
        while self.a.now < until:
            now = min(self.a.now + step, until)
            for star in self.relays.values():
                star.now = now
                star.relay.tick(now)
            self.listings.tick(now)
            for pair in self.a.pairs:
                pair.client.tick(now)
                pair.server.tick(now)
            self.a.run()

    def status(self, name):
        """How TRACK_STATUS of a track that nobody has is refused."""
        answers = []
        self.a.connect().client.track_status(name).on_answer = answers.append
        self.a.run()
        return answers[0]


@pytest.fixture
def mesh():
    mesh = Mesh("b", "c")
    mesh.reach("b")
    mesh.reach("c")
    return mesh


def cannot_be_told(listing):
    (error,) = listing.ended
    return error.code == RequestErrorCode.INTERNAL_ERROR and error.retry_after_ms == 1000


def test_a_listing_waits_for_the_directory_and_tells_what_all_have_that_it_names(mesh):
    mesh.relays["b"].publisher()
    mesh.relays["c"].publisher(namespace=OTHER)
    mesh.relays["c"].publisher(namespace=(b"elsewhere",))
    listing = mesh.list()
    assert mesh.asked == [PREFIX] and listing.request.state is RequestState.PENDING
    mesh.answer("b", "c")
    assert listing.request.namespaces == {NAMESPACE, OTHER}
    again = mesh.list()
    assert mesh.asked == [] and again.request.namespaces == {NAMESPACE, OTHER}


def test_a_listing_of_what_nobody_has_says_so(mesh):
    listing = mesh.list()
    mesh.answer()
    assert listing.request.state is RequestState.ESTABLISHED and not listing.events


def test_what_comes_and_goes_at_another_relay_is_told_while_a_listing_stands(mesh):
    first = mesh.relays["b"].publisher()
    listing = mesh.list()
    mesh.answer("b")
    mesh.relays["b"].publisher(namespace=OTHER)
    assert listing.request.namespaces == {NAMESPACE, OTHER}
    first.published.cancel()
    mesh.a.run()
    assert listing.request.namespaces == {OTHER}


@pytest.mark.parametrize("before", [(), ("b",)])
def test_the_directory_is_looked_at_again_while_a_listing_stands(mesh, before):
    mesh.relays["b"].publisher()
    listing = mesh.list()
    mesh.answer(*before)
    mesh.relays["c"].publisher(namespace=OTHER)
    mesh.pass_time(FOUND_SECONDS if before else NOT_FOUND_SECONDS)
    assert mesh.asked == [PREFIX]
    mesh.answer("b", "c")
    assert listing.request.namespaces == {NAMESPACE, OTHER}
    mesh.pass_time(FOUND_SECONDS)
    mesh.answer("c")
    mesh.pass_time(FADING_SECONDS)
    assert listing.request.namespaces == {OTHER}, "b is not named any more"
    listing.request.cancel()
    mesh.pass_time(2 * FOUND_SECONDS)
    assert mesh.asked == [], "nobody lists"


def test_relays_of_a_mesh_tell_each_other_of_what_they_have_themselves_alone(mesh):
    mesh.relays["c"].publisher(namespace=OTHER)
    listing = mesh.list()
    mesh.answer("c")
    assert listing.request.namespaces == {OTHER}
    link = mesh.a.connect(client_config=SessionConfig(relay_id=101, first_hand=True))
    mesh.a.run()
    first_hand = Listing(mesh.a, SimpleNamespace(client=link.client), PREFIX)
    assert first_hand.request.state is RequestState.ESTABLISHED and not first_hand.events
    mesh.a.publisher()
    assert first_hand.request.namespaces == {NAMESPACE}
    assert mesh.asked == [], "nor is the directory asked for it"


def test_a_directory_that_does_not_answer_is_never_taken_for_one_that_names_nobody(mesh):
    refused = mesh.list()
    mesh.fail()
    assert cannot_be_told(refused)
    assert cannot_be_told(mesh.list()), "also while its silence is remembered"
    mesh.a.publisher()
    assert mesh.list().request.namespaces == {NAMESPACE}, "what is here is told"


def test_what_the_directory_named_before_it_fell_silent_holds(mesh):
    mesh.relays["b"].publisher()
    listing = mesh.list()
    mesh.answer("b")
    mesh.pass_time(FOUND_SECONDS)
    mesh.fail()
    mesh.pass_time(NOT_FOUND_SECONDS + FADING_SECONDS)
    assert listing.events == [(NAMESPACE, True)]


def test_while_a_relay_that_is_named_cannot_be_reached_nothing_is_said_not_to_be_there():
    mesh = Mesh("b")
    mesh.relays["b"].publisher()
    refused = mesh.list()
    mesh.answer("b")
    assert cannot_be_told(refused)
    missing = FullTrackName((*PREFIX, b"nobody's"), b"0")
    assert mesh.status(missing).code == RequestErrorCode.INTERNAL_ERROR
    elsewhere = FullTrackName((b"elsewhere",), b"0")
    assert mesh.status(elsewhere).code == RequestErrorCode.DOES_NOT_EXIST
    mesh.reach("b")
    mesh.pass_time(FOUND_SECONDS)
    listing = mesh.list()
    mesh.answer("b")
    assert listing.request.namespaces == {NAMESPACE}
    assert mesh.status(missing).code == RequestErrorCode.DOES_NOT_EXIST


def test_a_relay_that_has_no_room_for_a_listing_is_not_taken_for_one_that_has_nothing():
    mesh = Mesh("b", max_namespaces=1)
    mesh.reach("b")
    mesh.relays["b"].publisher()
    busy = mesh.list((b"elsewhere",), at="b")
    refused = mesh.list()
    mesh.answer("b")
    assert cannot_be_told(refused)
    busy.request.cancel()
    mesh.pass_time(2)
    assert mesh.list().request.namespaces == {NAMESPACE}


def test_what_is_here_is_not_kept_back_for_a_relay_that_is_slow_and_its_own_comes_later(mesh):
    mesh.relays["b"].publisher()
    mesh.a.publisher(namespace=OTHER)
    later = []
    awaited = mesh.relays["b"].relay.namespaces.events.awaited
    awaited.append(lambda session, prefix, then: later.append(then))
    listing = mesh.list()
    mesh.answer("b")
    assert listing.request.state is RequestState.PENDING
    mesh.pass_time(UPSTREAM_PATIENCE + 0.1)
    assert listing.request.namespaces == {OTHER}
    missing = FullTrackName((*PREFIX, b"nobody's"), b"0")
    assert mesh.status(missing).code == RequestErrorCode.INTERNAL_ERROR, "b has yet to tell"
    for then in later:
        then(True)
    mesh.a.run()
    assert listing.request.namespaces == {OTHER, NAMESPACE}
    assert mesh.status(missing).code == RequestErrorCode.DOES_NOT_EXIST


def test_who_is_told_to_ask_again_finds_a_slow_relay_asked_already(mesh):
    mesh.relays["b"].publisher()
    later = []
    awaited = mesh.relays["b"].relay.namespaces.events.awaited
    awaited.append(lambda session, prefix, then: later.append(then))
    refused = mesh.list()
    mesh.answer("b")
    mesh.pass_time(UPSTREAM_PATIENCE + 0.1)
    assert cannot_be_told(refused)
    for then in later:
        then(True)
    mesh.a.run()
    assert mesh.list().request.namespaces == {NAMESPACE} and len(later) == 1
    mesh.pass_time(UNWANTED_SECONDS + FADING_SECONDS)


def test_prefixes_of_which_one_covers_another_are_asked_for_once(mesh):
    mesh.relays["b"].publisher()
    wide = mesh.list()
    mesh.answer("b")
    narrow = mesh.list(NAMESPACE)
    mesh.answer("b")
    assert len(mesh.relays["b"].relay.namespaces.listings) == 1
    assert wide.request.namespaces == narrow.request.namespaces == {NAMESPACE}


def test_the_session_to_another_relay_comes_back_and_nobody_notices():
    mesh = Mesh("b", publisher_linger=5)
    mesh.reach("b")
    mesh.relays["b"].publisher()
    listing = mesh.list()
    mesh.answer("b")
    mesh.lose("b")
    mesh.pass_time(1)
    assert mesh.asked == [PREFIX], "it is looked at once who is there"
    mesh.reach("b")
    mesh.answer("b")
    mesh.pass_time(10)
    assert listing.events == [(NAMESPACE, True)]


def test_what_a_relay_had_that_has_gone_is_there_no_more(mesh):
    mesh.relays["b"].publisher()
    listing = mesh.list()
    mesh.answer("b")
    mesh.lose("b")
    mesh.pass_time(1)
    mesh.answer()
    mesh.pass_time(FADING_SECONDS)
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]
    assert not len(mesh.a.relay.namespaces.remote)


def test_nothing_is_asked_of_others_any_more_when_nobody_has_listed_for_a_while(mesh, monkeypatch):
    monkeypatch.setattr(listings, "MAX_UNWANTED", 1)
    mesh.relays["b"].publisher()
    mesh.relays["b"].publisher(namespace=(b"elsewhere",))
    asked = mesh.relays["b"].relay.namespaces.listings
    for prefix in (PREFIX, (b"elsewhere",)):
        listing = mesh.list(prefix)
        mesh.answer("b")
        listing.request.cancel()
        mesh.a.run()
    assert list(asked.values()) == [(b"elsewhere",)], "the oldest goes at the limit"
    mesh.pass_time(UNWANTED_SECONDS + FADING_SECONDS + 1)
    assert not asked and not len(mesh.a.relay.namespaces.remote)
