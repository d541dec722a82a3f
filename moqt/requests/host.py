"""What requests need of others: their session, the table they stand in, the application.

Protocols that this folder owns: `moqt.session` has what is asked here, and nothing in here knows
it. Where a Protocol says `Any` it means a request, whose classes stand above this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moqt.delivery import Outlet
from moqt.receiving.data_streams import DataStreams
from moqt.requests.rules import Rules
from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode
from moqt.values.config import SessionConfig, SessionCounters
from moqt.values.deadlines import Deadlines
from moqt.values.errors import MoqtError
from moqt.values.messages import Goaway, Message, Parameters
from moqt.values.names import FullTrackName, TrackNamespace


class Offers(Protocol):
    """A SUBSCRIBE_TRACKS of ours, as the PUBLISH that answers it sees it."""

    @property
    def wants_fill(self) -> bool:
        """Whether a fill comes under the Request ID of PUBLISH."""
        ...

    @property
    def parameters(self) -> Parameters: ...

    def offered(self, publish: Any) -> None:
        """Hand it to who asked."""


class Registry(Protocol):
    """The requests of one session, which each of them stands in until it is over."""

    @property
    def has_room(self) -> bool:
        """Whether the peer may have one more request, or fill, open."""
        ...

    def next_id(self) -> int:
        """A Request ID of ours."""
        ...

    def take_back(self, request: Any) -> None:
        """A request of ours is cancelled before it was sent."""

    def forget(self, stream_id: int) -> None:
        """A request of ours is over."""

    def over(self, stream_id: int) -> None:
        """A peer's request is over."""

    def claim_prefix(self, request: Any, prefix: TrackNamespace) -> bool:
        """Have `request` claim `prefix`; False when it overlaps that of another of its kind."""
        ...

    def at_limit(self, name: str, limit: int) -> None:
        """The session has come to one of its limits: the log says so, once for each."""

    def over_limit(self, request: Any, name: str, limit: int, why: str) -> None:
        """Refuse a `request` of the peer's beyond the limit `name`; `why` is for the peer."""

    def tracks_request_for(self, name: FullTrackName) -> Offers | None:
        """The SUBSCRIBE_TRACKS of ours that a PUBLISH of this track answers."""
        ...


class Application(Protocol):
    """What an open request tells the application, or asks it."""

    def request_goaway_received(self, request: Any, goaway: Goaway) -> None: ...

    def check_prefix(self, request: Any, prefix: TrackNamespace) -> RequestErrorCode | None: ...

    def namespace_prefix_changed(self, request: Any) -> None: ...

    def subscribe_tracks_changed(self, request: Any) -> None: ...


class RequestHost(Outlet, Protocol):
    """The session, as its requests see it."""

    @property
    def config(self) -> SessionConfig: ...

    @property
    def counters(self) -> SessionCounters: ...

    @property
    def clock(self) -> Deadlines: ...

    @property
    def rules(self) -> Rules: ...

    @property
    def data_streams(self) -> DataStreams: ...

    @property
    def requests(self) -> Registry: ...

    @property
    def handler(self) -> Application: ...

    @property
    def peer_update_limit(self) -> int:
        """REQUEST_UPDATEs that may be unanswered on one stream; 0 is no limit."""
        ...

    def send_message(self, stream_id: int, message: Message, fin: bool) -> None: ...

    def forget_stream(self, stream_id: int) -> None:
        """Nothing more comes on the stream, or is wanted."""

    def next_track_alias(self) -> int: ...

    def publish(
        self,
        store: TrackStore,
        parameters: Parameters,
        *,
        include_properties: bool,
        on_ended: Callable[[MoqtError | None], None] | None,
    ) -> Any:
        """PUBLISH the track in `store`; returns the request."""
        ...
