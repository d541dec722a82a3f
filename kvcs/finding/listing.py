"""All publications of a scope and model at one relay, by one standing SUBSCRIBE_NAMESPACE
(KVCS "Discovering Publications").

The prefix has three fields, ("kvcs-1", Scope ID, Compatibility ID): one round trip lists every
publication, of every prompt, and shows nothing of ours. While it stands, a search is a look
into a dictionary.

A relay sends the namespaces it knows right after REQUEST_OK, on the same stream, but nothing
says that it has sent the last one: the listing counts as settled when it has paused for
`grace` seconds, and for as long as REQUEST_OK took to come (a lost packet takes about as long),
which our relays send when those upstream of them have answered. Sans-IO over a `moqt` session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self
from weakref import WeakKeyDictionary

from kvcs.keeping.failures import DEFAULT_SECONDS, Failures
from kvcs.names.errors import (
    MisuseError,
    NotAuthorized,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
)
from kvcs.names.namespace import PublicationNamespace, compat_prefix
from kvcs.names.refusals import NO_STREAM_DELAY, cannot_tell, not_authorized, retry_delay
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.tokens import Tokens
from moqt.aio import MoqtSession
from moqt.requests import OutgoingSubscribeNamespace, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import TrackNamespace

DEFAULT_GRACE: Final = 0.02
"""Seconds for which a listing must pause, at least."""

LONGEST_PAUSE: Final = 0.2
"""Seconds for which it must pause at most, however long REQUEST_OK took."""

MOST_PAUSES: Final = 10
"""A listing that never pauses counts as settled after so many times as long."""

OVERLAP_DELAY: Final = 0.05
"""Seconds before another try when this session asks for an overlapping prefix already."""

OVERLAP_TRIES: Final = 20
"""After which overlapping prefixes are taken for somebody's lasting ones."""

Found = tuple[int, PublicationNamespace]
"""A publication, and how many of our blocks its Anchor Key says it has."""


