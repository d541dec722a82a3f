"""The QUIC endpoint's numbers for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moqt.quic.config import MAX_DATAGRAM_SIZE
from moqt.quic.counters import Wait
from moqt.quic.udp.endpoint import Endpoint
from relay.service.told.names import exported, labelled

GAUGES = {
    "connections": "QUIC connections, closing ones included.",
    "handshakes": "Handshakes under way.",
    "session_tickets": "Session tickets given out that nobody has used.",
    "reassembly_octets": "Octets held out of order, over all connections.",
    "in_flight_octets": "Octets sent and not yet acknowledged, over all connections.",
    "window_octets": "What may be under way, over all connections.",
    "receive_window_octets": "What peers may send beyond what was consumed, over all "
    "connections of the process, 256 KiB of each not counted.",
    "bandwidth_octets": "Octets a second that paths are thought to carry, over all connections.",
}
COUNTERS = {
    "connections_accepted": "Handshakes begun.",
    "connections_refused": "Connections refused for want of room, in all or per address.",
    "handshakes_failed": "Handshakes that were not completed.",
    "handshakes_resumed": "Handshakes completed with a session ticket, without a certificate.",
    "versions_refused": "Clients of a QUIC version that is not spoken.",
    "datagrams_ignored": "Datagrams of no connection, which began none.",
    "datagrams_handed_over": "Datagrams for connections of other workers, which got them.",
    "retries_sent": "Clients asked to prove their address.",
    "resets_sent": "Of the datagrams ignored, those answered with a stateless reset.",
    "connections_over_budget": "Connections closed because they held too much out of order.",
    "path_changes": "Connections that went on from another address.",
    "paths_narrowed": "Connections whose path ceased to carry packets of the size it had.",
    "packets_lost": "Packets sent that were found lost.",
    "packets_spurious": "Of these, packets that came after all: they had only been late.",
    "webtransport_sessions": "WebTransport sessions established.",
    "webtransport_sessions_refused": "WebTransport sessions refused.",
    "webtransport_streams_refused": "Streams of no WebTransport session.",
    "receive_windows_denied": "Times that a peer could have sent faster and its window did not "
    "grow, for the sake of stream_window, session_window or window_memory.",
    "log_events_dropped": "Events the logs of ended connections could not take.",
}
RTT = "rtt_seconds"
"""Of the shortest round trips of connections, which tell how far the peers are."""
PHASES = "congestion_phase_connections"
PACKET_OCTETS = (1200, 1280, 1452, 1472, 8952, MAX_DATAGRAM_SIZE)
"""Upper ends of the classes in which connections are counted by the size of their packets."""
BACKEND = "backend"
WAITS = "sending_waits_seconds"
PREFIX = "kvcs_relay_quic_"


class TransportMetrics(Collector):
    """Copies the endpoint's numbers when told to; a scrape comes from another thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._gauges: dict[str, int] = {}
        self._counters: dict[str, int] = {}
        self._phases: Counter[str] = Counter()
        self._trips: list[float] = []
        self._packets: Counter[int] = Counter()
        self._waits: dict[Wait, float] = {}
        self.update()

    def update(self) -> None:
        """Take the numbers of now, in the thread that runs the endpoint."""
        endpoint = self._endpoint
        self._phases = Counter()
        self._trips = []
        in_flight = window = bandwidth = 0
        for transport in endpoint.transports:
            state = transport.congestion
            self._phases[state.phase] += 1
            in_flight += transport.in_flight
            window += state.window
            bandwidth += int(state.bandwidth or 0)
            if state.rtt_min is not None:
                self._trips.append(state.rtt_min)
        self._gauges = {
            "in_flight_octets": in_flight,
            "window_octets": window,
            "receive_window_octets": endpoint.window_memory.octets,
            "bandwidth_octets": bandwidth,
            "connections": endpoint.connections,
            "handshakes": endpoint.half_open,
            "session_tickets": endpoint.session_tickets,
            "reassembly_octets": sum(transport.held for transport in endpoint.transports),
        }
        self._packets = Counter(
            PACKET_OCTETS[bisect_left(PACKET_OCTETS, transport.packet_size)]
            for transport in endpoint.transports
            if transport.established
        )
        self._waits = dict(endpoint.waits.seconds)
        self._counters = asdict(endpoint.counters) | {
            "log_events_dropped": endpoint.log_events_dropped,
            "receive_windows_denied": endpoint.window_memory.denied,
        }

    def collect(self) -> Iterable[Metric]:
        yield labelled(
            GaugeMetricFamily,
            PREFIX + "connections_by_packet_size",
            "Connections by the UDP payload of their largest packets, up to so many octets.",
            "up_to",
            {str(octets): self._packets[octets] for octets in PACKET_OCTETS},
        )
        yield labelled(
            GaugeMetricFamily,
            PREFIX + BACKEND,
            "1 for what protects packets: python or native.",
            "backend",
            {self._endpoint.backend: 1},
        )
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(PREFIX + exported(name), GAUGES[name], value=value)
        yield labelled(
            GaugeMetricFamily,
            PREFIX + PHASES,
            "Connections by what their congestion control does.",
            "phase",
            self._phases,
        )
        trips = {}
        if self._trips:
            trips = {
                "shortest": min(self._trips),
                "median": median(self._trips),
                "longest": max(self._trips),
            }
        yield labelled(
            GaugeMetricFamily, PREFIX + RTT, "Shortest round trips of connections.", "of", trips
        )
        yield labelled(
            CounterMetricFamily,
            PREFIX + WAITS,
            "Seconds that connections have sent nothing, by what they waited for.",
            "waits_for",
            {wait.value: seconds for wait, seconds in self._waits.items()},
        )
        for name, value in self._counters.items():
            yield CounterMetricFamily(PREFIX + exported(name), COUNTERS[name], value=value)
