"""What a session says and hears, for people and tools: qlog events and `moqt.wire` lines.

Events have the names and fields of draft-pardue-moq-qlog-moq-events and go to the
connection's `QlogWriter`; what draft-22 has and that draft does not is named in its manner.
The logger `moqt.wire` prints each control message, with its parameters, at DEBUG.

A log shows who asked for which track; never a payload, and nothing that `moqt.log.describe`
takes for a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal, Protocol

from moqt.log.describe import Fields, describe, line, location_fields
from moqt.quic.transport import Transport, connection_of
from moqt.values.codes import GroupOrder, ObjectStatus
from moqt.values.messages import Message
from moqt.wire.codec import Codec
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
    WholeObject,
)

wire = logging.getLogger("moqt.wire")

Side = Literal["created", "parsed"]

_STREAM_TYPES = {
    StreamKind.CONTROL: "control",
    StreamKind.SUBGROUP: "subgroup_header",
    StreamKind.FETCH: "fetch_header",
}


class Logged(Protocol):
    """A session, as its log sees it."""

    @property
    def codec(self) -> Codec:
        """Known from the handshake on."""
        ...

    @property
    def now(self) -> float: ...

    def sending_order(self, stream_id: int) -> GroupOrder:
        """In which order the groups of a fetch stream of ours go out."""
        ...


def event_log(session: Logged, transport: Transport) -> EventLog | None:
    """The log of a new session on `transport`, or None when nobody wants one.

    That is decided once: the transport has a `qlog`, or `moqt.wire` is enabled for DEBUG.
    """
    readable = wire.isEnabledFor(logging.DEBUG)
    if transport.qlog is None and not readable:
        return None
    return EventLog(session, transport, readable=readable)


class EventLog:
    """The events of one session. The session calls it for what it parses and for messages it
    creates; `LoggedTransport` for the data streams and datagrams it sends."""

    def __init__(self, session: Logged, transport: Transport, *, readable: bool) -> None:
        self.session = session
        self.writer = transport.qlog
        self.connection = connection_of(transport)
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
            wire.debug("%s %s stream %d: %s", self.connection, arrow, stream_id, line(message))

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
                case WholeObject(header=each) | (ObjectHeader() as each):
                    data = _object(each, {"stream_id": stream_id})
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
