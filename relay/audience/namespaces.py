"""Namespaces: who publishes which, and who is told of them (MOQT "Namespace Discovery")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moqt.requests import IncomingPublishNamespace, IncomingSubscribeNamespace, RequestState
from moqt.session import Session, session_of
from moqt.values.names import TrackNamespace, printable_namespace
from relay.audience.prefixes import PrefixMap
from relay.rights.policy import Action
from relay.rights.refusals import Refusals
from relay.sources.hops import is_one_of, relay_of

logger = logging.getLogger("relay")

HELD_SECONDS = 3.0
"""For which other relays are not told of a namespace that has lost a source here, and that upstream
relays still tell of: in a circle they would go on to tell each other of what is gone."""


@dataclass(slots=True)
class NamespaceEvents:
    """Who is told when namespaces, or those who ask for them, come and go."""

    appeared: list[Callable[[TrackNamespace], None]] = field(default_factory=list)
    """A local publisher has it: the first one, or one more."""
    withdrawn: list[Callable[[TrackNamespace], None]] = field(default_factory=list)
    """A local publisher has it no more; others may."""
    told: list[Callable[[TrackNamespace], None]] = field(default_factory=list)
    """Some source of it has come or gone."""
    listed: list[Callable[[Session, TrackNamespace, object, bool], None]] = field(
        default_factory=list
    )
    """A SUBSCRIBE_NAMESPACE for the prefix has come (True) or gone."""
    awaited: list[Callable[[Session, TrackNamespace, Callable[[bool], None]], None]] = field(
        default_factory=list
    )
    """Each calls `then`, perhaps more than once, when it tells of what it knows under the prefix,
    or will not (True), or cannot be asked (False): a listing is answered when all have, so that
    whoever asked can tell soon after REQUEST_OK that nothing more is there."""


class Namespaces:
    """The namespaces of a relay, by where each comes from, and who listens for them.

    NAMESPACE goes out when the first of the sources below has a namespace, NAMESPACE_DONE
    when the last one has lost it.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self.events = NamespaceEvents()
        self.published: PrefixMap[IncomingPublishNamespace] = PrefixMap()
        """Accepted PUBLISH_NAMESPACEs."""
        self.published_here: PrefixMap[Hashable] = PrefixMap()
        """Complete cached tracks without a publisher: the relay is the publisher."""
        self.on_disk: PrefixMap[Any] = PrefixMap()
        """Complete tracks on the disk: the relay is the publisher of these, too."""
        self.remote: PrefixMap[Session] = PrefixMap()
        """What upstream relays told of (NAMESPACE)."""
        self.is_part = False
        """What the relay above has is ours, too: we are parts of one."""
        self.publications = 0
        self.listings: dict[IncomingSubscribeNamespace, TrackNamespace] = {}
        """SUBSCRIBE_NAMESPACEs, with the prefix each is filed under."""
        self._published_by: dict[Session, int] = {}
        self._held: dict[TrackNamespace, float] = {}
        """Those that other relays are not told of, until when."""
        self._now = 0.0
        self._by_prefix: PrefixMap[IncomingSubscribeNamespace] = PrefixMap()

    @property
    def cached(self) -> tuple[PrefixMap[Any], ...]:
        """Of what this relay is the publisher itself."""
        return self.published_here, self.on_disk

    @property
    def _here(self) -> tuple[PrefixMap[Any], ...]:
        return self.published, *self.cached

    def goes_up(self, asking: Session) -> bool:
        """Whether other relays may be asked for what is requested by `asking`."""
        peer = asking.peer_relay
        if asking in self._refusals.trusted:
            return False
        return self.is_part or peer is None or not peer.first_hand

    def any_below(self, prefix: TrackNamespace) -> bool:
        """Whether something is here of a namespace that is longer than `prefix`."""
        return any(table.any_below(prefix) for table in self._here)

    def _tells(self, session: Session, namespace: TrackNamespace) -> bool:
        """Whether `session` is told of `namespace`: what another relay told is news neither to an
        upstream relay, nor to one that asks for what is here alone (FIRST_HAND)."""
        if any(namespace in each for each in self._here):
            return True
        if not self.goes_up(session):
            return False
        peer = relay_of(session)
        if peer is None:
            return namespace in self.remote
        if namespace in self._held:
            return False
        own = frozenset((peer,))
        return any(not is_one_of(each, own) for each in self.remote.at(namespace))

    @property
    def tables(self) -> tuple[PrefixMap[Any], ...]:
        """Every table, to see that nothing is left behind."""
        return (*self._here, self.remote, self._by_prefix)

    # -- publishers ------------------------------------------------------------------------

    def publish(self, request: IncomingPublishNamespace) -> None:
        """PUBLISH_NAMESPACE (MOQT "Publisher Interactions")."""
        session, namespace, config = session_of(request), request.namespace, self._refusals.config
        if not self._refusals.admits(request, Action.PUBLISH_NAMESPACE, namespace):
            return
        count = self._published_by.get(session, 0)
        if count >= config.max_namespaces_per_session:
            self._refusals.overloaded(
                request, "max_namespaces_per_session", "namespaces that one session publishes"
            )
            return
        if self.publications >= config.max_namespaces:
            self._refusals.overloaded(request, "max_namespaces", "published namespaces")
            return
        self._published_by[session] = count + 1
        self.publications += 1
        self.published.add(namespace, request)
        request.when_ended(lambda: self._withdrawn(request))
        request.accept()
        logger.info("%s is published", printable_namespace(namespace))
        self.tell(namespace)
        for appeared in self.events.appeared:
            appeared(namespace)

    def _withdrawn(self, request: IncomingPublishNamespace) -> None:
        """Cancelled, or the session was lost."""
        session, namespace = session_of(request), request.namespace
        self.published.remove(namespace, request)
        self.publications -= 1
        self._published_by[session] -= 1
        if not self._published_by[session]:
            del self._published_by[session]
        logger.info("%s is published no more", printable_namespace(namespace))
        for withdrawn in self.events.withdrawn:
            withdrawn(namespace)
        self.tell(namespace, lost=True)

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions to ask for a track of `namespace` (MOQT "Publisher Interactions").

        All that published it or a prefix of it, the longest first; those that said GOAWAY
        only when there is nobody else.
        """
        requests = self.published.above(namespace)
        sessions = list(dict.fromkeys(session_of(request) for request in requests))
        return [session for session in sessions if session.goaway is None] or sessions

    # -- subscribers -----------------------------------------------------------------------

    def subscribe(self, request: IncomingSubscribeNamespace) -> None:
        """SUBSCRIBE_NAMESPACE (MOQT "Subscribing to Namespaces")."""
        if not self._refusals.admits(request, Action.SUBSCRIBE_NAMESPACE, request.prefix):
            return
        if len(self.listings) >= self._refusals.config.max_namespaces:
            self._refusals.overloaded(request, "max_namespaces", "namespace subscriptions")
            return
        request.when_ended(lambda: self._unlist(request))
        prefix = request.prefix
        self._file(request)
        left = set(range(len(self.events.awaited)))
        lost: set[int] = set()
        """Who cannot be asked."""

        def told(by: int, known: bool) -> None:
            if by not in left:
                return  # it was not waited for any longer
            left.discard(by)
            if not known:
                lost.add(by)
            if not left:
                self._answer(request, all_asked=not lost)

        for number, wait in enumerate(self.events.awaited):
            wait(session_of(request), prefix, partial(told, number))
        if not self.events.awaited:
            self._answer(request)

    def _answer(self, request: IncomingSubscribeNamespace, *, all_asked: bool = True) -> None:
        """Accept it; where there is nothing to tell of, and not all could be asked who may have
        something, that cannot be said."""
        if request.state is not RequestState.PENDING:
            return  # given up in the meantime
        if not all_asked and not self._known(request):
            self._refusals.counters.requests_unreachable += 1
            self._refusals.unreachable(request)
            return
        self._by_prefix.add(self.listings[request], request)
        request.accept()
        self._list(request)

    def prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        self._unlist(request)
        self._file(request)
        self._by_prefix.add(request.prefix, request)
        self._list(request)

    def _file(self, request: IncomingSubscribeNamespace) -> None:
        self.listings[request] = request.prefix
        for listed in self.events.listed:
            listed(session_of(request), request.prefix, request, True)

    def _unlist(self, request: IncomingSubscribeNamespace) -> None:
        prefix = self.listings.pop(request, None)
        if prefix is not None:
            self._by_prefix.remove(prefix, request)
            for listed in self.events.listed:
                listed(session_of(request), prefix, request, False)

    def _list(self, request: IncomingSubscribeNamespace) -> None:
        for namespace in self._known(request):
            request.add(namespace)

    def _known(self, request: IncomingSubscribeNamespace) -> list[TrackNamespace]:
        """What `request` is told of by now."""
        session = session_of(request)
        found: dict[TrackNamespace, None] = {}
        for known in (*self._here, self.remote):
            found.update(dict.fromkeys(known.namespaces_under(request.prefix)))
        return [namespace for namespace in found if self._tells(session, namespace)]

    def tick(self, now: float) -> None:
        """Time has passed. Needed only where there are upstream relays."""
        self._now = now
        for namespace in [each for each, until in self._held.items() if now >= until]:
            del self._held[namespace]
            self.tell(namespace)

    def tell(self, namespace: TrackNamespace, *, lost: bool = False) -> None:
        """NAMESPACE or NAMESPACE_DONE to every session whose prefix matches, where it is new;
        `lost`: one of its sources is gone."""
        if lost and namespace in self.remote:
            self._held[namespace] = self._now + HELD_SECONDS
        for told in self.events.told:
            told(namespace)
        for listing in list(self._by_prefix.above(namespace)):
            if self._tells(session_of(listing), namespace):
                listing.add(namespace)
            else:
                listing.remove(namespace)
