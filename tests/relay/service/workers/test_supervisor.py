"""The supervisor: what it hands to its workers, and what it does with one that ends."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from moqt.quic.config import QuicConfig
from relay.config import RelayConfig
from relay.service.checks import Failure
from relay.service.daemon import DaemonConfig
from relay.service.workers import supervisor as module
from relay.service.workers.gathered import NotTold
from relay.service.workers.settings import HOME, Secret, Sockets, WorkerSettings
from relay.service.workers.supervisor import Child, Plan, Supervisor


def settings(tmp_path, number=None):
    return WorkerSettings(
        number=number,
        edges=2,
        sockets=Sockets(udp=0, inbox=0, outboxes=()),
        relay=RelayConfig(),
        session=DaemonConfig(host="", port=0, quic=QuicConfig()).session,
        quic=QuicConfig(),
        secret=Secret(key=b"secret of this start"),
        home_port=1,
        home_cert=tmp_path / "cert.pem",
    )


class Orders:
    """Nobody's."""

    def __init__(self):
        self.stop = None
        self.began = False

    def begin(self, answers, stop, reload):
        self.began, self.stop = True, stop

    def end(self):
        self.began = False


class Life:
    """A child that serves at once, in the place of a process, until it is told to stop."""

    def __init__(self, child, *, serves=True, failure=None):
        self.child, self.serves, self.failure = child, serves, failure
        self.told = []
        child.run = self.run
        child.tell = lambda **message: self.told.append(message)

    async def run(self):
        if not self.serves:
            self.child.failure = self.failure
            return
        self.child.up = True
        self.child.serving.set()
        async with asyncio.timeout(20):
            while {"do": "stop"} not in self.told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def family(tmp_path, **of_edge):
    plan = Plan(
        workers=1, daemon=DaemonConfig(host="", port=0, quic=QuicConfig()), relay=RelayConfig()
    )
    children = [Child(settings(tmp_path, each), lambda child: None) for each in (None, 0)]
    lives = [Life(children[0]), Life(children[1], **of_edge)]
    return Supervisor(plan, children), lives


async def test_edges_are_told_to_stop_before_the_home(tmp_path):
    supervisor, (home, edge) = family(tmp_path)
    orders = Orders()

    def ready():
        assert orders.began
        orders.stop()
        assert edge.told == [{"do": "stop"}] and home.told == []

    await supervisor.run(None, ready, orders)
    assert {"do": "stop"} in home.told and not orders.began


async def test_a_second_order_to_stop_is_for_all_at_once(tmp_path):
    supervisor, (home, edge) = family(tmp_path)
    orders = Orders()

    def ready():
        orders.stop()
        orders.stop()
        assert edge.told == [{"do": "stop"}] * 2 and home.told == [{"do": "stop"}]

    await supervisor.run(None, ready, orders)


async def test_a_worker_that_cannot_begin_to_serve_ends_the_start_with_its_sentence(tmp_path):
    supervisor, _ = family(tmp_path, serves=False, failure="--cache-dir: no room")
    with pytest.raises(Failure, match="--cache-dir: no room"):
        await supervisor.run(None, lambda: None, Orders())


async def test_a_worker_that_ends_without_a_word_is_named(tmp_path):
    supervisor, _ = family(tmp_path, serves=False)
    with pytest.raises(Failure, match="worker 0 ended at once"):
        await supervisor.run(None, lambda: None, Orders())


async def test_the_others_are_told_of_a_worker_that_has_died(tmp_path):
    supervisor, (home, edge) = family(tmp_path)
    supervisor.died(edge.child)
    assert home.told == [{"do": "gone", "who": "0"}] and edge.told == []
    supervisor.died(home.child)
    assert edge.told == [{"do": "gone", "who": HOME}]


async def test_a_worker_that_is_not_there_is_not_asked(tmp_path):
    child = Child(settings(tmp_path, 0), lambda each: None)
    with pytest.raises(NotTold, match="worker 0 is not there"):
        await child.ask("numbers", {})


async def test_a_worker_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASK_SECONDS", 0.01)
    child = Child(settings(tmp_path, 0), lambda each: None)
    child.up = True
    with pytest.raises(NotTold, match="worker 0 does not answer"):
        await child.ask("numbers", {})


def test_settings_arrive_as_they_were_and_show_no_secret(tmp_path):
    sent = settings(tmp_path, 1)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert "secret of this start" not in repr(sent)
    assert (sent.name, settings(tmp_path).name) == ("1", HOME)
