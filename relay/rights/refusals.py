"""Refusing requests: the policy, the limits, and what has been found to be malformed."""

from __future__ import annotations

import logging

from moqt.requests import IncomingRequest, OpenRequest
from moqt.session import Session, session_of
from moqt.track.malformed import MalformedTracks
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import Redirect
from moqt.values.names import TrackNamespace
from relay.config import Counters, RelayConfig
from relay.rights.absent import AbsentTracks
from relay.rights.policy import Action, Policy

logger = logging.getLogger("relay")


class Refusals:
    """Where every request comes first: it goes on, or is answered with why not."""

    def __init__(self, config: RelayConfig, policy: Policy, counters: Counters) -> None:
        self.config = config
        self.policy = policy
        self.counters = counters
        self.trusted: dict[Session, None] = {}
        """Sessions to upstream relays: who runs this relay has chosen them."""
        self._told: set[str] = set()
        """Limits of which the log has heard that the relay came to them."""
        self.absent = AbsentTracks(config.max_absent)
        """Tracks that their publishers have said do not exist."""
        self.malformed = MalformedTracks()
        """Tracks whose publishers contradicted themselves or each other."""

    def may(self, request: OpenRequest, action: Action, namespace: TrackNamespace) -> bool:
        """Whether the session may, by the tokens of `request` and of its SETUP."""
        return session_of(request) in self.trusted or self.policy.allow(
            session_of(request), action, namespace, request.tokens
        )

    def admits(self, request: IncomingRequest, action: Action, namespace: TrackNamespace) -> bool:
        """`may`; answers UNAUTHORIZED when it may not."""
        if self.may(request, action, namespace):
            return True
        self.refuse(request, RequestErrorCode.UNAUTHORIZED, f"no right to {action.value} here")
        return False

    def overloaded(self, request: IncomingRequest, limit: str, what: str) -> None:
        """It goes beyond a limit, named as in `RelayConfig`, on `what`."""
        most = getattr(self.config, limit)
        self.counters.requests_over_limit += 1
        if limit not in self._told:
            self._told.add(limit)
            logger.warning(
                "the relay is at its limit of %d %s (%s): what goes beyond is refused",
                most,
                what,
                limit,
            )
        self.no_room(request, f"there are {most} {what}, and no more may be ({limit})")

    def no_room(self, request: IncomingRequest, reason: str) -> None:
        self.refuse(
            request, RequestErrorCode.EXCESSIVE_LOAD, reason, retry=self.config.retry_after_ms
        )

    def refuse(
        self,
        request: IncomingRequest,
        code: RequestErrorCode,
        reason: str,
        *,
        retry: int | None = None,
        redirect: Redirect | None = None,
    ) -> None:
        self.counters.requests_refused += 1
        request.reject(code, reason, retry_after_ms=retry, redirect=redirect)
