"""Where tests of sessions look inside: what no interface of theirs shows, each named once.

For sessions and what they are made of; `tests.moqt.probe` does the same for moqt.quic. How much a
session keeps it says itself (`Session.remembered`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from moqt.delivery.scheduler import Scheduler
from moqt.delivery.subscription import SubscriptionDelivery
from moqt.log.logged_transport import LoggedTransport
from moqt.publisher import Publisher
from moqt.responses import ObjectQueue
from moqt.session import Session
from moqt.track.malformed import TrackChecker
from moqt.track.store import TrackStore
from moqt.values.deadlines import Deadlines
from moqt.values.intervals import IntervalSet


def streams_sent(session: Session) -> Collection[int]:
    """The IDs of the streams that Objects are written to."""
    return session.scheduler.sending


def control_of_peer(session: Session) -> int | None:
    """The peer's control stream, once it has come."""
    return session._control_in


def read_through(session: Session, kind: type[dict[int, Any]]) -> None:
    """Have a session keep the streams it reads in a dictionary of `kind`."""
    session._streams = kind(session._streams)


def tokens_sent(session: Session) -> Collection[Any]:
    """The tokens a session has registered with its peer, with what is under way of each."""
    return session.rules.sent_tokens._entries.values()


# ---- deliveries


def listeners(store: TrackStore) -> Collection[Any]:
    """Who is told of what comes into a store."""
    return store.listeners


def fills(delivery: SubscriptionDelivery) -> Collection[Any]:
    """The fills of a subscription that are not over."""
    return delivery._fills


def considered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note from now on the group of each subgroup that a subscription asks whether it wants it."""
    groups: list[int] = []
    consider = SubscriptionDelivery._consider

    def noted(delivery: SubscriptionDelivery, log: Any) -> Any:
        groups.append(log.group)
        return consider(delivery, log)

    monkeypatch.setattr(SubscriptionDelivery, "_consider", noted)
    return groups


def blocked(scheduler: Scheduler) -> Collection[int]:
    """The streams that wait for credit."""
    return scheduler._blocked


def entries(scheduler: Scheduler) -> Sequence[Any]:
    """What a scheduler has to look through, void entries included."""
    return scheduler._flows


def nothing_waits(scheduler: Scheduler) -> bool:
    """Whether nothing waits for credit, for a flush or for a stream."""
    streamless = [e for e in scheduler._streamless if e[4].streamless_entry is e]
    return not (scheduler._blocked or scheduler._unflushed or streamless)


def noted(deadlines: Deadlines) -> Sequence[Any]:
    """The times that are noted, those taken back included."""
    return deadlines._heap


def groups_of(checker: TrackChecker) -> Collection[int]:
    """The groups that a checker remembers."""
    return checker._groups


# ---- what stands on a session


class Kept(NamedTuple):
    """Requests of its peers that a Publisher remembers."""

    waiting: int
    """SUBSCRIBEs for Tracks that are not there yet."""
    listings: Collection[Any]
    wanted: Collection[Any]


def kept(publisher: Publisher) -> Kept:
    count = publisher._waiting_count
    assert count == sum(map(len, publisher._waiting.values()))
    assert all(publisher._waiting.values())
    return Kept(count, publisher._listings, publisher._wanted)


def queued(response: ObjectQueue) -> Sequence[Any]:
    """The Objects that the application has not taken yet."""
    return response._objects


def octets_queued(response: ObjectQueue) -> int:
    """What the queue bills for them."""
    return response._octets


def events_queued(listing: Any) -> Collection[Any]:
    """The namespaces whose coming and going the application has not been told."""
    events: Collection[Any] = listing._events
    return events


def streams_read_along(transport: LoggedTransport) -> Iterable[int]:
    """The streams whose messages the log reads as they go out."""
    return transport._sent


def keep_in(intervals: IntervalSet, kind: type[list[int]]) -> None:
    """Have a set keep its intervals in lists of `kind`."""
    intervals._starts, intervals._ends = kind(intervals._starts), kind(intervals._ends)
