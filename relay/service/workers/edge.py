"""An edge: it takes clients, has their rights, and asks the home for what they want.

It is a relay behind the home. What its clients publish is taken by a second relay, in which the
home is the one who reads: the home gets each Object once, has it in its cache, and every edge, this
one included, gets it from there once. So a publication is found, kept and listed as in one process,
whichever edge a client has come to. Sans-IO.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingPublishNamespace,
    IncomingRequest,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
    OutgoingPublishNamespace,
    RequestState,
)
from moqt.session import Session, session_of
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import Parameters
from moqt.values.names import TrackNamespace, printable_namespace
from moqt.values.tokens import Token
from relay.config import Counters, RelayConfig
from relay.core import Relay
from relay.mesh.uplink import Uplink
from relay.published_here import unmarked
from relay.rights.policy import Action, AllowAll, Policy
from relay.rights.refusals import passed_on
from relay.service.workers.settings import passing

logger = logging.getLogger("relay")

AGAIN_SECONDS = 1.0
"""After which a namespace is announced again that the home has refused."""


REFUSALS = ("requests_revoked", "requests_over_limit", "claims_ignored", "malformed_tracks")


class Trusting:
    """A policy by which the home may all: it asks for nobody but edges, which have asked theirs."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        # nobody but the home is dialled by an edge
        return session.transport.is_client or self._policy.allow(session, action, namespace, tokens)

    def is_relay(self, session: Session) -> bool:
        return self._policy.is_relay(session)

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        return self._policy.check(session, token)


class Announced:
    """The namespaces that publishers at an edge have, as the home is told of them."""

    def __init__(self, relay: Relay, attached: Callable[[], None]) -> None:
        self.session: Session | None = None
        self._relay = relay
        self._attached = attached
        self._requests: dict[TrackNamespace, OutgoingPublishNamespace] = {}
        self._waiting: dict[TrackNamespace, list[Callable[[MoqtError | None], None]]] = {}
        self._again: dict[TrackNamespace, float] = {}
        relay.namespaces.events.withdrawn.append(self._withdrawn)

    def attach(self, session: Session) -> None:
        """There is a session to the home, which is told all anew."""
        self.session = session
        self._requests.clear()
        self._again.clear()
        for namespace in self._relay.namespaces.published.namespaces_under(()):
            self._announce(namespace)
        self._attached()

    def leave(self, session: Session) -> None:
        """The home is going away, and this process with it."""

    def detach(self, session: Session) -> None:
        if session is self.session:
            self.session = None
            self._requests.clear()

    def announce(self, namespace: TrackNamespace, then: Callable[[MoqtError | None], None]) -> None:
        """Call `then` when the home has `namespace`, or with why it has not."""
        held = self._requests.get(namespace)
        if held is not None and held.state is RequestState.ESTABLISHED:
            then(None)
            return
        self._waiting.setdefault(namespace, []).append(then)
        if held is None:
            self._announce(namespace)

    def _announce(self, namespace: TrackNamespace) -> None:
        session = self.session
        if session is None:
            self._told(namespace, RequestError(RequestErrorCode.INTERNAL_ERROR, "not reached"))
            return

        def ended(error: MoqtError) -> None:
            if self.session is not session or self._requests.pop(namespace, None) is None:
                return
            self._told(namespace, error)

        def answered(error: MoqtError | None) -> None:
            if error is None and self.session is session:
                self._told(namespace, None)

        try:
            request = session.publish_namespace(namespace, on_ended=ended)
        except MoqtError as error:
            self._told(namespace, error)
            return
        self._requests[namespace] = request
        request.on_answer = answered

    def _told(self, namespace: TrackNamespace, error: MoqtError | None) -> None:
        for then in self._waiting.pop(namespace, ()):
            then(error)
        published = self._relay.namespaces.published
        if error is None:
            self._withdrawn(namespace)  # who waited may have gone
        elif namespace in published:
            logger.warning(
                "the home does not take %s of this worker: %s",
                printable_namespace(namespace),
                error,
            )
            self._again[namespace] = self._relay.clock.now + AGAIN_SECONDS

    def _withdrawn(self, namespace: TrackNamespace) -> None:
        if namespace in self._relay.namespaces.published or namespace in self._waiting:
            return
        self._again.pop(namespace, None)
        request = self._requests.pop(namespace, None)
        if request is not None:
            request.cancel()

    def tick(self, now: float) -> None:
        for namespace in [each for each, at in self._again.items() if now >= at]:
            del self._again[namespace]
            if namespace in self._relay.namespaces.published and namespace not in self._requests:
                self._announce(namespace)


class _Uplink(Uplink):
    """To the home; it is told when that is there."""

    def __init__(self, relay: Relay, attached: Callable[[], None]) -> None:
        super().__init__(relay)
        self._attached = attached

    def attach(self, session: Session) -> None:
        super().attach(session)
        self._attached()


class Taking(Relay):
    """Takes what publishers at an edge have; the home reads."""

    def enter(self, session: Session) -> None:
        super().enter(session)
        self.sessions.discard(session)  # it is no client's


