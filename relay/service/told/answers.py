"""What a relay tells its admin listener: whether it is ready, its numbers, what it holds and whom
it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from moqt.session import Session
from moqt.values.names import (
    FullTrackName,
    TrackNamespace,
    namespace_of,
    printable_name,
    printable_namespace,
)
from relay.core import Relay
from relay.disk.tier import Shelf
from relay.scopes import Scopes, scope_of
from relay.service.told.grids import Grid, row

logger = logging.getLogger("relay")

PAGE = 1000
"""Entries of an answer, unless fewer are asked for with `limit`."""
PUBLICATIONS = 16
"""Those of an answer with their grids, likewise."""

Query = Mapping[str, str]


class Numbers(Protocol):
    """What Prometheus' encoders take."""

    def collect(self) -> Iterable[Metric]: ...


class Answers(Protocol):
    """Whoever the listener asks: one relay, or all its workers together."""

    async def not_ready(self) -> str | None:
        """Why no new client should be sent here; None when there is no reason."""

    async def numbers(self) -> Numbers: ...

    async def tell(self, what: str, query: Query) -> dict[str, Any]:
        """`tracks`, `publications`, `sessions`, `upstreams`, or what a `purge` did.

        Raises ValueError with a sentence for a query that cannot be meant.
        """


@dataclass(frozen=True, slots=True)
class Upstream:
    """A relay above, as the listener tells of it."""

    url: str
    session: Callable[[], Session | None]


