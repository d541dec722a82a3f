"""The subscriber's side of a subscription, made by SUBSCRIBE or by PUBLISH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moqt.receiving.receiver import Receiver, Via
from moqt.requests.host import Offers, RequestHost
from moqt.requests.incoming import IncomingTrackRequest
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.request import OpenRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.requests.updates import UpdateAnswer
from moqt.track.filters import matches
from moqt.track.properties import check_track_properties, track_property
from moqt.values.codes import (
    DEFAULT_PRIORITY,
    GroupOrder,
    ParameterType,
    PropertyType,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.values.deadlines import Deadline
from moqt.values.errors import MisuseError, MoqtError, RequestError, protocol_violation
from moqt.values.messages import (
    LocationFilter,
    Message,
    Parameters,
    Properties,
    Publish,
    PublishDone,
    PublishStateNotify,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeOk,
)
from moqt.values.names import MAX_LOCATION, FullTrackName, Location
from moqt.wire.objects import ObjectHeader

MAX_PATIENCE = 300.0
"""Seconds a subscriber waits at most for streams after PUBLISH_DONE."""


class SubscriberSide(OpenRequest):
    """What takes Objects: a SUBSCRIBE of ours, or a peer's PUBLISH that was accepted."""

    name: FullTrackName
    receiver: Receiver
    via = Via.FILL

    def __init__(
        self,
        session: RequestHost,
        message: Subscribe | Publish,
        stream: RequestStream | None = None,
    ) -> None:
        super().__init__(session, message, stream)
        self.track_alias: int | None = None
        self.largest: Location | None = None
        """Largest Object as the publisher told last."""
        self.properties: Properties = ()
        self._chosen: LocationFilter | None = None
        self._range = Location(0, 0), MAX_LOCATION
        self._forwards = True
        self.streams_ended = 0
        self._heard_at = 0.0
        """When its last stream that is over ended."""
        self.done: PublishDone | None = None
        self.publisher_state = Parameters()
        """What the publisher said last in PUBLISH_STATE_NOTIFY."""
        self.on_state: Callable[[Parameters], None] | None = None
        """Called with each PUBLISH_STATE_NOTIFY; nothing has to be done about it."""
        fill = message.parameters.fill_parameters
        order = (fill.group_order if fill else None) or message.parameters.group_order
        self._order_follows_track = order is None
        self.group_order = GroupOrder(order or GroupOrder.ASCENDING)
        """In which order fills come; the track's default is known from the answer on."""
        self._fill_ids: list[int] = []
        """Request IDs of updates with a fill that have no answer yet."""
        self._done_timer: Deadline | None = None

    @property
    def ready(self) -> bool:
        """Whether the receiver and the order of fills are known: data can be taken."""
        raise NotImplementedError

    def take_properties(self, properties: Properties) -> None:
        """Track Properties have come; raises RequestError for what cannot be accepted."""
        check_track_properties(properties, self.session.config.known_properties)
        self.properties = properties
        if self._order_follows_track and (
            track_property(properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER)
            == GroupOrder.DESCENDING
        ):
            self.group_order = GroupOrder.DESCENDING

    def restrict(self, asked: Parameters, largest: Location | None) -> None:
        """The publisher has taken these filters, when its Largest Object was `largest`."""
        if asked.location_filter is not None:
            self._chosen = asked.location_filter
            self._range = asked.location_filter.resolve(largest)
        if asked.forward is not None:
            self._forwards = asked.forward == 1

    def selects(self, header: ObjectHeader) -> bool:
        """Whether an Object passes the filters in force."""
        start, end = self._range
        priority = header.priority
        if priority is None:
            default = track_property(self.properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
            priority = default if isinstance(default, int) else DEFAULT_PRIORITY
        return (
            self._forwards
            and start <= header.location <= end
            and matches(
                self.updates.asked_filters,
                object=header.object,
                subgroup=header.subgroup,
                priority=priority,
                properties=header.properties,
            )
        )

    def expect_fill(self, request_id: int) -> None:
        """A fill fetch stream with this Request ID is ours, if there is something to fill."""
        self.session.data_streams.expect(request_id, self)

    def _fill_answered(self, request_id: int, fill: Parameters, largest: Location | None) -> None:
        """The publisher has taken it when its Largest Object was `largest`: without a range to
        fill, no stream comes (MOQT "Fill Semantics")."""
        chosen = fill.location_filter or self._chosen or LocationFilter.absolute_start(0)
        if self._forwards and largest is not None:
            start, end = chosen.resolve(largest)
            if start <= min(end, largest):
                return
        self.session.data_streams.expect_no_more(request_id)

    def saw(self, largest: Location | None) -> None:
        if largest is not None and (self.largest is None or largest > self.largest):
            self.largest = largest

    def answered(self, message: Message) -> None:
        match message:
            case PublishDone():
                self.done = message
                self.finish_done()
            case PublishStateNotify():
                self.saw(message.parameters.largest_object)
                self.publisher_state = message.parameters
                if self.on_state is not None:
                    self.on_state(message.parameters)

    def finish_done(self) -> None:
        """PUBLISH_DONE has come: wait for the streams it counts, but not for ever. What we had
        asked to change meanwhile is settled by it: no answer follows."""
        self.updates.settle_all()
        if self.state is not RequestState.ESTABLISHED:
            return  # whoever was told has cancelled
        self.stream.finish()
        self._done_timer = self.session.clock.after(self._patience(), self._out_of_patience)
        self.check_done()

    def _out_of_patience(self) -> None:
        """Not while its streams still bring something, one after the other: a slow path is no
        reason to give up."""
        heard_at = max(self._heard_at, self.session.data_streams.last_heard(self))
        left = heard_at + self.session.config.done_timeout - self.session.clock.now
        if left > 0:
            self._done_timer = self.session.clock.after(left, self._out_of_patience)
        else:
            self.check_done(expired=True)

    def _patience(self) -> float:
        """How long streams may be late: no less than the larger delivery timeout."""
        timeouts = [
            track_property(self.properties, PropertyType.OBJECT_DELIVERY_TIMEOUT),
            track_property(self.properties, PropertyType.SUBGROUP_DELIVERY_TIMEOUT),
            self.parameters.object_delivery_timeout,
            self.parameters.subgroup_delivery_timeout,
        ]
        longest = max((t for t in timeouts if isinstance(t, int)), default=0)
        return max(self.session.config.done_timeout, min(longest / 1000, MAX_PATIENCE))

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        """As for every request; also MisuseError for a NEW_GROUP_REQUEST to a track that has
        not said DYNAMIC_GROUPS 1 (MOQT "NEW GROUP REQUEST Parameter")."""
        if parameters.new_group_request is not None and (
            track_property(self.properties, PropertyType.DYNAMIC_GROUPS) != 1
        ):
            raise MisuseError("the track has no DYNAMIC_GROUPS: no new group can be asked for")
        super().update(parameters, on_answer)

    def update_sent(self, message: RequestUpdate) -> None:
        if message.parameters.fill_parameters is not None:
            self._fill_ids.append(message.request_id)
            self.expect_fill(message.request_id)

    def update_accepted(self, message: RequestOk, asked: Parameters) -> None:
        largest = message.parameters.largest_object
        self.saw(largest)
        self.restrict(asked, largest)
        if asked.fill_parameters is not None:
            self._fill_answered(self._fill_ids.pop(0), asked.fill_parameters, largest)

    def update_refused(self, error: RequestError) -> None:
        """PUBLISH_DONE UPDATE_FAILED follows."""

    def stream_ended(self) -> None:
        self.streams_ended += 1
        self._heard_at = self.session.clock.now
        self.check_done()

    def check_done(self, *, expired: bool = False) -> None:
        """The subscription is over once the streams PUBLISH_DONE counts have ended."""
        done = self.done
        if done is None or self.state is not RequestState.ESTABLISHED:
            return
        if expired or self.streams_ended >= done.stream_count:
            self.forget_subscription()
            self.stream.closed()
            self.receiver.subscription_done(done.code, done.reason)
            self.subscription_over()

    def subscription_over(self) -> None:
        """PUBLISH_DONE was the end of it."""

    def forget_subscription(self) -> None:
        """Drop what the session remembers for this subscription."""
        self.session.clock.cancel(self._done_timer)
        if self.track_alias is not None:
            self.session.data_streams.remove_alias(self.track_alias, self)
        self.session.data_streams.forget(self, self.track_alias)


class OutgoingSubscribe(SubscriberSide, OutgoingRequest):
    """SUBSCRIBE. The receiver gets the answer and the Objects."""

    def __init__(
        self,
        session: RequestHost,
        name: FullTrackName,
        parameters: Parameters,
        receiver: Receiver,
    ) -> None:
        super().__init__(session, Subscribe(-1, name.namespace, name.name, parameters))
        self.name = name
        self.receiver = receiver

    def opened(self) -> None:
        if self.parameters.fill_parameters is not None:
            self.expect_fill(self.request_id)

    def answered(self, message: Message) -> None:
        if not isinstance(message, SubscribeOk):
            super().answered(message)
            return
        self.saw(message.parameters.largest_object)
        self.expires(message.parameters)
        self.session.data_streams.add_alias(message.track_alias, self)
        self.track_alias = message.track_alias
        self.restrict(self.parameters, message.parameters.largest_object)
        if self.parameters.fill_parameters is not None:
            self._fill_answered(
                self.request_id,
                self.parameters.fill_parameters,
                message.parameters.largest_object,
            )
        self.take_properties(message.properties)
        self.receiver.subscribe_accepted(self)
        self.session.data_streams.place_waiting(self, self.track_alias)

    @property
    def ready(self) -> bool:
        return not self._order_follows_track or self.state is not RequestState.PENDING

    @property
    def owed(self) -> bool:
        return self.done is None

    def subscription_over(self) -> None:
        self.notify(None)

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        self.forget_subscription()


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

    def __init__(
        self, session: RequestHost, message: Publish, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self.receiver = Receiver()
        self._offered_properties = message.properties
        self.largest = message.parameters.largest_object
        self.offered_for: Offers | None = session.requests.tracks_request_for(self.name)
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

    def admit(self) -> bool:
        try:
            self.take_properties(self._offered_properties)
        except RequestError as error:
            self.reject(RequestErrorCode(error.code), error.reason)
            return False
        self.session.counters.publications_received += 1
        if len(self.session.data_streams.aliases) > self.session.config.max_track_aliases:
            limit = self.session.config.max_track_aliases
            self.session.requests.over_limit(
                self, "max_track_aliases", limit, f"{limit} tracks are open, and no more may be"
            )
            return False
        if self.offered_for is not None:
            self.offered_for.offered(self)
            return False
        return True

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
        if self.done is None and (update is not None or filters):
            update = update or Parameters()
            if filters and not update.range_filters:
                # PUBLISH cannot tell that they are in force: ask for them once more.
                update = replace(update, range_filters=filters)
            self.update(update, lambda answer: None)
        self.updates.flush()
        self.apply_held_updates()
        if self.state is RequestState.ESTABLISHED:
            self.session.data_streams.place_waiting(self, self.track_alias)
        if self.done is not None and self.state is RequestState.ESTABLISHED:
            self.finish_done()

    def answered(self, message: Message) -> None:
        if isinstance(message, PublishDone) and self.pending:
            self.done = message  # it counts from the moment it is accepted
            return
        super().answered(message)

    def updated(self, update: RequestUpdate) -> None:
        if update.parameters != Parameters(
            authorization_tokens=update.parameters.authorization_tokens
        ):
            raise protocol_violation("REQUEST_UPDATE of a publisher carries more than tokens")
        super().updated(update)

    # -- its end ---------------------------------------------------------------------------

    def cancel(self) -> None:
        """Unsubscribe; the receiver hears nothing more of it."""
        self.revoke()

    def revoke(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        self.updates.settle_all()
        super().revoke(code)

    def give_up(self, error: RequestError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.cancel()
            self._fail(error)

    def _fail(self, error: MoqtError) -> None:
        self.updates.settle_all()
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
            self.stream.end()
            self._fail(error)

    def subscription_over(self) -> None:
        self.ended()

    def ended(self) -> None:
        self.forget_subscription()
        self.updates.settle_all()
        super().ended()
