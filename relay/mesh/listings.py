"""What the relays of a mesh have under the prefixes that are listed here. Sans-IO.

The directory names those that have something there, and each of them is asked for what it has
itself (SUBSCRIBE_NAMESPACE in a session with FIRST_HAND) for as long as somebody lists. Meanwhile
the directory is looked at again and again: others may have something later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from moqt.session import Session
from moqt.values.names import TrackNamespace
from relay.core import Relay
from relay.mesh.directory import LookUps
from relay.mesh.interests import UNWANTED_SECONDS, UPSTREAM_PATIENCE, Answered
from relay.mesh.told import Told

MAX_UNWANTED = 1024
"""Prefixes of one scope that others are asked for, though nobody lists them, for
`UNWANTED_SECONDS`: whoever was told to ask again finds them answered. Beyond, the oldest goes."""


@dataclass(slots=True)
class _Listed:
    """A prefix that others are asked for."""

    listeners: set[object] = field(default_factory=set)
    relays: tuple[str, ...] = ()
    """Who is asked."""


class Listings(LookUps):
    """Those of one scope. What others tell goes to `Namespaces.remote`."""

    def __init__(
        self,
        relay: Relay,
        ask: Callable[[TrackNamespace], None],
        sessions: Mapping[str, Session],
    ) -> None:
        """`ask` is to have the directory asked who has something under a prefix; `sessions` are
        those to the relays of the mesh, by their names, as they come and go."""
        super().__init__(relay, ask)
        self._sessions = sessions
        self._wanted: dict[TrackNamespace, _Listed] = {}
        self._unwanted: OrderedDict[TrackNamespace, float] = OrderedDict()
        """Those of them that nobody lists, until when they are kept."""
        self._others: dict[str, Told] = {}
        """What each relay tells."""
        relay.namespaces.events.listed.append(self._listed)
        relay.namespaces.events.awaited.append(self._await_others)
        relay.askable.untold.append(self._is_untold)

    def tick(self, now: float) -> None:
        self.relay.namespaces.tick(now)
        for name, told in tuple(self._others.items()):
            told.tick(now)
            if told.idle:
                del self._others[name]
        while self._unwanted and now >= next(iter(self._unwanted.values())):
            self._drop(self._unwanted.popitem(last=False)[0])
        for prefix, listed in tuple(self._wanted.items()):
            if listed.listeners:
                self._look(prefix)

    def lost(self, name: str) -> None:
        """The session to that relay has ended: it is looked at once whether it is still there."""
        told = self._others.get(name)
        if told is not None:
            told.attach(None)
        for prefix, listed in self._wanted.items():
            if name in listed.relays:
                self.forget(prefix)

    # -- who lists here ----------------------------------------------------------------------

    def _listed(self, session: Session, prefix: TrackNamespace, item: object, on: bool) -> None:
        listed = self._wanted.get(prefix)
        if not on:
            if listed is not None and item in listed.listeners:
                listed.listeners.discard(item)
                self._left(prefix, listed)
            return
        if not self.relay.namespaces.goes_up(session):
            return
        if listed is None:
            listed = self._wanted[prefix] = _Listed()
        listed.listeners.add(item)
        self._unwanted.pop(prefix, None)
        if self.known(prefix):
            self._ask_others(prefix)
        else:
            self._look(prefix)

    def _left(self, prefix: TrackNamespace, listed: _Listed) -> None:
        if listed.listeners:
            return
        if not listed.relays:
            self._drop(prefix)
            return
        self._unwanted[prefix] = self.relay.clock.now + UNWANTED_SECONDS
        if len(self._unwanted) > MAX_UNWANTED:
            self._drop(self._unwanted.popitem(last=False)[0])

    def _drop(self, prefix: TrackNamespace) -> None:
        for name in self._wanted.pop(prefix).relays:
            self._others[name].remove(prefix, self)

    def _await_others(self, session: Session, prefix: TrackNamespace, then: Answered) -> None:
        if not self.relay.namespaces.goes_up(session):
            then(True)
            return
        waits = True

        def answered(known: bool) -> None:
            nonlocal waits
            waits = False
            then(known)

        if self.known(prefix):
            self._await_told(prefix, answered)
        else:
            self.look_up(prefix, partial(self._await_told, prefix, answered))
        if waits:
            # what is known here is not kept back, but of the others nothing can be said
            session.clock.after(UPSTREAM_PATIENCE, partial(then, False))

    def _await_told(self, prefix: TrackNamespace, then: Answered) -> None:
        """Who has something is known: wait until they have told of it."""
        answer, listed = self.answer(prefix), self._wanted.get(prefix)
        if answer is None or listed is None:
            then(False)
            return
        left = set(listed.relays)
        lost = not answer.said

        def told(name: str, known: bool) -> None:
            nonlocal lost
            if name in left:
                left.discard(name)
                lost = lost or not known
                if not left:
                    then(not lost)

        if not left:
            then(not lost)
        for name in listed.relays:
            self._others[name].await_answer(prefix, partial(told, name))

    def _is_untold(self, namespace: TrackNamespace) -> bool:
        """Whether not all have told what they have below a prefix of it that is listed: who lists
        and then asks for what nobody has must not be told that it has heard of everything."""
        for length in range(len(namespace) + 1):
            prefix = namespace[:length]
            listed = self._wanted.get(prefix)
            if listed is None:
                continue
            answer = self.answer(prefix)
            if answer is None or not answer.said:
                return True
            if not all(self._others[name].tells(prefix) for name in listed.relays):
                return True
        return False

    # -- whom it asks ------------------------------------------------------------------------

    def _look(self, prefix: TrackNamespace) -> None:
        """Ask the directory, if what it has said is old."""
        if not self.known(prefix) and not self.asked(prefix):
            self.look_up(prefix, partial(self._ask_others, prefix))

    def _ask_others(self, prefix: TrackNamespace) -> None:
        """Ask those that the directory names, and no others any more."""
        answer, listed = self.answer(prefix), self._wanted.get(prefix)
        if answer is None or listed is None:
            return
        before, listed.relays = listed.relays, answer.relays
        for name in answer.relays:
            told = self._others.get(name)
            if told is None:
                told = self._others[name] = Told(self.relay)
            session = self._sessions.get(name)
            if session is not told.session and session is not None and session.closed is None:
                told.attach(session)
            told.add(prefix, self)
        for name in before:
            if name not in answer.relays:
                self._others[name].remove(prefix, self)
