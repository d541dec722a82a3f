"""Datagrams: one Object each, for whom its Track Alias names."""

from __future__ import annotations

from moqt.receiving.data_streams import DataStreams, tell_in_steps
from moqt.receiving.receiver import IncomingStream, Via
from moqt.values.codes import ObjectStatus
from moqt.values.errors import MalformedTrack
from moqt.wire.objects import ObjectHeader, PaddingDatagram, SubgroupHeader


def receive_datagram(streams: DataStreams, data: bytes) -> None:
    """One QUIC DATAGRAM: an Object for whom its Track Alias names, or padding."""
    host, aliases = streams.host, streams.aliases
    decoded = host.codec.decode_datagram(data)
    if host.event_log is not None:
        host.event_log.datagram("parsed", decoded)
    if isinstance(decoded, PaddingDatagram):
        return
    if decoded.track_alias not in aliases:
        return
    incoming = IncomingStream(
        -1,
        Via.DATAGRAM,
        subgroup=SubgroupHeader(
            decoded.track_alias, decoded.group, None, decoded.priority, decoded.end_of_group
        ),
    )
    header = ObjectHeader(
        group=decoded.group,
        object=decoded.object,
        subgroup=None,
        priority=decoded.priority,
        properties=decoded.properties,
        length=len(decoded.payload),
        status=ObjectStatus(decoded.status),
    )
    subscriber = aliases.subscriber(decoded.track_alias, header)
    if subscriber is None or not subscriber.ready:
        return
    try:
        if not subscriber.receiver.object_arrived(incoming, header, decoded.payload):
            tell_in_steps(subscriber, incoming, header, decoded.payload)
    except MalformedTrack as malformed:
        host.track_malformed(subscriber, str(malformed))
