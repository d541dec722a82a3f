"""The namespaces that another relay tells of, over the sessions to it that come and go. Sans-IO."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from moqt.requests import RequestState
from moqt.session import Session
from moqt.values.errors import MoqtError, SessionClosed
from moqt.values.names import TrackNamespace
from relay.core import Relay
from relay.mesh.interests import Cancellable, Ended, Interests

FADING_SECONDS = 2.0
"""For which the namespaces of a listing given up for another one are held: that tells them anew."""


class Told(Interests):
    """What one relay tells: those here who list hear of it."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(self._subscribe_namespace)
        self._relay = relay
        self._told: Counter[tuple[Session, TrackNamespace]] = Counter()
        """How many listings at a session, those that fade included, tell of a namespace."""
        self._fading: deque[tuple[float, Session, TrackNamespace]] = deque()

    @property
    def idle(self) -> bool:
        """Nothing is asked, and nothing that was told holds still."""
        return not self._wanted and not self._asked and not self._told

    def attach(self, session: Session | None) -> None:
        if session is not None:
            # what the session before has told of holds until this one has told
            soon = self._relay.clock.now + FADING_SECONDS
            self._fading = deque((max(at, soon), who, told) for at, who, told in self._fading)
        super().attach(session)

    def tick(self, now: float) -> None:
        super().tick(now)
        while self._fading and now >= self._fading[0][0]:
            _, session, namespace = self._fading.popleft()
            self._changed(session, namespace, False)

    def _subscribe_namespace(
        self, session: Session, prefix: TrackNamespace, ended: Ended
    ) -> Cancellable:
        told: set[TrackNamespace] = set()

        def changed(namespace: TrackNamespace, present: bool) -> None:
            (told.add if present else told.discard)(namespace)
            self._changed(session, namespace, present)

        def fade(seconds: float) -> None:
            gone = tuple(told)
            told.clear()
            if seconds:
                until = self._relay.clock.now + seconds
                self._fading.extend((until, session, namespace) for namespace in gone)
                return
            for namespace in gone:
                self._changed(session, namespace, False)

        def over(error: MoqtError | None) -> None:
            # of who is lost nobody knows what it has: it is to come back
            lost = isinstance(error, SessionClosed)
            fade(self._relay.config.publisher_linger if lost else 0.0)
            ended(error)

        def given_up() -> None:
            fade(FADING_SECONDS)
            ended(None)

        request = session.subscribe_namespace(
            prefix,
            on_namespace=changed,
            on_ended=over,
            on_full=lambda: self.full(prefix),
        )

        def answered(error: MoqtError | None) -> None:
            if error is None:
                self.accepted(prefix)

        request.on_answer = answered
        return _Listing(request, given_up)

    def _changed(self, session: Session, namespace: TrackNamespace, present: bool) -> None:
        """One more, or one less, of the listings at `session` tells of `namespace`."""
        key = session, namespace
        before = self._told[key]
        self._told[key] = before + (1 if present else -1)
        if not self._told[key]:
            del self._told[key]
        if not (before and key in self._told):
            names = self._relay.namespaces
            (names.remote.add if present else names.remote.remove)(namespace, session)
            again = self._session is not None and (self._session, namespace) in self._told
            names.tell(namespace, lost=not present and not again)


class _Listing:
    """A SUBSCRIBE_NAMESPACE whose namespaces are held for a moment when it is given up."""

    def __init__(self, request: Cancellable, given_up: Callable[[], None]) -> None:
        self._request = request
        self._given_up = given_up

    @property
    def state(self) -> RequestState:
        return self._request.state

    def cancel(self) -> None:
        self._request.cancel()
        self._given_up()
