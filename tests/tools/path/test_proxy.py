"""The proxy between real sockets on loopback. When something arrives is the link's to tell
(`test_link.py`): here counts, that nothing is lost that no link loses, and that it comes back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tools.path import proxy as proxy_module
from tools.path.link import Path
from tools.path.proxy import Proxy, Route

FREE = ("127.0.0.1", 0)
FAST = Path(latency=0.001)


@contextmanager
def sockets(count: int) -> Iterator[list[socket.socket]]:
    made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    try:
        for each in made:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            each.bind(FREE)
            each.settimeout(10)
        yield made
    finally:
        for each in made:
            each.close()


World = tuple[Proxy, Route, list[socket.socket]]


@contextmanager
def proxied(up: Path, down: Path = FAST, *, rebind: float | None = None) -> Iterator[World]:
    """A proxy that runs; a server behind it and two clients before it."""
    with sockets(3) as made:
        proxy = Proxy()
        route = proxy.add(FREE, made[0].getsockname(), up, down, rebind=rebind)
        with proxy:
            yield proxy, route, made


def test_datagrams_pass_both_ways_whole_and_in_order():
    with proxied(FAST) as (proxy, route, (server, client, _)):
        sent = [bytes([n]) * (100 + n) for n in range(200)]
        for data in sent:
            client.sendto(data, route.address)
        got, addresses = zip(*(server.recvfrom(65536) for _ in sent), strict=True)
        assert list(got) == sent
        assert len(set(addresses)) == 1
        for data in got:
            server.sendto(data[::-1], addresses[0])
        assert [client.recv(65536) for _ in sent] == [data[::-1] for data in sent]
        told = proxy.statistics()[0]
    assert told["up"]["forwarded"] == told["down"]["forwarded"] == 200
    assert told["up"]["octets"] == sum(map(len, sent))
    assert set(told["proxy_dropped"].values()) == {0}


def test_a_route_may_lead_from_one_family_of_addresses_to_the_other():
    with sockets(1) as (server,), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
        client.settimeout(10)
        proxy = Proxy()
        route = proxy.add(("::1", 0), server.getsockname(), FAST, FAST)
        with proxy:
            client.sendto(b"six", route.address)
            data, source = server.recvfrom(100)
            server.sendto(data + b" and four", source)
            assert client.recv(100) == b"six and four"


def test_every_client_has_its_answers():
    with proxied(FAST) as (proxy, route, (server, *clients)):
        for n, client in enumerate(clients):
            client.sendto(b"%d" % n, route.address)
        for _ in clients:
            data, source = server.recvfrom(100)
            server.sendto(b"for " + data, source)
        assert [client.recv(100) for client in clients] == [b"for 0", b"for 1"]
        assert proxy.statistics()[0]["clients"] == 2


def test_what_the_links_drop_does_not_arrive_and_is_told_by_reason():
    with proxied(Path(latency=0.001, mtu=1300, loss=0.5)) as (proxy, route, (server, client, _)):
        for n in range(200):
            client.sendto(bytes(1300 + n % 2), route.address)
        while (told := proxy.statistics()[0]["up"])["offered"] < 200:
            time.sleep(0.001)
        arrived = [len(server.recv(65536)) for _ in range(told["forwarded"])]
    assert set(arrived) == {1300}
    assert told["dropped"]["too long"] == 100
    assert told["dropped"]["lost"] == 100 - len(arrived) > 20


def test_a_duplicate_comes_twice():
    with proxied(Path(latency=0.001, duplicate=1.0)) as (_, route, (server, client, _other)):
        client.sendto(b"twice", route.address)
        assert [server.recv(100) for _ in range(2)] == [b"twice"] * 2


def test_a_client_that_is_rebound_comes_from_another_port_and_still_has_its_answers():
    with proxied(FAST, rebind=0.001) as (proxy, route, (server, client, _)):
        seen = set()
        for n in range(5):
            client.sendto(b"%d" % n, route.address)
            data, source = server.recvfrom(100)
            seen.add(source)
            server.sendto(data, source)
            assert client.recv(100) == data
        assert len(seen) > 1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as another:
            another.bind(min(seen - {source}))  # nobody has the old ports any more
        assert proxy.statistics()[0]["rebound"] == len(seen) - 1


def test_no_more_is_under_way_than_may_be(monkeypatch):
    monkeypatch.setattr(proxy_module, "UNDER_WAY", 1000)
    with sockets(2) as (server, client):
        proxy = Proxy()
        route = proxy.add(FREE, server.getsockname(), FAST, FAST)
        for _ in range(3):  # they are all there when it begins
            client.sendto(bytes(400), route.address)
        with proxy:
            assert [len(server.recv(1000)) for _ in range(2)] == [400, 400]
            for _ in range(2):
                client.sendto(bytes(300), route.address)
            assert [len(server.recv(1000)) for _ in range(2)] == [300, 300]
            assert proxy.statistics()[0]["proxy_dropped"]["too much under way"] == 1


def test_the_client_that_was_silent_longest_makes_room_for_another(monkeypatch):
    monkeypatch.setattr(proxy_module, "FLOWS", 1)
    with proxied(FAST) as (proxy, route, (server, *clients)):
        for _ in range(3):
            for client in clients:
                client.sendto(b"?", route.address)
                data, source = server.recvfrom(100)
                server.sendto(data, source)
                assert client.recv(100) == b"?"
                assert proxy.statistics()[0]["clients"] == 1


def test_many_routes_in_one_process_keep_apart():
    with sockets(3) as (first, second, client):
        proxy = Proxy()
        routes = [proxy.add(FREE, s.getsockname(), FAST, FAST) for s in (first, second)]
        with proxy:
            for n, route in enumerate(routes):
                client.sendto(b"%d" % n, route.address)
            assert first.recv(100) == b"0" and second.recv(100) == b"1"


def test_a_server_that_is_not_there_stops_nothing():
    with sockets(2) as (server, client):
        gone = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        gone.bind(FREE)
        address = gone.getsockname()
        gone.close()
        proxy = Proxy()
        dead = proxy.add(FREE, address, FAST, FAST)
        live = proxy.add(FREE, server.getsockname(), FAST, FAST)
        with proxy:
            for _ in range(5):
                client.sendto(b"?", dead.address)
            client.sendto(b"!", live.address)
            assert server.recv(100) == b"!"
