"""Data streams of the peer: which there are, for whom, and what waits to know for whom it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from heapq import heapify, heappop, heappush
from typing import cast

from moqt.receiving.aliases import TrackAliases
from moqt.receiving.host import Recipient, StreamHost, Subscriber
from moqt.receiving.receiver import IncomingStream, Via
from moqt.values.codes import GroupOrder, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.errors import MalformedTrack, protocol_violation
from moqt.wire.codec import FetchDecoder, SubgroupDecoder
from moqt.wire.objects import (
    FetchHeader,
    ObjectHeader,
    Payload,
    RangeMarker,
    StreamKind,
    SubgroupHeader,
    WholeObject,
)

_PAYLOAD = (bytes, memoryview)


class DataStreams:
    """The data streams of one session and the tables they are placed by.

    Requests say what is theirs, by Track Alias or Request ID. A stream of which nobody has said
    so yet waits: all of them within `max_held_octets`, each for `alias_timeout`.
    """

    def __init__(self, host: StreamHost) -> None:
        self.host = host
        self.aliases = TrackAliases()
        self.expected: dict[int, Recipient] = {}
        """For whom a fetch stream is to come, by its Request ID."""
        self._expecting: defaultdict[Recipient, set[int]] = defaultdict(set)
        """The Request IDs under which something is to come for a recipient."""
        self.waiting: dict[int, DataIn] = {}
        """Streams, by id, that came before it is known for whom."""
        self._held_for: defaultdict[tuple[bool, int], dict[int, DataIn]] = defaultdict(dict)
        """The same, by what they begin with: a Track Alias, or the Request ID of a fetch."""
        self.reading: dict[Recipient, dict[int, DataIn]] = {}
        """Streams, by id, that are read for a recipient."""
        self.held_octets = 0
        """What all that wait have brought."""
        self.kept_octets = 0
        """What streams that are read have brought of headers, with their properties, of Objects
        that are not whole."""

    def remembered(self) -> dict[str, int]:
        """Of a session's `Remembered` what is here; what came before SETUP is not."""
        return {
            "streams_waiting": len(self.waiting),
            "streams_expected": len(self.expected),
            "octets_held": self.held_octets,
            "octets_kept": self.kept_octets,
            "aliases": len(self.aliases),
            "aliases_ended": len(self.aliases.dead),
            "shared_objects": self.aliases.shared_objects,
        }

    # -- for requests ------------------------------------------------------------------------

    def add_alias(self, alias: int, subscriber: Subscriber) -> None:
        """Subgroup streams and datagrams of `alias` are `subscriber`'s.

        Raises SessionError DUPLICATE_TRACK_ALIAS when it names another track.
        """
        self.aliases.add(alias, subscriber)

    def remove_alias(self, alias: int, subscriber: Subscriber) -> None:
        """`subscriber` uses `alias` no more; `forget` follows."""
        self.aliases.remove(alias, subscriber, self.host.clock.now)

    def expect(self, request_id: int, recipient: Recipient) -> None:
        """A fetch stream with this Request ID is `recipient`'s."""
        self.expected[request_id] = recipient
        self._expecting[recipient].add(request_id)

    def expect_no_more(self, request_id: int) -> None:
        """No fetch stream with this Request ID comes any more, or it has come."""
        recipient = self.expected.pop(request_id, None)
        if recipient is not None:
            self._expecting[recipient].discard(request_id)
            if not self._expecting[recipient]:
                del self._expecting[recipient]

    def place_waiting(self, recipient: Recipient, alias: int | None) -> None:
        """`recipient` has named its Track Alias, or is ready: place what waited for that."""
        for stream in self._waiting_for(self._expecting.get(recipient, ()), alias):
            if not stream.discard:
                stream.place()

    def reset(self, recipient: Recipient, code: int) -> bool:
        """The peer gave it up: its streams end as if reset; False when there is none."""
        streams = self._streams_of(recipient)
        for stream in streams:
            stream.drop()
            stream.reset(code)
        return bool(streams)

    def forget(self, recipient: Recipient, alias: int | None = None) -> None:
        """It is over, and has given up its `alias`: no stream is expected for it any more, and
        STOP_SENDING goes out on those of its that are still open."""
        request_ids = self._expecting.pop(recipient, ())
        for request_id in request_ids:
            del self.expected[request_id]
        for stream in self._streams_of(recipient):
            stream.drop()
        for stream in self._waiting_for(request_ids, alias):
            if not self.may_want(stream.header):
                stream.drop()

    def last_heard(self, recipient: Recipient) -> float:
        """When a stream of its that is still open brought something: a slow path is no reason
        to give up what is on its way."""
        return max((stream.heard_at for stream in self._streams_of(recipient)), default=0)

    # -- for the session ---------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Drop what has waited for too long; not what only has to be accepted."""
        for stream in tuple(self.waiting.values()):
            if now - stream.held_since > self.host.config.alias_timeout and not self.knows(
                stream.header
            ):
                self.host.counters.streams_dropped += 1
                stream.drop()

    def clear(self) -> None:
        """The session is over. What requests expect, they take back themselves."""
        self.reading.clear()
        self.waiting.clear()
        self._held_for.clear()
        self.held_octets = self.kept_octets = 0

    # -- for the streams ---------------------------------------------------------------------

    def knows(self, header: SubgroupHeader | FetchHeader | None) -> bool:
        """Whether it is known for whom a stream is that begins so."""
        if isinstance(header, SubgroupHeader):
            return header.track_alias in self.aliases
        return header is not None and header.request_id in self.expected

    def may_want(self, header: SubgroupHeader | FetchHeader | None) -> bool:
        """Whether somebody wants a stream that begins so, or may still come who does."""
        host = self.host
        if isinstance(header, SubgroupHeader):
            died = self.aliases.dead.get(header.track_alias)
            # an alias may be used again once nothing of its old track is on its way
            return died is None or host.clock.now - died > host.config.alias_timeout
        return header is not None and (
            header.request_id in self.expected or host.may_be_fill(header.request_id)
        )

    def hold(self, stream: DataIn, data: bytes) -> None:
        """What came on `stream` waits; its credit is held back."""
        if stream.stream_id not in self.waiting:
            stream.held_since = self.host.clock.now
            self.waiting[stream.stream_id] = stream
            self._held_for[stream.holder][stream.stream_id] = stream
            self.host.transport.pause_receiving(stream.stream_id)
        stream.held += data
        self.held_octets += len(data)
        if self.held_octets > self.host.config.max_held_octets:
            self._make_room()

    def release(self, stream: DataIn) -> bytes:
        """What was held of `stream`, which waits no more."""
        if self.waiting.pop(stream.stream_id, None) is None:
            return b""
        held_for = self._held_for[stream.holder]
        del held_for[stream.stream_id]
        if not held_for:
            del self._held_for[stream.holder]
        held, stream.held = bytes(stream.held), bytearray()
        self.held_octets -= len(held)
        self.host.transport.resume_receiving(stream.stream_id)
        return held

    def started(self, stream: DataIn, recipient: Recipient) -> None:
        """What comes on `stream` is read for `recipient`."""
        self.reading.setdefault(recipient, {})[stream.stream_id] = stream
        if isinstance(stream.header, FetchHeader):
            # There is one stream for each request: another one of this ID is unwanted.
            self.expect_no_more(stream.header.request_id)

    def ended(self, stream: DataIn) -> None:
        """Nothing more is read from `stream`."""
        self.kept_octets -= stream.kept
        stream.kept = 0
        self.host.forget_stream(stream.stream_id)
        streams = self.reading.get(stream.recipient) if stream.recipient is not None else None
        if streams is not None:
            streams.pop(stream.stream_id, None)
            if not streams:
                del self.reading[cast(Recipient, stream.recipient)]

    def too_much(self, stream: DataIn) -> None:
        """Streams keep more than `max_held_octets` of Objects that are not whole: the one that
        brought the last of it is stopped, and ends as if reset."""
        host = self.host
        host.at_limit("max_held_octets", host.config.max_held_octets)
        host.counters.streams_dropped += 1
        stream.drop()
        stream.reset(StreamErrorCode.EXCESSIVE_LOAD)

    # -- inside ------------------------------------------------------------------------------

    def _streams_of(self, recipient: Recipient) -> tuple[DataIn, ...]:
        return tuple(self.reading.get(recipient, {}).values())

    def _waiting_for(self, request_ids: Iterable[int], alias: int | None) -> list[DataIn]:
        keys = [(False, request_id) for request_id in request_ids]
        if alias is not None:
            keys.append((True, alias))
        return [stream for key in keys for stream in self._held_for.get(key, {}).values()]

    def _make_room(self) -> None:
        """Drop what is held, from whoever holds most, until an eighth of `max_held_octets` is
        free: a publication that nobody answers takes no room from the others, and who all are is
        looked at once for so many octets."""
        limit = self.host.config.max_held_octets
        self.host.at_limit("max_held_octets", limit)
        held = [
            (-sum(len(stream.held) for stream in streams.values()), holder)
            for holder, streams in self._held_for.items()
        ]
        heapify(held)
        while self.held_octets > limit - limit // 8 and held:
            octets, holder = heappop(held)
            newest = next(s for s in reversed(self._held_for[holder].values()) if s.held)
            octets += len(newest.held)
            self.host.counters.streams_dropped += 1
            newest.drop()
            if octets:
                heappush(held, (octets, holder))


