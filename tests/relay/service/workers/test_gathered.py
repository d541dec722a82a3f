"""What the workers of a relay tell is told as one."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from relay.service.workers.channel import Channel
from relay.service.workers.gathered import Gathered, NotTold


class Worker:
    """Answers what it was given."""

    def __init__(self, name, up=True, **answers):
        self.name, self.up, self.restarts = name, up, 0
        self.answers = answers
        self.asked = []

    async def ask(self, what, query):
        self.asked.append((what, query))
        if not self.up:
            raise NotTold(f"worker {self.name} is not there")
        answer = self.answers[what]
        if what in ("tracks", "sessions"):
            skip, limit = int(query["after"]), int(query["limit"])
            return {what: answer[skip : skip + limit], "of": len(answer), "after": 0}
        return answer


def numbered(count):
    return [{"track": str(number)} for number in range(count)]


async def test_lists_go_on_from_one_worker_to_the_next():
    workers = [Worker("home", tracks=numbered(3)), Worker("0", tracks=numbered(2))]
    gathered = Gathered(workers)
    whole = await gathered.tell("tracks", {})
    assert [each["worker"] for each in whole["tracks"]] == ["home"] * 3 + ["0"] * 2
    assert (whole["of"], whole["after"]) == (5, 5)
    found = []
    while len(found) < 5:
        page = await gathered.tell("tracks", {"limit": "2", "after": str(len(found))})
        assert page["of"] == 5
        found += page["tracks"]
        assert page["after"] == len(found)
    assert found == whole["tracks"]


async def test_a_worker_that_does_not_answer_is_named():
    workers = [Worker("home", sessions=numbered(1)), Worker("0", up=False)]
    told = await Gathered(workers).tell("sessions", {})
    assert told["missing"] == ["0"] and len(told["sessions"]) == 1


async def test_what_only_the_home_can_say_is_a_fault_while_it_is_gone():
    gathered = Gathered([Worker("home", up=False), Worker("0")])
    with pytest.raises(ValueError, match="worker home is not there"):
        await gathered.tell("upstreams", {})


async def test_a_relay_is_ready_when_all_workers_are_and_the_home_says_so():
    home, edge = Worker("home", not_ready=None), Worker("0")
    gathered = Gathered([home, edge])
    assert await gathered.not_ready() is None
    home.answers["not_ready"] = "no upstream relay is connected"
    assert await gathered.not_ready() == "no upstream relay is connected"
    edge.up = False
    assert "worker 0 is not there" in await gathered.not_ready()


async def test_a_purge_frees_the_edges_before_the_home():
    order = []

    class Purged(Worker):
        async def ask(self, what, query):
            order.append(self.name)
            return await super().ask(what, query)

    workers = [
        Purged("home", purge={"tracks": 3, "octets": 300, "in_use": 0}),
        Purged("0", purge={"tracks": 2, "octets": 200, "in_use": 1}),
        Purged("1", up=False),
    ]
    told = await Gathered(workers).tell("purge", {"namespace": ""})
    assert told == {"tracks": 3, "octets": 500, "in_use": 1}
    assert order[-1] == "home"


def exposition(value):
    registry = CollectorRegistry()
    Gauge("kvcs_relay_sessions", "Established.", registry=registry).set(value)
    counted = Counter("kvcs_relay_refused", "Refused.", ["reason"], registry=registry)
    counted.labels("TIMEOUT").inc(value)
    return generate_latest(registry).decode()


async def test_series_of_all_workers_are_one_family_each_with_whose_they_are():
    workers = [
        Worker("home", numbers=exposition(1)),
        Worker("0", numbers=exposition(2)),
        Worker("1", up=False),
    ]
    workers[2].restarts = 3
    text = generate_latest(await Gathered(workers).numbers()).decode()
    assert text.count("# TYPE kvcs_relay_sessions gauge") == 1
    assert 'kvcs_relay_sessions{worker="0"} 2.0' in text
    assert 'kvcs_relay_refused_total{reason="TIMEOUT",worker="home"} 1.0' in text
    assert 'kvcs_relay_worker_up{worker="1"} 0.0' in text
    assert 'kvcs_relay_worker_restarts_total{worker="1"} 3.0' in text


async def test_what_is_said_to_a_worker_arrives_whole_and_ends_with_the_other_end():
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    first, second = await Channel.over(ours), await Channel.over(theirs)
    said = [{"do": "tell", "text": "x" * 300_000}, {"do": "stop"}]

    async def say():
        for each in said:
            first.send(each)
        await first.flush()
        first.close()

    telling = asyncio.ensure_future(say())
    async with asyncio.timeout(20):
        assert [each async for each in second.messages()] == said
        await telling
    second.send({"of": 1})  # nobody is there any more
    second.close()
