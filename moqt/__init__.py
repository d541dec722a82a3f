"""MOQT (Media over QUIC Transport, draft-22): sessions, publishing, subscribing.

The core (`moqt.session`, `moqt.track.store`) owns no I/O; `moqt.connect` and `moqt.serve`
put it on asyncio and UDP.

Floors: server → client, redirects → aio → publisher, responses → session → requests → delivery,
receiving → track, log → token_file → wire, quic → uri, private_files → values, backoff.
"""

from __future__ import annotations

from moqt.aio import (
    FetchResponse,
    MoqtSession,
    NamespaceEvent,
    NamespaceListing,
    OfferedTrack,
    PublishedNamespace,
    PublishedTrack,
    Subscription,
    TrackOffers,
)
from moqt.client import connect
from moqt.publisher import Publisher
from moqt.quic.config import QuicConfig
from moqt.receiving.receiver import ObjectReceiver, ReceivedObject, Receiver, Via
from moqt.redirects import Churn, FollowLimits, follow
from moqt.server import Server, serve
from moqt.session import Session, SessionConfig, SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import (
    GroupOrder,
    ObjectStatus,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.values.config import SessionCounters
from moqt.values.errors import (
    ConnectError,
    MisuseError,
    MoqtError,
    RequestError,
    SessionClosed,
    SessionError,
    StreamReset,
)
from moqt.values.messages import KeyValue, LocationFilter, Parameters, RangeFilter
from moqt.values.names import FullTrackName, Location, TrackNamespace

__all__ = [
    "Churn",
    "ConnectError",
    "FetchResponse",
    "FollowLimits",
    "FullTrackName",
    "GroupOrder",
    "KeyValue",
    "Location",
    "LocationFilter",
    "MisuseError",
    "MoqtError",
    "MoqtSession",
    "NamespaceEvent",
    "NamespaceListing",
    "ObjectReceiver",
    "ObjectStatus",
    "OfferedTrack",
    "Parameters",
    "PublishDoneCode",
    "PublishedNamespace",
    "PublishedTrack",
    "Publisher",
    "QuicConfig",
    "RangeFilter",
    "ReceivedObject",
    "Receiver",
    "RequestError",
    "RequestErrorCode",
    "Server",
    "Session",
    "SessionClosed",
    "SessionConfig",
    "SessionCounters",
    "SessionError",
    "SessionErrorCode",
    "SessionHandler",
    "StreamErrorCode",
    "StreamReset",
    "Subscription",
    "TrackNamespace",
    "TrackOffers",
    "TrackStore",
    "Via",
    "connect",
    "follow",
    "serve",
]
