"""Requests: one bidirectional stream each, in both directions (MOQT "Control Messages").

`RequestStream` enforces what may travel on such a stream, by table. On top of it
stand the objects an application holds: `Outgoing…` for what we ask, `Incoming…`
for what a peer asks. A subscription has the same two sides whoever starts it:
`SubscriberSide` (OutgoingSubscribe, IncomingPublish) and `PublisherSide`
(IncomingSubscribe, OutgoingPublish).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moqt.requests.incoming import (
    IncomingFetch,
    IncomingRequest,
    IncomingTrackRequest,
    IncomingTrackStatus,
)
from moqt.requests.namespaces import (
    IncomingPublishNamespace,
    IncomingSubscribeNamespace,
    OutgoingPublishNamespace,
    OutgoingSubscribeNamespace,
)
from moqt.requests.outgoing import OutgoingFetch, OutgoingRequest, OutgoingTrackStatus
from moqt.requests.publications import IncomingPublish
from moqt.requests.publisher_side import IncomingSubscribe, OutgoingPublish, PublisherSide
from moqt.requests.request import RequestOwner, UpdateAnswer, track_property
from moqt.requests.stream import (
    AFTER_OPENING,
    FIRST_ANSWER,
    LATER_ANSWERS,
    REQUEST_MOVES,
    RequestState,
    RequestStream,
)
from moqt.requests.subscribe_tracks import IncomingSubscribeTracks, OutgoingSubscribeTracks
from moqt.requests.subscriber_side import OutgoingSubscribe, SubscriberSide
from moqt.values.messages import (
    Fetch,
    Publish,
    PublishNamespace,
    Request,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = [
    "AFTER_OPENING",
    "FIRST_ANSWER",
    "LATER_ANSWERS",
    "REQUEST_MOVES",
    "IncomingFetch",
    "IncomingPublish",
    "IncomingPublishNamespace",
    "IncomingRequest",
    "IncomingSubscribe",
    "IncomingSubscribeNamespace",
    "IncomingSubscribeTracks",
    "IncomingTrackRequest",
    "IncomingTrackStatus",
    "OutgoingFetch",
    "OutgoingPublish",
    "OutgoingPublishNamespace",
    "OutgoingRequest",
    "OutgoingSubscribe",
    "OutgoingSubscribeNamespace",
    "OutgoingSubscribeTracks",
    "OutgoingTrackStatus",
    "PublisherSide",
    "RequestOwner",
    "RequestState",
    "RequestStream",
    "SubscriberSide",
    "UpdateAnswer",
    "build_incoming",
    "track_property",
]

_INCOMING: dict[type[Request], Callable[..., IncomingRequest]] = {
    Subscribe: IncomingSubscribe,
    Publish: IncomingPublish,
    Fetch: IncomingFetch,
    TrackStatus: IncomingTrackStatus,
    PublishNamespace: IncomingPublishNamespace,
    SubscribeNamespace: IncomingSubscribeNamespace,
    SubscribeTracks: IncomingSubscribeTracks,
}


def build_incoming(session: Session, stream: RequestStream, message: Request) -> IncomingRequest:
    """The object for a peer's opening message."""
    return _INCOMING[type(message)](session, stream, message)
