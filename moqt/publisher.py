"""An original publisher: TrackStores under namespaces, served to any number of sessions."""

from __future__ import annotations

from collections import Counter

from moqt.requests import (
    IncomingFetch,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
)
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.names import FullTrackName, TrackNamespace, is_prefix, printable_namespace

MAX_RENDEZVOUS = 30.0
"""Seconds a SUBSCRIBE waits at most for its track, whatever RENDEZVOUS_TIMEOUT allows."""
MAX_WAITING = 1024
"""SUBSCRIBEs that may wait for their tracks at once; beyond, EXCESSIVE_LOAD."""


class Publisher(SessionHandler):
    """Answers SUBSCRIBE, FETCH, TRACK_STATUS, SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS from
    its stores.

    One Publisher may serve several sessions, as a client of a relay or as a server.
    """

    max_rendezvous = MAX_RENDEZVOUS
    max_waiting = MAX_WAITING

    def __init__(self) -> None:
        self.tracks: dict[FullTrackName, TrackStore] = {}
        self._namespaces: Counter[TrackNamespace] = Counter()
        """How many of them each namespace has."""
        self._absent: dict[FullTrackName, int] = {}
        """Tracks that will not exist for so many milliseconds."""
        self._listings: set[IncomingSubscribeNamespace] = set()
        self._wanted: set[IncomingSubscribeTracks] = set()
        self._waiting: dict[FullTrackName, dict[IncomingSubscribe, Deadline]] = {}
        """SUBSCRIBEs within their RENDEZVOUS_TIMEOUT, and when that is over."""
        self._waiting_count = 0

    # -- tracks ----------------------------------------------------------------------------

    def add_track(self, store: TrackStore) -> None:
        """Serve `store` from now on; tell those who asked for its namespace or for its tracks,
        and answer those who wait for it."""
        self._namespaces[store.name.namespace] += store.name not in self.tracks
        self.tracks[store.name] = store
        for listing in tuple(self._listings):
            listing.add(store.name.namespace)
        waiting = tuple(self._waiting.get(store.name, ()))
        for request in waiting:
            self._stop_waiting(request)
            request.accept(store)
        for wanted in tuple(self._wanted):
            if all(request.session is not wanted.session for request in waiting):
                wanted.offer(store)

    def remove_track(self, name: FullTrackName) -> None:
        """Serve the track to no new request."""
        if self.tracks.pop(name, None) is not None:
            self._namespaces[name.namespace] -= 1
        for wanted in tuple(self._wanted):
            wanted.withdrawn(name)
        if not self._namespaces[name.namespace]:
            del self._namespaces[name.namespace]
            for listing in tuple(self._listings):
                listing.remove(name.namespace)

    def set_absent(self, name: FullTrackName, retry_after_ms: int | None) -> None:
        """Who asks for this track is told that it does not exist, and not to ask again for so
        long: a relay that asked for others can tell them. None takes that back."""
        self._absent.pop(name, None)
        if retry_after_ms is not None:
            self._absent[name] = retry_after_ms

    def namespaces(self) -> set[TrackNamespace]:
        return set(self._namespaces)

    # -- requests for one track ------------------------------------------------------------

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        store = self.tracks.get(request.name)
        if store is not None:
            request.accept(store)
        elif request.parameters.rendezvous_timeout:
            self._wait(request, request.parameters.rendezvous_timeout / 1000)
        else:
            self._refuse(request)

    def fetch_received(self, request: IncomingFetch) -> None:
        store = self.tracks.get(request.name)
        if store is not None:
            request.accept(store)
        else:
            self._refuse(request)

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        store = self.tracks.get(request.name)
        if store is not None:
            request.accept(store)
        else:
            self._refuse(request)

    def _wait(self, request: IncomingSubscribe, seconds: float) -> None:
        """Hold it until the track is added (MOQT "RENDEZVOUS_TIMEOUT Parameter")."""
        if self._waiting_count >= self.max_waiting:
            request.reject(
                RequestErrorCode.EXCESSIVE_LOAD, "too many requests wait", retry_after_ms=1000
            )
            return
        deadline = request.session.clock.after(
            min(seconds, self.max_rendezvous), lambda: self._give_up(request)
        )
        self._waiting.setdefault(request.name, {})[request] = deadline
        self._waiting_count += 1
        request.when_ended(lambda: self._stop_waiting(request))

    def _give_up(self, request: IncomingSubscribe) -> None:
        request.reject(RequestErrorCode.TIMEOUT, "the track did not appear in time")

    def _stop_waiting(self, request: IncomingSubscribe) -> None:
        requests = self._waiting.get(request.name, {})
        if request not in requests:
            return
        request.session.clock.cancel(requests.pop(request))
        self._waiting_count -= 1
        if not requests:
            del self._waiting[request.name]

    def _refuse(self, request: IncomingSubscribe | IncomingFetch | IncomingTrackStatus) -> None:
        request.reject(
            RequestErrorCode.DOES_NOT_EXIST,
            f"no such track in {printable_namespace(request.name.namespace)}"[:200],
            retry_after_ms=self._absent.get(request.name),
        )

    # -- requests for namespaces -----------------------------------------------------------

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        self._listings.add(request)
        request.when_ended(lambda: self._listings.discard(request))
        request.accept()
        self.namespace_prefix_changed(request)

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        for namespace in self.namespaces():
            if is_prefix(request.prefix, namespace):
                request.add(namespace)

    def subscribe_tracks_received(self, request: IncomingSubscribeTracks) -> None:
        self._wanted.add(request)
        request.when_ended(lambda: self._wanted.discard(request))
        request.accept()
        self.subscribe_tracks_changed(request)

    def subscribe_tracks_changed(self, request: IncomingSubscribeTracks) -> None:
        for store in tuple(self.tracks.values()):
            request.offer(store)
