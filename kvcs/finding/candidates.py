"""Which publication to try next, and on which session (KVCS "Discovering Publications").

Publications that the application names replace all others. Else they are discovered on the
consumer's own relay, and named by an index service, which may know of other relays, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from kvcs.finding.discovery import DEFAULT_GRACE, DEFAULT_PROBES, Discovery
from kvcs.finding.relays import Sessions
from kvcs.names.errors import NotFound, PublisherLost, RetrievalError, VerificationFailed
from kvcs.names.namespace import PublicationNamespace
from kvsp.names.codes import Codec
from moqt.aio import MoqtSession
from moqt.values.errors import MoqtError

if TYPE_CHECKING:
    from kvsp.records.records import LookupResponse, ReplicaRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """A publication, and the relay to ask: None for the consumer's own."""

    url: str | None
    namespace: PublicationNamespace
    blocks: int = field(default=0, compare=False)
    """How many of our blocks it is said to have; 0 when nothing tells."""
    records: tuple[ReplicaRecord, ...] = field(default=(), compare=False, repr=False)
    """What the index service has recorded of our leading blocks in it."""


class Index(Protocol):
    """What an index service has said of publications so far."""

    @property
    def looked_up(self) -> bool:
        """Whether it has answered, or failed to."""
        ...

    @property
    def named(self) -> Sequence[Candidate]:
        """Publications, those with most of our blocks first."""
        ...


def named_by(found: LookupResponse) -> list[Candidate]:
    """The publications in an answer of the index service, those with most blocks first."""
    recorded: dict[tuple[str, str], list[ReplicaRecord]] = {}
    for number, block in enumerate(found.blocks):
        for record in block.replicas:
            if record.moqt_namespace is None:
                continue
            place = record.holder, record.moqt_namespace
            known = recorded.get(place, [])
            # one that lacks an earlier block is of no use for this one
            if len(known) == number:
                recorded.setdefault(place, known).append(record)
            elif len(known) == number + 1 and record.codec == Codec.RAW:
                known[number] = record  # in several codecs: the one that can be compared
    most_first = sorted(recorded.items(), key=lambda each: -len(each[1]))
    return [
        Candidate(url, PublicationNamespace.from_text(text), len(records), tuple(records))
        for (url, text), records in most_first
    ]


