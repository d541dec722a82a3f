"""QUIC endpoints on asyncio: one UDP socket, batches in, batches out.

Per wake-up: drain the socket, hand each connection its datagrams, then let each touched
connection deliver its events and transmit once (repeated while its handler has more and the
congestion window takes it, but not so long that receiving waits).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from moqt.quic.aio.context import SUPPORTED_VERSIONS, QuicContext
from moqt.quic.aio.handshake import versions
from moqt.quic.aio.transport import AioquicTransport, HandlerFactory
from moqt.quic.config import NO_ANSWER, QuicConfig
from moqt.quic.congestion.careful_resume import PathMemory
from moqt.quic.counters import TransportCounters, Waits
from moqt.quic.packets.layout import CID_LENGTH, Address, Datagram, origin_of, show_address
from moqt.quic.packets.retry import parse_long_header
from moqt.quic.packets.tickets import HeldTickets
from moqt.quic.udp.admission import Admission
from moqt.quic.udp.binding import bound, resolve
from moqt.quic.udp.refusals import Refusals
from moqt.quic.udp.sharing import SharedPort
from moqt.quic.udp.socket import UdpSocket
from moqt.quic.udp.turns import TURN_SECONDS, Receiving
from moqt.quic.windows import WindowMemory
from moqt.values.codes import SessionErrorCode
from moqt.values.errors import ConnectError, escaped

log = logging.getLogger(__name__)

TRANSMIT_ROUNDS = 4
"""Bursts (of 256 KiB at most) before other work has its turn."""

STARVED = 0.01
"""Seconds between two looks at what is due while the socket takes nothing."""

MAX_BACKLOG = 16 << 20
"""Octets that may wait for the socket; what goes beyond counts as lost in the network."""

DRAIN_TIMEOUT = 2.0
"""How long `close` waits for the closing periods of its connections."""

WINDOW_MEMORY, PATHS, TICKETS = WindowMemory(), PathMemory(), HeldTickets()
"""What the connections of all endpoints of this process share."""


class QuicConnectError(ConnectError):
    """No QUIC connection could be established. `code` is QUIC's (or the application's)."""

    def __init__(self, message: str, code: int = 0, application: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.application = application


class Endpoint:
    """One UDP socket and the connections on it. Made by `serve` and `connect`."""

    def __init__(
        self,
        context: QuicContext,
        udp: UdpSocket,
        handler_factory: HandlerFactory,
        *,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedPort | None = None,
    ) -> None:
        """`shared`: other processes are on the port, too."""
        self.counters = TransportCounters()
        self.waits = Waits()
        self._context = context
        self._config = context.config
        self._udp = udp
        self._handler_factory = handler_factory
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._receiving = Receiving()
        self._routes: dict[bytes, AioquicTransport] = {}
        self._cids: dict[AioquicTransport, set[bytes]] = {}
        self._timers: dict[AioquicTransport, tuple[float, asyncio.TimerHandle]] = {}
        self._shared = shared
        self._woken: set[AioquicTransport] = set()
        self._waiters: dict[AioquicTransport, asyncio.Future[None]] = {}
        self._backlog: list[Datagram] = []
        self._backlog_octets = 0
        self._starved: set[AioquicTransport] = set()  # wait for the socket to take more
        self.admission = Admission(self._config)
        self._refusals = Refusals(clock, self._loop.call_later)
        self._closing = False
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop.add_reader(udp.sock.fileno(), self._on_readable)
        if shared is not None:
            self._loop.add_reader(shared.inbox.fileno(), self._on_handed, shared)

    # ---- what an application uses

    @property
    def address(self) -> Address:
        """The local address: `(host, port)`, or four members for IPv6."""
        return self._udp.address

    @property
    def port(self) -> int:
        port: int = self._udp.address[1]
        return port

    @property
    def connections(self) -> int:
        """Connections held, those in their closing period included."""
        return len(self._cids)

    @property
    def half_open(self) -> int:
        """Handshakes of clients that are not complete."""
        return len(self.admission.half_open)

    @property
    def session_tickets(self) -> int:
        """Session tickets that were given out and not used."""
        return self._context.session_tickets

    @property
    def log_events_dropped(self) -> int:
        return self._context.log_events_dropped

    @property
    def window_memory(self) -> WindowMemory:
        """What peers may send at once, over all connections of the process."""
        return self._context.memory

    @property
    def backend(self) -> str:
        """What protects packets of bulk data: `python` or `native`."""
        return self._context.backend

    @property
    def transports(self) -> list[AioquicTransport]:
        return list(self._cids)

    def reload_certificate(self) -> None:
        """Read certfile and keyfile of a server anew: new connections get them, others stay.

        Raises ValueError and OSError for files that do not do; the pair in use stays then.
        """
        self._context.load_certificate()

    async def close(self, code: int = 0, reason: str = "") -> None:
        """Close every connection with `code`, wait until their peers can know, and the socket."""
        self._closing = True
        for transport in list(self._cids):
            if not transport.leaving:
                transport.close(code, reason)
        if self._cids:
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    await self._idle.wait()
            except TimeoutError:
                log.info("%d connections were still closing", len(self._cids))
        self._shutdown()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed: after `close`, or when a client's connection ends."""
        await self._closed.wait()

    # ---- connections

    def open(self, addr: Address, server_name: str) -> AioquicTransport:
        """A client's connection; the first flight leaves at once."""
        transport = self._context.connect(
            addr, self._handler_factory, server_name=server_name, now=self._clock()
        )
        self._adopt(transport)
        self._route(transport, transport.local_cid)
        self._pump(transport)
        return transport

    def _adopt(self, transport: AioquicTransport) -> None:
        self._cids[transport] = set()
        self._idle.clear()
        transport.counters = self.counters
        transport.waits = self.waits
        transport.ask_interface(self._udp.payload_limit)
        transport.on_wake = lambda: self._wake(transport)
        transport.on_cid_issued = lambda cid: self._route(transport, cid)
        transport.on_refused = lambda why: self._refusals.note(transport.remote_address, why)
        transport.on_cid_retired = lambda cid: self._unroute(transport, cid)

    def _accept(self, data: bytes, addr: Address) -> None:
        """A datagram for no connection we know."""
        now = self._clock()
        if self._context.is_client:
            for transport in self.transports:
                if transport.takes_reset(data, addr, now):
                    self._pump(transport)
            return
        if self._shared is None or not self._shared.hand_over(data, addr):
            self._begin(data, addr)
        else:
            self.counters.datagrams_handed_over += 1

    def _begin(self, data: bytes, addr: Address) -> None:
        """A datagram that begins a connection here, or is of none."""
        if self._closing:
            return
        now = self._clock()
        header = parse_long_header(data)
        if header is None:
            self._reset(data, addr, now)
            return
        full = self.admission.is_full(addr, len(self._cids))
        prove = self.admission.needs_proof(addr)
        answer = self._context.unsolicited(
            data, now=now, full=full, addr=addr, prove=prove, why=self.admission.closed
        )
        if answer is None:
            self.counters.datagrams_ignored += 1
            return
        if isinstance(answer, bytes):
            self._send([(answer, addr)])
            if header[0] not in SUPPORTED_VERSIONS:
                self.counters.versions_refused += 1
                self._refusals.note(
                    addr,
                    f"it speaks QUIC {versions([header[0]])}; "
                    f"spoken here: {versions(SUPPORTED_VERSIONS)}",
                )
            elif full:
                self.counters.connections_refused += 1
                self._refusals.note(addr, self.admission.why_full(addr, len(self._cids)))
            else:
                self.counters.retries_sent += 1
            return
        transport = answer
        transport.receive([data], addr, now)
        if not transport.started:
            self.counters.datagrams_ignored += 1  # it only looked like an Initial packet
            return
        self._adopt(transport)
        self.counters.connections_accepted += 1
        self.admission.add(transport, addr)
        self._route(transport, header[2])
        self._route(transport, transport.local_cid)
        try:
            transport.attach(self._handler_factory(transport))
        except Exception:
            log.exception("no handler for a connection from %s", show_address(addr))
            transport.close(SessionErrorCode.INTERNAL_ERROR, "internal error")
        self._pump(transport)

    def _reset(self, data: bytes, addr: Address, now: float) -> None:
        """Tell who sent a packet of a connection that is not here (RFC 9000 section 10.3)."""
        self.counters.datagrams_ignored += 1
        cid = data[1 : 1 + CID_LENGTH]
        answer = self._context.resets.answer(data, cid, origin_of(addr), now)
        if answer is not None:
            self.counters.resets_sent += 1
            self._send([(answer, addr)])

    def _route(self, transport: AioquicTransport, cid: bytes) -> None:
        self._routes[cid] = transport
        self._cids[transport].add(cid)

    def _unroute(self, transport: AioquicTransport, cid: bytes) -> None:
        self._cids[transport].discard(cid)
        if self._routes.get(cid) is transport:
            del self._routes[cid]

    def _forget(self, transport: AioquicTransport) -> None:
        for cid in self._cids.pop(transport, ()):
            if self._routes.get(cid) is transport:
                del self._routes[cid]
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer[1].cancel()
        self._woken.discard(transport)
        self._starved.discard(transport)
        self.admission.discard(transport)
        if not self._cids:
            self._idle.set()
            if self._context.is_client and transport not in self._waiters:
                self._shutdown()

    def _shutdown(self) -> None:
        if self._closed.is_set():
            return
        self._closing = True
        self._closed.set()
        self._loop.remove_reader(self._udp.sock.fileno())
        if self._shared is not None:
            self._loop.remove_reader(self._shared.inbox.fileno())
        if self._backlog:
            self._loop.remove_writer(self._udp.sock.fileno())
            self._backlog.clear()
        for transport in list(self._cids):
            # One word to the peer, who would otherwise wait for its idle time-out.
            transport.abort("the endpoint was closed")
            self._udp.send(transport.datagrams_to_send(self._clock()))
            self._forget(transport)
        self._refusals.close()
        self._udp.close()
        self._context.close()

    # ---- receiving

    def _on_readable(self) -> None:
        began = time.thread_time()
        batches, _ = self._udp.receive(self._receiving.octets)
        if self._udp.refused:
            self._on_refused()
        self._take(batches, self._accept)
        self._receiving.took(time.thread_time() - began)

    def _take(
        self,
        batches: list[tuple[list[bytes], Address]],
        other: Callable[[bytes, Address], None],
    ) -> None:
        """Give connections their datagrams, and `other` those of none."""
        routes = self._routes
        now = self._clock()
        touched: dict[AioquicTransport, list[tuple[Address, list[bytes]]]] = {}
        for datagrams, addr in batches:
            if len(datagrams) > 1 and not datagrams[0][0] & 0x80:
                cid = datagrams[0][1 : 1 + CID_LENGTH]
                transport = routes.get(cid)
                if transport is not None and [data[1 : 1 + CID_LENGTH] for data in datagrams].count(
                    cid
                ) == len(datagrams):
                    _add_run(touched, transport, addr, datagrams)
                    continue
            for data in datagrams:
                if len(data) <= CID_LENGTH:
                    continue
                if data[0] & 0x80:
                    cid = data[6 : 6 + data[5]]
                else:
                    cid = data[1 : 1 + CID_LENGTH]
                transport = routes.get(cid)
                if transport is None:
                    other(data, addr)
                    continue
                _add_run(touched, transport, addr, [data])
        for transport, runs in touched.items():
            for addr, run in runs:
                if answer := transport.receive(run, addr, now):
                    self._send(answer)
            self._pump(transport)

    def _on_handed(self, shared: SharedPort) -> None:
        """Other processes on the port got what is for connections here."""
        self._take([([data], addr) for data, addr in shared.handed()], self._begin)

    def _on_refused(self) -> None:
        """An ICMP answer on a client's socket: nobody listens there."""
        self._udp.refused = False
        for transport in list(self._cids):
            # Anybody can forge ICMP, so a connection that has heard from its peer ignores it.
            if not transport.started:
                transport.abort("connection refused: nobody listens on that port")
                self._settle(transport)
                self._forget(transport)

    # ---- sending

    def _wake(self, transport: AioquicTransport) -> None:
        if not self._woken:
            self._loop.call_soon(self._on_woken)
        self._woken.add(transport)

    def _on_woken(self) -> None:
        woken, self._woken = self._woken, set()
        for transport in woken:
            if transport in self._cids:
                self._pump(transport)

    def _pump(self, transport: AioquicTransport) -> None:
        """Deliver what came, transmit what may go, and set the timer."""
        if self._backlog:
            self._starved.add(transport)
            transport.deliver()
        else:
            began, rounds = time.thread_time(), 1
            datagrams = transport.datagrams_to_send(self._clock())
            while datagrams:
                self._send(datagrams)
                if not transport.more:
                    break
                if self._backlog:
                    self._starved.add(transport)
                    break
                if rounds == TRANSMIT_ROUNDS or time.thread_time() - began > TURN_SECONDS:
                    self._wake(transport)
                    break
                datagrams = transport.datagrams_to_send(self._clock(), again=True)
                rounds += 1
        self._settle(transport)
        if transport.terminated:
            self._forget(transport)
        else:
            self._set_timer(transport)

    def _settle(self, transport: AioquicTransport) -> None:
        if (transport.alpn or transport.closed) and transport in self.admission.half_open:
            self.admission.half_open.discard(transport)
            if transport.closed and not transport.alpn and not self._closing:
                self.counters.handshakes_failed += 1
                who = "it gave up: " if transport.closed_by_peer else ""
                self._refusals.note(transport.remote_address, f"{who}{transport.closed[1]}")
        waiter = self._waiters.get(transport)
        if waiter is not None and not waiter.done() and (transport.alpn or transport.closed):
            waiter.set_result(None)

    def _send(self, datagrams: list[Datagram]) -> None:
        if not self._backlog:
            sent = self._udp.send(datagrams)
            if sent == len(datagrams):
                return
            datagrams = datagrams[sent:]
            self._loop.add_writer(self._udp.sock.fileno(), self._on_writable)
        for datagram in datagrams:
            if self._backlog_octets + len(datagram[0]) > MAX_BACKLOG:
                break
            self._backlog.append(datagram)
            self._backlog_octets += len(datagram[0])

    def _on_writable(self) -> None:
        sent = self._udp.send(self._backlog)
        for data, _ in self._backlog[:sent]:
            self._backlog_octets -= len(data)
        del self._backlog[:sent]
        if self._backlog:
            return
        self._loop.remove_writer(self._udp.sock.fileno())
        starved, self._starved = self._starved, set()
        for transport in starved:
            if transport in self._cids:
                self._pump(transport)

    # ---- timers

    def _set_timer(self, transport: AioquicTransport) -> None:
        at = transport.timer()
        current = self._timers.get(transport)
        if at is None:
            if current is not None:
                current[1].cancel()
                del self._timers[transport]
            return
        if self._backlog:
            # What is due cannot be sent, and stays due: the socket tells when it can.
            self._starved.add(transport)
            at = max(at, self._clock() + STARVED)
        if current is not None:
            if current[0] <= at:
                return  # it fires too early and is set again then: cheaper than replacing it
            current[1].cancel()
        delay = max(0.0, at - self._clock())
        self._timers[transport] = at, self._loop.call_later(delay, self._on_timer, transport)

    def _on_timer(self, transport: AioquicTransport) -> None:
        # Event loops round; a timer that fires a moment early is on time.
        due, _ = self._timers.pop(transport)
        now = max(due, self._clock())
        at = transport.timer()
        if at is not None and at > now:
            self._set_timer(transport)
            return
        transport.handle_timer(now)
        self._pump(transport)

    # ---- clients

    async def _established(self, transport: AioquicTransport, within: float) -> None:
        """Wait for the handshake; raises QuicConnectError with the reason it failed.

        A close of the handler's own after it, before this has woken up, is the handler's to tell.
        """
        if not transport.established and transport.closed is None:
            waiter = self._waiters[transport] = self._loop.create_future()
            try:
                async with asyncio.timeout(within):
                    await waiter
            except TimeoutError:
                raise QuicConnectError(f"no answer within {within:g} s: {NO_ANSWER}") from None
            finally:
                self._waiters.pop(transport, None)
        if transport.closed is not None and (not transport.established or transport.closed_by_peer):
            code, reason, application = transport.closed
            raise QuicConnectError(escaped(reason), code, application)


