"""The directory of a mesh at work: it is told, asked, and the relays that it names are dialled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from moqt.aio import MoqtSession
from moqt.quic.config import QuicConfig
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from moqt.values.errors import ConnectError, MoqtError
from moqt.values.names import TrackNamespace
from relay.core import Relay
from relay.mesh.directory import (
    BATCH,
    Change,
    Circuit,
    Finder,
    Has,
    LookUps,
    Place,
    Registrations,
)
from relay.mesh.listings import Listings
from relay.scopes import Scopes

logger = logging.getLogger("relay")

ALIVE_SECONDS = 10.0
"""For which the directory believes a relay to be there that says nothing."""

STAY_SECONDS = 3.0
"""After which it says again that it is."""

TTL_SECONDS = 600.0
"""For which a namespace stays registered that is not told again; a relay that is gone counts no
more after `ALIVE_SECONDS`."""

CHANGES_SECONDS = 0.05
"""For which changes are gathered."""

DIAL_SECONDS = 2.0
"""That a relay of the mesh may take to answer; later ones are found by the next look-up."""

DIALLED_AT_ONCE = 4
"""Relays that are dialled for one look-up of a namespace; of a prefix that is listed, all are."""

LISTING_SECONDS = 0.5
"""After which it is seen what listings are to look for again."""

FAILED_SECONDS = 2.0
"""For which a relay that did not answer is not dialled again."""

CLOSING_SECONDS = 1.0
"""That telling the directory of the end may take."""

IDLE_SECONDS = 60.0
"""After which a session of the mesh that nobody uses is closed."""


DIRECTORY_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
"""Of the URLs of a directory."""


class Store(Protocol):
    """The server; what it cannot do raises an OSError or a DirectoryError."""

    async def stay(self, relay: str, url: str, alive_s: float) -> bool: ...
    async def leave(self, relay: str) -> None: ...
    async def tell(self, relay: str, changes: list[Change], ttl_s: float) -> None: ...
    async def find(self, asked: list[Place]) -> list[list[tuple[str, str]]]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The directory, and how the relays in it are dialled."""

    url: str = field(repr=False)
    reached_as: str | None
    """Where other relays reach this one; None: where it listens."""
    quic: QuicConfig
    session: SessionConfig = field(default_factory=SessionConfig)
    password: str | None = field(default=None, repr=False)
    cafile: Path | None = None
    prefix: str = "kvcs-relay"
    timeout: float = 0.5
    """Seconds that the server may take."""


Connect = Callable[[str, Relay], Awaitable[MoqtSession]]
"""Makes an established session to a URL; raises MoqtError."""


