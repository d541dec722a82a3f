"""What the readers of streams need of others: the session, and whom they read for.

Protocols that this folder owns: `moqt.session` and `moqt.requests` have what is asked here,
and nothing in here knows them.
"""

from __future__ import annotations

from typing import Protocol

from moqt.log.event_log import EventLog
from moqt.quic.transport import Transport
from moqt.receiving.receiver import Receiver, Via
from moqt.receiving.request_octets import RequestOctets
from moqt.values.codes import GroupOrder
from moqt.values.config import SessionConfig, SessionCounters
from moqt.values.deadlines import Deadlines
from moqt.values.errors import SessionClosed
from moqt.values.messages import Message
from moqt.values.names import FullTrackName
from moqt.wire.codec import Codec
from moqt.wire.objects import ObjectHeader


class Recipient(Protocol):
    """Whose Objects a data stream brings: one side of a subscription, or a FETCH of ours."""

    @property
    def name(self) -> FullTrackName: ...

    @property
    def receiver(self) -> Receiver: ...

    @property
    def via(self) -> Via:
        """What a fetch stream for it is: a FETCH's, or the fill of a subscription."""
        ...

    @property
    def group_order(self) -> GroupOrder:
        """In which order the groups of a fetch stream for it come."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the receiver and the group order are known: data can be taken."""
        ...

    @property
    def over(self) -> bool:
        """It takes nothing more."""
        ...

    def stream_ended(self) -> None:
        """A data stream of its own has ended, and its receiver has heard so."""


class Subscriber(Recipient, Protocol):
    """The subscriber's side of a subscription, which a Track Alias names."""

    def selects(self, header: ObjectHeader) -> bool:
        """Whether an Object passes its filters; asked where the Track Alias is shared."""
        ...


class MessageSink(Protocol):
    """A request stream, once its first message is read."""

    def receive(self, message: Message) -> None: ...

    def peer_finished(self) -> None:
        """FIN."""

    def peer_cancelled(self, code: int) -> None:
        """RESET_STREAM or STOP_SENDING."""


class StreamHost(Protocol):
    """The session, as the readers of its streams see it."""

    @property
    def transport(self) -> Transport: ...

    @property
    def codec(self) -> Codec:
        """Known from the handshake on."""
        ...

    @property
    def config(self) -> SessionConfig: ...

    @property
    def counters(self) -> SessionCounters: ...

    @property
    def request_octets(self) -> RequestOctets: ...

    @property
    def clock(self) -> Deadlines: ...

    @property
    def event_log(self) -> EventLog | None: ...

    @property
    def closed(self) -> SessionClosed | None: ...

    def control_opened(self, stream_id: int, data: bytes, fin: bool) -> None:
        """A unidirectional stream is the control stream; `data` is all that came of it."""

    def control_message(self, message: Message) -> None: ...

    def request_opened(self, stream_id: int, message: Message) -> MessageSink:
        """The first message of a bidirectional stream of the peer's."""
        ...

    def at_limit(self, name: str, limit: int) -> None:
        """The session has come to one of its limits: the log says so, once for each."""

    def forget_stream(self, stream_id: int) -> None:
        """Nothing more comes on the stream, or is wanted."""

    def track_malformed(self, recipient: Recipient, reason: str) -> None:
        """Give up every request for the track (MOQT "Malformed Tracks")."""

    def may_be_fill(self, request_id: int) -> bool:
        """Whether a PUBLISH with this ID may still come whose fill was asked for."""
        ...
