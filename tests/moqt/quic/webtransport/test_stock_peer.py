"""Our WebTransport against aioquic's own HTTP/3: what is on the wire is WebTransport."""

from __future__ import annotations

from collections import defaultdict

from aioquic.h3.connection import H3Connection
from aioquic.h3.events import (
    DatagramReceived,
    DataReceived,
    HeadersReceived,
    WebTransportStreamDataReceived,
)
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from moqt.quic.aio.context import QuicContext
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.packets.retry import parse_long_header
from moqt.quic.webtransport.client import WebTransportClient
from moqt.quic.webtransport.server import WebTransportServer
from tests.moqt.quic.stock import exchange
from tests.moqt.quic_pair import CLIENT, SERVER, Recorder, certificate
from tests.moqt.webtransport_pair import AUTHORITY, CONNECT, PATH, h3_config


class StockH3:
    """aioquic with HTTP/3 on it; a server accepts each session without naming a protocol."""

    def __init__(self, connection: QuicConnection) -> None:
        self.connection = connection
        self.h3: H3Connection | None = None
        self.headers: dict[bytes, bytes] = {}
        self.session: int | None = None
        self.data: dict[int, bytearray] = defaultdict(bytearray)
        self.capsules = b""
        self.datagrams: list[bytes] = []
        self.echo = not connection.configuration.is_client

    def handle(self) -> None:
        if self.h3 is None:
            self.h3 = H3Connection(self.connection, enable_webtransport=True)
        while (event := self.connection.next_event()) is not None:
            for found in self.h3.handle_event(event):
                if isinstance(found, HeadersReceived):
                    self.headers = dict(found.headers)
                    self.session = found.stream_id
                    if self.echo:
                        self.h3.send_headers(found.stream_id, [(b":status", b"200")])
                elif isinstance(found, WebTransportStreamDataReceived):
                    self.data[found.stream_id] += found.data
                    if self.echo and not found.stream_id & 2:
                        self.connection.send_stream_data(
                            found.stream_id, found.data, found.stream_ended
                        )
                elif isinstance(found, DatagramReceived):
                    self.datagrams.append(found.data)
                elif isinstance(found, DataReceived):
                    self.capsules += found.data


def test_our_client_and_a_stock_server() -> None:
    cert, key = certificate()
    records: list[Recorder] = []
    sessions: list[WebTransportClient] = []

    def make(transport: AioquicTransport) -> WebTransportClient:
        def handler(session: object) -> Recorder:
            records.append(Recorder(session))  # type: ignore[arg-type]
            return records[-1]

        sessions.append(
            WebTransportClient(transport, handler, ("moqt-22",), authority=AUTHORITY, path=PATH)
        )
        return sessions[-1]

    context = QuicContext(h3_config(), is_client=True)
    ours = context.connect(SERVER, make, server_name="localhost", now=100.0)
    first = ours.datagrams_to_send(100.0)
    header = parse_long_header(first[0][0])
    assert header is not None
    configuration = QuicConfiguration(
        is_client=False, alpn_protocols=["h3"], max_datagram_frame_size=65536
    )
    configuration.load_cert_chain(cert, key)
    stock = StockH3(
        QuicConnection(configuration=configuration, original_destination_connection_id=header[2])
    )
    for data, _ in first:
        stock.connection.receive_datagram(data, CLIENT, 100.0)
    record, session = records[0], sessions[0]
    exchange(ours, stock, lambda: bool(record.alpn))  # type: ignore[arg-type]
    assert record.alpn == "moqt-22"  # not echoed: there was but one offer
    assert (
        stock.headers[b":protocol"] == b"webtransport" and stock.headers[b":path"] == PATH.encode()
    )
    stream_id = session.open_stream(bidirectional=True)
    uni = session.open_stream(bidirectional=False)
    assert stream_id is not None and uni is not None
    session.send(stream_id, b"there and back", True)
    session.send(uni, b"one way", True)
    assert session.send_datagram(b"dg")
    exchange(ours, stock, lambda: stream_id in record.finished and bool(stock.datagrams))  # type: ignore[arg-type]
    assert bytes(record.data[stream_id]) == b"there and back"
    assert bytes(stock.data[uni]) == b"one way"
    session.close(7, "bye")
    exchange(ours, stock, lambda: bool(stock.capsules))  # type: ignore[arg-type]
    assert stock.capsules == bytes.fromhex("68430700000007") + b"bye"


def test_a_stock_client_and_our_server() -> None:
    cert, _ = certificate()
    configuration = QuicConfiguration(
        is_client=True,
        alpn_protocols=["h3"],
        server_name="localhost",
        cafile=str(cert),
        max_datagram_frame_size=65536,
    )
    stock = StockH3(QuicConnection(configuration=configuration))
    stock.connection.connect(SERVER, 100.0)
    first = [data for data, _ in stock.connection.datagrams_to_send(100.0)]
    ours = QuicContext(h3_config(), is_client=False).unsolicited(first[0], now=100.0)
    assert isinstance(ours, AioquicTransport)
    records: list[Recorder] = []

    def handler(session: object) -> Recorder:
        records.append(Recorder(session))  # type: ignore[arg-type]
        return records[-1]

    session = WebTransportServer(ours, handler, ("moqt-22",))
    ours.receive(first, CLIENT, 100.0)
    ours.attach(session)
    exchange(ours, stock, lambda: ours.established)  # type: ignore[arg-type]
    assert stock.h3 is not None
    request = stock.connection.get_next_available_stream_id()
    stock.h3.send_headers(request, CONNECT)
    exchange(ours, stock, lambda: bool(stock.headers))  # type: ignore[arg-type]
    assert stock.headers[b":status"] == b"200" and stock.headers[b"wt-protocol"] == b'"moqt-22"'
    uni = stock.h3.create_webtransport_stream(request, is_unidirectional=True)
    stock.connection.send_stream_data(uni, b"one way", True)
    stock.h3.send_datagram(request, b"dg")
    exchange(ours, stock, lambda: uni in records[0].finished and bool(records[0].datagrams))  # type: ignore[arg-type]
    assert bytes(records[0].data[uni]) == b"one way"
    ours_uni = session.open_stream(bidirectional=False)
    assert ours_uni is not None
    session.send(ours_uni, b"and back", True)
    exchange(ours, stock, lambda: bytes(stock.data[ours_uni]) == b"and back")  # type: ignore[arg-type]
