"""Upstream subscriptions of a track: one SUBSCRIBE to, or one PUBLISH from, a publisher."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from moqt.receiving.receiver import AcceptedSubscribe, IncomingStream, Receiver, Via
from moqt.requests import IncomingPublish, OutgoingSubscribe, RequestState, UpdateAnswer
from moqt.session import Session, session_of
from moqt.values.codes import MAX_VI64, GroupOrder, RequestErrorCode, StreamErrorCode
from moqt.values.errors import MalformedTrack, MoqtError, RequestError
from moqt.values.messages import LocationFilter, Parameters, RequestOk
from moqt.values.names import Location, location_after
from moqt.wire.objects import ObjectHeader, SubgroupHeader
from relay.sources.fetches import UpstreamFill
from relay.sources.filled import Filled
from relay.sources.hops import relay_path
from relay.sources.receiver import StreamState, UpstreamReceiver
from relay.sources.wanted import EVERYTHING, Wanted

NO_ROOM = "the cache has no room for the Track Properties"
MAX_CUTS = 64
"""Subgroups whose streams were cut that one subscription remembers, the last ones."""
MAX_FUTURE = 1 << 31
"""Seconds; EXPIRES beyond is no expiry that matters."""


def _ignore(answer: RequestOk | RequestError) -> None:
    """An answer that changes nothing: a refusal ends the request, and that is told by itself."""


class Subscribed(Filled, Protocol):
    """The track that is subscribed to; it alone says of a subscription that it is `established`."""

    def adjust(self) -> None:
        """Resume or pause what is established, as it is wanted."""

    def upstream_accepted(self, subscription: UpstreamSubscription) -> None:
        """The publisher, or we, have accepted it."""

    def upstream_told(self, subscription: UpstreamSubscription) -> None:
        """An update was answered, with the Largest Object at that moment."""

    def upstream_failed(self, subscription: UpstreamSubscription, error: MoqtError) -> None:
        """Refused, cancelled by the publisher, or its session ended."""

    def upstream_done(self, subscription: UpstreamSubscription, code: int, reason: str) -> None:
        """PUBLISH_DONE, and the streams it counts have ended."""

    def rejected(self, location: Location) -> None:
        """The cache had no room for an Object that it brought."""

    def reissue(self, subscription: UpstreamSubscription) -> None:
        """The publisher wants it to move (GOAWAY on the request)."""


class UpstreamSubscription(UpstreamReceiver):
    """What both kinds share once they are established."""

    live = True
    published = False
    """The publisher started it: it can be paused, but once given up only the publisher can
    offer it again."""

    replaces: UpstreamSubscription | None = None
    """It is given up once this one is established (GOAWAY on a request)."""

    def __init__(self, track: Subscribed, session: Session) -> None:
        super().__init__(track.filling, session)
        self.track = track
        self.request: OutgoingSubscribe | IncomingPublish | None = None
        self.established = False
        self.paused = False
        """FORWARD 0 is in force: the publisher said so, or we asked for it."""
        self.slept = True
        """It was paused at some time since the Largest Object was told last."""
        self.whole = True
        self.cuts: dict[tuple[int, int], Location] = {}
        """Subgroups of which a stream was cut that no other goes on with, and where."""
        self.lost = False
        """Some of it was lost, and no Subgroup whose reset could say so is known."""
        self.start = Location(0, 0)
        """It brings what is published from there on."""
        self.asked = EVERYTHING
        """The filters in force, or asked for."""
        self.unfiltered = False
        """The publisher has refused filters of ours: it is asked for everything."""
        self.unasked = False
        """Everything was asked for while nobody listened yet: fetches alone had it made."""
        self.surplus_since: float | None = None
        """Since when more is asked for than is wanted."""
        self._widening = 0
        """Updates that ask for more and are not answered yet."""
        self.used = False
        """Somebody downstream has wanted its Objects."""
        self._resuming = 0
        """Updates with FORWARD 1 that are not answered yet."""
        self._fill: UpstreamFill | None = None
        """The fill that was asked for last."""
        self._refreshing = False
        self._expiry: float | None = None
        self._renew_at = 0.0

    @property
    def flows(self) -> bool:
        """The Objects that are asked for come."""
        if self.request is not None and self.request.done is not None:
            return self.established and not self.paused
        waits = self.paused or self._resuming or self._widening
        return self.established and not waits

    @property
    def current(self) -> bool:
        """All Objects come, so what is known as the Largest Object is up to date."""
        return self.flows and not self.narrowed

    @property
    def narrowed(self) -> bool:
        """Filters of ours leave out Objects, or did a moment ago."""
        return self._widening > 0 or self.asked != EVERYTHING

    def accepted(self) -> None:
        """It is established, and begins after the Largest Object of then."""
        assert self.request is not None
        self.established = True
        if self.request.largest is not None:
            self.start = location_after(self.request.largest)

    def settle(self) -> bool:
        """End it, if PUBLISH_DONE has come while not everything was asked for: who wants more has
        to ask anew, and the streams that are still to come do not matter for that."""
        request = self.request
        if not self.established or request is None or request.done is None or self.current:
            return False
        request.check_done(expired=True)
        return True

    # -- asking ----------------------------------------------------------------------------

    def forward(self, wanted: bool, fill: UpstreamFill | None = None) -> None:
        """Pause or resume it (MOQT "Paused Subscription Handling"), `fill` along with that."""
        if not self.established or wanted is not self.paused:
            return
        filled = LocationFilter.absolute_start(*fill.next) if fill is not None else None
        parameters = Parameters(
            forward=int(wanted),
            fill_parameters=None if fill is None else Parameters(location_filter=filled),
        )
        self._fill = fill or self._fill
        if self.update(parameters, partial(self._resumed, fill) if wanted else _ignore):
            self.paused = not wanted
            self.slept = True
            self._resuming += wanted
            self.whole = False
        elif fill is not None:
            fill.request_failed(timed_out("the subscription takes no fill any more"))

    @property
    def fillable(self) -> bool:
        """Whether it can be resumed with a fill: it is paused, and the publisher's own."""
        request = self.request
        return (
            self.published
            and self.paused
            and (self._fill is None or self._fill.is_over)
            and self.asked == EVERYTHING
            and request is not None
            and request.group_order is GroupOrder.ASCENDING
        )

    def _resumed(self, fill: UpstreamFill | None, answer: RequestOk | RequestError) -> None:
        self._resuming -= 1
        if fill is not None:
            fill.answered(answer)
        if isinstance(answer, RequestOk):
            self.track.upstream_told(self)
        else:
            self.paused = True  # it ended before it was resumed

    def has_surplus(self) -> bool:
        """More is asked for than is wanted, as is said again and again: whether for long."""
        now = self.track.clock.now
        if self.surplus_since is None:
            self.surplus_since = now
        return now - self.surplus_since >= self.track.config.linger

    def ask(self, wanted: Wanted) -> bool:
        """Have the filters let through what is `wanted`; whether they have to change for that."""
        wanted = wanted.in_ranges(self.session.peer_max_filter_ranges)
        if wanted == self.asked or self.unfiltered:
            return False
        widens = wanted | self.asked != self.asked
        if not self.update(wanted.after(self.asked), self._widened if widens else _ignore):
            return False
        self.asked = wanted
        self._widening += widens
        self.sifted_to = MAX_VI64
        for state in self.streams.values():
            self._sift(state)
        return True

    def _widened(self, answer: RequestOk | RequestError) -> None:
        self._widening -= 1
        if isinstance(answer, RequestOk):
            largest = self.request.largest if self.request is not None else None
            if not self.narrowed:
                self.sifted_to = largest.group if largest is not None else -1
            self.track.upstream_told(self)

    def refresh(self) -> None:
        """Ask for the Largest Object: an update without parameters is answered with it."""
        if not self._refreshing:
            self._refreshing = self.update(Parameters(), self._refreshed)

    def _refreshed(self, answer: RequestOk | RequestError) -> None:
        self._refreshing = False
        if isinstance(answer, RequestOk):
            self.track.upstream_told(self)

    def ask_new_group(self, value: int) -> None:
        """NEW_GROUP_REQUEST of somebody downstream (MOQT "NEW GROUP REQUEST")."""
        self.update(Parameters(new_group_request=value))

    def update(self, parameters: Parameters, answered: UpdateAnswer = _ignore) -> bool:
        """REQUEST_UPDATE; False when the subscription takes none any more."""
        request = self.request
        if (
            request is None
            or request.done is not None
            or request.state is not RequestState.ESTABLISHED
        ):
            return False

        try:
            request.update(parameters, answered)
        except MoqtError:
            return False
        return True

    def begin_anew(self) -> None:
        """The store is another one from now on: what has come of its streams is not there."""
        self.whole = False
        self.cuts.clear()
        for state in self.streams.values():
            state.previous = state.subgroup = state.arrival = None
            state.lossy = True

    def cancel(self) -> None:
        """Unsubscribe."""
        request, self.request = self.request, None
        if request is not None:
            request.cancel()
        self._end_streams()

    def tick(self, now: float) -> None:
        """Extend it before it expires (MOQT "EXPIRES Parameter")."""
        request = self.request
        expiry = request.expires_at if request is not None else None
        if expiry != self._expiry:
            self._expiry = expiry
            # not all at once, after a publisher has accepted thousands
            self._renew_at = now + ((expiry or now) - now) * random.uniform(0.5, 0.75)
        if expiry is not None and expiry - now < MAX_FUTURE and now >= self._renew_at:
            self._renew_at = expiry
            self.update(Parameters())

    @property
    def brought_all(self) -> bool:
        """Whether it has brought everything since it began."""
        return self.whole and self.sifted_to < 0

    @property
    def expires(self) -> bool:
        return self.request is not None and self.request.expires_at is not None

    def stream_opened(self, stream: IncomingStream) -> None:
        if stream.via is Via.FILL:
            fill = self._fill
            stream.receiver = Receiver() if fill is None or fill.is_over else fill
            stream.receiver.stream_opened(stream)
        else:
            super().stream_opened(stream)

    # -- Receiver --------------------------------------------------------------------------

    def request_failed(self, error: MoqtError) -> None:
        self._end_streams()
        self.track.upstream_failed(self, error)
        self._over()

    def subscription_done(self, code: int, reason: str) -> None:
        request = self.request
        if request is None or request.done is None or self.streams:
            self.whole = False
        elif request.streams_ended != request.done.stream_count:
            self.whole = False  # given up waiting: the rest was lost on the way
        if request is not None and request.done is not None:
            came = request.streams_ended + len(self.streams)
            self.lost |= came < request.done.stream_count
        self._end_streams()
        self.track.upstream_done(self, code, reason)
        self._over()

    def _over(self) -> None:
        """Nothing of it, nor of its fill, comes any more; it and its request, which refer to each
        other, are not left to the cyclic collector."""
        self.request = None
        if self._fill is not None and not self._fill.is_over:
            self._fill.request_failed(timed_out("the subscription has ended"))

    def _before_first(self, stream: IncomingStream, header: ObjectHeader) -> int | None:
        opened = stream.subgroup
        if self.cuts and opened is not None and header.subgroup is not None:
            self.cuts.pop((header.group, header.subgroup), None)
        if opened is not None and opened.first_object and not self._stream(stream).lossy:
            return -1
        if opened is None or not self.whole or header.group < self.start.group:
            return None  # a stream of the same Subgroup may have been reset
        return self.start.object - 1 if header.group == self.start.group else -1

    def rejected(self, location: Location) -> None:
        self.track.rejected(location)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        state = self.streams.pop(stream.stream_id, None)
        if state is None:
            return
        opened = stream.subgroup
        if error is not None:
            self.whole = False
            if error != StreamErrorCode.DELIVERY_TIMEOUT:
                self._note_cut(state)
            if state.subgroup is None:
                self._cut_at_header(opened)
        end_of_group = opened is not None and opened.end_of_group
        try:
            self._close(state, finished=error is None, end_of_group=end_of_group)
        except MalformedTrack as contradiction:
            self._settle(contradiction)

    def _note_cut(self, state: StreamState) -> None:
        """Whatever may follow what came whole on the stream does not come on it."""
        opened, previous, arrival = state.incoming.subgroup, state.previous, state.arrival
        if opened is None:
            return
        if previous is None:
            at = max(Location(opened.group, 0), self.start)
        elif arrival is not None and not arrival.stored.complete:
            at = arrival.stored.location
        else:
            at = Location(opened.group, previous + 1)
        self.cuts[state.subgroup or (opened.group, opened.subgroup or 0)] = at
        if len(self.cuts) > MAX_CUTS:
            del self.cuts[next(iter(self.cuts))]

    def _cut_at_header(self, opened: SubgroupHeader | None) -> None:
        """A stream ended in some other way than with FIN, and no Object had begun on it."""
        if opened is None or opened.subgroup is None:
            self.lost = True  # nobody can tell which Subgroup it was to bring
        else:
            self.filling.feed_empty((opened.group, opened.subgroup), opened.priority)

    def _end_streams(self) -> None:
        """No more will be read from the streams that are still open."""
        streams, self.streams = self.streams, {}
        for state in streams.values():
            self._note_cut(state)
            if state.subgroup is None:
                self._cut_at_header(state.incoming.subgroup)
            self._close(state, finished=False, end_of_group=False)

    def _close(self, state: StreamState, *, finished: bool, end_of_group: bool) -> None:
        self._cut(state)
        if state.subgroup is not None:
            last = state.previous if finished and not state.lossy else None
            self.filling.feed_closed(
                state.subgroup, last, end_of_group=end_of_group, sifted=state.sifted
            )


