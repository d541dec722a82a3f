"""Requests: one bidirectional stream each, in both directions (MOQT "Control Messages").

`RequestStream` enforces what may travel on such a stream, by table. On top of it
stand the objects an application holds: `Outgoing…` for what we ask, `Incoming…`
for what a peer asks. A subscription has the same two sides whoever starts it:
`SubscriberSide` (OutgoingSubscribe, IncomingPublish) and `PublisherSide`
(IncomingSubscribe, OutgoingPublish).

What either side may change with REQUEST_UPDATE goes through `updates`; what needs to know both
ends (Request IDs, tokens, ranges) is in `rules`; namespaces and prefixes are in `namespaces`.

May import `moqt.delivery` and `moqt.receiving` and what is below them; never the session, of
which requests see what `host` says.
"""

from __future__ import annotations

from moqt.requests.fetch import (
    IncomingFetch,
    IncomingTrackStatus,
    OutgoingFetch,
    OutgoingTrackStatus,
)
from moqt.requests.incoming import IncomingRequest, IncomingTrackRequest
from moqt.requests.namespaces import (
    IncomingPublishNamespace,
    IncomingSubscribeNamespace,
    OutgoingPublishNamespace,
    OutgoingSubscribeNamespace,
)
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.publisher_side import IncomingSubscribe, OutgoingPublish, PublisherSide
from moqt.requests.request import OpenRequest
from moqt.requests.stream import REQUEST_TABLE, RequestState, RequestStream, Stage, crossings
from moqt.requests.subscribe_tracks import IncomingSubscribeTracks, OutgoingSubscribeTracks
from moqt.requests.subscriber_side import IncomingPublish, OutgoingSubscribe, SubscriberSide
from moqt.requests.updates import UpdateAnswer

__all__ = [
    "REQUEST_TABLE",
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
    "OpenRequest",
    "RequestState",
    "RequestStream",
    "Stage",
    "SubscriberSide",
    "UpdateAnswer",
    "crossings",
]