class EdgeRelay(Relay):
    """One scope of an edge. What needs the home waits for it a moment when it is not there."""

    def __init__(
        self, config: RelayConfig | None = None, policy: Policy | None = None, **shared: Any
    ) -> None:
        super().__init__(config, policy, **shared)
        self.namespaces.is_part = True
        self.taking = Taking(
            passing(self.config),
            Trusting(policy or AllowAll()),
            # what it takes is counted by the home
            counters=Counters(refused=self.counters.refused),
            clock=self.clock,
        )
        self.parts = (self, self.taking)
        self._held: dict[IncomingRequest, tuple[float, Callable[[], None]]] = {}
        self._held_of: Counter[Session] = Counter()
        self.uplink = _Uplink(self, self._let_go)
        self.announced = Announced(self.taking, self._let_go)

    @property
    def up(self) -> bool:
        """Whether the home is there, both ways."""
        return self.uplink.session is not None and self.announced.session is not None

    def enter(self, session: Session) -> None:
        super().enter(session)
        if session.transport.is_client:
            self.sessions.discard(session)  # the home is no client

    # -- waiting for the home ----------------------------------------------------------------

    def _with_home(
        self,
        request: IncomingRequest,
        action: Action,
        namespace: TrackNamespace,
        take: Callable[[], None],
    ) -> None:
        """`take` it when the home is there, or has not come in time."""
        if self.up:
            take()
            return
        if not self.refusals.admits(request, action, namespace):
            return
        session, most = session_of(request), self.config.max_pending
        if self._held_of[session] >= most - len(self._held):
            own = self._held_of[session] if len(self._held) < most else None
            what = "requests that wait for the relay's own cache"
            self.refusals.overloaded(request, "max_pending", what, own)
            return
        self._held[request] = self.clock.now + self.config.upstream_timeout, take
        self._held_of[session] += 1
        request.when_ended(partial(self._unhold, request))

    def _unhold(self, request: IncomingRequest) -> None:
        if self._held.pop(request, None) is not None:
            session = session_of(request)
            self._held_of[session] -= 1
            if not self._held_of[session]:
                del self._held_of[session]

    def _let_go(self, *, due: float | None = None) -> None:
        """Take what has waited: all when the home is there, else what is due."""
        if due is None and not self.up:
            return
        for request, (at, take) in tuple(self._held.items()):
            if request in self._held and (due is None or at <= due):
                self._unhold(request)
                take()

    # -- what publishers have ----------------------------------------------------------------

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        self._with_home(
            request,
            Action.PUBLISH_NAMESPACE,
            request.namespace,
            partial(self._announce, request),
        )

    def _announce(self, request: IncomingPublishNamespace) -> None:
        """It is accepted when the home has taken it: whoever is told that can ask for it, at
        whichever edge."""
        refusals, namespace = self.taking.refusals, request.namespace
        if not refusals.admits(request, Action.PUBLISH_NAMESPACE, namespace):
            return

        def told(error: MoqtError | None) -> None:
            if request.state is not RequestState.PENDING:
                return  # given up in the meantime
            if error is None:
                self.taking.publish_namespace_received(request)
            elif isinstance(error, RequestError):
                code, reason = passed_on(error)
                refusals.refuse(request, code, reason, retry=error.retry_after_ms or 1000)
            else:
                refusals.unreachable(request)

        self.announced.announce(namespace, told)

    def publish_received(self, request: IncomingPublish) -> None:
        take = partial(self.taking.publish_received, request)
        self._with_home(request, Action.PUBLISH, request.name.namespace, take)

    # -- what clients want -------------------------------------------------------------------

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        take = partial(super().subscribe_namespace_received, request)
        self._with_home(request, Action.SUBSCRIBE_NAMESPACE, request.prefix, take)

    def subscribe_tracks_received(self, request: IncomingSubscribeTracks) -> None:
        take = partial(super().subscribe_tracks_received, request)
        self._with_home(request, Action.SUBSCRIBE_TRACKS, request.prefix, take)

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        take = partial(super().subscribe_received, request)
        if request.name in self.tracks:
            take()
        else:
            self._with_home(request, Action.SUBSCRIBE, request.name.namespace, take)

    def fetch_received(self, request: IncomingFetch) -> None:
        take = partial(super().fetch_received, request)
        if request.name in self.tracks:
            take()
        else:
            self._with_home(request, Action.FETCH, request.name.namespace, take)

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        name = unmarked(request.name)
        take = partial(super().track_status_received, request)
        if name is not request.name:
            take = partial(self._ask_disk, request, name.namespace)
        self._with_home(request, Action.TRACK_STATUS, name.namespace, take)

    def _ask_disk(self, request: IncomingTrackStatus, namespace: TrackNamespace) -> None:
        """Whether a track is on the disk, which is the home's."""
        home = self.uplink.session
        if not self.refusals.admits(request, Action.TRACK_STATUS, namespace):
            return
        if home is None:
            self.refusals.unreachable(request)
            return

        def answered(error: MoqtError | None) -> None:
            if error is None:
                request.answer(asked.largest, asked.properties)
            elif isinstance(error, RequestError):
                code, reason = passed_on(error)
                self.refusals.refuse(request, code, reason, retry=error.retry_after_ms)
            else:
                self.refusals.unreachable(request)

        try:
            asked = home.track_status(request.name, Parameters())
        except MoqtError:
            self.refusals.unreachable(request)
            return
        asked.on_answer = answered

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        super().tick(now)
        self.taking.tick(now)
        self.uplink.tick(now)
        self.announced.tick(now)
        self._let_go(due=now)
        self._count_refusals()

    def _count_refusals(self) -> None:
        """What was refused to publishers was refused here, and the home has not heard of it."""
        taken = self.taking.counters
        for name in REFUSALS:
            setattr(self.counters, name, getattr(self.counters, name) + getattr(taken, name))
            setattr(taken, name, 0)

    def forget_all(self) -> None:
        super().forget_all()
        self.taking.forget_all()
