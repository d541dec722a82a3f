"""Finding publications of the longest prefix (KVCS "Discovering Publications").

Sans-IO over a `moqt` session. Each prefix of n blocks has its own Anchor Key, the key of
its last block, so each is asked for with a SUBSCRIBE_NAMESPACE of its own: longest first,
several at a time. That a prefix is published says nothing about shorter or longer ones, so
there is no bisection.

How long to wait for NAMESPACE: a relay sends the namespaces it knows right after
REQUEST_OK, on the same stream, but nothing says that it has sent the last one. So a prefix
counts as unpublished `grace` seconds after its REQUEST_OK, whatever the number of prefixes;
streams are not ordered among each other, so that answers to later requests prove nothing.
A prefix that was announced is found at once, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvcs.names.errors import NotAuthorized, PublisherLost, RetrievalError
from kvcs.names.namespace import PublicationNamespace, anchor_prefix
from kvcs.names.refusals import NO_STREAM_DELAY, not_authorized, retry_delay
from kvsp.names.errors import DecodeError
from moqt.requests import OutgoingSubscribeNamespace, RequestState
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.names import TrackNamespace

DEFAULT_GRACE: Final = 0.2
"""Seconds after REQUEST_OK in which a namespace must come."""

DEFAULT_PROBES: Final = 32
"""Prefixes asked for at a time."""

OVERLAP_DELAY: Final = 0.05
"""Seconds before another try when this session asks for the same prefix already."""


class _Probe:
    """One prefix that is being asked for."""

    def __init__(self, blocks: int, prefix: TrackNamespace) -> None:
        self.blocks = blocks
        self.prefix = prefix
        self.request: OutgoingSubscribeNamespace | None = None
        self.answered = False
        self.over = False
        """Refused, or ended by the peer: nothing more will come."""
        self.due: float | None = None
        """When to ask (again), or until when to wait for a namespace."""
        self.delay: float | None = 0.0
        """What `due` is to be, from now on."""
        self.namespaces: dict[TrackNamespace, None] = {}

    def cancel(self) -> None:
        if self.request is not None and self.request.state is not RequestState.CLOSED:
            self.request.cancel()


class Discovery:
    """Looks for publications of `keys[:n]`, for the largest n first.

    `poll` at once, whenever `changed` was called, and when the time it returned has come,
    until `done`. Then `found` is the number of blocks of the longest published prefix, 0 for
    none, or `error` is set: NotAuthorized, PublisherLost when the session has ended, or
    RetrievalError. The listing of the prefix found stays open, so that `choose` knows of
    publications that come later; `close` ends it.
    """

    def __init__(
        self,
        session: Session,
        scope_id: bytes,
        compat_id: bytes,
        keys: Sequence[bytes],
        *,
        min_blocks: int = 1,
        grace: float = DEFAULT_GRACE,
        probes: int = DEFAULT_PROBES,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`min_blocks` is the shortest prefix worth having, in blocks."""
        self.session = session
        self.error: RetrievalError | None = None
        self.done = False
        self.asked = 0
        """Prefixes asked for so far."""
        self._scope_id = scope_id
        self._compat_id = compat_id
        self._keys = keys
        self._min_blocks = max(min_blocks, 1)
        self._grace = grace
        self._window = probes
        self._changed = changed
        self._next = len(keys)
        self._probes: list[_Probe] = []

    @property
    def found(self) -> int:
        """Blocks of the longest prefix published, once `done`."""
        return self._probes[0].blocks if self.done and self._probes else 0

    def choose(self, tried: Collection[PublicationNamespace]) -> PublicationNamespace | None:
        """A publication of the prefix found that is not in `tried`, the first known first."""
        for fields in self._probes[0].namespaces if self.found else ():
            try:
                namespace = PublicationNamespace.from_fields(fields)
            except DecodeError:
                continue  # announced by somebody who does not follow KVCS
            if namespace not in tried:
                return namespace
        return None

    def settled_at(self) -> float | None:
        """Until when further publications of the prefix found may still be told of."""
        return self._probes[0].due if self.found and not self._probes[0].over else None

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        for probe in self._probes:
            if probe.delay is not None:
                probe.due, probe.delay = now + probe.delay, None
        if self.done or self.error is not None:
            return None
        while self._probes and self._decide(self._probes[0], now):
            if self.done or self.error is not None:
                return None
        while len(self._probes) < self._window and self._next >= self._min_blocks:
            prefix = anchor_prefix(self._scope_id, self._compat_id, self._keys[self._next - 1])
            probe = _Probe(self._next, prefix)
            probe.due, probe.delay = now, None
            self._probes.append(probe)
            self._next -= 1
        if not self._probes:
            self.done = True
            return None
        for index, probe in enumerate(self._probes):
            if probe.request is None and not probe.over and self.error is None:
                self._ask(probe, now)
            # nothing there: let others have the stream, whatever longer prefixes say
            elif index and self._is_empty(probe, now):
                probe.cancel()
        times = [p.due for p in self._probes if p.due is not None and p.due > now]
        return min(times, default=None)

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        for probe in self._probes:
            probe.cancel()
        self._probes.clear()
        self._next = 0

    # -- inside --------------------------------------------------------------------------

    def _is_empty(self, probe: _Probe, now: float) -> bool:
        if probe.namespaces:
            return False
        return probe.over or (probe.answered and probe.due is not None and now >= probe.due)

    def _decide(self, probe: _Probe, now: float) -> bool:
        """Whether the longest prefix that is open has an answer, and act on it."""
        if probe.namespaces:
            for shorter in self._probes[1:]:
                shorter.cancel()
            del self._probes[1:]
            self.done = True
            return True
        if self._is_empty(probe, now):
            probe.cancel()
            del self._probes[0]
            return True
        return False

    def _ask(self, probe: _Probe, now: float) -> None:
        if probe.due is not None and probe.due > now:
            return
        probe.due = None

        def namespace_changed(namespace: TrackNamespace, present: bool) -> None:
            if present:
                probe.namespaces[namespace] = None
            else:
                probe.namespaces.pop(namespace, None)
            self._changed()

        def ended(error: MoqtError | None) -> None:
            self._ended(probe, error)

        def answered(error: MoqtError | None) -> None:
            if error is None:
                probe.answered, probe.delay = True, self._grace
                self._changed()

        try:
            probe.request = self.session.subscribe_namespace(
                probe.prefix, on_namespace=namespace_changed, on_ended=ended
            )
        except SessionClosed as error:
            self.error = PublisherLost(str(error))
        except RequestError as error:
            if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                raise
            probe.due = now + NO_STREAM_DELAY
        else:
            self.asked += 1
            probe.request.on_answer = answered

    def _ended(self, probe: _Probe, error: MoqtError | None) -> None:
        if isinstance(error, RequestError) and not probe.answered:
            overlaps = error.code == RequestErrorCode.PREFIX_OVERLAP
            again = OVERLAP_DELAY if overlaps else retry_delay(error)
            if again is not None:
                probe.request, probe.delay = None, again
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
