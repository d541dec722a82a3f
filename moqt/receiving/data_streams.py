"""Readers of the peer's streams: the control stream, request streams and data streams.

Each is fed the octets of one stream and calls the session; none owns I/O.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, cast

from moqt.receiving.receiver import IncomingStream, Via
from moqt.requests import (
    ObjectOwner,
    OutgoingFetch,
    RequestState,
    RequestStream,
    SubscriberSide,
)
from moqt.values.codes import (
    REQUEST_OPENERS,
    GroupOrder,
    MessageType,
    ObjectStatus,
    StreamErrorCode,
)
from moqt.values.errors import MalformedTrack, protocol_violation
from moqt.wire.codec import FetchDecoder, SubgroupDecoder
from moqt.wire.objects import (
    FetchHeader,
    ObjectHeader,
    PaddingDatagram,
    RangeMarker,
    StreamKind,
    SubgroupHeader,
)

if TYPE_CHECKING:
    from moqt.session import Session
    from moqt.values.deadlines import Deadline

_CONTROL_TYPES = frozenset({MessageType.SETUP})
_PAYLOAD = (bytes, memoryview)


class ControlIn:
    """The peer's control stream."""

    def __init__(self, session: Session, stream_id: int) -> None:
        self.session = session
        self.stream_id = stream_id
        self.decoder = session.codec.message_decoder(_CONTROL_TYPES)

    def data(self, data: bytes, fin: bool) -> None:
        log = self.session.event_log
        for message in self.decoder.feed(data):
            if log is not None:
                log.message("parsed", self.stream_id, message)
            self.session.control_message(message)
            if self.session.closed is not None:
                return
        if fin:
            raise protocol_violation("the control stream ended")


class RequestIn:
    """A bidirectional stream, from its first octet."""

    def __init__(
        self, session: Session, stream_id: int, stream: RequestStream | None = None
    ) -> None:
        self.session = session
        self.stream_id = stream_id
        self.decoder = session.codec.message_decoder(None if stream else REQUEST_OPENERS)
        self.stream = stream

    def data(self, data: bytes, fin: bool) -> None:
        session = self.session
        for message in self.decoder.feed(data):
            if session.event_log is not None:
                session.event_log.message("parsed", self.stream_id, message)
            if self.stream is None:
                self.stream = session.request_opened(self.stream_id, message)
            else:
                self.stream.receive(message)
            if session.closed is not None:
                return
        if not fin:
            return
        if self.decoder.buffered:
            raise protocol_violation("FIN inside a message")
        if self.stream is not None:
            self.stream.peer_finished()
        else:
            session.transport.send(self.stream_id, b"", fin=True)
            session.forget_stream(self.stream_id)


