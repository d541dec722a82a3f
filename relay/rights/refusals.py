"""Refusing requests: the policy, the limits, and what has been found to be malformed."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from moqt.requests import IncomingRequest, OpenRequest
from moqt.session import Session, session_of
from moqt.track.malformed import MalformedTracks
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import Redirect
from moqt.values.names import TrackNamespace
from relay.config import Counters, RelayConfig
from relay.rights.absent import AbsentTracks
from relay.rights.policy import Action, Policy
from relay.rights.refusal_log import RefusalLog

logger = logging.getLogger("relay")

UNREACHABLE = "an upstream relay cannot be asked"

CLAIMS = "what a peer says as a relay is ignored, as nothing shows that it is one"


_PASSED_ON = frozenset(
    {
        RequestErrorCode.INTERNAL_ERROR,
        RequestErrorCode.UNAUTHORIZED,
        RequestErrorCode.TIMEOUT,
        RequestErrorCode.NOT_SUPPORTED,
        RequestErrorCode.EXCESSIVE_LOAD,
        RequestErrorCode.DOES_NOT_EXIST,
        RequestErrorCode.MALFORMED_TRACK,
        RequestErrorCode.UNSUPPORTED_EXTENSION,
        RequestErrorCode.REDIRECT,
    }
)
"""Refusals that mean downstream what they meant to us; others are about our own request."""


def passed_on(error: RequestError) -> tuple[RequestErrorCode, str]:
    """Code and reason of a publisher's refusal, as those downstream are told of it."""
    try:
        code = RequestErrorCode(error.code)
    except ValueError:
        code = RequestErrorCode.INTERNAL_ERROR
    if code in _PASSED_ON:
        return code, error.reason
    return RequestErrorCode.INTERNAL_ERROR, f"the publisher said {code.name}"


def no_right(action: Action) -> str:
    return f"no right to {action.value} here"


class Refusals:
    """Where every request comes first: it goes on, or is answered with why not."""

    def __init__(self, config: RelayConfig, policy: Policy, counters: Counters) -> None:
        self.config = config
        self.policy = policy
        self.counters = counters
        self.trusted: dict[Session, int] = {}
        """Sessions to upstream relays: who runs this relay has chosen them, in that order."""
        self._disbelieved: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        """Which relays those say to be that show nothing of it: a later policy may believe it."""
        self._log = RefusalLog()
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
        self.refuse(request, RequestErrorCode.UNAUTHORIZED, no_right(action))
        return False

    def overloaded(
        self, request: IncomingRequest, limit: str, what: str, own: int | None = None
    ) -> None:
        """It goes beyond a limit, named as in `RelayConfig`, on `what`; `own`: or beyond what a
        session has of it, which has so many."""
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
        if own:
            reason = (
                f"{own} of this session are as many {what} as are still free of {most} ({limit})"
            )
        else:
            reason = f"there are {most} {what}, and no more may be ({limit})"
        self.no_room(request, reason)

    def no_room(self, request: IncomingRequest, reason: str) -> None:
        self.refuse(
            request, RequestErrorCode.EXCESSIVE_LOAD, reason, retry=self.config.retry_after_ms
        )

    def unreachable(self, request: IncomingRequest) -> None:
        """What is asked for may be at an upstream relay that cannot be asked now."""
        if UNREACHABLE not in self._told:
            self._told.add(UNREACHABLE)
            logger.warning("%s: requests for what is not here are refused for now", UNREACHABLE)
        self.refuse(
            request,
            RequestErrorCode.INTERNAL_ERROR,
            UNREACHABLE,
            retry=self.config.retry_after_ms,
        )

    def believe(self, session: Session) -> None:
        """What `session` says as a relay counts from now on if it may say so."""
        peer = session.peer_relay
        if peer is None or session.transport.is_client:
            return  # whom we have dialled is a relay by our settings, or by the directory
        said = self._disbelieved.get(session, peer.id)
        if said is None:
            return
        if self.policy.is_relay(session):
            self._disbelieved.pop(session, None)
            session.peer_relay = peer._replace(id=said)
        elif peer.id is not None:
            self._disbelieved[session] = said
            session.peer_relay = peer._replace(id=None)
            self.claim_ignored(session)

    def claim_ignored(self, session: Session) -> None:
        """It has said something that counts from relays alone."""
        self.counters.claims_ignored += 1
        if CLAIMS not in self._told:
            self._told.add(CLAIMS)
            logger.warning(
                "%s: the first one is %s; a relay is told by the token of its SETUP, that of a "
                'principal with the role "relay"',
                CLAIMS,
                session.transport.peer_address or "without an address",
            )

    def reached(self) -> None:
        """There is a session to an upstream relay again: the next time is told anew."""
        self._told.discard(UNREACHABLE)

    def note(self, request: IncomingRequest, code: RequestErrorCode, reason: str) -> None:
        """Count a refusal, and log it."""
        self.counters.refused[code.name] += 1
        self._log.note(request, code, reason)

    def refuse(
        self,
        request: IncomingRequest,
        code: RequestErrorCode,
        reason: str,
        *,
        retry: int | None = None,
        redirect: Redirect | None = None,
    ) -> None:
        self.note(request, code, reason)
        request.reject(code, reason, retry_after_ms=retry, redirect=redirect)