def _add_run(
    touched: dict[AioquicTransport, list[tuple[Address, list[bytes]]]],
    transport: AioquicTransport,
    addr: Address,
    datagrams: list[bytes],
) -> None:
    """Put datagrams behind those that have come from one address for a connection."""
    runs = touched.get(transport)
    if runs is None:
        touched[transport] = [(addr, datagrams)]
    elif runs[-1][0] == addr:
        runs[-1][1].extend(datagrams)
    else:
        runs.append((addr, datagrams))


async def serve(
    host: str | None,
    port: int,
    config: QuicConfig,
    handler_factory: HandlerFactory,
    *,
    shared: SharedPort | None = None,
) -> Endpoint:
    """Listen on `host` (None or "" for every address) and `port` (0 for a free one), or on the
    socket of `shared`, which has its address.

    `handler_factory(transport)` makes the handler of each connection; it is called when the
    client's first packet could be read, before the handshake is complete.
    """
    number = None if shared is None else shared.number
    context = QuicContext(config, is_client=False, memory=WINDOW_MEMORY, paths=PATHS, number=number)
    size = config.socket_buffer
    try:
        if shared is None:
            udp = await bound(host, port, buffer_size=size)
        else:
            udp = UdpSocket(shared.udp.family, bound=shared.udp, buffer_size=size)
        return Endpoint(context, udp, handler_factory, shared=shared)
    except BaseException:
        context.close()
        raise


