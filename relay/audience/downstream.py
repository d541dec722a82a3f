"""Who wants a track downstream: requests that wait, those that are served, offers made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final, TypeGuard

from moqt.requests import (
    IncomingFetch,
    IncomingSubscribe,
    IncomingTrackStatus,
    OutgoingPublish,
    PublisherSide,
    RequestState,
)
from moqt.session import Session
from moqt.track.filters import RangeFilters, merge_update
from moqt.values.codes import PublishDoneCode, StreamErrorCode
from moqt.values.messages import LocationFilter, RequestUpdate
from relay.audience.readers import Readers

MAX_RELAYS: Final = 256
"""Of those behind a track, that are looked at for each request: any peer may name as many."""

TrackRequest = IncomingSubscribe | IncomingFetch | IncomingTrackStatus
"""What a downstream session may ask about a track."""


class Downstream:
    """The downstream side of one track."""

    def __init__(self) -> None:
        self.waiting: Readers[TrackRequest] = Readers()
        self.requests: Readers[TrackRequest] = Readers()
        """Accepted downstream requests; `prune` finds the finished ones."""
        self.offers: Readers[OutgoingPublish] = Readers()
        """Publications of it that were made downstream (SUBSCRIBE_TRACKS)."""
        self.deferred: dict[PublisherSide, RequestUpdate] = {}
        """Subscriptions whose update waits until upstream has resumed, or brings more."""

    @property
    def idle(self) -> bool:
        """Nobody needs the track."""
        return not self.requests and not self.waiting and not self.offers

    def reads(self, session: Session) -> bool:
        """Whether `session` waits for the track, or is served."""
        return any(session in kind.sessions for kind in self._kinds)

    def some(self, test: Callable[[Session], bool]) -> bool:
        """Whether `test` holds for a session that waits, or is served; the first will do."""
        return any(test(each) for kind in self._kinds for each in kind.sessions)

    @property
    def relays(self) -> frozenset[int]:
        """The relays among them, and those that wait behind these; not all where there are many."""
        return frozenset(islice(chain.from_iterable(k.relays for k in self._kinds), MAX_RELAYS))

    @property
    def _kinds(self) -> tuple[Readers[TrackRequest] | Readers[OutgoingPublish], ...]:
        return self.waiting, self.requests, self.offers

    @property
    def listens(self) -> bool:
        """Whether some subscription is not paused."""
        for request in self._open():
            delivery = request.delivery
            if request.parameters.forward != 0 if delivery is None else not delivery.paused:
                return True
        return False

    @property
    def wants(self) -> bool:
        """Whether somebody is to get Objects as they are published, now or when upstream
        has resumed."""
        return (
            any(request.state is RequestState.ESTABLISHED for request in self.deferred)
            or any(live(request) for request in self.waiting)
            or self.listens
        )

    def listening(self) -> Iterator[tuple[LocationFilter | None, RangeFilters]]:
        """The filters of those who are to get Objects as they are published."""
        for request in self._open():
            if request.delivery is None or not request.delivery.paused:
                yield request.filter, request.range_filters
        for waiting in self.waiting:
            if live(waiting):
                yield waiting.filter, waiting.range_filters
        for deferred, update in self.deferred.items():
            yield after(deferred, update)

    @property
    def subscribes(self) -> bool:
        """Whether there is any subscription, paused or not."""
        return bool(self.offers) or any(
            isinstance(each, IncomingSubscribe) for each in chain(self.waiting, self.requests)
        )

    @property
    def new_group(self) -> int | None:
        """The largest NEW_GROUP_REQUEST of those who wait."""
        asked = (request.parameters.new_group_request for request in self.waiting)
        return max((value for value in asked if value is not None), default=None)

    @property
    def rendezvous_ms(self) -> int:
        """The longest RENDEZVOUS_TIMEOUT of those who wait."""
        return max((r.parameters.rendezvous_timeout or 0 for r in self.waiting), default=0)

    def subscriptions(self) -> list[PublisherSide]:
        """The established ones."""
        return [each for each in self._open() if each.state is RequestState.ESTABLISHED]

    def _open(self) -> Iterator[PublisherSide]:
        """The subscriptions that are not over, those of ours that are not answered yet, too."""
        for request in chain(self.requests, self.offers):
            if isinstance(request, PublisherSide) and request.state is not RequestState.CLOSED:
                yield request

    def let_go(self) -> None:
        """Apply the updates that waited for upstream."""
        for request in tuple(self.deferred):
            self.deferred.pop(request, None)
            request.apply_held_updates(asked=1)

    def prune(self) -> None:
        """Forget what is over."""
        for request in [r for r in self.requests if r.state is not RequestState.ESTABLISHED]:
            self.requests.discard(request)
        for offer in [o for o in self.offers if o.state is RequestState.CLOSED]:
            self.offers.discard(offer)
        for closed in [r for r in self.deferred if r.state is RequestState.CLOSED]:
            del self.deferred[closed]

    def end(self, code: PublishDoneCode, stream_code: StreamErrorCode, reason: str) -> None:
        """End everything accepted at once: subscriptions with `code`, streams with the other."""
        self.deferred.clear()
        for request in tuple(self.requests):
            if isinstance(request, IncomingFetch):
                request.abort(stream_code)
        for subscription in self.subscriptions():
            if subscription.delivery is not None:
                subscription.delivery.cancel(stream_code)
            subscription.end(code, reason)
        for offer in tuple(self.offers):
            offer.withdraw(code, reason)
        self.requests.clear()
        self.offers.clear()


def after(
    request: PublisherSide, update: RequestUpdate
) -> tuple[LocationFilter | None, RangeFilters]:
    """The filters of a subscription once `update` holds."""
    asked = update.parameters
    chosen = request.filter if asked.location_filter is None else asked.location_filter
    return chosen, merge_update(request.range_filters, asked.range_filters)


def live(request: TrackRequest) -> TypeGuard[IncomingSubscribe]:
    """Whether it asks for Objects as they are published."""
    return isinstance(request, IncomingSubscribe) and request.parameters.forward != 0
