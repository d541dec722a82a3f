"""The directory of a mesh: which relay publishes which namespaces. Sans-IO.

Each relay registers what is published there; a relay that is asked for something else looks up who
has it, and asks that one (`directory_client` keeps the connections). That one answers with what it
has itself (FIRST_HAND): a track goes one hop, whoever asks. The prefixes of what is published are
registered, too, so that who lists under one finds all that have something there (`listings`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from moqt.session import Session
from moqt.values.errors import escaped
from moqt.values.names import TrackNamespace
from relay.config import Clock, Counters, RelayConfig
from relay.core import Relay

logger = logging.getLogger("relay")

BATCH = 512
"""Namespaces that are told, or looked up, at once."""

FOUND_SECONDS = 5.0
"""For which an answer of the directory that names a relay holds."""

NOT_FOUND_SECONDS = 1.0
"""For which one holds that names none, or that did not come."""

MAX_ANSWERS = 16_384
"""Answers that are remembered for one scope; beyond, the oldest goes."""

MAX_LOOKED_UP = 4096
"""Namespaces of one scope that are looked up at once, and as many prefixes that are listed; asked
for more, the directory counts as one that does not answer."""

MAX_FAILURES = 3
"""In a row, after which the directory is left alone for a while."""

RESTING_SECONDS = 5.0


class Circuit:
    """Whether the directory is asked at all: one that is dead would make everybody wait."""

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self._closed_until = 0.0

    def allows(self, now: float) -> bool:
        return now >= self._closed_until

    def failed(self, now: float) -> bool:
        """Whether it is left alone from now on, which it was not before."""
        self.failures += 1
        if self.failures < MAX_FAILURES:
            return False
        self._closed_until = now + RESTING_SECONDS
        return self.failures == MAX_FAILURES

    def succeeded(self) -> bool:
        """Whether it had been left alone."""
        failures, self.failures = self.failures, 0
        return failures >= MAX_FAILURES


class Has(IntEnum):
    """What a relay has of a namespace."""

    NOTHING = 0
    CACHED = 1
    """A complete track, whose publisher is gone."""
    PUBLISHED = 2


class Place(NamedTuple):
    """A namespace of a scope, or (`below`) all those that are longer and begin with it."""

    scope: str
    namespace: TrackNamespace
    below: bool = False


class Change(NamedTuple):
    """What is here of a namespace, or below it, from now on."""

    scope: str
    namespace: TrackNamespace
    has: Has
    below: bool = False

    @property
    def place(self) -> Place:
        return Place(self.scope, self.namespace, self.below)


@dataclass(slots=True)
class _Entry:
    has: Has
    due: float = 0.0
    """When the directory is to be told again."""


class Registrations:
    """What the directory is to be told: every change once, and all again before it expires."""

    def __init__(self, config: RelayConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._entries: dict[Place, _Entry] = {}
        self._queue: OrderedDict[Place, None] = OrderedDict()
        """What is to be told now."""
        self._told: OrderedDict[Place, None] = OrderedDict()
        """What was told, the one that is due again first first."""
        self._of_scope: Counter[tuple[str, bool]] = Counter()
        """How many entries each scope has of namespaces, and (True) of what is below some."""
        self._warned = False

    def __len__(self) -> int:
        """Namespaces."""
        return sum(number for (_, below), number in self._of_scope.items() if not below)

    def note(
        self,
        scope: str,
        namespace: TrackNamespace,
        has: Has,
        below: Callable[[TrackNamespace], bool],
    ) -> None:
        """That is here of `namespace` from now on; what was so before changes nothing. `below` says
        whether something is here below a prefix of it."""
        self._note(Place(scope, namespace), has)
        for length in range(len(namespace)):
            prefix = namespace[:length]
            here = Has.PUBLISHED if below(prefix) else Has.NOTHING
            self._note(Place(scope, prefix, below=True), here)

    def _note(self, key: Place, has: Has) -> None:
        entry = self._entries.get(key)
        if has is (Has.NOTHING if entry is None else entry.has):
            return
        if entry is None:
            of = key.scope, key.below
            if self._of_scope[of] >= self._config.max_registered:
                self._at_limit(key.scope)
                return
            entry = self._entries[key] = _Entry(has)
            self._of_scope[of] += 1
        entry.has = has
        self._told.pop(key, None)
        self._queue[key] = None

    def _at_limit(self, scope: str) -> None:
        self._counters.namespaces_unregistered += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "the directory is told of %d namespaces, or prefixes of them, of the path %s and "
                "no more (max_registered): other relays do not find what is published beyond",
                self._config.max_registered,
                escaped(scope),
            )

    def tell_all(self) -> None:
        """The directory has lost what it was told."""
        self._told.clear()
        self._queue.update(dict.fromkeys(self._entries))

    def due(self, now: float) -> list[Change]:
        """What is to be told now, at most `BATCH`; `told` or `untold` is to follow."""
        changes: list[Change] = []
        while self._queue and len(changes) < BATCH:
            key, _ = self._queue.popitem(last=False)
            changes.append(_change(key, self._entries[key]))
        while self._told and len(changes) < BATCH:
            key = next(iter(self._told))
            entry = self._entries[key]
            if entry.due > now:
                break
            del self._told[key]
            changes.append(_change(key, entry))
        return changes

    def told(self, changes: list[Change], again_at: float) -> None:
        """The directory knows them; what is there is to be told again at `again_at`."""
        for change in changes:
            key = change.place
            if key in self._queue:
                continue  # it has changed meanwhile
            if change.has:
                self._entries[key].due = again_at
                self._told[key] = None
            else:
                del self._entries[key]
                of = key.scope, key.below
                self._of_scope[of] -= 1
                if not self._of_scope[of]:
                    del self._of_scope[of]

    def untold(self, changes: list[Change]) -> None:
        """They did not get through: again, before what came later."""
        for change in reversed(changes):
            self._queue[change.place] = None
            self._queue.move_to_end(change.place, last=False)


def _change(key: Place, entry: _Entry) -> Change:
    return Change(key.scope, key.namespace, entry.has, key.below)


class Answer(NamedTuple):
    """What the directory said of a namespace."""

    until: float
    relays: tuple[str, ...]
    said: bool
    """False: it did not answer, and the relays are those that it named before."""


class LookUps:
    """What the directory is asked, and has said, for one scope."""

    def __init__(self, relay: Relay, ask: Callable[[TrackNamespace], None]) -> None:
        """`ask` is to have the directory asked; `answered` is to follow, soon."""
        self.relay = relay
        self._ask = ask
        self._clock: Clock = relay.clock
        self._answers: OrderedDict[TrackNamespace, Answer] = OrderedDict()
        self._waiting: dict[TrackNamespace, list[Callable[[], None]]] = {}

    def known(self, namespace: TrackNamespace) -> bool:
        """Whether the directory need not be asked."""
        answer = self._answers.get(namespace)
        return answer is not None and self._clock.now < answer.until

    def look_up(self, namespace: TrackNamespace, then: Callable[[], None]) -> None:
        """Call `then` when it is known."""
        waiting = self._look_up(namespace)
        if waiting is not None:
            waiting.append(then)
            return
        self.answered(namespace, None)
        then()

    def _look_up(self, namespace: TrackNamespace) -> list[Callable[[], None]] | None:
        """Who is told when it is known; None: too many are looked up already."""
        waiting = self._waiting.get(namespace)
        if waiting is None:
            if len(self._waiting) >= MAX_LOOKED_UP:
                return None
            waiting = self._waiting[namespace] = []
            self._ask(namespace)
        return waiting

    def answer(self, namespace: TrackNamespace) -> Answer | None:
        """What the directory has said of it, be it old; None: nothing, or that is forgotten."""
        return self._answers.get(namespace)

    def asked(self, namespace: TrackNamespace) -> bool:
        """Whether it is looked up."""
        return namespace in self._waiting

    def forget(self, namespace: TrackNamespace) -> None:
        """What the directory has said of it may not hold any more."""
        self._answers.pop(namespace, None)

    @property
    def waited_for(self) -> list[TrackNamespace]:
        """What the directory has been asked for."""
        return list(self._waiting)

    def answered(self, namespace: TrackNamespace, relays: tuple[str, ...] | None) -> Answer:
        """The directory names these, and they are connected where they could be; None: it did not
        answer, and what it said before holds."""
        old = self._answers.pop(namespace, None)
        if relays is None:
            until = self._clock.now + NOT_FOUND_SECONDS
            answer = Answer(until, old.relays if old else (), said=False)
        else:
            lasts = FOUND_SECONDS if relays else NOT_FOUND_SECONDS
            answer = Answer(self._clock.now + lasts, relays, said=True)
        self._answers[namespace] = answer
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        self._heard(answer)
        for then in self._waiting.pop(namespace, ()):
            then()
        return answer

    def _heard(self, answer: Answer) -> None:
        """Before those who wait are told."""


class Finder(LookUps):
    """Who has what is not here, for one scope."""

    def __init__(self, relay: Relay, ask: Callable[[TrackNamespace], None]) -> None:
        super().__init__(relay, ask)
        self.sessions: dict[str, Session] = {}
        """To the relays of the mesh, by their names."""

    def look_for_waiting(self) -> None:
        """Somebody may have come for whom requests wait (RENDEZVOUS_TIMEOUT)."""
        for namespace in self.relay.waiting.rendezvous.namespaces_under(()):
            if not self.known(namespace):
                self._look_up(namespace)

    def found(self, namespace: TrackNamespace) -> list[Session]:
        """The relays that have it and are connected. Looks anew when the answer is old."""
        answer = self._answers.get(namespace)
        if answer is None or self._clock.now >= answer.until:
            self._look_up(namespace)
        return [] if answer is None else list(self._connected(answer))

    def _connected(self, answer: Answer) -> Iterator[Session]:
        for name in answer.relays:
            session = self.sessions.get(name)
            if session is not None and session.closed is None and session.goaway is None:
                yield session

    def _heard(self, answer: Answer) -> None:
        unreachable = self.relay.askable.unreachable
        (unreachable.discard if answer.said else unreachable.add)(self)

    def answered(self, namespace: TrackNamespace, relays: tuple[str, ...] | None) -> Answer:
        """The same, the best first: requests that wait go there."""
        answer = super().answered(namespace, relays)
        for session in self._connected(answer):
            self.relay.source_found(namespace, session)
            for request in self.relay.waiting.under(namespace):
                self.relay.looked(request)
        return answer

    def lost(self, name: str) -> None:
        """The session to that relay has ended."""
        self.sessions.pop(name, None)
