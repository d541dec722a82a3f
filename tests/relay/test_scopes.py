"""Paths separate names (MOQT "MOQT URI Scheme")."""

from __future__ import annotations

import pytest

from moqt.session import SessionConfig
from moqt.token_file import bearer
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from relay.config import RelayConfig
from relay.scopes import Scopes, scope_of
from relay.service.metrics import PREFIX, RelayMetrics
from tests.relay.inside import make_room
from tests.relay.star import JOIN, Star, everything, publish, track


class Paths(Star):
    """A Star whose peers say what they have dialled."""

    def __init__(self, policy=None, **settings):
        super().__init__()
        self.relay = Scopes(RelayConfig(**settings), policy)

    def at(self, path, authority="relay.example"):
        return {"client_config": SessionConfig(path=path, authority=authority)}


def test_equal_names_under_different_paths_are_different_tracks():
    star = Paths()
    for path, size in (("/one", 100), ("/two", 50)):
        star.publisher(track(1, size=size, ended=True), **star.at(path))
    for path, size in (("/one", 100), ("/two", 50), ("/one?query=1", 100)):
        _, collector = star.subscriber(JOIN, **star.at(path))
        assert collector.payloads == everything(1, size=size)
    _, nobody = star.subscriber(JOIN, **star.at("/three"))
    assert nobody.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert star.relay.counters.malformed_tracks == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("", "relay.example"), ("/", "relay.example")),
        (("/a", "relay.example"), ("/a?token=1", "relay.example")),
        (("/a", "relay.example"), ("/a", "192.0.2.1:4443")),
    ],
)
def test_queries_authorities_and_an_empty_path_separate_nothing(one, other):
    star = Paths()
    star.publisher(track(1), **star.at(*one))
    _, collector = star.subscriber(JOIN, **star.at(*other))
    assert collector.payloads == everything(1)


@pytest.mark.parametrize("other", ["/A", "/a/", "/%61", "/a/b", "//a"])
def test_paths_are_compared_octet_by_octet(other):
    assert scope_of("/a") != scope_of(other)


def test_the_cache_is_one_for_all_and_a_scope_of_nobody_is_forgotten():
    star = Paths(cache_octets=8 * 10_000, linger=0)
    pairs = []
    for path in ("/one", "/two"):
        pairs.append(star.publisher(track(1, size=15_000), **star.at(path)))
        star.subscriber(JOIN, **star.at(path))
    assert star.relay.cache.evictions > 0 and star.relay.cache.billed <= 80_000
    for pair in tuple(star.pairs):
        star.kill(pair)
    star.pass_time(2)
    assert len(star.relay.relays) <= 2
    for relay in star.relay.relays.values():
        assert not relay.sessions and relay.tracks
    make_room(star.relay.cache, 80_000)
    star.pass_time(1)
    assert star.relay.relays == {} and star.relay.cache.billed == 0


def test_one_path_too_many_is_refused_unless_another_is_only_cached():
    star = Paths(max_scopes=2)
    one = star.publisher(track(1), **star.at("/one"))
    star.subscriber(JOIN, **star.at("/one"))
    star.subscriber(JOIN, **star.at("/two"))
    refused = star.connect(**star.at("/three"))
    star.run()
    assert refused.client.closed.code == SessionErrorCode.INVALID_PATH
    again = star.connect(**star.at("/one"))
    star.run()
    assert again.client.closed is None
    for pair in [pair for pair in star.pairs if pair.server.path == "/one"]:
        star.kill(pair)
    assert star.relay.cache.objects == 4 and one.client is not None
    third, _ = star.subscriber(JOIN, **star.at("/three"))
    assert third.client.closed is None and set(star.relay.relays) == {"/two", "/three"}
    assert star.relay.cache.billed == 0


class Owners:
    """Only who has shown the token may do anything."""

    def __init__(self):
        self.asked = 0

    def allow(self, session, action, namespace, tokens=()):
        self.asked += 1
        return (0, b"owner") in (*tokens, *session.peer_tokens)

    def check(self, session, token):
        return None


def owned(path):
    config = SessionConfig(path=path, authority="relay.example", setup_tokens=(bearer(b"owner"),))
    return {"client_config": config}


