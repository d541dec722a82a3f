"""Namespaces: who publishes which, and who is told of them (MOQT "Namespace Discovery")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from moqt.requests import IncomingPublishNamespace, IncomingSubscribeNamespace, RequestState
from moqt.session import Session, session_of
from moqt.values.names import TrackNamespace, printable_namespace
from relay.audience.prefixes import PrefixMap
from relay.rights.policy import Action
from relay.rights.refusals import Refusals

logger = logging.getLogger("relay")


@dataclass(slots=True)
class NamespaceEvents:
    """Who is told when namespaces, or those who ask for them, come and go."""

    appeared: list[Callable[[TrackNamespace], None]] = field(default_factory=list)
    """A local publisher has it: the first one, or one more."""
    withdrawn: list[Callable[[TrackNamespace], None]] = field(default_factory=list)
    """A local publisher has it no more; others may."""
    listed: list[Callable[[Session, TrackNamespace, object, bool], None]] = field(
        default_factory=list
    )
    """A SUBSCRIBE_NAMESPACE for the prefix has come (True) or gone."""
    await_upstream: Callable[[Session, TrackNamespace, Callable[[], None]], None] = (
        lambda session, prefix, then: then()
    )
    """Calls `then`, perhaps more than once, when those upstream tell of what they know under the
    prefix, or will not: a listing is accepted then, so that whoever asked can tell soon after
    REQUEST_OK that nothing more is there."""


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
        self.on_disk: PrefixMap[Hashable] = PrefixMap()
        """Complete tracks on the disk: the relay is the publisher of these, too."""
        self.remote: PrefixMap[Session] = PrefixMap()
        """What upstream relays told of (NAMESPACE)."""
        self.publications = 0
        self.listings: dict[IncomingSubscribeNamespace, TrackNamespace] = {}
        """SUBSCRIBE_NAMESPACEs, with the prefix each is filed under."""
        self._published_by: dict[Session, int] = {}
        self._by_prefix: PrefixMap[IncomingSubscribeNamespace] = PrefixMap()

    def _sources(self, session: Session) -> tuple[PrefixMap[Any], ...]:
        """Whose namespaces `session` is told of: an upstream relay's own are not its news."""
        if session in self._refusals.trusted:
            return (self.published, self.published_here, self.on_disk)
        return (self.published, self.published_here, self.on_disk, self.remote)

    @property
    def tables(self) -> tuple[PrefixMap[Any], ...]:
        """Every table, to see that nothing is left behind."""
        return (
            self.published,
            self.published_here,
            self.on_disk,
            self.remote,
            self._by_prefix,
        )

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
        self.tell(namespace)

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
        self.events.await_upstream(session_of(request), prefix, lambda: self._accept(request))

    def _accept(self, request: IncomingSubscribeNamespace) -> None:
        if request.state is not RequestState.PENDING:
            return  # given up in the meantime, or waited for long enough
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
        found: dict[TrackNamespace, None] = {}
        for known in self._sources(session_of(request)):
            found.update(dict.fromkeys(known.namespaces_under(request.prefix)))
        for namespace in found:
            request.add(namespace)

    def tell(self, namespace: TrackNamespace) -> None:
        """NAMESPACE or NAMESPACE_DONE to every session whose prefix matches, where it is new."""
        for listing in list(self._by_prefix.above(namespace)):
            if any(namespace in known for known in self._sources(session_of(listing))):
                listing.add(namespace)
            else:
                listing.remove(namespace)