async def connect(
    host: str,
    port: int,
    config: QuicConfig,
    handler_factory: HandlerFactory,
    *,
    within: float | None = None,
) -> Endpoint:
    """Connect to `host`, trying its addresses in order, `within` so many seconds over all.

    `within` is `config.handshake_timeout` when None. A handler is made per address tried;
    those of failed attempts get `connection_closed`. The endpoint is the one connection's
    own and closes its socket when that ends.

    Raises QuicConnectError with a reason for people.
    """
    budget = config.handshake_timeout if within is None else within
    loop = asyncio.get_running_loop()
    deadline = loop.time() + budget
    try:
        async with asyncio.timeout(budget):
            infos = await resolve(host, port, passive=False)
    except TimeoutError:
        raise QuicConnectError(f"cannot resolve {host} within {budget:g} s") from None
    except OSError as exc:
        raise QuicConnectError(f"cannot resolve {host}: {exc}") from exc
    failure: QuicConnectError | None = None
    for tried, (family, _, _, _, addr) in enumerate(infos):
        remaining = deadline - loop.time()
        if remaining <= 0:
            break
        context = QuicContext(
            config, is_client=True, memory=WINDOW_MEMORY, paths=PATHS, tickets=TICKETS
        )
        try:
            udp = UdpSocket(family, remote=addr, buffer_size=config.socket_buffer)
        except OSError as exc:
            context.close()
            failure = QuicConnectError(f"cannot connect to {show_address(addr)}: {exc}")
            continue
        endpoint = Endpoint(context, udp, handler_factory)
        try:
            transport = endpoint.open(addr, host)
            await endpoint._established(transport, remaining / (len(infos) - tried))
            return endpoint
        except QuicConnectError as exc:
            endpoint._shutdown()
            failure = QuicConnectError(
                f"cannot connect to {show_address(addr)}: {exc}", exc.code, exc.application
            )
        except BaseException:
            endpoint._shutdown()
            raise
    if failure is None:
        failure = QuicConnectError(
            f"cannot connect to {host}: no answer within {budget:g} s: {NO_ANSWER}"
        )
    raise failure
