"""A relay behind a relay: what is asked of, and told to, one upstream relay. Sans-IO.

What no publisher here has is asked upstream: SUBSCRIBE, FETCH and TRACK_STATUS by
`Relay.publishers`; namespaces and tracks by one SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS
for each prefix that somebody downstream asks for and that no shorter one covers. How relays
interconnect is out of the draft's scope; only its ordinary requests are used here.
"""

from __future__ import annotations

import logging

from moqt.requests import IncomingPublish, OutgoingPublishNamespace
from moqt.session import Session
from moqt.values.errors import MoqtError
from moqt.values.names import TrackNamespace, printable_namespace
from relay.core import Relay
from relay.mesh.interests import (
    UPSTREAM_PATIENCE,
    Answered,
    Cancellable,
    Ended,
    Interests,
    retry_after,
)
from relay.mesh.told import Told
from relay.sources.hops import relay_of

logger = logging.getLogger("relay")


class Uplink:
    """One upstream relay, over the sessions to it that come and go."""

    def __init__(self, relay: Relay, *, announce: bool = False, place: int = 0) -> None:
        """`announce`: what is published here is announced there (PUBLISH_NAMESPACE). Of several
        upstream relays those of a lower `place` are asked first."""
        self.relay = relay
        self._announce = announce
        self._place = place
        self._session: Session | None = None
        self._announced: dict[TrackNamespace, OutgoingPublishNamespace] = {}
        self._again: dict[TrackNamespace, float] = {}
        self._namespaces = Told(relay)
        self._tracks = Interests(self._subscribe_tracks)
        relay.askable.unreachable.add(self)
        relay.namespaces.events.listed.append(self._listed)
        relay.namespaces.events.awaited.append(self._await_upstream)
        relay.offers.on_wanted.append(self._tracks_wanted)
        relay.namespaces.events.appeared.append(self._appeared)
        relay.namespaces.events.withdrawn.append(self._withdrawn)

    @property
    def session(self) -> Session | None:
        """The session that is asked now."""
        return self._session

    def attach(self, session: Session) -> None:
        """A session is established. An older one that is still there is moved away from."""
        old, self._session = self._session, session
        self.relay.askable.unreachable.discard(self)
        self.relay.add_upstream(session, self._place)
        self._announced.clear()
        self._again.clear()
        self._namespaces.attach(session)
        self._tracks.attach(session)
        for namespace in self.relay.namespaces.published.namespaces_under(()):
            self._appeared(namespace)
        if old is not None and old.closed is None:
            self.relay.upstreams.pop(old, None)
            self._move(old, session)

    def leave(self, session: Session) -> None:
        """The upstream relay is going away (GOAWAY), and no other session to it is there yet: what
        comes from it is asked of the next one, where there is one."""
        others = [each for each in self.relay.askable.above() if each.goaway is None]
        if session is self._session and others:
            self._move(session, others[0])

    def _move(self, old: Session, new: Session) -> None:
        """Ask `new` for what comes on `old`."""
        for track in tuple(self.relay.tracks.values()):
            if track.publishes(old):
                track.move(old, new)

    def detach(self, session: Session) -> None:
        """The session has ended."""
        if session is self._session:
            self._session = None
            self.relay.askable.unreachable.add(self)
            self._announced.clear()
            self._again.clear()
            self._namespaces.attach(None)
            self._tracks.attach(None)

    def tick(self, now: float) -> None:
        self.relay.namespaces.tick(now)
        self._namespaces.tick(now)
        self._tracks.tick(now)
        for namespace in [each for each, at in self._again.items() if now >= at]:
            del self._again[namespace]
            self._appeared(namespace)

    # -- asking ----------------------------------------------------------------------------

    def _listed(self, session: Session, prefix: TrackNamespace, item: object, on: bool) -> None:
        if session not in self.relay.upstreams:
            (self._namespaces.add if on else self._namespaces.remove)(prefix, item)

    def _await_upstream(self, session: Session, prefix: TrackNamespace, then: Answered) -> None:
        above, asking = self._session, relay_of(session)
        if not self.relay.askable.goes_up(session) or (
            above is not None and asking is not None and relay_of(above) == asking
        ):
            then(True)  # who asks would wait for itself
            return
        enough = self._namespaces.await_answer(prefix, then)
        if enough is not None:
            # what is known here is not kept back for an upstream that is slow
            session.clock.after(UPSTREAM_PATIENCE, enough)

    def _tracks_wanted(
        self, session: Session, prefix: TrackNamespace, item: object, on: bool
    ) -> None:
        if session not in self.relay.upstreams:
            (self._tracks.add if on else self._tracks.remove)(prefix, item)

    def _subscribe_tracks(
        self, session: Session, prefix: TrackNamespace, ended: Ended
    ) -> Cancellable:
        return session.subscribe_tracks(
            prefix, on_publish=self._offered, on_ended=ended, on_skipped=lambda name: None
        )

    def _offered(self, publication: IncomingPublish) -> None:
        self.relay.take_publication(publication)

    # -- telling ---------------------------------------------------------------------------

    def _appeared(self, namespace: TrackNamespace) -> None:
        session = self._session
        if (
            not self._announce
            or session is None
            or namespace in self._announced
            or namespace not in self.relay.namespaces.published
        ):
            return

        def ended(error: MoqtError) -> None:
            if self._session is not session or self._announced.pop(namespace, None) is None:
                return
            logger.warning("upstream refuses %s: %s", printable_namespace(namespace), error)
            wait = retry_after(error)
            if wait is not None:
                self._again[namespace] = self.relay.clock.now + wait

        try:
            self._announced[namespace] = session.publish_namespace(namespace, on_ended=ended)
        except MoqtError as error:
            logger.warning(
                "%s is not announced upstream: %s", printable_namespace(namespace), error
            )

    def _withdrawn(self, namespace: TrackNamespace) -> None:
        if namespace not in self.relay.namespaces.published:
            self._again.pop(namespace, None)
            announced = self._announced.pop(namespace, None)
            if announced is not None:
                announced.cancel()
