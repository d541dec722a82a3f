"""What a session says and hears, for people and tools: qlog events and `moqt.wire` lines.

Events have the names and fields of draft-pardue-moq-qlog-moq-events and go to the
connection's `QlogWriter`; what draft-22 has and that draft does not is named in its manner.
The logger `moqt.wire` prints each control message, with its parameters, at DEBUG.

A log shows who asked for which track; never a payload, and nothing that `moqt.log.describe`
takes for a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from moqt.log.describe import Fields, describe, line, location_fields
from moqt.quic.qlog import QlogWriter
from moqt.quic.transport import Transport
from moqt.values.codes import ObjectStatus
from moqt.values.errors import SessionError
from moqt.values.messages import Message
from moqt.wire.codec import FetchDecoder, SubgroupDecoder
from moqt.wire.objects import (
    DatagramObject,
    FetchEvent,
    FetchHeader,
    ObjectHeader,
    PaddingDatagram,
    RangeMarker,
    StreamKind,
    SubgroupEvent,
    SubgroupHeader,
)

if TYPE_CHECKING:
    from moqt.session import Session

wire = logging.getLogger("moqt.wire")

Side = Literal["created", "parsed"]

_STREAM_TYPES = {
    StreamKind.CONTROL: "control",
    StreamKind.SUBGROUP: "subgroup_header",
    StreamKind.FETCH: "fetch_header",
}


def event_log(session: Session, transport: Transport) -> EventLog | None:
    """The log of a new session, or None when nobody wants one.

    That is decided once: the transport has a `qlog`, or `moqt.wire` is enabled for DEBUG.
    """
    readable = wire.isEnabledFor(logging.DEBUG)
    if transport.qlog is None and not readable:
        return None
    return EventLog(session, transport.qlog, readable=readable)


class EventLog:
    """The events of one session. The session calls it for what it parses and for messages it
    creates; `LoggedTransport` for the data streams and datagrams it sends."""

    def __init__(self, session: Session, writer: QlogWriter | None, *, readable: bool) -> None:
        self.session = session
        self.writer = writer
        self.readable = readable

    def event(self, name: str, data: Fields) -> None:
        if self.writer is not None:
            # The session hears the time only now and then; QUIC's events have it at every turn.
            self.writer.event(max(self.session.now, self.writer.now), f"moqt:{name}", data)

    def message(self, side: Side, stream_id: int, message: Message) -> None:
        """A control message was created (sent) or parsed."""
        if self.writer is not None:
            data = {"stream_id": stream_id, "message": describe(message)}
            self.event(f"control_message_{side}", data)
        if self.readable:
            arrow = "->" if side == "created" else "<-"
            wire.debug("%s stream %d: %s", arrow, stream_id, line(message))

    def stream_type(self, side: Side, stream_id: int, kind: StreamKind) -> None:
        """What a unidirectional stream is has become known."""
        if kind in _STREAM_TYPES:
            owner = "local" if side == "created" else "remote"
            data = {"owner": owner, "stream_id": stream_id, "stream_type": _STREAM_TYPES[kind]}
            self.event("stream_type_set", data)

    def objects(
        self,
        side: Side,
        stream_id: int,
        header: SubgroupHeader | FetchHeader,
        events: Iterable[SubgroupEvent | FetchEvent],
    ) -> None:
        """Headers and Objects of the data stream that began with `header`."""
        if self.writer is None:
            return
        kind = "subgroup" if isinstance(header, SubgroupHeader) else "fetch"
        for event in events:
            match event:
                case ObjectHeader():
                    data = _object(event, {"stream_id": stream_id})
                    if isinstance(header, SubgroupHeader):
                        data.pop("publisher_priority", None)
                        data["group_id"] = header.group
                    self.event(f"{kind}_object_{side}", data)
                case SubgroupHeader():
                    self.event(f"subgroup_header_{side}", _subgroup(stream_id, event))
                case FetchHeader():
                    data = {"stream_id": stream_id, "request_id": event.request_id}
                    self.event(f"fetch_header_{side}", data)
                case RangeMarker():
                    data = {
                        "stream_id": stream_id,
                        "kind": event.kind.name.lower(),
                        "location": location_fields(event.location),
                    }
                    self.event(f"fetch_range_{side}", data)

    def datagram(self, side: Side, datagram: DatagramObject | PaddingDatagram) -> None:
        if self.writer is None or isinstance(datagram, PaddingDatagram):
            return
        data: Fields = {
            "track_alias": datagram.track_alias,
            "group_id": datagram.group,
            "object_id": datagram.object,
            "extension_headers_length": len(datagram.properties),
            "object_payload": {"length": len(datagram.payload)},
            "end_of_group": datagram.end_of_group,
        }
        if datagram.priority is not None:
            data["publisher_priority"] = datagram.priority
        if datagram.status is not ObjectStatus.NORMAL:
            data["object_status"] = int(datagram.status)
        self.event(f"object_datagram_{side}", data)


def _object(header: ObjectHeader, data: Fields) -> Fields:
    data |= {
        "group_id": header.group,
        "object_id": header.object,
        "extension_headers_length": len(header.properties),
        "object_payload_length": header.length,
    }
    if header.subgroup is not None:
        data["subgroup_id"] = header.subgroup
    if header.priority is not None:
        data["publisher_priority"] = header.priority
    if header.status is not ObjectStatus.NORMAL:
        data["object_status"] = int(header.status)
    return data


def _subgroup(stream_id: int, header: SubgroupHeader) -> Fields:
    data: Fields = {
        "stream_id": stream_id,
        "track_alias": header.track_alias,
        "group_id": header.group,
    }
    if header.subgroup is not None:
        data["subgroup_id"] = header.subgroup
    if header.priority is not None:
        data["publisher_priority"] = header.priority
    return data


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
            wire.error("what was sent on stream %d cannot be read: %s", stream_id, error)
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

    def take_credited(self) -> Iterable[int]:
        return self._transport.take_credited()

    def wake(self) -> None:
        self._transport.wake()

    def close(self, code: int, reason: str) -> None:
        self._sent.clear()
        self._transport.close(code, reason)
