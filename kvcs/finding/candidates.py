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

from kvcs.finding import listing as listings
from kvcs.finding import probing
from kvcs.finding.listing import Found, Listing, listing, release
from kvcs.finding.probing import DEFAULT_PROBES, Probing
from kvcs.finding.relays import Sessions
from kvcs.names.errors import NotFound, PublisherLost, RetrievalError, tells_more
from kvcs.names.namespace import PublicationNamespace
from kvsp.names.codes import Codec
from moqt.aio import MoqtSession
from moqt.session import Session
from moqt.values.errors import MoqtError

if TYPE_CHECKING:
    from kvsp.records.records import LookupResponse, ReplicaRecord

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
    ) -> None:
        """`given` are known already, in order of preference, and replace the search.
        `min_blocks` is the shortest prefix worth having; `grace` and `probes` are those of
        `Listing` and `Probing`, which each have their own `grace` without one. `preferred` is
        the Publication ID of one that goes before others of as many blocks.
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
        self._own: Session | None = None
        self._listing: Listing | None = None
        self._probing: Probing | None = None
        self._lost = False
        """Our own relay tells of nothing."""
        self._tried: set[Candidate] = set()
        self._of_prefix: Counter[int] = Counter()
        self._stalled: list[Candidate] = []
        self._known: tuple[object, Candidate | None] = (None, None)

    # -- the search ----------------------------------------------------------------------

    def poll(self, now: float) -> float | None:
        """Go on with the search. Returns when to come back at the latest."""
        if self._given is not None or self._discovery is DiscoveryMode.INDEX or self._lost:
            return None
        if self._own is None and not self._dialled():
            return None
        due = None
        if self._listing is not None:
            due = self._listing.poll(now, _or(self._grace, listings.DEFAULT_GRACE))
            if self._listing.error is not None:
                self._give_up(self._listing.error)
            elif self._listing.refused is not None:
                self._let_go()
        if self._listing is None and not self._lost:
            due = self._probe(now)
        return due

    @property
    def open(self) -> int:
        """Publications of so many of our blocks, and of fewer, may yet be found."""
        if self._given is not None:
            return 0
        if self._index is not None and not self._index.looked_up:
            return len(self._keys)
        if self._discovery is DiscoveryMode.INDEX or self._lost:
            return 0
        if self._probing is not None:
            return self._probing.open
        if self._listing is not None and self._listing.settled:
            return 0
        return len(self._keys)

    @property
    def searching(self) -> bool:
        """Whether more may yet be found."""
        return self.open >= max(self._min_blocks, 1)

    # -- the choice ----------------------------------------------------------------------

    def best(self) -> Candidate | None:
        """The best of those known that was not tried."""
        state = (
            len(self._tried),
            self._listing.changes if self._listing is not None else -1,
            self._index.looked_up if self._index is not None else None,
            self._lost,
        )
        # looked for again only when there is something new
        if self._probing is not None or self._known[0] != state:
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

    def failed(self, error: RetrievalError) -> None:
        """Why one that was tried is given up."""
        # that a cache is bad is worth knowing, even when the next one is only gone
        if tells_more(error, self.failure):
            self.failure = error

    def stalled(self, candidate: Candidate, error: RetrievalError) -> None:
        """It brings nothing for now: it may be tried again after all others."""
        self.failed(error)
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
        self._let_go()
        if self._probing is not None:
            self._probing.close()

    # -- inside --------------------------------------------------------------------------

    def _dialled(self) -> bool:
        """Whether there is a session to our own relay; a listing is begun on it."""
        task = self._sessions.dial(None)
        if not task.done():
            return False
        try:
            session = task.result()
        except MoqtError as error:
            lost = PublisherLost(str(error))
            lost.__cause__ = error
            self._give_up(lost)
            return False
        self._own = session.session
        if self._discovery is DiscoveryMode.LISTING:
            self._listing = listing(self._own, self._scope_id, self._compat_id)
            self._listing.watchers.add(self._changed)
        return True

    def _probe(self, now: float) -> float | None:
        if self._probing is None:
            assert self._own is not None
            self._probing = Probing(
                self._own,
                self._scope_id,
                self._compat_id,
                self._keys,
                min_blocks=self._min_blocks,
                grace=_or(self._grace, probing.DEFAULT_GRACE),
                probes=self._probes,
                changed=self._changed,
            )
        due = self._probing.poll(now)
        if self._probing.error is not None:
            self._give_up(self._probing.error)
        return due

    def _give_up(self, error: RetrievalError) -> None:
        """Our own relay cannot be searched; an index service may know of others."""
        self._lost = True
        self.failed(error)
        self._let_go()

    def _let_go(self) -> None:
        held, self._listing = self._listing, None
        if held is not None:
            assert self._own is not None
            held.watchers.discard(self._changed)
            release(self._own, held)

    def _best(self) -> Candidate | None:
        best = later = None
        for each in self._all():
            self.longest = max(self.longest, each.blocks)
            if best is not None and each.blocks < best.blocks:
                break
            if each in self._tried:
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
        return merge(self._found(), self._named(), key=lambda each: -each.blocks)

    def _found(self) -> Iterator[Candidate]:
        """What our own relay has told of."""
        found: Iterator[Found] = iter(())
        if self._listing is not None:
            found = self._listing.find(self._keys, self._min_blocks)
        elif self._probing is not None:
            found = self._probing.find()
        for blocks, namespace in found:
            yield Candidate(None, namespace, blocks)

    def _named(self) -> Iterator[Candidate]:
        """What the index service names."""
        for named in self._index.named if self._index is not None else ():
            # our own relay may lead there, too, and is nearer
            for each in (replace(named, url=None), named):
                if named.blocks >= self._min_blocks and self._sessions.reaches(each.url):
                    yield each


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _not_found() -> NotFound:
    # one sentence for every reason, so that it tells nothing about scopes
    return NotFound(
        "no publication of these tokens, or of a shorter prefix of them, was found; one is found "
        "only when all of its tokens are the first of these, and scope key, descriptor and the "
        "path of the URL are its publisher's"
    )
