"""What is asked of a track's publishers for those downstream: FORWARD, filters, new groups.

A subscription that is paused or narrowed leaves out what nobody is to get; who comes to want
more waits until the publisher has answered that it brings it, and what the Largest Object is.
Sans-IO.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Protocol

from moqt.requests import PublisherSide
from moqt.session import Session
from moqt.track.filters import RangeFilters
from moqt.track.store import TrackStore
from moqt.values.messages import LocationFilter, Parameters, RequestUpdate
from moqt.values.names import MAX_LOCATION, Location
from relay.audience.downstream import Downstream, TrackRequest, after, live
from relay.sources.fetches import UpstreamFill
from relay.sources.filled import Filled
from relay.sources.missing import Ranges
from relay.sources.subscriptions import UpstreamSubscription
from relay.sources.wanted import EVERYTHING, Wanted


class Demanded(Filled, Protocol):
    """The track that is in demand."""

    ranges: Ranges
    subscriptions: dict[UpstreamSubscription, None]
    downstream: Downstream


class Demand:
    """Directs the subscriptions to the publishers of one track."""

    def __init__(self, track: Demanded) -> None:
        self._track = track
        self._downstream = track.downstream
        self.patience: float | None = None
        """How long who waits for upstream's Largest Object waits for it."""
        self._unwanted_since: float | None = None
        self._narrower = False
        """A reader has said that it wants less, which nobody who merely leaves does."""
        self._new_group_asked: tuple[int, int] | None = None
        """NEW_GROUP_REQUEST that is outstanding, and the current group when it was made."""

    @property
    def stale(self) -> bool:
        """Whether upstream is paused or narrowed, and knows better what the Largest Object is."""
        established = False
        for each in self._track.subscriptions:
            if each.current:
                return False
            established |= each.established
        return established

    @property
    def forward(self) -> bool:
        """FORWARD of a SUBSCRIBE of ours: fetches alone leave it running, too."""
        return self._downstream.wants or not self._downstream.subscribes

    # -- more ------------------------------------------------------------------------------

    def catch_up(self, request: TrackRequest | None = None) -> None:
        """Have upstream bring what `request` wants, too, or at least say what the Largest Object
        is; without a request, what those want who wait."""
        if request is None:
            more = self._waited_for()
            more += [self._wanted(*after(*each)) for each in self._downstream.deferred.items()]
        elif live(request):
            more = [self._wanted(request.filter, request.range_filters)]
        else:
            more = []
        self._more(more)

    def update_received(self, request: PublisherSide, update: RequestUpdate) -> bool:
        """Whether a downstream REQUEST_UPDATE can be applied, or must wait for upstream."""
        asked = update.parameters
        self._narrower |= asked.location_filter is not None or bool(asked.range_filters)
        forward = asked.forward
        if forward is None and (
            asked.location_filter is not None
            or asked.range_filters
            or asked.fill_parameters is not None
        ):
            forward = int(request.delivery is not None and not request.delivery.paused)
        if forward != 1 or not self.stale:
            return True
        self._downstream.deferred[request] = update
        self._more([self._wanted(*after(request, update))])
        return request not in self._downstream.deferred

    def widen(self, subscription: UpstreamSubscription) -> None:
        """It is established: have it bring what those want, too, who came since it was asked."""
        subscription.ask(reduce(or_, self._waited_for(), subscription.asked))

    def _waited_for(self) -> list[Wanted]:
        """What those want who wait to listen."""
        waiting = self._downstream.waiting
        return [self._wanted(r.filter, r.range_filters) for r in waiting if live(r)]

    def _more(self, more: list[Wanted]) -> None:
        """Ask for that, too, or else for what the Largest Object is, and wait for the answer."""
        if self.patience is None:
            self.patience = self._track.clock.now + self._track.config.upstream_timeout
        wants = self._downstream.wants
        listens = self._downstream.listens  # to what is still to come after PUBLISH_DONE, too
        if wants:
            self._direct(True)
        for subscription in tuple(self._track.subscriptions):
            if subscription.established and (listens or not subscription.settle()):
                widened = subscription.ask(reduce(or_, more, subscription.asked))
                if not widened and (subscription.flows or not wants):
                    subscription.refresh()

    def is_out_of_patience(self) -> bool:
        """Whether those who wait for upstream's answer have waited for long enough, just now."""
        if self.patience is None or self._track.clock.now <= self.patience:
            return False
        self.patience = None
        return True

    # -- as much as is wanted --------------------------------------------------------------

    @property
    def wanted(self) -> Wanted | None:
        """What those downstream want of what is published, all in all; None: nobody does."""
        wanted: Wanted | None = None
        seen = set()
        for chosen, filters in self._downstream.listening():
            if wanted is not None and not wanted.filters:
                filters = ()  # somebody wants all, and each one's cost more than to see that
            if (chosen, filters) not in seen:
                seen.add((chosen, filters))
                each = self._wanted(chosen, filters)
                wanted = each if wanted is None else wanted | each
                if wanted == EVERYTHING:
                    break
        return wanted

    def _wanted(self, chosen: LocationFilter | None, filters: RangeFilters) -> Wanted:
        return Wanted.by(chosen, filters, self._track.store.largest)

    def adjust(self) -> None:
        """Resume upstream at once when it is wanted; pause it when it has not been for long.

        A publication that nobody has asked for yet is paused at once.
        """
        self._direct(self._downstream.wants)

    def listened(self) -> None:
        """Somebody listens: what was asked for while nobody did has nobody who wants the rest."""
        unasked = [each for each in self._track.subscriptions if each.unasked and each.flows]
        wanted = self.wanted if unasked else None
        if wanted is None:
            return
        for subscription in unasked:
            subscription.unasked = False
            subscription.ask(wanted)

    def tick(self) -> None:
        """Time has passed: `adjust`, and ask for less where more has not been wanted for long,
        or by who says so: a relay that asks for less has waited already."""
        self.adjust()
        narrower, self._narrower = self._narrower, False
        flowing = [each for each in self._track.subscriptions if each.flows]
        wanted = self.wanted if flowing else None
        if wanted is None:
            return
        for subscription in flowing:
            if wanted == subscription.asked:
                subscription.surplus_since = None
            elif wanted | subscription.asked != subscription.asked:
                subscription.ask(wanted | subscription.asked)
            elif narrower or subscription.has_surplus():
                subscription.surplus_since = None
                subscription.ask(wanted)

    def _direct(self, wanted: bool) -> None:
        """`adjust`, knowing whether it is `wanted`."""
        now = self._track.clock.now
        if wanted:
            self._unwanted_since = None
        elif self._unwanted_since is None:
            self._unwanted_since = now
        rested = not wanted and now - (self._unwanted_since or 0.0) >= self._track.config.linger
        sessions: set[Session] = set()
        for subscription in tuple(self._track.subscriptions):
            if not subscription.established:
                continue
            if subscription.session in sessions:
                subscription.forward(False)  # the same Objects come on another of its subscriptions
            elif wanted or (not subscription.published and self.forward):
                subscription.used = True
                self._resume(subscription)
            elif rested or not subscription.used:
                subscription.forward(False)
            sessions.add(subscription.session)

    def _resume(self, subscription: UpstreamSubscription) -> None:
        """Have it bring what is published from now on, and, where that is wanted, what was before:
        its publisher may have ended the track, and need not take a FETCH."""
        start = self._filled_from() if subscription.fillable else None
        low = self._track.store.first_unknown(start, MAX_LOCATION) if start is not None else None
        if low is not None:
            self._track.ranges.fill(
                UpstreamFill(self._track, self._track.ranges, subscription, low)
            )
        else:
            subscription.forward(True)

    def _filled_from(self) -> Location | None:
        """From where on those who wait want what is there already; None when they do not."""
        starts = [
            _fill_start(each.parameters.fill_parameters, each.filter)
            for each in self._downstream.waiting
            if live(each) and each.parameters.fill_parameters is not None
        ]
        starts += [
            _fill_start(update.parameters.fill_parameters, after(request, update)[0])
            for request, update in self._downstream.deferred.items()
            if update.parameters.fill_parameters is not None
        ]
        return min(starts, default=None)

    # -- NEW_GROUP_REQUEST -----------------------------------------------------------------

    @property
    def _group(self) -> int:
        largest = self._track.store.largest
        return largest.group if largest is not None else -1

    def new_group(self) -> int | None:
        """The NEW_GROUP_REQUEST that a SUBSCRIBE of ours carries."""
        value = self._downstream.new_group
        if value is not None:
            self._new_group_asked = (value, self._group)
        return value

    def ask_new_group(self, store: TrackStore, value: int) -> None:
        """Pass a downstream NEW_GROUP_REQUEST on, unless one as large is outstanding."""
        asked = self._new_group_asked
        if asked is not None and asked[1] == self._group and value <= asked[0]:
            return
        self._new_group_asked = (value, self._group)
        for subscription in tuple(self._track.subscriptions):
            if subscription.established:
                subscription.ask_new_group(value)


def _fill_start(fill: Parameters | None, chosen: LocationFilter | None) -> Location:
    """Where a fill begins, or before that where only the publisher knows."""
    chosen = (fill.location_filter if fill is not None else None) or chosen
    return Wanted.by(chosen, (), None).start
