"""The publisher's side of a subscription, made by SUBSCRIBE or by PUBLISH."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moqt.delivery import FetchDelivery, Selection, SubscriptionDelivery, Timeouts
from moqt.delivery.scheduler import Flow
from moqt.requests.host import RequestHost
from moqt.requests.incoming import IncomingTrackRequest
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.request import OpenRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.track.filters import merge_update
from moqt.track.properties import track_property
from moqt.track.store import TrackStore
from moqt.values.codes import (
    DEFAULT_PRIORITY,
    GroupOrder,
    LocationFilterType,
    MessageType,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
)
from moqt.values.deadlines import Deadline
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import (
    LocationFilter,
    Message,
    Parameters,
    Publish,
    PublishDone,
    PublishStateNotify,
    Request,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeOk,
)
from moqt.values.names import FullTrackName, Location


class PublisherSide(OpenRequest):
    """What delivers Objects: a peer's SUBSCRIBE, or a PUBLISH of ours."""

    def __init__(
        self,
        session: RequestHost,
        message: Subscribe | Publish,
        stream: RequestStream | None = None,
    ) -> None:
        super().__init__(session, message, stream)
        self.delivery: SubscriptionDelivery | None = None
        self.filter = message.parameters.location_filter
        self.range_filters = message.parameters.range_filters
        self.store: TrackStore | None = None
        self.track_alias: int | None = None
        self.lifetime_ms: int | None = None
        """The EXPIRES that was told; each REQUEST_UPDATE extends the subscription by it again."""

    def begin_delivery(
        self,
        store: TrackStore,
        asked: Parameters,
        largest: Location | None,
        *,
        done_waits: bool = False,
    ) -> None:
        """Deliver from `store` as `asked` says, fill included. `largest` was told the peer.

        `done_waits`: no PUBLISH_DONE until that is taken off the delivery.
        """
        assert self.track_alias is not None
        self.store = store
        chosen = self.filter or LocationFilter(LocationFilterType.NONE)
        start, end = chosen.resolve(largest)
        order = asked.group_order or track_property(
            store.properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER
        )
        priority = asked.subscriber_priority
        selection = Selection(
            store,
            start=start,
            end=end,
            filters=self.range_filters,
            group_order=GroupOrder.DESCENDING
            if order == GroupOrder.DESCENDING
            else GroupOrder.ASCENDING,
            paused=asked.forward == 0,
            unfiltered=chosen.type is LocationFilterType.NONE,
        )
        self.delivery = SubscriptionDelivery(
            self.session,
            selection,
            self.track_alias,
            subscriber_priority=DEFAULT_PRIORITY if priority is None else priority,
            on_done=self._done,
            timeouts=Timeouts.asked(asked),
        )
        self.delivery.done_waits = done_waits
        if asked.new_group_request is not None:
            store.request_new_group(asked.new_group_request)
        if asked.fill_parameters is not None:
            self._fill(self.request_id, asked.fill_parameters, largest)
        self.delivery.begin()

    def _fill(self, request_id: int, fill: Parameters, largest: Location | None) -> None:
        """Open the fill fetch stream, unless there is nothing to fill (MOQT "Fill Semantics")."""
        delivery = self.delivery
        assert delivery is not None and self.store is not None
        if delivery.over or delivery.paused or largest is None:
            return
        chosen = fill.location_filter or self.filter or LocationFilter.absolute_start(0)
        start, end = chosen.resolve(largest)
        end = min(end, largest)
        if start > end:
            return
        order = fill.group_order or delivery.group_order
        priority = fill.subscriber_priority
        flow = delivery.flow
        if priority is not None and priority != flow.subscriber_priority:
            flow = Flow(self.session.scheduler, priority)
        delivery.add_fill(
            FetchDelivery(
                self.session,
                flow,
                self.store,
                request_id,
                start=start,
                end=end,
                group_order=GroupOrder(order),
                filters=fill.range_filters or self.range_filters,
                on_done=lambda done, _code: delivery.fill_done(done),
                behind=order != delivery.group_order,
                fill_timeout_ms=fill.fill_timeout,
            )
        )

    def updated(self, update: RequestUpdate) -> None:
        delivery, store, parameters = self.delivery, self.store, update.parameters
        assert delivery is not None and store is not None
        merged = self.range_filters
        if parameters.range_filters or parameters.fill_parameters is not None:
            merged = merge_update(merged, parameters.range_filters)
            self.session.rules.check_filters(replace(parameters, range_filters=merged))
        if parameters.fill_parameters is not None:
            self._check_fills(delivery)
        # What changes may be all that PUBLISH_DONE waited for: it comes after the answer.
        waits, delivery.done_waits = delivery.done_waits, True
        largest = store.largest
        self.range_filters = merged
        start: Location | None = None
        end: Location | None = None
        if parameters.location_filter is not None:
            self.filter = parameters.location_filter
            start, end = self.filter.resolve(largest)
        if parameters.subscriber_priority is not None:
            delivery.flow.set_priority(parameters.subscriber_priority)
        if (
            parameters.object_delivery_timeout is not None
            or parameters.subgroup_delivery_timeout is not None
        ):
            delivery.set_timeouts(delivery.timeouts.updated(parameters))
        if parameters.new_group_request is not None:
            store.request_new_group(parameters.new_group_request)
        if start is not None or parameters.range_filters:
            delivery.refilter(start, end, merged)
        if parameters.forward is not None:
            delivery.pause(parameters.forward == 0)
        if self.lifetime_ms:
            self.live_for(self.lifetime_ms)
        self.stream.send(
            RequestOk(Parameters(largest_object=largest, expires=self.lifetime_ms or None))
        )
        if parameters.fill_parameters is not None:
            self._fill(update.request_id, parameters.fill_parameters, largest)
        delivery.done_waits = waits
        if store.ended:
            delivery.check_done()

    def _check_fills(self, delivery: SubscriptionDelivery) -> None:
        """A fill is a request in all but its stream: raises RequestError EXCESSIVE_LOAD beyond
        what one subscription, or the session, may have open."""
        session = self.session
        name, limit = "pending_fills", session.scheduler.limits.pending_fills
        if delivery.open_fills < limit:
            if session.requests.has_room:
                return
            name, limit = "max_requests", session.config.max_requests
        session.counters.fills_over_limit += 1
        session.requests.at_limit(name, limit)
        reason = f"{limit} are open, and this fill is one more than may be ({name})"
        raise RequestError(RequestErrorCode.EXCESSIVE_LOAD, reason)

    def live_for(self, lifetime_ms: int | None) -> None:
        """End with PUBLISH_DONE EXPIRED that long from now (MOQT "EXPIRES Parameter")."""
        self.lifetime_ms = lifetime_ms
        if lifetime_ms and self.delivery is not None:
            self.delivery.expire_at(self.session.scheduler.now + lifetime_ms / 1000)

    def update_failed(self, error: RequestError) -> None:
        self.stream.send(RequestErrorMessage(error.code, 0, error.reason))
        self._done(PublishDoneCode.UPDATE_FAILED, error.reason)

    def notify_state(
        self, *, forward: int | None = None, location_filter: LocationFilter | None = None
    ) -> None:
        """PUBLISH_STATE_NOTIFY: what changed without a REQUEST_UPDATE, Largest Object included."""
        if self.state is RequestState.ESTABLISHED and self.store is not None:
            self.stream.send(
                PublishStateNotify(
                    Parameters(
                        largest_object=self.store.largest,
                        forward=forward,
                        location_filter=location_filter,
                    )
                )
            )

    def end(self, code: int, reason: str = "") -> None:
        """PUBLISH_DONE before the track has ended, e.g. when the relay lets go."""
        if self.state is RequestState.ESTABLISHED:
            self._done(code, reason)

    def _done(self, code: int, reason: str) -> None:
        delivery = self.delivery
        assert delivery is not None
        delivery.cancel()
        self.stream.send(PublishDone(code, delivery.streams_opened, reason), fin=True)
        self.done_sent()

    def done_sent(self) -> None:
        """PUBLISH_DONE and FIN were sent: the request is over on this side."""
        raise NotImplementedError

    def stop_delivery(self) -> None:
        if self.delivery is not None:
            self.delivery.cancel()