class DataIn:
    """A unidirectional stream: placed by its header, then decoded for its owner.

    What comes before the owner is known (its Track Alias, or the group order of a fill) is
    held as octets, bounded over all streams, and the stream's credit is held back.
    """

    def __init__(self, session: Session, stream_id: int) -> None:
        self.session = session
        self.stream_id = stream_id
        self.decoder: SubgroupDecoder | FetchDecoder | None = None
        self.header: SubgroupHeader | FetchHeader | None = None
        self.incoming: IncomingStream | None = None
        self.owner: ObjectOwner | None = None
        self.chosen: SubscriberSide | None = None
        """Of the subscriptions that share its Track Alias, the one it is for."""
        self.held = bytearray()
        self.held_since = 0.0
        self.heard_at = 0.0
        self._headless: Deadline | None = None
        self.ended = False
        self.error: int | None = None
        """The code of a reset, once `ended`."""
        self.discard = False

    def data(self, data: bytes, fin: bool) -> None:
        self.heard_at = self.session.now
        self.ended = self.ended or fin
        if self.discard:  # padding
            if fin:
                self.session.forget_stream(self.stream_id)
        elif self.owner is not None:
            self._decode(data)
        elif self.header is not None:
            if self._on_shared_alias:
                self.place(data)
            else:
                self._hold(data)
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Read the header, octet by octet so that nothing after it is decoded yet."""
        session, decoder = self.session, self.decoder
        if decoder is None:
            data = bytes(self.held) + data
            found = session.codec.data_stream_type(data)
            if found is None:
                if self.ended and data:
                    raise protocol_violation("a stream ended inside its type")
                if self.ended:
                    self._forget()
                else:
                    self._expect_header()
                self.held[:] = data
                return
            self.held.clear()
            if session.event_log is not None:
                session.event_log.stream_type("parsed", self.stream_id, found[0])
            match found[0]:
                case StreamKind.CONTROL:
                    session.deadlines.cancel(self._headless)
                    session.control_opened(self.stream_id, data, self.ended)
                    return
                case StreamKind.PADDING:
                    self.discard = True
                    session.deadlines.cancel(self._headless)
                    if self.ended:
                        session.forget_stream(self.stream_id)
                    return
                case StreamKind.SUBGROUP:
                    decoder = session.codec.subgroup_decoder()
                case StreamKind.FETCH:
                    decoder = session.codec.fetch_decoder(GroupOrder.ASCENDING)
            self.decoder = decoder
        for position in range(len(data)):
            events = decoder.feed(data[position : position + 1])
            if events:
                header = events[0]
                assert isinstance(header, SubgroupHeader | FetchHeader)
                self.header = header
                session.deadlines.cancel(self._headless)
                if session.event_log is not None:
                    session.event_log.objects("parsed", self.stream_id, header, events)
                self.place(data[position + 1 :])
                return
        if self.ended:
            raise protocol_violation("a data stream ended inside its header")
        self._expect_header()

    def _expect_header(self) -> None:
        """It has begun: its header is to follow in as long as an unknown alias may wait."""
        if self._headless is None:
            timeout = self.session.config.alias_timeout
            self._headless = self.session.call_later(timeout, self._without_header)

    def _without_header(self) -> None:
        self.session.streams_dropped += 1
        self.drop()

    @property
    def waiting(self) -> bool:
        return self.stream_id in self.session.waiting_for_alias

    @property
    def wanted(self) -> bool:
        """Whether an owner is there or may still come."""
        if isinstance(self.header, SubgroupHeader):
            died = self.session.aliases.dead.get(self.header.track_alias)
            # an alias may be used again once nothing of its old track is on its way
            return died is None or self.session.now - died > self.session.config.alias_timeout
        return self.header is not None and (
            self.header.request_id in self.session.fetch_receivers
            or self.session.may_be_fill(self.header.request_id)
        )

    @property
    def owner_pending(self) -> bool:
        """Whether its owner is known and only has to be accepted."""
        if isinstance(self.header, SubgroupHeader):
            return self.header.track_alias in self.session.aliases
        return self.header is not None and self.header.request_id in self.session.fetch_receivers

    def place(self, data: bytes = b"") -> None:
        """Start for the owner, wait for it, or drop what nobody wants."""
        session, header = self.session, self.header
        owner: ObjectOwner | None
        if isinstance(header, SubgroupHeader):
            owner = self._subscription(header, data)
            incoming = IncomingStream(self.stream_id, Via.SUBSCRIPTION, subgroup=header)
        else:
            assert header is not None
            owner = session.fetch_receivers.get(header.request_id)
            via = Via.FETCH if isinstance(owner, OutgoingFetch) else Via.FILL
            incoming = IncomingStream(self.stream_id, via, request_id=header.request_id)
        if owner is not None and owner.ready:
            self._start(owner, incoming, data)
        elif self.wanted:
            self._hold(data)
        else:
            self.drop()

    @property
    def _on_shared_alias(self) -> bool:
        header = self.header
        return isinstance(header, SubgroupHeader) and self.session.aliases.is_shared(
            header.track_alias
        )

    def _subscription(self, header: SubgroupHeader, data: bytes) -> SubscriberSide | None:
        """Whose the stream is; None when that cannot be said yet."""
        aliases = self.session.aliases
        if not aliases.is_shared(header.track_alias):
            return aliases.owner(header.track_alias)
        if self.chosen is None or self.chosen.state is RequestState.CLOSED:
            events = deepcopy(self.decoder).feed(bytes(self.held) + data)  # type: ignore[union-attr]
            first = next((event for event in events if isinstance(event, ObjectHeader)), None)
            if first is not None or self.ended:
                self.chosen = aliases.owner(header.track_alias, first)
        return self.chosen

    @property
    def holder(self) -> tuple[bool, int]:
        """For whom its octets are held: a Track Alias, or the Request ID of a fetch."""
        if isinstance(self.header, SubgroupHeader):
            return True, self.header.track_alias
        return False, self.header.request_id if self.header is not None else -1

    def _hold(self, data: bytes) -> None:
        session = self.session
        if not self.waiting:
            self.held_since = session.now
            session.waiting_for_alias[self.stream_id] = self
            session.transport.pause_receiving(self.stream_id)
        self.held += data
        session.held_octets += len(data)
        if session.held_octets > session.config.max_held_octets:
            make_room(session)

    def _release(self) -> bytes:
        """Leave the waiting room with what was held."""
        session = self.session
        held, self.held = bytes(self.held), bytearray()
        if session.waiting_for_alias.pop(self.stream_id, None) is not None:
            session.held_octets -= len(held)
        return held

    def _start(self, owner: ObjectOwner, incoming: IncomingStream, data: bytes) -> None:
        if self.waiting:
            data = self._release() + data
            self.session.transport.resume_receiving(self.stream_id)
        self.owner, self.incoming = owner, incoming
        self.session.stream_owned(self, owner)
        if isinstance(self.header, FetchHeader):
            cast(FetchDecoder, self.decoder).group_order = owner.group_order
            # There is one stream for each request: another one of this ID is unwanted.
            del self.session.fetch_receivers[self.header.request_id]
        owner.receiver.stream_opened(incoming)
        if not self.discard:
            self._decode(data)

    def _decode(self, data: bytes) -> None:
        decoder, owner, incoming = self.decoder, self.owner, self.incoming
        assert decoder is not None and owner is not None and incoming is not None
        events = decoder.feed(data)
        if self.session.event_log is not None:
            assert self.header is not None
            self.session.event_log.objects("parsed", self.stream_id, self.header, events)
        if self.ended and self.error is None and decoder.mid_object:
            raise protocol_violation("a data stream ended inside an object")
        receiver = owner.receiver
        try:
            for event in events:
                if isinstance(event, _PAYLOAD):
                    header = incoming.header
                    assert header is not None
                    receiver.object_part(incoming, event)
                    incoming.remaining -= len(event)
                    if not incoming.remaining and not self.discard:
                        incoming.header = None
                        receiver.object_ended(incoming, header)
                elif isinstance(event, ObjectHeader):
                    receiver.object_begun(incoming, event)
                    incoming.remaining = event.length
                    if event.length:
                        incoming.header = event
                    elif not self.discard:
                        receiver.object_ended(incoming, event)
                elif isinstance(event, RangeMarker):
                    receiver.range_marker(incoming, event)
                if self.discard:  # a callback gave the request up, or closed the session
                    return
        except MalformedTrack as malformed:
            self.session.track_malformed(owner, str(malformed))
            return
        if self.ended:
            self._over()

    def reset(self, code: int) -> None:
        self.ended, self.error = True, code
        if self.owner is not None:
            self._over()
        elif not self.waiting:
            self.discard = True
            self._forget()
        elif self._on_shared_alias:
            self.place()

    def _over(self) -> None:
        owner, incoming = self.owner, self.incoming
        assert owner is not None and incoming is not None
        self.discard = True
        self.session.forget_stream(self.stream_id)
        try:
            owner.receiver.stream_ended(incoming, self.error)
        except MalformedTrack as malformed:
            self.session.track_malformed(owner, str(malformed))
            return
        owner.stream_ended()

    def drop(self) -> None:
        """Nobody wants what comes on this stream."""
        if self.discard:
            return
        self.discard = True
        if self.waiting:
            self._release()
            self.session.transport.resume_receiving(self.stream_id)
        if not self.ended:
            self.session.transport.stop_receiving(self.stream_id, StreamErrorCode.CANCELLED)
        self._forget()

    def _forget(self) -> None:
        self.session.deadlines.cancel(self._headless)
        self.session.forget_stream(self.stream_id)


def make_room(session: Session) -> None:
    """Drop what is held until it is within `max_held_octets`, from whoever holds most: a
    publication that nobody answers takes no room from the others."""
    while session.held_octets > session.config.max_held_octets:
        held: dict[tuple[bool, int], int] = defaultdict(int)
        newest_first = tuple(reversed(session.waiting_for_alias.values()))
        for stream in newest_first:
            held[stream.holder] += len(stream.held)
        greediest = max(held, key=held.__getitem__)
        session.streams_dropped += 1
        next(s for s in newest_first if s.held and s.holder == greediest).drop()


def receive_datagram(session: Session, data: bytes) -> None:
    """One QUIC DATAGRAM: an Object for the owner of its Track Alias, or padding."""
    decoded = session.codec.decode_datagram(data)
    if session.event_log is not None:
        session.event_log.datagram("parsed", decoded)
    if isinstance(decoded, PaddingDatagram):
        return
    if decoded.track_alias not in session.aliases:
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
    owner = session.aliases.owner(decoded.track_alias, header)
    if owner is None or not owner.ready:
        return
    receiver = owner.receiver
    try:
        receiver.object_begun(incoming, header)
        if decoded.payload and owner.state is RequestState.ESTABLISHED:
            receiver.object_part(incoming, decoded.payload)
        if owner.state is RequestState.ESTABLISHED:
            receiver.object_ended(incoming, header)
    except MalformedTrack as malformed:
        session.track_malformed(owner, str(malformed))