class DataIn:
    """A unidirectional stream: placed by its header, then decoded for its recipient.

    What comes before the recipient is known (its Track Alias, or the group order of a fill) is
    held as octets.
    """

    def __init__(self, streams: DataStreams, stream_id: int) -> None:
        self.streams = streams
        self.host = streams.host
        self.stream_id = stream_id
        self.decoder: SubgroupDecoder | FetchDecoder | None = None
        self.header: SubgroupHeader | FetchHeader | None = None
        self.incoming: IncomingStream | None = None
        self.recipient: Recipient | None = None
        self.chosen: Subscriber | None = None
        """Of the subscriptions that share its Track Alias, the one it is for."""
        self._probe: SubgroupDecoder | FetchDecoder | None = None
        self._probed = 0
        """Octets that it has read."""
        self._first: ObjectHeader | None = None
        self.held = bytearray()
        self.kept = 0
        """Octets kept of the header of an Object that is not whole."""
        self.held_since = 0.0
        self.heard_at = 0.0
        self._headless: Deadline | None = None
        self.ended = False
        self.error: int | None = None
        """The code of a reset, once `ended`."""
        self.discard = False

    def data(self, data: bytes, fin: bool) -> None:
        self.heard_at = self.host.clock.now
        self.ended = self.ended or fin
        if self.discard:  # padding
            if fin:
                self._forget()
        elif self.recipient is not None:
            self._decode(data)
        elif self.header is not None:
            if self._on_shared_alias:
                self.place(data)
            else:
                self.streams.hold(self, data)
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Read the header, octet by octet so that nothing after it is decoded yet."""
        host, decoder = self.host, self.decoder
        if decoder is None:
            data = bytes(self.held) + data
            found = host.codec.data_stream_type(data)
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
            if host.event_log is not None:
                host.event_log.stream_type("parsed", self.stream_id, found[0])
            match found[0]:
                case StreamKind.CONTROL:
                    host.clock.cancel(self._headless)
                    host.control_opened(self.stream_id, data, self.ended)
                    return
                case StreamKind.PADDING:
                    self.discard = True
                    host.clock.cancel(self._headless)
                    if self.ended:
                        self._forget()
                    return
                case StreamKind.SUBGROUP:
                    decoder = host.codec.subgroup_decoder()
                case StreamKind.FETCH:
                    decoder = host.codec.fetch_decoder(GroupOrder.ASCENDING)
            self.decoder = decoder
        for position in range(len(data)):
            events = decoder.feed(data[position : position + 1])
            if events:
                header = events[0]
                assert isinstance(header, SubgroupHeader | FetchHeader)
                self.header = header
                host.clock.cancel(self._headless)
                if host.event_log is not None:
                    host.event_log.objects("parsed", self.stream_id, header, events)
                self.place(data[position + 1 :])
                return
        if self.ended:
            raise protocol_violation("a data stream ended inside its header")
        self._expect_header()

    def _expect_header(self) -> None:
        """It has begun: its header is to follow in as long as an unknown alias may wait."""
        if self._headless is None:
            timeout = self.host.config.alias_timeout
            self._headless = self.host.clock.after(timeout, self._without_header)

    def _without_header(self) -> None:
        self.host.counters.streams_dropped += 1
        self.drop()

    def place(self, data: bytes = b"") -> None:
        """Start for the recipient, wait for it, or drop what nobody wants."""
        streams, header = self.streams, self.header
        recipient: Recipient | None
        if isinstance(header, SubgroupHeader):
            recipient = self._subscriber(header, data)
            incoming = IncomingStream(self.stream_id, Via.SUBSCRIPTION, subgroup=header)
        else:
            assert header is not None
            recipient = streams.expected.get(header.request_id)
            via = recipient.via if recipient is not None else Via.FETCH
            incoming = IncomingStream(self.stream_id, via, request_id=header.request_id)
        if recipient is not None and recipient.ready:
            self._start(recipient, incoming, data)
        elif streams.may_want(header):
            streams.hold(self, data)
        else:
            self.drop()

    @property
    def _on_shared_alias(self) -> bool:
        header = self.header
        return isinstance(header, SubgroupHeader) and self.streams.aliases.is_shared(
            header.track_alias
        )

    def _subscriber(self, header: SubgroupHeader, data: bytes) -> Subscriber | None:
        """Whose the stream is; None when that cannot be said yet."""
        aliases = self.streams.aliases
        if not aliases.is_shared(header.track_alias):
            return aliases.subscriber(header.track_alias)
        if self.chosen is None or self.chosen.over:
            first = self._first_object(data)
            if first is not None or self.ended:
                self.chosen = aliases.subscriber(header.track_alias, first)
        return self.chosen

    def _first_object(self, data: bytes) -> ObjectHeader | None:
        """The stream's first Object, once it begins in what is held or in `data`: read ahead by
        a decoder of its own, which sees each octet once."""
        if self._first is None:
            if self._probe is None:
                self._probe = deepcopy(self.decoder)
            assert self._probe is not None
            fresh = bytes(self.held[self._probed :]) + data
            self._probed += len(fresh)
            events = self._probe.feed(fresh)
            headers = (e.header if isinstance(e, WholeObject) else e for e in events)
            self._first = next((each for each in headers if isinstance(each, ObjectHeader)), None)
            if self._first is not None:
                self._probe = None
        return self._first

    @property
    def holder(self) -> tuple[bool, int]:
        """For whom its octets are held: a Track Alias, or the Request ID of a fetch."""
        if isinstance(self.header, SubgroupHeader):
            return True, self.header.track_alias
        return False, self.header.request_id if self.header is not None else -1

    def _start(self, recipient: Recipient, incoming: IncomingStream, data: bytes) -> None:
        data = self.streams.release(self) + data
        self.recipient, self.incoming = recipient, incoming
        self.streams.started(self, recipient)
        if isinstance(self.header, FetchHeader):
            cast(FetchDecoder, self.decoder).group_order = recipient.group_order
        recipient.receiver.stream_opened(incoming)
        if not self.discard:
            self._decode(data)

    def _decode(self, data: bytes) -> None:
        decoder, recipient, incoming = self.decoder, self.recipient, self.incoming
        assert decoder is not None and recipient is not None and incoming is not None
        events = decoder.feed(data)
        if self.host.event_log is not None:
            assert self.header is not None
            self.host.event_log.objects("parsed", self.stream_id, self.header, events)
        if self.ended and self.error is None and decoder.mid_object:
            raise protocol_violation("a data stream ended inside an object")
        receiver = incoming.receiver or recipient.receiver
        try:
            for event in events:
                if isinstance(event, WholeObject):
                    header, payload = event
                    if not receiver.object_arrived(incoming, header, payload):
                        tell_in_steps(recipient, incoming, header, payload)
                elif isinstance(event, _PAYLOAD):
                    begun = incoming.header
                    assert begun is not None
                    receiver.object_part(incoming, event)
                    incoming.remaining -= len(event)
                    if not incoming.remaining and not self.discard:
                        incoming.header = None
                        receiver.object_ended(incoming, begun)
                elif isinstance(event, ObjectHeader):
                    receiver.object_begun(incoming, event)
                    incoming.header, incoming.remaining = event, event.length
                elif isinstance(event, RangeMarker):
                    receiver.range_marker(incoming, event)
                if self.discard:  # a callback gave the request up, or closed the session
                    return
        except MalformedTrack as malformed:
            self.host.track_malformed(recipient, str(malformed))
            return
        if self.ended:
            self._over()
            return
        begun = incoming.header
        kept = len(decoder.pending) + (len(begun.properties) if begun is not None else 0)
        if kept != self.kept:
            self.streams.kept_octets += kept - self.kept
            self.kept = kept
            if self.streams.kept_octets > self.host.config.max_held_octets:
                self.streams.too_much(self)

    def reset(self, code: int) -> None:
        self.ended, self.error = True, code
        if self.recipient is not None:
            self._over()
        elif self.stream_id not in self.streams.waiting:
            self.discard = True
            self._forget()
        elif self._on_shared_alias:
            self.place()

    def _over(self) -> None:
        recipient, incoming = self.recipient, self.incoming
        assert recipient is not None and incoming is not None
        self.discard = True
        self._forget()
        try:
            (incoming.receiver or recipient.receiver).stream_ended(incoming, self.error)
        except MalformedTrack as malformed:
            self.host.track_malformed(recipient, str(malformed))
            return
        recipient.stream_ended()

    def drop(self) -> None:
        """Nobody wants what comes on this stream."""
        if self.discard:
            return
        self.discard = True
        self.streams.release(self)
        if not self.ended:
            self.host.transport.stop_receiving(self.stream_id, StreamErrorCode.CANCELLED)
        self._forget()

    def _forget(self) -> None:
        self.host.clock.cancel(self._headless)
        self.streams.ended(self)


def tell_in_steps(
    recipient: Recipient, incoming: IncomingStream, header: ObjectHeader, payload: Payload
) -> None:
    """Tell of a whole Object as of one that comes bit by bit, until somebody gives it up."""
    receiver = incoming.receiver or recipient.receiver
    receiver.object_begun(incoming, header)
    if payload and not recipient.over:
        receiver.object_part(incoming, payload)
    if not recipient.over:
        receiver.object_ended(incoming, header)
