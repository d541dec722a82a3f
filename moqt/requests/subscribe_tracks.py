"""SUBSCRIBE_TRACKS: the tracks under a prefix, each offered with a PUBLISH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moqt.requests.host import RequestHost
from moqt.requests.namespaces import IncomingPrefixRequest, check_full_name
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.publisher_side import OutgoingPublish
from moqt.requests.stream import RequestState, RequestStream
from moqt.requests.subscriber_side import IncomingPublish
from moqt.requests.updates import UpdateAnswer
from moqt.track.filters import matches_track, merge_update
from moqt.track.store import TrackStore
from moqt.values.codes import MessageType
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import (
    Message,
    Parameters,
    PublishSkipped,
    RequestOk,
    RequestUpdate,
    SubscribeTracks,
)
from moqt.values.names import FullTrackName, TrackNamespace, is_prefix


class OutgoingSubscribeTracks(OutgoingRequest):
    """SUBSCRIBE_TRACKS (MOQT "SUBSCRIBE_TRACKS"): `on_publish` gets each track offered for it.

    Its end stops new offers; publications that were accepted go on.
    """

    def __init__(
        self,
        session: RequestHost,
        prefix: TrackNamespace,
        parameters: Parameters,
        *,
        on_publish: Callable[[IncomingPublish], None],
        on_skipped: Callable[[FullTrackName], None] | None = None,
        on_ended: Callable[[MoqtError | None], None],
    ) -> None:
        super().__init__(session, SubscribeTracks(-1, prefix, parameters))
        self.prefix = prefix
        self._old_prefix: TrackNamespace | None = None
        self._on_publish = on_publish
        self._on_skipped = on_skipped
        self._on_ended = on_ended

    @property
    def wants_fill(self) -> bool:
        """Whether each publication comes with a fill, under the Request ID of its PUBLISH."""
        return self.parameters.fill_parameters is not None

    def covers(self, namespace: TrackNamespace) -> bool:
        """Whether a track of `namespace` may be offered, also while a new prefix is asked for."""
        return is_prefix(self.prefix, namespace) or (
            self._old_prefix is not None and is_prefix(self._old_prefix, namespace)
        )

    def offered(self, publish: IncomingPublish) -> None:
        self._on_publish(publish)

    def answered(self, message: Message) -> None:
        match message:
            case RequestOk():
                self.session.codec.check_request_ok(message, MessageType.SUBSCRIBE_TRACKS)
                self.expires(message.parameters)
            case PublishSkipped():
                namespace = self.prefix + message.suffix
                check_full_name(namespace, message.name)
                if self._on_skipped is not None:
                    self._on_skipped(FullTrackName(namespace, message.name))

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        """REQUEST_UPDATE: FORWARD, TRACK_PROPERTY_FILTER or the prefix of what comes later."""
        prefix = parameters.track_namespace_prefix

        def answered(answer: RequestOk | RequestError) -> None:
            if prefix is not None and isinstance(answer, RequestOk):
                # An offer under the old prefix may still be on its way, but not for long.
                self._old_prefix, self.prefix = self.prefix, prefix
            on_answer(answer)

        super().update(parameters, answered)

    def failed(self, error: MoqtError) -> None:
        self._on_ended(error)

    def peer_finished(self) -> None:
        super().peer_finished()
        if self.state is not RequestState.CLOSED:
            self._close()
            self._on_ended(None)


class IncomingSubscribeTracks(IncomingPrefixRequest):
    """SUBSCRIBE_TRACKS from a peer: `accept` it, then `offer` every matching track.

    `prefix` and `parameters` are what is asked for now, updates included.
    """

    def __init__(
        self, session: RequestHost, message: SubscribeTracks, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self._offered: set[FullTrackName] = set()
        """Tracks offered or skipped: not again before they are `withdrawn`."""

    def accept(self, *, expires_ms: int | None = None) -> None:
        """SUBSCRIBE_TRACKS_OK. Offer what is there afterwards."""
        self._accept_for(expires_ms)

    def matches(self, store: TrackStore) -> bool:
        """Whether the prefix and the TRACK_PROPERTY_FILTERs select the track."""
        return is_prefix(self.prefix, store.name.namespace) and matches_track(
            self.parameters.range_filters, store.properties
        )

    def offer(
        self, store: TrackStore, *, on_ended: Callable[[MoqtError | None], None] | None = None
    ) -> OutgoingPublish | None:
        """PUBLISH the track as SUBSCRIBE_TRACKS asks, once per publication of it.

        None when it does not match, was offered before, or no PUBLISH can be made: then the
        subscriber is told with PUBLISH_SKIPPED. Leave out the tracks the subscriber itself
        publishes, and those it may not have.
        """
        if (
            self.state is not RequestState.ESTABLISHED
            or store.name in self._offered
            or not self.matches(store)
        ):
            return None
        self._offered.add(store.name)
        asked = self.parameters
        try:
            publication: OutgoingPublish = self.session.publish(
                store,
                replace(asked, authorization_tokens=(), track_namespace_prefix=None),
                include_properties=asked.include_properties != 0,
                on_ended=on_ended,
            )
        except RequestError:
            self._skip(store.name)
            return None
        return publication

    def skip(self, name: FullTrackName) -> None:
        """PUBLISH_SKIPPED: no PUBLISH comes for the track, which can still be subscribed to."""
        if (
            self.state is RequestState.ESTABLISHED
            and name not in self._offered
            and is_prefix(self.prefix, name.namespace)
        ):
            self._offered.add(name)
            self._skip(name)

    def _skip(self, name: FullTrackName) -> None:
        self.session.counters.tracks_skipped += 1
        self.tell(PublishSkipped(name.namespace[len(self.prefix) :], name.name))

    def withdrawn(self, name: FullTrackName) -> None:
        """The track is published no more: another publication of it may be offered."""
        self._offered.discard(name)

    def updated(self, update: RequestUpdate) -> None:
        parameters = update.parameters
        merged = merge_update(self.parameters.range_filters, parameters.range_filters)
        self.session.rules.check_filters(replace(self.parameters, range_filters=merged))
        prefix = parameters.track_namespace_prefix
        if prefix is not None:
            self.check_prefix(prefix)
            self.prefix = prefix
            self._offered = {n for n in self._offered if is_prefix(prefix, n.namespace)}
        forward = self.parameters.forward if parameters.forward is None else parameters.forward
        self.parameters = replace(self.parameters, range_filters=merged, forward=forward)
        super().updated(update)
        self.session.handler.subscribe_tracks_changed(self)
