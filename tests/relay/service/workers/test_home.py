"""The home: it takes requests of the edges of its own start, and of nobody else."""

from __future__ import annotations

import pickle

import pytest

from moqt.session import SessionConfig
from moqt.token_file import bearer
from moqt.values.codes import RequestErrorCode
from relay.config import RelayConfig
from relay.service.workers.settings import Secret, Way, of_edge, of_home
from tests.moqt.memory import Pair
from tests.relay.service.workers.cluster import SECRET, Cluster
from tests.relay.star import JOIN, NAME, Collector


@pytest.mark.parametrize(
    "tokens",
    [
        (),
        (bearer(b"of this start"),),
        (Secret(key=b"of another start").token(Way.SERVING, 0),),
        (SECRET.token(Way.SERVING, 7),),
    ],
)
def test_who_shows_no_token_of_this_start_may_nothing(tokens):
    cluster = Cluster()
    pair = Pair(None, cluster.scopes, client_config=SessionConfig(setup_tokens=tokens))
    collector, ended = Collector(), []
    pair.client.subscribe(NAME, collector, JOIN)
    pair.client.publish_namespace((b"mine",), on_ended=ended.append)
    pair.run()
    for error in (collector.failed, *ended):
        assert error.code == RequestErrorCode.UNAUTHORIZED
    assert len(ended) == 1
    assert not cluster.scopes.relays, "nothing is made for it"


def test_the_secret_is_not_shown():
    assert "of this start" not in repr(SECRET)
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET


def test_the_parts_of_the_cache_are_no_more_than_the_whole():
    config = RelayConfig(cache_octets=1000, cache_octets_per_scope=100)
    for workers in (2, 3, 64):
        edges, home = of_edge(config, workers), of_home(config, workers)
        assert home.cache_octets + workers * edges.cache_octets <= 1000
        assert home.cache_octets_per_scope == 50 and edges.cache_octets_per_scope >= 1
    assert of_edge(RelayConfig(), 2).cache_octets_per_scope == 0, "no quota stays none"
