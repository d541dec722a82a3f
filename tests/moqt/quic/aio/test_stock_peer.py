"""Our connection against aioquic's own: the wire is QUIC's, whatever we do inside."""

from __future__ import annotations

import os
import ssl

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from moqt.quic.aio.context import QuicContext
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.packets.retry import parse_long_header
from tests.moqt.quic.stock import Stock, exchange
from tests.moqt.quic_pair import CLIENT, SERVER, Recorder, certificate, quic_config


@pytest.mark.parametrize("size", [1200, 8952])
def test_our_client_and_a_stock_server(size: int) -> None:
    cert, key = certificate()
    handlers: list[Recorder] = []

    def make(transport: AioquicTransport) -> Recorder:
        handlers.append(Recorder(transport))
        return handlers[-1]

    context = QuicContext(quic_config(max_datagram_size=size), is_client=True)
    ours = context.connect(SERVER, make, server_name="localhost", now=100.0)
    first = ours.datagrams_to_send(100.0)
    header = parse_long_header(first[0][0])
    assert header is not None
    configuration = QuicConfiguration(
        is_client=False, alpn_protocols=["moqt-22"], max_datagram_size=size
    )
    configuration.load_cert_chain(cert, key)
    stock = Stock(
        QuicConnection(configuration=configuration, original_destination_connection_id=header[2])
    )
    for data, _ in first:
        stock.connection.receive_datagram(data, CLIENT, 100.0)
    record = handlers[0]
    exchange(ours, stock, lambda: bool(record.alpn))
    stream_id = ours.open_stream(bidirectional=True)
    assert stream_id is not None
    payload = os.urandom(3 << 20)
    ours.send(stream_id, payload, True)
    exchange(ours, stock, lambda: stream_id in record.finished)
    assert bytes(record.data[stream_id]) == payload


def test_a_stock_client_and_our_server() -> None:
    cert, _ = certificate()
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=["moqt-22"], server_name="localhost", cafile=str(cert)
    )
    assert configuration.verify_mode != ssl.CERT_NONE
    stock = Stock(QuicConnection(configuration=configuration))
    stock.connection.connect(SERVER, 100.0)
    first = [data for data, _ in stock.connection.datagrams_to_send(100.0)]
    context = QuicContext(quic_config(), is_client=False)
    ours = context.unsolicited(first[0], now=100.0)
    assert isinstance(ours, AioquicTransport)
    record = Recorder(ours)
    ours.receive(first, CLIENT, 100.0)
    ours.attach(record)
    record.on_data = lambda stream, data, fin: ours.send(stream, data, fin)
    exchange(ours, stock, lambda: bool(record.alpn))
    payload = os.urandom(3 << 20)
    stock.connection.send_stream_data(0, payload, True)
    exchange(ours, stock, lambda: 0 in stock.finished)
    assert bytes(stock.data[0]) == payload