class IncomingSubscribe(PublisherSide, IncomingTrackRequest):
    """SUBSCRIBE from a peer."""

    def accept(self, store: TrackStore, *, expires_ms: int | None = None) -> None:
        """SUBSCRIBE_OK, then deliver from `store` by the filters, fill included."""
        if not self.pending:
            return
        parameters = self.parameters
        largest = store.largest
        self.track_alias = self.session.next_track_alias()
        if not self._accept(
            SubscribeOk(
                self.track_alias,
                Parameters(largest_object=largest, expires=expires_ms),
                store.properties if parameters.include_properties != 0 else (),
            )
        ):
            return
        self.begin_delivery(store, parameters, largest)
        self.live_for(expires_ms)
        self.apply_held_updates()

    def done_sent(self) -> None:
        self._end()

    def ended(self) -> None:
        self.stop_delivery()
        super().ended()


PUBLISH_PARAMETERS = (
    "object_delivery_timeout",
    "authorization_tokens",
    "subgroup_delivery_timeout",
    "expires",
    "forward",
    "subscriber_priority",
    "location_filter",
    "group_order",
)
"""What PUBLISH can carry of what is asked; LARGEST_OBJECT is added when it is sent."""


class OutgoingPublish(PublisherSide, OutgoingRequest):
    """PUBLISH: a subscription that the publisher starts (MOQT "PUBLISH").

    Unless FORWARD is 0 Objects go out at once, even before the answer, from the Next Object on
    (or by LOCATION_FILTER). PUBLISH_DONE waits for the answer, for a paused subscriber to
    resume, and a little for a fill to be asked for.
    """

    def __init__(
        self,
        session: RequestHost,
        store: TrackStore,
        parameters: Parameters,
        *,
        include_properties: bool = True,
        on_ended: Callable[[MoqtError | None], None] | None = None,
    ) -> None:
        alias = session.next_track_alias()
        carried = Parameters(**{each: getattr(parameters, each) for each in PUBLISH_PARAMETERS})
        super().__init__(
            session,
            Publish(
                -1,
                store.name.namespace,
                store.name.name,
                alias,
                carried,
                store.properties if include_properties else (),
            ),
        )
        self.name: FullTrackName = store.name
        self._asked = parameters
        self._on_ended = on_ended
        self._lingering = True
        self._linger: Deadline | None = None
        self.filter = parameters.location_filter or LocationFilter.next_object()
        self.range_filters = parameters.range_filters
        self.store = store
        self.track_alias = alias

    def opening_message(self, request_id: int) -> Request:
        assert isinstance(self.message_sent, Publish) and self.store is not None
        parameters = replace(self.message_sent.parameters, largest_object=self.store.largest)
        return replace(self.message_sent, request_id=request_id, parameters=parameters)

    def opened(self) -> None:
        assert self.store is not None
        self.begin_delivery(
            self.store, self._asked, self.message_sent.parameters.largest_object, done_waits=True
        )
        self.live_for(self.parameters.expires)

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.PUBLISH)
            self.expires(message.parameters)
            self._linger = self.session.clock.after(
                self.session.config.publish_linger, self._lingered
            )

    def updated(self, update: RequestUpdate) -> None:
        super().updated(update)
        asked = update.parameters
        if asked.fill_parameters is not None or asked.forward == 1:
            self._lingering = False
        self._release()

    def _lingered(self) -> None:
        self._lingering = False
        self._release()

    def _release(self) -> None:
        """Let PUBLISH_DONE go once the subscriber has had its chance to ask for a fill."""
        delivery = self.delivery
        if delivery is not None and self.state is RequestState.ESTABLISHED:
            delivery.done_waits = delivery.paused or self._lingering
            delivery.check_done()

    def done_sent(self) -> None:
        self._close()
        self.notify(None)
        self._over(None)

    def failed(self, error: MoqtError) -> None:
        self._over(error)

    def _over(self, error: MoqtError | None) -> None:
        if self._on_ended is not None:
            on_ended, self._on_ended = self._on_ended, None
            on_ended(error)

    def _forget(self) -> None:
        self.session.clock.cancel(self._linger)
        self.stop_delivery()

    def withdraw(self, code: int = PublishDoneCode.TRACK_ENDED, reason: str = "") -> None:
        """End the publication: PUBLISH_DONE once it was accepted, else cancel it."""
        if self.state is RequestState.ESTABLISHED:
            self._done(code, reason)
        elif self.state is not RequestState.CLOSED:
            self.cancel()
            self._over(None)
