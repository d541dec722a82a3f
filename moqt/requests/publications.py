"""PUBLISH from a peer: a subscription that its publisher offers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moqt.receiving.receiver import Receiver
from moqt.requests.incoming import IncomingTrackRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.requests.subscriber_side import SubscriberSide
from moqt.values.codes import ParameterType, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, protocol_violation
from moqt.values.messages import (
    LocationFilter,
    Message,
    Parameters,
    Publish,
    PublishDone,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
)

if TYPE_CHECKING:
    from moqt.requests.subscribe_tracks import OutgoingSubscribeTracks
    from moqt.session import Session
    from moqt.session.handler import SessionHandler

OBJECT_FILTERS = frozenset(
    {
        ParameterType.SUBGROUP_FILTER,
        ParameterType.OBJECTID_FILTER,
        ParameterType.PRIORITY_FILTER,
        ParameterType.OBJECT_PROPERTY_FILTER,
    }
)
"""Range filters that choose Objects; the other one chooses tracks."""


class IncomingPublish(SubscriberSide, IncomingTrackRequest):
    """PUBLISH from a peer (MOQT "PUBLISH"): `accept` it with a receiver, or `reject` it.

    `name`, `track_alias`, `largest`, `properties` and `parameters` (FORWARD, EXPIRES, priority,
    group order, filter) are what the publisher said. Objects that come before the answer are
    held, bounded as for an unknown Track Alias. Once accepted, `update` changes the
    subscription (FORWARD, filters, fill) and `cancel` ends it.
    """

    def __init__(self, session: Session, stream: RequestStream, message: Publish) -> None:
        self.receiver = Receiver()
        self.init_subscriber(message.parameters)
        IncomingTrackRequest.__init__(self, session, stream, message)
        self._offered_properties = message.properties
        self.largest = message.parameters.largest_object
        self.offered_for: OutgoingSubscribeTracks | None = session.tracks_request_for(self.name)
        """The SUBSCRIBE_TRACKS of ours that it answers, None when nobody asked."""
        self.expires(message.parameters)
        session.data_streams.add_alias(message.track_alias, self)
        self.track_alias = message.track_alias
        self.restrict(
            replace(
                message.parameters,
                location_filter=message.parameters.location_filter or LocationFilter.next_object(),
            ),
            self.largest,
        )
        if self.offered_for is not None and self.offered_for.wants_fill:
            self.expect_fill(self.request_id)

    @property
    def ready(self) -> bool:
        return self.state is RequestState.ESTABLISHED

    @property
    def paused(self) -> bool:
        """Whether the publisher said FORWARD 0: nothing comes until `update(forward=1)`."""
        return self.parameters.forward == 0

    def dispatch(self, handler: SessionHandler) -> None:
        try:
            self.take_properties(self._offered_properties)
        except RequestError as error:
            self.reject(RequestErrorCode(error.code), error.reason)
            return
        self.session.counters.publications_received += 1
        if len(self.session.data_streams.aliases) > self.session.config.max_track_aliases:
            self.session.counters.requests_over_limit += 1
            self.reject(
                RequestErrorCode.EXCESSIVE_LOAD, "too many tracks are open", retry_after_ms=1000
            )
        elif self.offered_for is not None:
            self.offered_for.offered(self)
        else:
            handler.publish_received(self)

    def accept(
        self,
        receiver: Receiver,
        *,
        expires_ms: int | None = None,
        update: Parameters | None = None,
    ) -> None:
        """PUBLISH_OK: Objects go to `receiver` from now on, those that were held first.

        PUBLISH_OK can carry nothing but EXPIRES: `update`, when given, follows as
        REQUEST_UPDATE (e.g. FORWARD 1 with a fill). A no-op when it was cancelled meanwhile.
        """
        if not self.pending:
            return
        self.receiver = receiver
        self._accept(RequestOk(Parameters(expires=expires_ms)))
        self.live_for(expires_ms)
        filters = self.offered_for.parameters.range_filters if self.offered_for else ()
        filters = tuple(f for f in filters if f.type in OBJECT_FILTERS)
        if update is not None or filters:
            update = update or Parameters()
            if filters and not update.range_filters:
                # PUBLISH cannot tell that they are in force: ask for them once more.
                update = replace(update, range_filters=filters)
            self.update(update, lambda answer: None)
        self.apply_held_updates()
        if self.state is RequestState.ESTABLISHED:
            self.session.data_streams.place_waiting()
        if self.done is not None and self.state is RequestState.ESTABLISHED:
            self.finish_done()

    def answered(self, message: Message) -> None:
        if isinstance(message, PublishDone) and self.pending:
            self.done = message  # it counts from the moment it is accepted
            return
        super().answered(message)

    def message(self, message: Message) -> None:
        if self.pending and isinstance(message, RequestOk | RequestErrorMessage):
            raise protocol_violation(f"{message.TYPE.name} of the publisher answers nothing")
        super().message(message)

    def updated(self, update: RequestUpdate) -> None:
        if update.parameters != Parameters(
            authorization_tokens=update.parameters.authorization_tokens
        ):
            raise protocol_violation("REQUEST_UPDATE of a publisher carries more than tokens")
        super().updated(update)

    # -- its end ---------------------------------------------------------------------------

    def cancel(self) -> None:
        """Unsubscribe; the receiver hears nothing more of it."""
        if self.state is not RequestState.CLOSED:
            self.drop_updates(tell=False)
            self.revoke()

    def give_up(self, error: RequestError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.cancel()
            self._fail(error)

    def _fail(self, error: MoqtError) -> None:
        self.drop_updates()
        self.receiver.request_failed(error)
        self.ended()

    def peer_finished(self) -> None:
        if self.done is None and self.state is not RequestState.CLOSED:
            self.stream.closed()
            self._fail(
                RequestError(
                    RequestErrorCode.INTERNAL_ERROR,
                    "the publisher ended the stream without PUBLISH_DONE",
                )
            )

    def peer_cancelled(self, code: int) -> None:
        self._fail(
            RequestError(RequestErrorCode.INTERNAL_ERROR, "the publisher cancelled the publication")
        )

    def peer_overstayed(self) -> None:
        self._fail(
            RequestError(RequestErrorCode.GOING_AWAY, "the request was not moved away in time")
        )

    def session_closed(self, error: MoqtError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.move(RequestState.CLOSED)
            self._fail(error)

    def subscription_over(self) -> None:
        self.ended()

    def ended(self) -> None:
        self.forget_subscription()
        super().ended()
