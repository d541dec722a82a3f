"""Readers of the streams that carry messages: the control stream and request streams."""

from __future__ import annotations

from moqt.receiving.host import MessageSink, StreamHost
from moqt.track.knowledge import PROPERTY_OCTETS
from moqt.values.codes import REQUEST_OPENERS, MessageType
from moqt.values.errors import protocol_violation

_CONTROL_TYPES = frozenset({MessageType.SETUP})


class ControlIn:
    """The peer's control stream."""

    def __init__(self, host: StreamHost, stream_id: int) -> None:
        self.host = host
        self.stream_id = stream_id
        self.decoder = host.codec.message_decoder(_CONTROL_TYPES)

    def data(self, data: bytes, fin: bool) -> None:
        log = self.host.event_log
        for message in self.decoder.feed(data):
            if log is not None:
                log.message("parsed", self.stream_id, message)
            self.host.control_message(message)
            if self.host.closed is not None:
                return
        if fin:
            raise protocol_violation("the control stream ended")


class RequestIn:
    """A bidirectional stream, from its first octet."""

    def __init__(self, host: StreamHost, stream_id: int, sink: MessageSink | None = None) -> None:
        self.host = host
        self.stream_id = stream_id
        self.decoder = host.codec.message_decoder(None if sink else REQUEST_OPENERS)
        self.sink = sink
        """None while the peer's first message has not come."""
        self._coming = 0
        """Octets that may be of a message whose end has not come; no fewer than are."""
        self._billed = 0

    def data(self, data: bytes, fin: bool) -> None:
        host = self.host
        octets = self._coming + len(data)
        messages = self.decoder.feed(data)
        self._coming = len(data) if messages else octets
        for message in messages:  # two octets on the wire make a value of fifty times as many
            octets += PROPERTY_OCTETS * len(getattr(message, "properties", ()))
        if octets > self._billed:  # most are shorter than the one that opened the stream
            self._coming, self._billed = self.decoder.buffered, octets
            host.request_octets.bill(self.stream_id, octets)
        for message in messages:
            if host.event_log is not None:
                host.event_log.message("parsed", self.stream_id, message)
            if self.sink is None:
                self.sink = host.request_opened(self.stream_id, message)
            else:
                self.sink.receive(message)
            if host.closed is not None:
                return
        if not fin:
            return
        if self.decoder.buffered:
            raise protocol_violation("FIN inside a message")
        if self.sink is not None:
            self.sink.peer_finished()
        else:
            host.transport.send(self.stream_id, b"", fin=True)
            host.forget_stream(self.stream_id)