class Candidates:
    """The publications that may be tried, each once: `next` gives them, the best first."""

    def __init__(
        self,
        sessions: Sessions,
        scope_id: bytes,
        compat_id: bytes,
        keys: Sequence[bytes],
        *,
        changed: asyncio.Event,
        wait: Callable[[float | None], Awaitable[None]],
        given: Sequence[PublicationNamespace] | None = None,
        index: Index | None = None,
        min_blocks: int = 1,
        grace: float = DEFAULT_GRACE,
        probes: int = DEFAULT_PROBES,
    ) -> None:
        """`given` are known already, in order of preference, and replace discovery.
        `min_blocks`, `grace` and `probes` are those of `Discovery`. `wait` waits for `changed`,
        until a time at the latest, and raises what ends the search.
        """
        self.failure: RetrievalError | None = None
        """The failure of those tried that tells most."""
        self.longest = 0
        """Blocks of the longest publication known of."""
        self._sessions = sessions
        self._scope_id = scope_id
        self._compat_id = compat_id
        self._keys = keys
        self._changed = changed
        self._wait = wait
        self._given = given
        self._index = index
        self._min_blocks = min_blocks
        self._grace = grace
        self._probes = probes
        self._discoveries: dict[int, Discovery] = {}
        self._tried: set[Candidate] = set()

    async def next(self, index_by: float) -> tuple[Candidate, MoqtSession]:
        """The next publication to try, and the session to its relay.

        The index service is waited for until `index_by`. Raises why there is none.
        """
        while True:
            candidate = await self._next(index_by)
            session = await self._session_at(candidate.url)
            self._tried.add(candidate)
            if session is not None:
                return candidate, session

    def known(self) -> Candidate | None:
        """A publication that is known already and was not tried."""
        if self._given is not None:
            given = (Candidate(None, namespace) for namespace in self._given)
            return next((each for each in given if each not in self._tried), None)
        for discovery in self._discoveries.values():
            chosen = self._discovered(discovery)
            if chosen is not None:
                return chosen
        if self._index is None or not self._searched_longer:
            return None
        for named in self._index.named:
            self.longest = max(self.longest, named.blocks)
            # our own relay may lead there, too, and is nearer
            for each in (replace(named, url=None), named):
                if each not in self._tried and self._sessions.reaches(each.url):
                    return each
        return None

    def allow_again(self, candidate: Candidate) -> None:
        """It was given up for no fault of its own: it may be tried again."""
        self._tried.discard(candidate)

    def failed(self, error: RetrievalError) -> None:
        """Why the last one was given up."""
        # that a cache is bad is worth knowing, even when the next one is only gone
        if not isinstance(self.failure, VerificationFailed):
            self.failure = error

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        for discovery in self._discoveries.values():
            discovery.close()

    # -- inside --------------------------------------------------------------------------

    async def _next(self, index_by: float) -> Candidate:
        if self._given is None and self._index is not None:
            while not self._index.looked_up and _now() < index_by:
                self._changed.clear()
                await self._wait(index_by)
        known = self.known()
        if known is not None:
            return known
        if self._given is None:
            named = self._named_blocks
            # the index service need not know of all, and of none that is longer than it says
            for least, keys in ((named + 1, self._keys), (self._min_blocks, self._keys[:named])):
                found = await self._discover(max(least, self._min_blocks), keys)
                if found is not None:
                    return found
                known = self.known()
                if known is not None:
                    return known
        raise self.failure or _not_found()

    @property
    def _named_blocks(self) -> int:
        """Blocks of the longest publication that the index service names."""
        named = self._index.named if self._index is not None else ()
        return min(named[0].blocks, len(self._keys)) if named else 0

    async def _session_at(self, url: str | None) -> MoqtSession | None:
        """The session to a relay, or None when there is none; `failure` says why."""
        task = self._sessions.dial(url)
        while not task.done():
            self._changed.clear()
            await self._wait(None)
        try:
            return task.result()
        except MoqtError as error:
            lost = PublisherLost(str(error))
            lost.__cause__ = error
            self.failure = self.failure or lost
            return None

    async def _discover(self, least: int, keys: Sequence[bytes]) -> Candidate | None:
        """Look for a publication of at least `least` of `keys` on our own relay."""
        if least > len(keys):
            return None
        session = await self._session_at(None)
        if session is None or (self.failure is not None and session.closed is not None):
            return None
        discovery = self._discoveries.get(least)
        if discovery is None:
            discovery = self._discoveries[least] = Discovery(
                session.session,
                self._scope_id,
                self._compat_id,
                keys,
                min_blocks=least,
                grace=self._grace,
                probes=self._probes,
                changed=self._changed.set,
            )
        while True:
            self._changed.clear()
            due = discovery.poll(_now())
            if discovery.done:
                self.longest = max(self.longest, discovery.found)
                chosen = self._discovered(discovery)
                if chosen is not None:
                    return chosen
                # others of the same prefix may be about to be told of
                due = discovery.settled_at()
                if self.failure is None or due is None or due <= _now():
                    return None
            elif discovery.error is not None:
                if self._index is None:
                    raise discovery.error
                self.failure = self.failure or discovery.error
                return None
            await self._wait(due)

    def _discovered(self, discovery: Discovery) -> Candidate | None:
        chosen = discovery.choose({c.namespace for c in self._tried if c.url is None})
        return None if chosen is None else Candidate(None, chosen)

    @property
    def _searched_longer(self) -> bool:
        """Whether there is nothing longer than what the index service names."""
        least = max(self._named_blocks + 1, self._min_blocks)
        discovery = self._discoveries.get(least)
        own = self._sessions.dial(None)
        lost = own.done() and (own.cancelled() or own.exception() is not None)
        return (
            least > len(self._keys)
            or lost
            or (discovery is not None and (discovery.done or discovery.error is not None))
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _not_found() -> NotFound:
    # one sentence for every reason, so that it tells nothing about scopes
    return NotFound(
        "no publication of these tokens, or of a shorter prefix of them, was found; one is found "
        "only when all of its tokens are the first of these, and scope key, descriptor and the "
        "path of the URL are its publisher's"
    )
