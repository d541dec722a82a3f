"""Asking for the publications of a prompt prefix by prefix, of peers that do not list a scope
(KVCS "Discovering Publications"). Sans-IO over a `moqt` session.

Each prefix of n blocks has its own Anchor Key, the key of its last block, so each is asked for
with a SUBSCRIBE_NAMESPACE of its own: longest first, many at a time, each until `grace` seconds
after its REQUEST_OK. That a prefix is published says nothing about shorter or longer ones, so
there is no bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvcs.finding.listing import OVERLAP_DELAY, Found
from kvcs.finding.telling import UNTOLD_SECONDS, untold
from kvcs.names.errors import NotAuthorized, PublisherLost, RetrievalError
from kvcs.names.namespace import PublicationNamespace, anchor_prefix
from kvcs.names.refusals import NO_STREAM_DELAY, cannot_tell, not_authorized, retry_delay
from kvsp.names.errors import DecodeError
from moqt.requests import OutgoingSubscribeNamespace, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import TrackNamespace

DEFAULT_GRACE: Final = 0.2
"""Seconds after REQUEST_OK in which a namespace must come."""

DEFAULT_PROBES: Final = 1024
"""Prefixes asked for at a time, if the peer grants as many streams."""


class _Probe:
    """One prefix that is being asked for."""

    def __init__(self, prefix: TrackNamespace) -> None:
        self.prefix = prefix
        self.request: OutgoingSubscribeNamespace | None = None
        self.answered = False
        self.over = False
        """Refused, or ended by the peer: nothing more will come."""
        self.due: float | None = None
        """When to ask (again), or until when to wait for a namespace."""
        self.delay: float | None = 0.0
        """What `due` is to be, from now on."""
        self.untold: str | None = None
        """Why the peer cannot tell for now."""

    def cancel(self) -> None:
        if self.request is not None and self.request.state is not RequestState.CLOSED:
            self.request.cancel()


class Probing:
    """Looks for publications of `keys[:n]`, for every n, the largest first.

    `poll` at once, whenever `changed` was called, and when the time it returned has come, as
    long as more is wanted. `find` gives what was found so far; of prefixes longer than `open`
    nothing more will. `error` is set when nothing can be found: NotAuthorized, PublisherLost
    when the session has ended, or RetrievalError.
    """

    def __init__(
        self,
        session: Session,
        scope_id: bytes,
        compat_id: bytes,
        keys: Sequence[bytes],
        *,
        min_blocks: int,
        grace: float,
        probes: int,
        changed: Callable[[], None],
        until: float | None = None,
    ) -> None:
        """`min_blocks` is the shortest prefix worth having, in blocks. A peer that cannot tell for
        now is asked again `until` then, for UNTOLD_SECONDS unless it is said."""
        self.error: RetrievalError | None = None
        self._session = session
        self._scope_id = scope_id
        self._compat_id = compat_id
        self._keys = keys
        self._grace = grace
        self._window = probes
        self._changed = changed
        self._next = len(keys)
        self._least = max(min_blocks, 1)
        self._probes: dict[int, _Probe] = {}
        """By blocks, longest first: a dict keeps the order in which they are asked for."""
        self._found: dict[int, dict[PublicationNamespace, None]] = {}
        self._until = until
        self.untold: str | None = None
        """Why the peer cannot tell of some prefix."""

    @property
    def open(self) -> int:
        """Blocks of the longest prefix that has not been answered for; 0 when all have."""
        if self.error is not None:
            return 0
        waiting = next((blocks for blocks in self._probes if blocks not in self._found), 0)
        return waiting or (self._next if self._next >= self._least else 0)

    def find(self) -> Iterator[Found]:
        """The publications found, longest first."""
        for blocks in sorted(self._found, reverse=True):
            for namespace in tuple(self._found[blocks]):
                yield blocks, namespace

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        if self.error is not None:
            return None
        for blocks, probe in list(self._probes.items()):
            if probe.delay is not None:
                probe.due, probe.delay = now + probe.delay, None
                self._lose_patience(probe, now)
            if probe.over or (probe.answered and probe.due is not None and now >= probe.due):
                probe.cancel()
                del self._probes[blocks]
        while len(self._probes) < self._window and self._next >= self._least:
            prefix = anchor_prefix(self._scope_id, self._compat_id, self._keys[self._next - 1])
            probe = self._probes[self._next] = _Probe(prefix)
            probe.due, probe.delay = now, None
            self._next -= 1
        for blocks, probe in self._probes.items():
            if probe.request is None and not probe.over and self.error is None:
                self._ask(blocks, probe, now)
        if self.untold is not None and not self.open and not self._found:
            self.error = self.error or untold(self.untold)
        times = [p.due for p in self._probes.values() if p.due is not None and p.due > now]
        return min(times, default=None)

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        for probe in self._probes.values():
            probe.cancel()
        self._probes.clear()
        self._next = 0

    # -- inside --------------------------------------------------------------------------

    def _lose_patience(self, probe: _Probe, now: float) -> None:
        """Do not ask again for what the peer cannot tell of for too long."""
        if probe.untold is None:
            return
        if self._until is None:
            self._until = now + UNTOLD_SECONDS
        self.untold = probe.untold
        if probe.due is not None and probe.due > self._until:
            probe.over = True

    def _ask(self, blocks: int, probe: _Probe, now: float) -> None:
        if probe.due is not None and probe.due > now:
            return
        probe.due = None

        def namespace_changed(fields: TrackNamespace, present: bool) -> None:
            try:
                namespace = PublicationNamespace.from_fields(fields)
            except DecodeError:
                return  # announced by somebody who does not follow KVCS
            if present:
                self._found.setdefault(blocks, {})[namespace] = None
            else:
                self._found.get(blocks, {}).pop(namespace, None)
            self._changed()

        def ended(error: MoqtError | None) -> None:
            self._ended(probe, error)

        def answered(error: MoqtError | None) -> None:
            if error is None:
                probe.answered, probe.delay, probe.untold = True, self._grace, None
                self._changed()

        try:
            probe.request = self._session.subscribe_namespace(
                probe.prefix, on_namespace=namespace_changed, on_ended=ended
            )
        except SessionClosed as error:
            self.error = PublisherLost(str(error))
        except RequestError as error:
            if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                raise
            probe.due = now + NO_STREAM_DELAY
        else:
            probe.request.on_answer = answered

    def _ended(self, probe: _Probe, error: MoqtError | None) -> None:
        if isinstance(error, RequestError) and not probe.answered:
            overlaps = error.code == RequestErrorCode.PREFIX_OVERLAP
            again = OVERLAP_DELAY if overlaps else retry_delay(error)
            if again is not None:
                probe.request, probe.delay = None, again
                probe.untold = str(error) if cannot_tell(error) else None
                self._changed()
                return
        probe.over = True
        if isinstance(error, SessionClosed):
            self.error = self.error or PublisherLost(str(error))
        elif error is not None and not_authorized(error):
            self.error = self.error or NotAuthorized(f"discovery is refused: {error}")
        elif isinstance(error, RequestError) and error.code not in (
            RequestErrorCode.DOES_NOT_EXIST,
            RequestErrorCode.NAMESPACE_TOO_LARGE,
        ):
            self.error = self.error or RetrievalError(f"discovery failed: {error}")
        self._changed()