class Listing:
    """The publications of a scope and model at the other end of a session; see `listing`.

    `poll` at once, whenever a watcher was called, and when the time it returned has come, until
    `settled`, or `error` is set: NotAuthorized, or PublisherLost when the session has ended.
    `refused` says why this peer lists nothing so: then prefixes are to be asked for one by one.
    """

    def __init__(self, session: Session, scope_id: bytes, compat_id: bytes) -> None:
        self.settled = False
        self.error: RetrievalError | None = None
        self.refused: str | None = None
        self.untold: str | None = None
        """Why the peer cannot tell for now: it is asked again."""
        self.changes = 0
        """How often something came or went."""
        self.watchers: set[Callable[[], None]] = set()
        self._session = session
        self._prefix = compat_prefix(scope_id, compat_id)
        self._by_anchor: dict[bytes, dict[bytes, PublicationNamespace]] = {}
        self._request: OutgoingSubscribeNamespace | None = None
        self._answered = self._heard = False
        self._asked = self._since = self._quiet = 0.0
        self._delay: float | None = 0.0
        self._due = 0.0
        self._overlaps = 0

    @property
    def over(self) -> bool:
        """Whether it tells of nothing any more."""
        return self.error is not None or self.refused is not None

    @property
    def publications(self) -> int:
        """How many are listed."""
        return sum(map(len, self._by_anchor.values()))

    def find(self, keys: Sequence[bytes], least: int = 1) -> Iterator[Found]:
        """The publications of every prefix of at least `least` blocks, longest first."""
        known = self._by_anchor
        for blocks in range(len(keys), max(least, 1) - 1, -1):
            for namespace in tuple(known.get(keys[blocks - 1], {}).values()):
                yield blocks, namespace

    def poll(self, now: float, grace: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        if self.over or self.settled:
            return None
        if self._delay is not None:
            self._due, self._delay = now + self._delay, None
        if self._request is None:
            if now < self._due:
                return self._due
            self._ask(now)
            return self._due if self._request is None and not self.over else None
        if not self._answered:
            return None
        if self._heard:
            self._heard, self._quiet = False, now
            self._since = self._since or now
        pause = max(grace, min(self._since - self._asked, LONGEST_PAUSE))
        due = min(self._quiet + pause, self._since + MOST_PAUSES * pause)
        if now < due:
            return due
        self.settled = True
        self._tell()
        return None

    def close(self) -> None:
        """Cancel the request; harmless when repeated."""
        if self._request is not None and self._request.state is not RequestState.CLOSED:
            self._request.cancel()
        self._request = None
        self.refused = self.refused or "it was closed"

    # -- inside --------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        try:
            self._request = self._session.subscribe_namespace(
                self._prefix, on_namespace=self._changed, on_ended=self._ended
            )
        except SessionClosed as error:
            self.error = PublisherLost(str(error))
        except RequestError as error:
            if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                raise
            self._due = now + NO_STREAM_DELAY
        else:
            self._asked = now
            self._request.on_answer = self._answer

    def _answer(self, error: MoqtError | None) -> None:
        if error is None:
            self.untold = None
            self._answered = self._heard = True
            self._tell()

    def _changed(self, fields: TrackNamespace, present: bool) -> None:
        try:
            namespace = PublicationNamespace.from_fields(fields)
        except DecodeError:
            return  # announced by somebody who does not follow KVCS
        anchor, publication = namespace.anchor_key, namespace.publication_id
        if present:
            self._by_anchor.setdefault(anchor, {})[publication] = namespace
        else:
            known = self._by_anchor[anchor]
            known.pop(publication, None)
            if not known:
                del self._by_anchor[anchor]
        self._heard = True
        self._tell()

    def _ended(self, error: MoqtError | None) -> None:
        self._request = None
        self._by_anchor.clear()
        if isinstance(error, SessionClosed):
            self.error = PublisherLost(str(error))
        elif error is not None and not_authorized(error):
            self.error = NotAuthorized(f"discovery is refused: {error}")
        elif not self._answered and (again := self._again(error)) is not None:
            self._delay = again
            self.untold = str(error) if error is not None and cannot_tell(error) else None
        else:
            self.refused = "the peer ended the listing" if error is None else str(error)
        self._tell()

    def _again(self, error: MoqtError | None) -> float | None:
        """Seconds after which the listing may be asked for again."""
        if isinstance(error, RequestError) and error.code == RequestErrorCode.PREFIX_OVERLAP:
            self._overlaps += 1
            return OVERLAP_DELAY if self._overlaps < OVERLAP_TRIES else None
        return None if error is None else retry_delay(error)

    def _tell(self) -> None:
        self.changes += 1
        for watcher in tuple(self.watchers):
            watcher()


class _Shared:
    """The listings of one session: prefixes of one session must not overlap, so all who search
    the same scope and model share one."""

    def __init__(self) -> None:
        self.listings: dict[tuple[bytes, bytes], Listing] = {}
        self.users: dict[Listing, int] = {}
        self.failures: Failures | None = None
        """Those of the Directory that is open."""


_SHARED: WeakKeyDictionary[Session, _Shared] = WeakKeyDictionary()


def failures_of(session: Session) -> Failures | None:
    """What the Directory that is open on a session has seen to fail lately."""
    shared = _SHARED.get(session)
    return None if shared is None else shared.failures


def listing(session: Session, scope_id: bytes, compat_id: bytes) -> Listing:
    """The listing of a session, made if there is none that still tells. `release` it."""
    shared = _SHARED.setdefault(session, _Shared())
    found = shared.listings.get((scope_id, compat_id))
    if found is None or found.over:
        found = shared.listings[scope_id, compat_id] = Listing(session, scope_id, compat_id)
    shared.users[found] = shared.users.get(found, 0) + 1
    return found


def release(session: Session, held: Listing) -> None:
    """The last one who lets go of a listing ends it."""
    shared = _SHARED[session]
    shared.users[held] -= 1
    if shared.users[held]:
        return
    del shared.users[held]
    held.close()
    shared.listings = {key: each for key, each in shared.listings.items() if each is not held}


class Directory:
    """What is published of a scope and model at one relay, known at all times.

    async with Directory(session, scope, descriptor) as directory:
        blocks, namespace = directory.find(tokens)[0]

    While it is open, `find` and every `Consumer` on the same session look publications up
    without asking the network. It holds at most the session's `max_namespaces_told`.
    """

    def __init__(
        self,
        session: MoqtSession,
        scope: Scope,
        descriptor: Descriptor,
        *,
        grace: float = DEFAULT_GRACE,
        timeout: float = 10.0,
        remember: float = DEFAULT_SECONDS,
    ) -> None:
        """`timeout` bounds the wait for the first listing, in seconds; `grace` is how long it
        must pause at least to count as settled. For `remember` seconds a publication that failed
        or stood still, and a relay that was silent, are tried after all others, by every
        `Consumer` on the same session."""
        self.failures = Failures(remember)
        self._session = session
        self._scope = scope
        self._descriptor = descriptor
        self._grace = grace
        self._timeout = timeout
        self._changed = asyncio.Event()
        self._listing: Listing | None = None

    @property
    def publications(self) -> int:
        """How many are published, of every prompt."""
        return self._open.publications

    def find(self, tokens: Tokens) -> list[Found]:
        """(blocks, publication) of every prefix of `tokens` that is published, longest first.

        Raises NotAuthorized, PublisherLost when the session has ended, RetrievalError when
        the relay lists nothing more, DecodeError `bad-token`.
        """
        return self.find_keys(block_keys(self._scope, self._descriptor, tokens))

    def find_keys(self, keys: Sequence[bytes]) -> list[Found]:
        """`find`, given the Block Keys of the tokens; in whatever thread. Raises as `find`."""
        listed = self._open
        _check(listed)
        return list(listed.find(keys))

    async def wait_ended(self) -> RetrievalError:
        """Wait until the relay lists nothing more, or the session has ended; returns why."""
        listed = self._open
        while True:
            self._changed.clear()
            try:
                _check(listed)
            except RetrievalError as error:
                return error
            await self._changed.wait()

    async def __aenter__(self) -> Self:
        """Raises as `find`, and RetrievalTimeout."""
        session, now = self._session.session, asyncio.get_running_loop().time
        held = self._listing = listing(session, self._scope.scope_id, self._descriptor.compat_id)
        held.watchers.add(self._changed.set)
        _SHARED[session].failures = self.failures
        deadline = now() + self._timeout
        try:
            while not held.settled:
                self._changed.clear()
                due = held.poll(now(), self._grace)
                _check(held)
                if held.settled:
                    break
                if now() >= deadline:
                    raise RetrievalTimeout(
                        f"the relay listed nothing within {self._timeout:g} s", held.untold or ""
                    )
                when = deadline if due is None else min(due, deadline)
                try:
                    async with asyncio.timeout_at(when):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the listing, unless somebody else uses it; harmless when repeated."""
        held, self._listing = self._listing, None
        if held is not None:
            held.watchers.discard(self._changed.set)
            shared = _SHARED[self._session.session]
            if shared.failures is self.failures:
                shared.failures = None
            release(self._session.session, held)

    @property
    def _open(self) -> Listing:
        if self._listing is None:
            raise MisuseError("the Directory is not open: use it in an async with")
        return self._listing


def _check(held: Listing) -> None:
    if held.error is not None:
        raise held.error
    if held.refused is not None:
        raise RetrievalError(f"the relay lists no publications: {held.refused}")
