"""Whatever a peer says: nothing grows that has no limit, and nothing beyond its limit."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields

import pytest

from moqt.session import Remembered
from relay.service.limits import LIMITS
from relay.service.metrics import EVERY_COUNTER, GAUGES
from relay.service.told.names import exported
from tests.moqt.containers import sizes
from tests.moqt.loose import Everything
from tests.relay.star import Star
from tools.fuzz_floods import MANY, RECORDED, FloodTarget, recorded
from tools.remembered import ROWS

NAMED = frozenset[str]().union(*(row.containers for row in ROWS))


def ends(*_):
    pass


@pytest.mark.parametrize("script", RECORDED, ids=lambda script: script.__name__)
def test_a_flood_makes_nothing_grow_but_what_has_a_row_in_the_table_of_limits(script):
    star, tracks = Star(FloodTarget.LIMITS), Everything()
    pairs, _ = recorded(star, tracks)
    pairs[0].client.publish_namespace((b"demo",), on_ended=ends)
    star.run()
    roots = star.relay, *(pair.server for pair in pairs)
    before = sizes(*roots)
    script(star, tracks, pairs[0].client, pairs[1].client)
    grown = {name for name, size in sizes(*roots).items() if size > before[name] + MANY // 10}
    assert grown - NAMED == set()
    for pair in list(star.pairs):
        star.kill(pair)
    star.pass_time(2)
    star.pass_time(60)
    star.relay.cache.expire(star.now)
    for track in list(star.relay.tracks.values()):
        star.relay.cache.forget(track.store)
        star.relay.track_busy(track)
    star.pass_time(2)
    star.assert_empty()
    left = sizes(star.relay)
    assert {name for name, size in left.items() if size > MANY // 10} == set()


def test_a_container_that_is_added_is_seen_wherever_it_hangs():
    star = Star()
    pair = star.connect()
    star.run()
    before = sizes(star.relay, pair.server)
    pair.server.handler.namespaces.events.listed.append([ends] * 70)
    pair.server.peer_tokens = ({n: bytearray(2) for n in range(60)},)
    grown = sizes(star.relay, pair.server) - before
    assert grown == {"NamespaceEvents.listed": 71, "Session.peer_tokens": 60 + 120}


def test_limits_and_metrics_of_the_table_are_there():
    tables = {each.name for each in fields(Remembered)}
    constants = [
        "moqt.receiving.aliases", "moqt.receiving.early", "moqt.requests.rules",
        "moqt.track.malformed", "moqt.track.stored", "relay.sources.fetches",
        "relay.sources.missing", "relay.sources.kept", "relay.disk.keeping",
    ]  # fmt: skip
    modules = [importlib.import_module(name) for name in constants]
    for row in ROWS:
        for name in re.findall(r"`([^`]+)`", row.limit):
            number = re.search(rf"([\d,]+)[a-zA-Z ]*\(`{name}`", row.limit)
            found = [getattr(module, name) for module in modules if hasattr(module, name)]
            assert name in LIMITS or name in ("--cache-memory", "--cache-disk") or found, row
            if number is not None:
                assert found == [int(number[1].replace(",", ""))], row
        for name in re.findall(r"`([^`]+)`", row.metric):
            known = {*tables, *map(exported, GAUGES), "remembered"}
            known |= {f"{exported(each)}_total" for each in EVERY_COUNTER}
            assert name in known, row
