"""An original publisher: TrackStores under namespaces, served to any number of sessions."""

from __future__ import annotations

from moqt.codes import RequestErrorCode
from moqt.names import FullTrackName, TrackNamespace, is_prefix, printable_namespace
from moqt.requests import (
    IncomingFetch,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingTrackStatus,
)
from moqt.session import SessionHandler
from moqt.store import TrackStore


class Publisher(SessionHandler):
    """Answers SUBSCRIBE, FETCH, TRACK_STATUS and SUBSCRIBE_NAMESPACE from its stores.

    One Publisher may serve several sessions, as a client of a relay or as a server.
    """

    def __init__(self) -> None:
        self.tracks: dict[FullTrackName, TrackStore] = {}
        self._listings: set[IncomingSubscribeNamespace] = set()

    def add_track(self, store: TrackStore) -> None:
        """Serve `store` from now on; its namespace is listed to those who asked."""
        self.tracks[store.name] = store
        for listing in tuple(self._listings):
            listing.add(store.name.namespace)

    def remove_track(self, name: FullTrackName) -> None:
        """Serve the track to no new request."""
        self.tracks.pop(name, None)
        if name.namespace not in self.namespaces():
            for listing in tuple(self._listings):
                listing.remove(name.namespace)

    def namespaces(self) -> set[TrackNamespace]:
        return {name.namespace for name in self.tracks}

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        store = self._find(request)
        if store is not None:
            request.accept(store)

    def fetch_received(self, request: IncomingFetch) -> None:
        store = self._find(request)
        if store is not None:
            request.accept(store)

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        store = self._find(request)
        if store is not None:
            request.accept(store)

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        self._listings.add(request)
        request.on_ended = lambda: self._listings.discard(request)
        request.accept()
        self.namespace_prefix_changed(request)

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        for namespace in self.namespaces():
            if is_prefix(request.prefix, namespace):
                request.add(namespace)

    def _find(
        self, request: IncomingSubscribe | IncomingFetch | IncomingTrackStatus
    ) -> TrackStore | None:
        store = self.tracks.get(request.name)
        if store is None:
            request.reject(
                RequestErrorCode.DOES_NOT_EXIST,
                f"no such track in {printable_namespace(request.name.namespace)}"[:200],
            )
            return None
        return store