class DirectoryClient:
    """Tells the directory what is published in any scope, and finds what is not."""

    def __init__(
        self,
        scopes: Scopes,
        store: Store,
        name: str,
        reached_as: str,
        connect: Connect,
        *,
        failures: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        """`name` is this relay's among the others; `failures` are what the store raises."""
        self._scopes = scopes
        self._store = store
        self._name = name
        self._reached_as = reached_as
        self._connect = connect
        self._failures = failures
        self._counters = scopes.counters
        self._registrations = Registrations(scopes.config, scopes.counters)
        self._circuit = Circuit()
        self._finders: dict[str, Finder] = {}
        self._listings: dict[str, Listings] = {}
        self._asked: list[Place] = []
        self._asking = asyncio.Event()
        self._sessions: dict[tuple[str, str], MoqtSession] = {}
        """By scope and relay."""
        self._idle_since: dict[tuple[str, str], float] = {}
        self._dials: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failed: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        scopes.made.append(self._scope_made)
        scopes.gone.append(self._scope_gone)
        for scope, relay in scopes.relays.items():
            self._scope_made(scope, relay)

    @property
    def registered(self) -> int:
        """Namespaces that the directory is told of."""
        return len(self._registrations)

    @property
    def sessions(self) -> int:
        """To other relays of the mesh."""
        return len(self._sessions)

    # -- scopes ------------------------------------------------------------------------------

    def _scope_made(self, scope: str, relay: Relay) -> None:
        def ask(below: bool, namespace: TrackNamespace) -> None:
            self._asked.append(Place(scope, namespace, below))
            self._asking.set()

        def told(namespace: TrackNamespace) -> None:
            names = relay.namespaces
            has = Has.NOTHING
            if namespace in names.published:
                has = Has.PUBLISHED
            elif any(namespace in table for table in names.cached):
                has = Has.CACHED
            self._registrations.note(scope, namespace, has, names.any_below)

        finder = self._finders[scope] = Finder(relay, partial(ask, False))
        self._listings[scope] = Listings(relay, partial(ask, True), finder.sessions)
        relay.askable.finder = finder
        relay.namespaces.events.told.append(told)
        for table in (relay.namespaces.published, *relay.namespaces.cached):
            for namespace in table.namespaces_under(()):
                told(namespace)

    def _scope_gone(self, scope: str) -> None:
        finder = self._finders.pop(scope)
        looking: tuple[LookUps, ...] = finder, self._listings.pop(scope)
        for each in looking:
            for namespace in each.waited_for:
                each.answered(namespace, ())
        for table in finder.relay.namespaces.cached:
            for namespace in table.namespaces_under(()):
                # what becomes of it is not heard any more
                self._registrations.note(scope, namespace, Has.NOTHING, lambda _: False)

    # -- work --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled; then the directory is told that this relay is not there any more."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stay())
                group.create_task(self._tell())
                group.create_task(self._answer())
                group.create_task(self._list())
        finally:
            for task in (*self._tasks, *self._dials.values()):
                task.cancel()
            for session in tuple(self._sessions.values()):
                session.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._leave()
                    await self._store.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _did_fail(self, error: Exception) -> None:
        self._counters.directory_failures += 1
        if self._circuit.failed(self._now()):
            logger.warning(
                "the directory does not answer (%s): what is not here is asked of upstream relays "
                "alone, until it does",
                error,
            )

    def _did_answer(self) -> None:
        if self._circuit.succeeded():
            logger.warning("the directory answers again")

    def leave(self) -> None:
        """This relay is going away: others are to find it no more. What is here goes on."""
        self._leaving = True
        self._spawn(self._leave())

    async def _leave(self) -> None:
        try:
            await self._store.leave(self._name)
        except self._failures as error:
            logger.info("the directory was not told that this relay leaves: %s", error)

    async def _stay(self) -> None:
        first = True
        while not self._leaving:
            try:
                known = await self._store.stay(self._name, self._reached_as, ALIVE_SECONDS)
            except self._failures as error:
                self._did_fail(error)
            else:
                self._did_answer()
                if not known and not first:
                    self._registrations.tell_all()
                first = False
            self._close_idle()
            for finder in self._finders.values():
                finder.look_for_waiting()
            await asyncio.sleep(STAY_SECONDS)

    async def _tell(self) -> None:
        while True:
            changes = self._registrations.due(self._now())
            if not changes or not self._circuit.allows(self._now()):
                self._registrations.untold(changes)
                await asyncio.sleep(CHANGES_SECONDS if not changes else STAY_SECONDS / 3)
                continue
            try:
                await self._store.tell(self._name, changes, TTL_SECONDS)
            except self._failures as error:
                self._registrations.untold(changes)
                self._did_fail(error)
                await asyncio.sleep(STAY_SECONDS / 3)
            else:
                self._did_answer()
                self._registrations.told(changes, self._now() + TTL_SECONDS / 3)

    async def _answer(self) -> None:
        while True:
            await self._asking.wait()
            self._asking.clear()
            while self._asked:
                asked, self._asked = self._asked[:BATCH], self._asked[BATCH:]
                await self._find(asked)

    async def _list(self) -> None:
        while True:
            await asyncio.sleep(LISTING_SECONDS)
            for listings in tuple(self._listings.values()):
                listings.tick(listings.relay.clock.now)

    async def _find(self, asked: list[Place]) -> None:
        found: list[list[tuple[str, str]]] | None = None
        if self._circuit.allows(self._now()):
            self._counters.directory_lookups += len(asked)
            try:
                found = await self._store.find(asked)
            except self._failures as error:
                self._did_fail(error)
            else:
                self._did_answer()
        for number, (scope, namespace, below) in enumerate(asked):
            finder = self._finders.get(scope)
            if finder is None:
                continue  # nobody is there any more
            looking = self._listings[scope] if below else finder
            if found is None:
                looking.answered(namespace, None)
                continue
            others = [each for each in found[number] if each[0] != self._name]
            others = others if below else others[:DIALLED_AT_ONCE]
            names = tuple(name for name, _ in others)
            missing = [each for each in others if each[0] not in finder.sessions]
            answer = partial(looking.answered, namespace, names)
            if not missing:
                answer()
            else:
                self._spawn(self._reach(scope, finder, missing, answer))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the other relays --------------------------------------------------------------------

    async def _reach(
        self,
        scope: str,
        finder: Finder,
        missing: list[tuple[str, str]],
        answer: Callable[[], object],
    ) -> None:
        """Dial those that are `missing`, and answer when all are there, or take too long."""
        dials = [
            dial
            for name, url in missing
            if (dial := self._dial(scope, finder, name, url)) is not None
        ]
        if dials:
            await asyncio.wait(dials, timeout=DIAL_SECONDS)
        answer()

    def _dial(self, scope: str, finder: Finder, name: str, url: str) -> asyncio.Task[None] | None:
        key = scope, name
        dial = self._dials.get(key)
        if dial is not None:
            return dial
        if self._failed.get(key, 0.0) > self._now():
            return None
        most = self._scopes.config.max_mesh_sessions
        own = sum(each == scope for each, _ in (*self._sessions, *self._dials))
        left = most - len(self._sessions) - len(self._dials)
        if own >= left and not self._close_one_idle(None if left <= 0 else scope):
            self._counters.mesh_sessions_refused += 1
            if self._counters.mesh_sessions_refused == 1:
                logger.warning(
                    "there are %d sessions to other relays of the mesh, and no more are made "
                    "(max_mesh_sessions)",
                    most,
                )
            return None
        dial = self._dials[key] = asyncio.ensure_future(self._connected(key, finder, url))
        dial.add_done_callback(lambda _: self._dials.pop(key, None))
        return dial

    async def _connected(self, key: tuple[str, str], finder: Finder, url: str) -> None:
        scope, name = key
        at = url.rstrip("/") + scope
        try:
            if parse_uri(at).path != scope:
                # a path that is none would name another host, or another scope
                raise ConnectError(f"{scope!r} is no path that can be dialled")
            session = await self._connect(at, finder.relay)
        except MoqtError as error:
            self._failed = {each: at for each, at in self._failed.items() if at > self._now()}
            self._failed[key] = self._now() + FAILED_SECONDS
            logger.warning("the relay %s of the mesh: %s", url, error)
            return
        if self._finders.get(scope) is not finder:
            session.close()  # nobody is in the scope any more
            return
        self._sessions[key] = session
        finder.sessions[name] = session.session
        self._spawn(self._until_closed(key, finder, session))

    async def _until_closed(
        self, key: tuple[str, str], finder: Finder, session: MoqtSession
    ) -> None:
        await session.wait_closed()
        self._sessions.pop(key, None)
        self._idle_since.pop(key, None)
        finder.lost(key[1])
        listings = self._listings.get(key[0])
        if listings is not None:
            listings.lost(key[1])

    def _close_idle(self) -> None:
        """Close the sessions that nobody has used for long."""
        now = self._now()
        for key, session in tuple(self._sessions.items()):
            if session.session.busy:
                self._idle_since.pop(key, None)
            elif now - self._idle_since.setdefault(key, now) >= IDLE_SECONDS:
                session.close()

    def _close_one_idle(self, scope: str | None) -> bool:
        """Whether one that nobody uses was closed; only one of `scope`, if that is said."""
        for (of, _), session in self._sessions.items():
            if scope in (None, of) and session.closed is None and not session.session.busy:
                session.close()
                return True
        return False