class OwnAnswers:
    """Those of the relay in this process."""

    def __init__(
        self, scopes: Scopes, registry: CollectorRegistry, upstreams: Sequence[Upstream] = ()
    ) -> None:
        self._scopes = scopes
        self._registry = registry
        self._above = upstreams

    async def not_ready(self) -> str | None:
        if not self._above or any(each.session() is not None for each in self._above):
            return None
        urls = ", ".join(each.url for each in self._above)
        return f"no upstream relay is connected ({urls})"

    async def numbers(self) -> Numbers:
        return self._registry

    async def tell(self, what: str, query: Query) -> dict[str, Any]:
        answers = {
            "tracks": self._tracks,
            "publications": self._publications,
            "sessions": self._sessions,
            "upstreams": self._upstreams,
            "purge": self._purge,
        }
        return await answers[what](query)

    def _relays(self, query: Query) -> list[tuple[str, Relay]]:
        return [(scope, relay) for scope, relay, _ in self._places(query) if relay is not None]

    def _places(self, query: Query) -> list[tuple[str, Relay | None, Shelf | None]]:
        """The scopes that are asked for, also those of which the disk alone has something."""
        scopes = self._scopes
        shelves = {} if scopes.disk is None else scopes.disk.shelves
        scope = query.get("scope")
        names = [*dict.fromkeys([*scopes.relays, *shelves])] if scope is None else [scope]
        return [(name, scopes.relays.get(name), shelves.get(name)) for name in names]

    async def _tracks(self, query: Query) -> dict[str, Any]:
        limit, prefix = limit_of(query), namespace_of(query.get("namespace", ""))
        skip = number_of(query, "after", 0)
        entries: list[dict[str, Any]] = []
        seen = 0
        for scope, relay, shelf in self._places(query):
            known = [] if relay is None else [*relay.tracks]
            kept = [] if shelf is None else [*shelf.entries]
            for name in dict.fromkeys([*known, *kept]):
                if name.namespace[: len(prefix)] != prefix:
                    continue
                seen += 1
                if seen <= skip or len(entries) >= limit:
                    continue
                if len(entries) % 100 == 99:
                    await asyncio.sleep(0)
                told = _track(relay, shelf, name)
                if told is not None:
                    entries.append({"scope": scope, **told})
        return {"tracks": entries, "of": seen, "after": skip + len(entries)}

    async def _publications(self, query: Query) -> dict[str, Any]:
        """Tracks by the Objects that are here, namespace by namespace."""
        limit = min(PUBLICATIONS, number_of(query, "limit", PUBLICATIONS))
        prefix = namespace_of(query.get("namespace", ""))
        skip = number_of(query, "after", 0)
        looked = seen = 0
        entries: list[dict[str, Any]] = []
        for scope, relay, shelf in self._places(query):
            found: dict[TrackNamespace, Grid] = {}
            known = [] if relay is None else [*relay.tracks]
            kept = [] if shelf is None else [*shelf.entries]
            for name in dict.fromkeys([*known, *kept]):
                looked += 1
                if looked % PAGE == 0:
                    await asyncio.sleep(0)
                if name.namespace[: len(prefix)] == prefix:
                    found.setdefault(name.namespace, Grid(scope, name)).add(name)
            for grid in found.values():
                seen += 1
                if seen <= skip or len(entries) >= limit:
                    continue
                entry = grid.told()
                for name in grid.names:
                    entry["rows"].append(row(relay, shelf, name))
                    await asyncio.sleep(0)
                entries.append(entry)
        return {"publications": entries, "of": seen, "after": skip + len(entries)}

    async def _sessions(self, query: Query) -> dict[str, Any]:
        limit, skip = limit_of(query), number_of(query, "after", 0)
        every: list[tuple[str, Relay | None, Session]] = [
            (scope, relay, session)
            for scope, relay in self._relays(query)
            for session in relay.sessions
        ]
        wanted = query.get("scope")
        every += [
            (scope, None, session)
            for session in self._scopes.threshold.sessions
            if wanted in (None, scope := scope_of(session.path))
        ]
        chosen = every[skip : skip + limit]
        entries = []
        for number, (scope, relay, session) in enumerate(chosen):
            if number % 100 == 99:
                await asyncio.sleep(0)
            entries.append(
                {
                    "scope": scope,
                    "connection": session.transport.connection_id,
                    "peer": session.transport.peer_address,
                    "upstream": relay is not None and session in relay.upstreams,
                    "leaving": session.goaway is not None,
                    "remembered": {
                        table: value
                        for table, value in asdict(session.remembered()).items()
                        if value
                    },
                }
            )
        return {"sessions": entries, "of": len(every), "after": skip + len(entries)}

    async def _upstreams(self, query: Query) -> dict[str, Any]:
        found = []
        for each in self._above:
            session = each.session()
            found.append(
                {
                    "url": each.url,
                    "connected": session is not None,
                    "peer": None if session is None else session.transport.peer_address,
                    "leaving": session is not None and session.goaway is not None,
                }
            )
        return {"upstreams": found}

    async def _purge(self, query: Query) -> dict[str, int]:
        if "namespace" not in query:
            raise ValueError("say which: ?namespace=, as /tracks.json shows it before --")
        prefix = namespace_of(query["namespace"])
        tracks = octets = used = 0
        for _, relay, shelf in self._places(query):
            if relay is not None:
                purged = relay.purge(prefix)
            elif shelf is not None:
                files = shelf.purge(prefix, ())
                purged = len(files), sum(files.values()), 0
            else:
                continue
            tracks, octets, used = tracks + purged[0], octets + purged[1], used + purged[2]
        logger.warning(
            "purged %d tracks, %d octets, under %r; %d are in use and stay",
            tracks,
            octets,
            printable_namespace(prefix),
            used,
        )
        return {"tracks": tracks, "octets": octets, "in_use": used}


def _track(relay: Relay | None, shelf: Shelf | None, name: FullTrackName) -> dict[str, Any] | None:
    """What there is of a track, in memory and on the disk."""
    track = None if relay is None else relay.tracks.get(name)
    entry = None if shelf is None else shelf.entries.get(name)
    if track is None and entry is None:
        return None
    told: dict[str, Any] = {
        "track": printable_name(name.namespace, name.name),
        "groups": 0,
        "octets": 0,
        "disk_octets": 0 if entry is None else entry.octets,
        "expires": None if entry is None else entry.expires,
        "largest": None,
        "ended": True,
        "publishers": 0,
        "fetches": 0,
        "readers": 0,
        "waiting": 0,
    }
    if entry is not None and entry.largest is not None:
        told["largest"] = list(entry.largest)
    if track is not None:
        store = track.store
        told |= {
            "groups": len(store.groups),
            "octets": store.octets,
            "largest": None if store.largest is None else list(store.largest),
            "ended": store.ended,
            "publishers": len(track.subscriptions),
            "fetches": len(track.ranges.fetches),
            "readers": len(track.requests) + len(track.offers),
            "waiting": len(track.waiting),
        }
    return told


def number_of(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(f"{name} must be a whole number")
    return int(text)


def limit_of(query: Query) -> int:
    return min(PAGE, number_of(query, "limit", PAGE))