def test_sessions_without_a_right_take_no_scope_whatever_they_dial_and_ask():
    policy = Owners()
    star = Paths(policy, max_scopes=2)
    strangers = [star.connect(**star.at(f"/invented/{number}")) for number in range(20)]
    star.run()
    for pair in strangers:
        assert pair.client.closed is None
        refused = star.subscribe(pair)
        assert refused.failed.code == RequestErrorCode.UNAUTHORIZED
        assert star.fetch(pair).failed.code == RequestErrorCode.UNAUTHORIZED
        ended = []
        pair.client.publish_namespace((b"demo",), on_ended=ended.append)
        pair.client.subscribe_namespace((), on_namespace=lambda *event: None, on_ended=ended.append)
        pair.client.subscribe_tracks(
            (),
            on_publish=lambda request: None,
            on_skipped=lambda name: None,
            on_ended=ended.append,
        )
        status = pair.client.track_status(refused.request.name)
        status.on_answer = ended.append
        publication = pair.client.publish(track())
        publication.on_answer = ended.append
        star.run()
        assert [each.code for each in ended] == 5 * [RequestErrorCode.UNAUTHORIZED]
    assert star.relay.relays == {} and policy.asked == 20 * 7
    star.publisher(track(1), **owned("/mine"))
    _, collector = star.subscriber(JOIN, **owned("/mine"))
    assert collector.payloads == everything(1)
    assert set(star.relay.relays) == {"/mine"}
    numbers = RelayMetrics(star.relay)
    assert number(numbers, "sessions") == number(numbers, "sessions_total") == 22
    for pair in tuple(star.pairs):
        star.kill(pair)
    assert star.relay.sessions() == []


def test_sessions_without_a_right_displace_no_scope_that_is_only_cached():
    star = Paths(Owners(), max_scopes=1)
    star.publisher(track(1), **owned("/mine"))
    star.subscriber(JOIN, **owned("/mine"))
    for pair in tuple(star.pairs):
        star.kill(pair)
    stranger, refused = star.subscriber(JOIN, **star.at("/invented"))
    assert refused.failed.code == RequestErrorCode.UNAUTHORIZED and not stranger.client.closed
    assert set(star.relay.relays) == {"/mine"} and star.relay.cache.objects == 4
    star.publisher(track(1), **owned("/other"))
    assert set(star.relay.relays) == {"/other"} and star.relay.cache.objects == 0


def test_a_session_without_a_right_does_not_keep_the_scope_that_it_dials():
    star = Paths(Owners(), max_scopes=1, linger=0)
    owner = star.publisher(track(1), **owned("/mine"))
    strangers = [star.connect(**star.at("/mine")) for _ in range(3)]
    for pair in strangers:
        assert star.subscribe(pair).failed.code == RequestErrorCode.UNAUTHORIZED
    assert number(RelayMetrics(star.relay), "sessions") == 4
    star.kill(owner)
    star.pass_time(2)
    assert star.relay.relays == {}
    star.publisher(track(1), **owned("/other"))
    assert set(star.relay.relays) == {"/other"}
    assert all(pair.client.closed is None for pair in strangers)


def test_a_session_that_waits_with_a_path_is_told_when_there_is_no_scope_left(caplog):
    star = Paths(max_scopes=1)
    late = star.connect(**star.at("/late"))
    star.publisher(track(1), **star.at("/one"))
    refused = star.subscribe(late)
    assert refused.failed.code == RequestErrorCode.EXCESSIVE_LOAD
    assert "max_scopes" in refused.failed.reason and refused.failed.retry_after_ms == 1000
    assert late.client.closed is None and star.relay.counters.scopes_refused == 1
    for pair in [pair for pair in star.pairs if pair is not late]:
        star.kill(pair)
    assert star.subscribe(late).failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_a_scope_that_is_kept_stays_without_sessions():
    star = Paths(max_scopes=1)
    kept = star.relay.keep("/up?x=1")
    star.pass_time(1)
    assert star.relay.relays == {"/up": kept}
    refused = star.connect(**star.at("/other"))
    star.run()
    assert refused.client.closed.code == SessionErrorCode.INVALID_PATH


def number(metrics, name):
    """What a scrape shows under `name`."""
    return metrics.registry.get_sample_value(PREFIX + name)


def test_numbers_are_those_of_all_scopes_and_never_shrink():
    star = Paths(linger=0)
    metrics = RelayMetrics(star.relay)
    for path in ("/one", "/two"):
        store = track(1)
        star.publisher(store, **star.at(path))
        star.subscriber(JOIN, **star.at(path))
        publish(store, 1, 0)
    star.run()
    metrics.update()
    assert number(metrics, "sessions") == 4 and number(metrics, "scopes") == 2
    assert number(metrics, "tracks") == 2 and number(metrics, "objects_in_total") == 10
    star.relay.relays["/one"].sessions.copy().pop().scheduler.counters.too_far_behind = 7
    for pair in tuple(star.pairs):
        star.kill(pair)
    make_room(star.relay.cache, star.relay.cache.budget)
    star.pass_time(1)
    metrics.update()
    assert number(metrics, "scopes") == 0 and number(metrics, "cache_billed_bytes") == 0
    assert number(metrics, "too_far_behind_total") == 7 and number(metrics, "sessions_total") == 4


def test_the_log_hears_once_that_there_are_as_many_scopes_as_may_be(caplog):
    star = Paths(max_scopes=1)
    for path in ("/a", "/b", "/c"):
        pair = star.connect(**star.at(path))
        if not pair.client.closed:
            star.subscribe(pair)
    told = [r.getMessage() for r in caplog.records if "max_scopes" in r.getMessage()]
    assert told == [
        "the relay is at its limit of 1 scopes (max_scopes): sessions for more are closed"
    ]
    assert star.relay.counters.scopes_refused == 2
