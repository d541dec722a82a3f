"""The log of what a session sends on data streams and in datagrams, which nobody else decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cryptography import x509

from moqt.log.event_log import EventLog, wire
from moqt.quic.transport import Transport
from moqt.values.errors import SessionError
from moqt.wire.codec import FetchDecoder, SubgroupDecoder
from moqt.wire.objects import (
    FetchEvent,
    FetchHeader,
    StreamKind,
    SubgroupEvent,
    SubgroupHeader,
)


class _Sent:
    """A data stream of ours, decoded again for the log."""

    def __init__(self) -> None:
        self.decoder: SubgroupDecoder | FetchDecoder | None = None
        self.header: SubgroupHeader | FetchHeader | None = None
        self.opening = b""
        self.ignored = False


class LoggedTransport:
    """A `Transport` that reads along what is sent on data streams and in datagrams.

    It stands before the real one only while there is a log, so that a session without one
    pays nothing for each Object.
    """

    def __init__(self, transport: Transport, log: EventLog) -> None:
        self._transport = transport
        self._log = log
        self._sent: dict[int, _Sent] = {}
        self.is_client = transport.is_client
        self.qlog = transport.qlog
        self.authority = transport.authority
        self.path = transport.path

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int | None:
        stream_id = self._transport.open_stream(bidirectional=bidirectional, urgent=urgent)
        if stream_id is not None and not bidirectional and self._log.writer is not None:
            self._sent[stream_id] = _Sent()
        return stream_id

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        sent = self._sent.get(stream_id)
        if sent is not None:
            if not sent.ignored:
                self._read(stream_id, sent, bytes(data))
            if fin:
                del self._sent[stream_id]
        self._transport.send(stream_id, data, fin)

    def _read(self, stream_id: int, sent: _Sent, data: bytes) -> None:
        codec = self._log.session.codec
        if sent.decoder is None:
            sent.opening += data
            found = codec.data_stream_type(sent.opening)
            if found is None:
                return
            kind, data, sent.opening = found[0], sent.opening, b""
            self._log.stream_type("created", stream_id, kind)
            if kind is StreamKind.SUBGROUP:
                sent.decoder = codec.subgroup_decoder()
            elif kind is StreamKind.FETCH:
                sent.decoder = codec.fetch_decoder(self._log.session.sending_order(stream_id))
            else:
                sent.ignored = True
                return
        try:
            events: Sequence[SubgroupEvent | FetchEvent] = sent.decoder.feed(data)
        except SessionError as error:
            sent.ignored = True
            wire.error(
                "%s: what was sent on stream %d cannot be read: %s",
                self._log.connection,
                stream_id,
                error,
            )
            return
        if sent.header is None and events:
            first = events[0]
            assert isinstance(first, SubgroupHeader | FetchHeader)
            sent.header = first
        if sent.header is not None:
            self._log.objects("created", stream_id, sent.header, events)

    def reset(self, stream_id: int, code: int) -> None:
        self._sent.pop(stream_id, None)
        self._transport.reset(stream_id, code)

    def stop_receiving(self, stream_id: int, code: int) -> None:
        self._transport.stop_receiving(stream_id, code)

    def send_datagram(self, data: bytes) -> bool:
        sent = self._transport.send_datagram(data)
        if sent:
            self._log.datagram("created", self._log.session.codec.decode_datagram(data))
        return sent

    def pause_receiving(self, stream_id: int) -> None:
        self._transport.pause_receiving(stream_id)

    def resume_receiving(self, stream_id: int) -> None:
        self._transport.resume_receiving(stream_id)

    @property
    def unsent(self) -> int:
        return self._transport.unsent

    def send_room(self, stream_id: int) -> int:
        return self._transport.send_room(stream_id)

    def acknowledged(self, stream_id: int) -> bool:
        return self._transport.acknowledged(stream_id)

    def take_credited(self) -> Iterable[int]:
        return self._transport.take_credited()

    @property
    def packet_sizes(self) -> tuple[int, int]:
        return self._transport.packet_sizes

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        return self._transport.peer_certificate

    @property
    def connection_id(self) -> str:
        return self._transport.connection_id

    @property
    def peer_address(self) -> str:
        return self._transport.peer_address

    def wake(self) -> None:
        self._transport.wake()

    def close(self, code: int, reason: str) -> None:
        self._sent.clear()
        self._transport.close(code, reason)
