"""A UDP proxy whose routes are links: it stands for networks between processes on one host.

One thread and one heap serve all routes. Datagrams are taken and given in batches (UDP_GRO and
UDP_SEGMENT where the kernel has them), so that it keeps up with a hundred megabytes a second; in
exchange a datagram may be late by `GRAIN`. Where it is allowed (as root), the thread has real-time
priority; how late it was at most is told all the same. ECN marks do not pass.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import selectors
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from moqt.quic.udp.socket import UdpSocket
from tools.path.link import Link, Path

Address = tuple[Any, ...]

GRAIN = 0.0005
"""Seconds that datagrams are gathered for on a path that takes much longer anyway."""
LEAST_GRAIN = 0.0002
"""Seconds below which it is not worth it."""
FLOWS = 512
"""Clients of one route, a socket each; the one that was silent longest makes room for another."""
UNDER_WAY = 512 << 20
"""Octets that may be under way on all routes; more are dropped, and counted."""
WAITING = 8192
"""Datagrams that wait for a socket of the host which takes no more; more are dropped."""


class _End:
    """A socket of ours and what waits for it."""

    def __init__(self, udp: UdpSocket) -> None:
        self.udp = udp
        self.waiting: list[tuple[bytes, Address]] = []

    def send(self) -> int:
        """Send what waits; returns the datagrams that had to be dropped."""
        del self.waiting[: self.udp.send(self.waiting)]
        dropped = max(0, len(self.waiting) - WAITING)
        if dropped:
            del self.waiting[WAITING:]
        return dropped


@dataclass(eq=False)
class _Flow:
    """One client of a route, and the socket that stands for it before the server."""

    route: Route
    client: Address
    end: _End
    rebind_at: float
    octets: int = 0
    """That went down to it."""


@dataclass(eq=False)
class Route:
    """Where clients send to, where that goes, and the links both ways."""

    to: Address
    up: Link
    """From the clients to the server."""
    down: Link
    rebind: float | None
    listener: _End
    flows: dict[Address, _Flow] = field(default_factory=dict)
    """In the order in which they last spoke."""
    rebound: int = 0
    """Times that a client got another address before the server."""
    overflown: Counter[str] = field(default_factory=Counter)
    """Datagrams that the proxy itself, not a link of its, dropped, by reason."""

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.listener.udp.address


class Proxy:
    """Routes in use. `run` forwards until `stop` is called, from a signal handler or a thread.

    A context manager runs it in a thread of its own.
    """

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.late_max = 0.0
        """Seconds by which a datagram was given too late at most: how well the host kept up."""
        self._selector = selectors.DefaultSelector()
        self._heap: list[tuple[float, int, _Flow, bool, bytes]] = []
        self._order = 0
        self._octets = 0
        self._grain = GRAIN
        self._unsent: dict[_End, Route] = {}
        self._stopped = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def add(
        self,
        listen: Address,
        to: Address,
        up: Path,
        down: Path,
        *,
        rebind: float | None = None,
        seed: int = 1,
    ) -> Route:
        """Forward what comes to `listen` (port 0 takes a free one) over `up` to `to`, and what is
        answered over `down`; every `rebind` seconds each client gets another port before the
        server, as a NAT does. Raises OSError or UnicodeError when an address cannot be had."""
        now = time.monotonic()
        number = len(self.routes)
        listen, to = _resolve(listen), _resolve(to)
        listener = _End(UdpSocket(_family(listen), local=listen))
        route = Route(
            to,
            Link(up, now=now, seed=f"{seed} {number} up"),
            Link(down, now=now, seed=f"{seed} {number} down"),
            rebind,
            listener,
        )
        self.routes.append(route)
        self._selector.register(listener.udp.sock, selectors.EVENT_READ, route)
        grain = min(self._grain, up.latency / 8, down.latency / 8)
        self._grain = grain if grain >= LEAST_GRAIN else 0.0
        return route

    # ---- the loop

    def run(self) -> None:
        """Forward until `stop`."""
        _hurry()
        while not self._stopped:
            self._wait()
            for key, _ in self._selector.select(0):
                if isinstance(key.data, Route):
                    self._from_clients(key.data)
                elif isinstance(key.data, _Flow):
                    # unless a client that was heard a moment ago took its place or its address
                    if key.fd == key.data.end.udp.sock.fileno():
                        self._from_server(key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(1 << 10)
            self._deliver(time.monotonic())

    def stop(self) -> None:
        """Have `run` return soon."""
        self._stopped = True
        self._wake.send(b"x")

    def close(self) -> None:
        """Close all sockets; what is under way is lost."""
        for route in self.routes:
            for end in (route.listener, *(flow.end for flow in route.flows.values())):
                self._selector.unregister(end.udp.sock)
                end.udp.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> Proxy:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self._thread is not None
        self._thread.join()
        self.close()

    def _wait(self) -> None:
        """Until a socket has something or a datagram is due, but not for less than the grain."""
        if self._grain:
            time.sleep(self._grain)
        timeout = 1.0
        if self._unsent:
            timeout = 0.001
        if self._heap:
            timeout = min(timeout, max(0.0, self._heap[0][0] - time.monotonic()))
        # A selector counts in milliseconds, select() in microseconds.
        select.select([self._selector.fileno()], [], [], timeout)

    # ---- in

    def _from_clients(self, route: Route) -> None:
        now = time.monotonic()
        for datagrams, client in route.listener.udp.receive()[0]:
            try:
                flow = route.flows.pop(client, None) or self._open(route, client, now)
                route.flows[client] = flow
                if now >= flow.rebind_at:
                    self._rebind(flow, now)
            except OSError:
                route.overflown["no socket to be had"] += len(datagrams)
                continue
            self._offer(route.up, flow, True, datagrams, now)

    def _from_server(self, flow: _Flow) -> None:
        now = time.monotonic()
        for datagrams, _ in flow.end.udp.receive()[0]:
            self._offer(flow.route.down, flow, False, datagrams, now)

    def _offer(
        self, link: Link, flow: _Flow, upward: bool, datagrams: list[bytes], now: float
    ) -> None:
        heap, offer, order, before = self._heap, link.offer, self._order, link.octets
        for data in datagrams:
            for at in offer(len(data), now, flow):
                if self._octets + len(data) > UNDER_WAY:
                    flow.route.overflown["too much under way"] += 1
                    continue
                self._octets += len(data)
                order += 1
                heapq.heappush(heap, (at, order, flow, upward, data))
        self._order = order
        if not upward:
            flow.octets += link.octets - before

    def _open(self, route: Route, client: Address, now: float) -> _Flow:
        if len(route.flows) >= FLOWS:
            oldest = route.flows.pop(next(iter(route.flows)))
            self._shut(oldest.end)
        flow = _Flow(route, client, self._toward(route), now + (route.rebind or float("inf")))
        self._selector.register(flow.end.udp.sock, selectors.EVENT_READ, flow)
        return flow

    def _toward(self, route: Route) -> _End:
        return _End(UdpSocket(_family(route.to), remote=route.to))

    def _rebind(self, flow: _Flow, now: float) -> None:
        """What the server sends to the old address from now on is lost."""
        end = self._toward(flow.route)
        self._shut(flow.end)
        flow.end = end
        flow.route.rebound += 1
        flow.rebind_at = now + (flow.route.rebind or float("inf"))
        self._selector.register(flow.end.udp.sock, selectors.EVENT_READ, flow)

    def _shut(self, end: _End) -> None:
        self._unsent.pop(end, None)
        self._selector.unregister(end.udp.sock)
        end.udp.close()

    # ---- out

    def _deliver(self, now: float) -> None:
        """Give what is due to the sockets, all of one socket at once."""
        heap, unsent = self._heap, self._unsent
        if heap and now - heap[0][0] > self.late_max:
            self.late_max = now - heap[0][0]
        while heap and heap[0][0] <= now:
            _, _, flow, upward, data = heapq.heappop(heap)
            self._octets -= len(data)
            route = flow.route
            end = flow.end if upward else route.listener
            if upward and route.flows.get(flow.client) is not flow:
                route.overflown["client made room"] += 1
                continue
            if not end.waiting:
                unsent[end] = route
            end.waiting.append((data, () if upward else flow.client))
        for end, route in list(unsent.items()):
            if dropped := end.send():
                route.overflown["socket full"] += dropped
            if not end.waiting:
                del unsent[end]

    # ---- what happened

    def statistics(self) -> list[dict[str, Any]]:
        """Of each route: what its links did, and what the host lost at the proxy's own sockets."""
        drops = _kernel_drops()
        told = []
        for route in self.routes:
            ends = (route.listener, *(flow.end for flow in route.flows.values()))
            host, port = route.address[:2]
            told.append(
                {
                    "listen": f"{host}:{port}",
                    "to": f"{route.to[0]}:{route.to[1]}",
                    "up": _told(route.up),
                    "down": _told(route.down),
                    "clients": len(route.flows),
                    "octets_by_client": [flow.octets for flow in route.flows.values()],
                    "rebound": route.rebound,
                    "late_max_ms": round(1000 * self.late_max, 3),
                    "proxy_dropped": dict(route.overflown)
                    | {
                        "receive buffer full": sum(
                            drops.get(os.fstat(end.udp.sock.fileno()).st_ino, 0) for end in ends
                        )
                    },
                }
            )
        return told


def _hurry() -> None:
    """Take real-time priority for this thread, where that is allowed: a network does not compete
    with its hosts for a processor. Most of the time the thread sleeps."""
    with contextlib.suppress(OSError, AttributeError):
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def _told(link: Link) -> dict[str, Any]:
    return {
        "offered": link.offered,
        "forwarded": link.offered - link.lost,
        "octets": link.octets,
        "dropped": {fate.value: count for fate, count in sorted(link.dropped.items())},
        "duplicated": link.duplicated,
        "reordered": link.reordered,
        "queue_max": link.queue_max,
    }


def _resolve(address: Address) -> Address:
    """The first address that a host's name stands for."""
    host, port = address[:2]
    return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4]


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _kernel_drops() -> dict[int, int]:
    """Datagrams that found the receive buffer of a UDP socket full, by its inode; Linux only."""
    found: dict[int, int] = {}
    for name in ("udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in FilePath(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
                fields = line.split()
                found[int(fields[9])] = int(fields[12])
    return found
