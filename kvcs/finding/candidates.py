"""Which publication to try next, and on which session (KVCS "Discovering Publications").

Publications that the application names replace all others. Else they are found at the
consumer's own relay, and named by an index service, which may know of other relays, too. All
of them are candidates, those with most of our blocks first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import merge
from typing import TYPE_CHECKING, Final, Protocol

from kvcs.finding.probing import DEFAULT_PROBES
from kvcs.finding.relays import Sessions
from kvcs.finding.searching import Search
from kvcs.keeping.failures import Failures
from kvcs.names.errors import (
    NotFound,
    RetrievalError,
    Unsupported,
    VerificationFailed,
    tells_more,
)
from kvcs.names.namespace import PublicationNamespace
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor, Scope
from moqt.aio import MoqtSession

if TYPE_CHECKING:
    from kvsp.records.records import LookupResponse, ReplicaRecord

SLOW: Final = 2.0
"""Seconds after which a relay that has not said what is published does not keep the next one from
being asked."""

OF_ONE_PREFIX: Final = 3
"""Publications of one prefix that are tried before those of shorter ones have their turn: who
announces many that are dead hides nothing."""


class DiscoveryMode(StrEnum):
    """How publications are found."""

    LISTING = "listing"
    """All of the scope and model in one listing; prefix by prefix where a peer refuses that."""
    PROBE = "probe"
    """Prefix by prefix, which shows the relay where prompts part."""
    INDEX = "index"
    """Those that an index service names, and no others: the relay is asked for nothing else."""


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


def check_publications(
    publications: Sequence[PublicationNamespace], scope: Scope, descriptor: Descriptor
) -> None:
    """Raises ValueError when one cannot be of this scope and model."""
    ours = (scope.scope_id, descriptor.compat_id)
    if any((each.scope_id, each.compat_id) != ours for each in publications):
        raise ValueError("a publication is of another scope or Compatibility ID")


class Candidates:
    """The publications that may be tried, each once, the best first.

    `poll` at once, whenever `changed` was called, and when the time it returned has come, as
    long as another one is wanted: then `best` is the one to try, if there is one yet, and
    `searching` whether waiting may bring a better one.
    """

    def __init__(
        self,
        sessions: Sessions,
        scope_id: bytes,
        compat_id: bytes,
        keys: Sequence[bytes],
        *,
        changed: Callable[[], None],
        given: Sequence[PublicationNamespace] | None = None,
        index: Index | None = None,
        discovery: DiscoveryMode = DiscoveryMode.LISTING,
        min_blocks: int = 1,
        grace: float | None = None,
        probes: int = DEFAULT_PROBES,
        preferred: bytes | None = None,
        failures: Failures | None = None,
    ) -> None:
        """`given` are known already, in order of preference, and replace the search.
        `min_blocks` is the shortest prefix worth having; `grace` and `probes` are those of
        `Listing` and `Probing`, which each have their own `grace` without one. `preferred` is
        the Publication ID of one that goes before others of as many blocks. What `failures` has
        seen to fail lately is tried last, but for that one, and what fails here is noted there.
        """
        self.failure: RetrievalError | None = None
        """The failure of those tried that tells most."""
        self.longest = 0
        """Blocks of the longest publication known of, tried or not."""
        self._sessions = sessions
        self._scope_id = scope_id
        self._compat_id = compat_id
        self._keys = keys
        self._changed = changed
        self._given = given
        self._index = index
        self._discovery = discovery
        self._min_blocks = min_blocks
        self._grace = grace
        self._probes = probes
        self._preferred = preferred
        self._failures = Failures(0) if failures is None else failures
        self._now = 0.0
        self._relays = list(sessions.relays)
        """Those not searched so far."""
        self._tried: set[Candidate] = set()
        self._unrecorded: set[Candidate] = set()
        """Those whose records are not believed any more."""
        self._of_prefix: Counter[int] = Counter()
        self._stalled: list[Candidate] = []
        self._known: tuple[object, Candidate | None] = (None, None)
        self._searches = [self._search(None)]

    # -- the search ----------------------------------------------------------------------

    def poll(self, now: float) -> float | None:
        """Go on with the search. Returns when to come back at the latest."""
        self._now = now
        if self._given is not None or self._discovery is DiscoveryMode.INDEX:
            return None
        times = []
        first = self._searches[0]
        if first.began is None and self._failures.holds(self._sessions.name(None), now):
            self.widen()  # it was silent lately: it is not waited for
        for search in self._searches:
            lost = search.error is not None
            times.append(search.poll(now))
            if search.error is not None and not lost:
                self.failed(search.error)  # others may still be had
        # one that says nothing keeps no further one from being asked, whatever came of others
        silent = [each for each in self._searches if each.open and each.began is not None]
        if silent and self._relays:
            last = silent[-1]
            assert last.began is not None
            if now >= last.began + SLOW:
                relay = self._sessions.name(last.url)
                if relay is not None:
                    self._failures.note(relay, now)
                self.widen()
                return self.poll(now)
            times.append(last.began + SLOW)
        return min((at for at in times if at is not None), default=None)

    def widen(self) -> bool:
        """Search at the next relay, too; whether there is one."""
        if not self._relays:
            return False
        self._searches.append(self._search(self._relays.pop(0)))
        self._changed()
        return True

    def elsewhere(self, url: str | None) -> bool:
        """Whether there is another relay to ask than this one."""
        best = self.best()
        return bool(self._relays) or (best is not None and best.url != url)

    @property
    def open(self) -> int:
        """Publications of so many of our blocks, and of fewer, may yet be found."""
        if self._given is not None:
            return 0
        if self._index is not None and not self._index.looked_up:
            return len(self._keys)
        if self._discovery is DiscoveryMode.INDEX:
            return 0
        return max(search.open for search in self._searches)

    @property
    def searching(self) -> bool:
        """Whether more may yet be found."""
        return self.open >= max(self._min_blocks, 1)

    @property
    def untold(self) -> str | None:
        """Why a relay cannot tell for now what is published; None when none says so."""
        return next(filter(None, (search.untold for search in self._searches)), None)

    # -- the choice ----------------------------------------------------------------------

    def best(self) -> Candidate | None:
        """The best of those known that was not tried."""
        states = [search.state for search in self._searches]
        looked_up = self._index.looked_up if self._index is not None else None
        state = (len(self._tried), looked_up, *states)
        # looked for again only when there is something new
        if None in states or self._known[0] != state:
            self._known = (state, self._best())
        return self._known[1]

    def take(self, candidate: Candidate) -> asyncio.Task[MoqtSession]:
        """It is tried now: the session to its relay, which may take its time."""
        self._tried.add(candidate)
        self._of_prefix[candidate.blocks] += 1
        return self._sessions.dial(candidate.url)

    def allow_again(self, candidate: Candidate) -> None:
        """It was given up for no fault of its own: it may be tried again."""
        self._tried.discard(candidate)
        self._of_prefix[candidate.blocks] -= 1
        self._known = (None, None)

    def doubted(self, candidate: Candidate) -> bool:
        """Whether it was seen to fail lately: what is there is better than what it may have. Not
        the preferred one: of that there is something here."""
        if candidate.namespace.publication_id == self._preferred:
            return False
        return self._failures.holds((candidate.url, candidate.namespace), self._now)

    def failed(self, error: RetrievalError, candidate: Candidate | None = None) -> None:
        """Why one that was tried is given up. Where records of an index service may be wrong, and
        not it, it is tried once more without them: for the blocks that its Anchor Key shows."""
        if candidate is not None:
            bad = isinstance(error, VerificationFailed | Unsupported)
            if bad and len(candidate.records) > self._anchored(candidate) > 0:
                self._unrecorded.add(candidate)
                self.allow_again(candidate)
            else:
                self._failures.note((candidate.url, candidate.namespace), self._now)
        # that a cache is bad is worth knowing, even when the next one is only gone
        if tells_more(error, self.failure):
            self.failure = error

    def stalled(self, candidate: Candidate, error: RetrievalError) -> None:
        """It brings nothing for now: it may be tried again after all others."""
        self.failed(error, candidate)
        self._stalled.append(candidate)

    @property
    def others_stalled(self) -> bool:
        """Whether there are any that may be tried again."""
        return bool(self._stalled)

    def retry_stalled(self) -> bool:
        """Allow those again that were stalled; whether there are any."""
        stalled, self._stalled = self._stalled, []
        for candidate in stalled:
            self.allow_again(candidate)
        return bool(stalled)

    def why(self) -> RetrievalError:
        """Why there is none."""
        return self.failure or _not_found()

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        for search in self._searches:
            search.close()

    # -- inside --------------------------------------------------------------------------

    def _search(self, url: str | None) -> Search:
        return Search(
            self._sessions,
            url,
            self._scope_id,
            self._compat_id,
            self._keys,
            changed=self._changed,
            lists=self._discovery is DiscoveryMode.LISTING,
            min_blocks=self._min_blocks,
            grace=self._grace,
            probes=self._probes,
        )

    def _best(self) -> Candidate | None:
        best = later = None
        for each in self._all():
            self.longest = max(self.longest, each.blocks)
            if best is not None and each.blocks < best.blocks:
                break
            if each in self._tried:
                continue
            if self.doubted(each):
                later = later or each
                continue
            if each.namespace.publication_id == self._preferred:
                return each
            if self._given is not None or self._of_prefix[each.blocks] < OF_ONE_PREFIX:
                best = best or each
                if self._preferred is None:
                    break
            later = later or each
        return best or later

    def _all(self) -> Iterator[Candidate]:
        """Every candidate, those with most of our blocks first."""
        if self._given is not None:
            return iter([Candidate(None, namespace) for namespace in self._given])
        found = [_of(search) for search in self._searches]
        named = sorted(self._named(), key=lambda each: -each.blocks)
        return merge(*found, named, key=lambda each: -each.blocks)

    def _named(self) -> Iterator[Candidate]:
        """What the index service names."""
        for named in self._index.named if self._index is not None else ():
            # our own relay may lead there, too, and is nearer
            for each in (replace(named, url=None), named):
                if each in self._unrecorded:
                    each = replace(each, records=(), blocks=self._anchored(each))
                if each.blocks >= self._min_blocks and self._sessions.reaches(each.url):
                    yield each

    def _anchored(self, candidate: Candidate) -> int:
        """Of how many of our blocks its Anchor Key shows that it has them."""
        key = candidate.namespace.anchor_key
        return self._keys.index(key) + 1 if key in self._keys else 0


def _of(search: Search) -> Iterator[Candidate]:
    """What a relay has told of."""
    for blocks, namespace in search.found():
        yield Candidate(search.url, namespace, blocks)


def _not_found() -> NotFound:
    # one sentence for every reason, so that it tells nothing about scopes
    return NotFound(
        "no publication of these tokens, or of a shorter prefix of them, was found; one is found "
        "only when all of its tokens are the first of these, and scope key, descriptor and the "
        "path of the URL are its publisher's"
    )
