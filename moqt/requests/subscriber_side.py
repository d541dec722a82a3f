"""The subscriber's side of a subscription, made by SUBSCRIBE or by PUBLISH."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moqt.receiving.receiver import Receiver, Via
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.request import (
    RequestOwner,
    UpdateAnswer,
    check_track_properties,
    track_property,
)
from moqt.requests.stream import RequestState
from moqt.track.filters import matches
from moqt.values.codes import DEFAULT_PRIORITY, GroupOrder, PropertyType
from moqt.values.errors import MisuseError, MoqtError, RequestError, protocol_violation
from moqt.values.messages import (
    Message,
    Parameters,
    Properties,
    PublishDone,
    PublishStateNotify,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeOk,
)
from moqt.values.names import MAX_LOCATION, FullTrackName, Location

if TYPE_CHECKING:
    from moqt.session import Session
    from moqt.values.deadlines import Deadline
    from moqt.wire.objects import ObjectHeader

MAX_PATIENCE = 300.0
"""Seconds a subscriber waits at most for streams after PUBLISH_DONE."""


class SubscriberSide(RequestOwner):
    """What takes Objects: a SUBSCRIBE of ours, or a peer's PUBLISH that was accepted."""

    name: FullTrackName
    receiver: Receiver
    via = Via.FILL

    def init_subscriber(self, parameters: Parameters) -> None:
        """Set what both kinds need; before the base class, which may send the request."""
        self.track_alias: int | None = None
        self.largest: Location | None = None
        """Largest Object as the publisher told last."""
        self.properties: Properties = ()
        self._range = Location(0, 0), MAX_LOCATION
        self._forwards = True
        self.streams_ended = 0
        self.done: PublishDone | None = None
        self.publisher_state = Parameters()
        """What the publisher said last in PUBLISH_STATE_NOTIFY."""
        self.on_state: Callable[[Parameters], None] | None = None
        """Called with each PUBLISH_STATE_NOTIFY; nothing has to be done about it."""
        fill = parameters.fill_parameters
        order = (fill.group_order if fill else None) or parameters.group_order
        self._order_follows_track = order is None
        self.group_order = GroupOrder(order or GroupOrder.ASCENDING)
        """In which order fills come; the track's default is known from the answer on."""
        self._fill_ids: list[int] = []
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
                self._asked_filters,
                object=header.object,
                subgroup=header.subgroup,
                priority=priority,
                properties=header.properties,
            )
        )

    def expect_fill(self, request_id: int) -> None:
        """A fill fetch stream with this Request ID is ours."""
        self._fill_ids.append(request_id)
        self.session.data_streams.expect(request_id, self)

    def saw(self, largest: Location | None) -> None:
        if largest is not None and (self.largest is None or largest > self.largest):
            self.largest = largest

    def message(self, message: Message) -> None:
        if self.done is not None:
            raise protocol_violation(f"{message.TYPE.name} after PUBLISH_DONE")
        super().message(message)

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
        """PUBLISH_DONE has come: wait for the streams it counts, but not for ever."""
        self.stream.finish()
        self._done_timer = self.session.call_later(self._patience(), self._out_of_patience)
        self.check_done()

    def _out_of_patience(self) -> None:
        """Not while a stream still brings something: a slow path is no reason to give up."""
        heard_at = self.session.data_streams.last_heard(self)
        left = heard_at + self.session.config.done_timeout - self.session.now
        if left > 0:
            self._done_timer = self.session.call_later(left, self._out_of_patience)
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
            self.expect_fill(message.request_id)

    def update_accepted(self, message: RequestOk, asked: Parameters) -> None:
        self.saw(message.parameters.largest_object)
        self.restrict(asked, message.parameters.largest_object)

    def update_refused(self, error: RequestError) -> None:
        """PUBLISH_DONE UPDATE_FAILED follows."""

    def stream_ended(self) -> None:
        self.streams_ended += 1
        self.check_done()

    def check_done(self, *, expired: bool = False) -> None:
        """The subscription is over once the streams PUBLISH_DONE counts have ended."""
        done = self.done
        if done is None or self.state is not RequestState.ESTABLISHED:
            return
        if expired or self.streams_ended >= done.stream_count:
            self.forget_subscription()
            self.stream.closed()
            self.drop_updates()
            self.receiver.subscription_done(done.code, done.reason)
            self.subscription_over()

    def subscription_over(self) -> None:
        """PUBLISH_DONE was the end of it."""

    def forget_subscription(self) -> None:
        """Drop what the session remembers for this subscription."""
        self.session.deadlines.cancel(self._done_timer)
        if self.track_alias is not None:
            self.session.data_streams.remove_alias(self.track_alias, self)
        self.session.data_streams.forget(self, self._fill_ids)


class OutgoingSubscribe(SubscriberSide, OutgoingRequest):
    """SUBSCRIBE. The receiver gets the answer and the Objects."""

    def __init__(
        self,
        session: Session,
        name: FullTrackName,
        parameters: Parameters,
        receiver: Receiver,
    ) -> None:
        self.name = name
        self.receiver = receiver
        self.init_subscriber(parameters)
        OutgoingRequest.__init__(
            self, session, Subscribe(-1, name.namespace, name.name, parameters)
        )

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
        self.stream.move(RequestState.ESTABLISHED)
        self.take_properties(message.properties)
        self.receiver.subscribe_accepted(self)
        self.session.data_streams.place_waiting()

    @property
    def ready(self) -> bool:
        return not self._order_follows_track or self.state is not RequestState.PENDING

    @property
    def owed(self) -> bool:
        return self.done is None or super().owed

    def subscription_over(self) -> None:
        self.notify(None)

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        self.forget_subscription()
