"""Who can be asked for a track: publishers here, relays of the directory, upstream relays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from moqt.session import Session, session_of
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import Parameters
from moqt.values.names import TrackNamespace
from relay.audience.downstream import TrackRequest
from relay.audience.namespaces import Namespaces
from relay.sources.hops import is_one_of, relay_path, waiting_relays
from relay.track import UpstreamTrack


class Finder(Protocol):
    """Finds relays that have what is not here."""

    sessions: dict[str, Session]
    """To such relays, by their names."""

    def known(self, namespace: TrackNamespace) -> bool:
        """Whether it need not look."""

    def look_up(self, namespace: TrackNamespace, then: Callable[[], None]) -> None:
        """Call `then` when it has looked: then it is known for a moment."""

    def found(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions to relays that have it, the best first."""


class Askable:
    """Those of one relay."""

    def __init__(self, namespaces: Namespaces, upstreams: dict[Session, int]) -> None:
        """`upstreams` are the sessions to upstream relays, each with its place among them."""
        self._namespaces = namespaces
        self._upstreams = upstreams
        self.finder: Finder | None = None
        """None where there is no directory."""
        self.unreachable: set[object] = set()
        """Upstream relays that there should be a session to, and is none: whether a track exists
        cannot be said without them, nor without a directory that does not answer."""
        self.untold: list[Callable[[TrackNamespace], bool]] = []
        """Each says whether relays that have something of which a namespace may be have yet to tell
        of what they have."""

    def above(self) -> list[Session]:
        """The upstream relays, in order; those that said GOAWAY only when there is no other."""
        sessions = sorted(self._upstreams, key=self._upstreams.__getitem__)
        return [session for session in sessions if session.goaway is None] or sessions

    def publishers(
        self, namespace: TrackNamespace, request: TrackRequest | None = None
    ) -> list[Session]:
        """The sessions to ask for a track of `namespace`, for who makes `request`.

        An upstream relay that asks is not asked back, nor is another one for it; nor is a relay
        that waits for the answer.
        """
        found = self._namespaces.publishers(namespace)
        if request is None or self.goes_up(session_of(request)):
            found = [*found, *self._beside(namespace), *self.above()]
        if request is None:
            return found
        return [each for each in found if not self._waits(request, each)]

    def _beside(self, namespace: TrackNamespace) -> list[Session]:
        return [] if self.finder is None else self.finder.found(namespace)

    def looks_for(self, request: TrackRequest) -> Finder | None:
        """Who is to be asked first who has the track; None where nobody need be."""
        finder = self.finder
        if finder is None or finder.known(request.namespace):
            return None
        return finder if self.goes_up(session_of(request)) else None

    def goes_up(self, asking: Session) -> bool:
        """Whether other relays may be asked for what is requested by `asking`."""
        return self._namespaces.goes_up(asking)

    def lacks(self, request: TrackRequest) -> bool:
        """Whether somebody else may have what `request` is for, who cannot be asked."""
        if not self.goes_up(session_of(request)):
            return False
        return bool(self.unreachable) or any(each(request.namespace) for each in self.untold)

    def ranks(self, track: UpstreamTrack) -> list[list[Session]]:
        """The same for `track`: publishers here together (MOQT "Publisher Interactions"), then
        each relay that the directory names, and each upstream relay, by itself. One that has the
        track from us cannot bring it."""
        namespace = track.name.namespace
        above = [*self._beside(namespace), *self.above()]
        here = [each.session for each in track.subscriptions if each.session not in above]
        here = [each for each in here if each not in self._upstreams]
        here = list(dict.fromkeys([*self._namespaces.publishers(namespace), *here]))
        if track.read_above and above:
            readers = track.downstream
            goes_up = readers.some(self.goes_up)
            above = [each for each in above if goes_up and not readers.reads(each)]
        return [*([here] if here else []), *([each] for each in above)]

    def note(self, track: UpstreamTrack, request: TrackRequest) -> None:
        """`request` waits for `track`, or is served: another relay may be behind it."""
        if waiting_relays(request) or session_of(request) in self._upstreams:
            track.read_above = True

    def _waits(self, request: TrackRequest, session: Session) -> bool:
        """Whether what `session` has may come from who makes `request`."""
        asking = session_of(request)
        if asking in self._upstreams and session in self._upstreams:
            return True
        return is_one_of(session, waiting_relays(request))

    def circling(self, track: UpstreamTrack, request: TrackRequest) -> list[Session]:
        """Who brings `track`, if that is only such as may have it from who makes `request`."""
        sources = list(dict.fromkeys(each.session for each in track.subscriptions))
        return sources if all(self._waits(request, each) for each in sources) else []

    def chase(
        self, track: UpstreamTrack, request: TrackRequest, denied: Callable[[], None]
    ) -> None:
        """A relay waits for `track` with others, and who was asked for it has not been told: they
        may wait for that relay in turn. TRACK_STATUS tells them; `denied` is called when none of
        them can have the track while that relay waits."""
        relays = waiting_relays(request)
        if track.established or relays <= track.candidates.waiting:
            return
        everybody = track.downstream.relays
        left = {each.session for each in track.subscriptions}

        def answered(session: Session, error: MoqtError | None) -> None:
            left.discard(session)
            if isinstance(error, RequestError) and error.code == RequestErrorCode.DOES_NOT_EXIST:
                if not left:
                    denied()
            else:
                left.add(session)  # it may have it

        for session in tuple(left):
            path = relay_path(session, everybody)
            if path is None:
                return  # no relay, or one that can tell nothing of who waits
            try:
                asked = session.track_status(track.name, Parameters(relay_path=path))
            except MoqtError:
                return
            asked.on_answer = partial(answered, session)