class UpstreamSubscribe(UpstreamSubscription):
    """The SUBSCRIBE to one publisher."""

    def __init__(
        self, track: Subscribed, session: Session, *, replaces: UpstreamSubscription | None = None
    ) -> None:
        super().__init__(track, session)
        self.replaces = replaces
        self.deadline = 0.0
        self.rendezvous = False
        self._parameters = Parameters()
        """Of the SUBSCRIBE, without its filters."""

    def open(
        self,
        wanted: Wanted,
        *,
        forward: bool,
        new_group: int | None,
        rendezvous_ms: int,
        waiting: Iterable[int] = (),
    ) -> MoqtError | None:
        """Send SUBSCRIBE, or have it wait for a stream.

        One subscription serves all: it asks for what all of them want, and each one's own filters
        are applied downstream (MOQT "Subscriber Interactions"). An upstream relay waits for a
        publisher as long as this one would: `rendezvous_ms`. It is told which relays are `waiting`.
        """
        track = self.track
        if self.unfiltered:
            wanted = EVERYTHING
        self.asked = wanted.in_ranges(self.session.peer_max_filter_ranges)
        self.sifted_to = MAX_VI64 if self.narrowed else -1
        self.rendezvous = rendezvous_ms > 0
        self.deadline = track.clock.now + track.config.upstream_timeout + rendezvous_ms / 1000
        self.paused = not forward
        self.whole = forward
        self._parameters = Parameters(
            forward=None if forward else 0,
            new_group_request=new_group,
            rendezvous_timeout=rendezvous_ms if self.rendezvous else None,
            relay_path=relay_path(self.session, waiting),
        )
        error = self._subscribe()
        if error is None:
            track.counters.upstream_subscriptions += 1
        return error

    def _subscribe(self) -> MoqtError | None:
        parameters = replace(
            self._parameters,
            location_filter=self.asked.location_filter or LocationFilter.next_object(),
            range_filters=self.asked.filters,
        )
        try:
            self.request = self.session.subscribe(self.track.name, self, parameters)
        except MoqtError as error:
            return error
        return None

    def request_failed(self, error: MoqtError) -> None:
        refused = isinstance(error, RequestError) and error.code == RequestErrorCode.INVALID_FILTER
        if refused and self.asked != EVERYTHING and not self.established:
            # the filters are an economy of ours: nobody asked for them
            self.asked, self.sifted_to, self.unfiltered = EVERYTHING, -1, True
            again = self._subscribe()
            if again is None:
                return
            error = again
        super().request_failed(error)

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None:
        if self.track.filling.has_room_for(request.properties):
            self.track.upstream_accepted(self)
            return
        self.cancel()
        retry = self.track.config.retry_after_ms
        error = RequestError(RequestErrorCode.EXCESSIVE_LOAD, NO_ROOM, retry_after_ms=retry)
        self.track.upstream_failed(self, error)

    def tick(self, now: float) -> None:
        if self.established:
            super().tick(now)
            return
        request, config = self.request, self.track.config
        if request is not None and request.state is RequestState.QUEUED:
            # the publisher grants no stream: that takes as long as streams may stall
            late = now > self.deadline - config.upstream_timeout + config.stall_timeout
        else:
            late = now > self.deadline
        if late:
            self.track.counters.upstream_timeouts += 1
            self.cancel()
            self.track.upstream_failed(self, timed_out("no answer in time"))


class UpstreamPublish(UpstreamSubscription):
    """A PUBLISH that was accepted."""

    published = True

    def __init__(self, track: Subscribed, request: IncomingPublish) -> None:
        super().__init__(track, session_of(request))
        self.request: IncomingPublish | None = request
        self.paused = request.paused
        self.whole = not request.paused

    def accept(self) -> None:
        """PUBLISH_OK; Objects that waited for it come at once."""
        request = self.request
        self.track.upstream_accepted(self)
        if request is not None:
            request.accept(self)
        self.track.adjust()


def timed_out(reason: str) -> RequestError:
    return RequestError(RequestErrorCode.TIMEOUT, reason)
