"""The scopes of a relay: one path, one set of names (MOQT "MOQT URI Scheme").

Tracks with one Full Track Name are the same track only where the sessions' authority and path
are equal. A relay process has one certificate, so whatever authority a client dials (a name,
another one, an address) is the same server; what separates scopes is the path, without its
query. Each scope has a `Relay` of its own; the cache's budget, the policy and the counters
are shared. Sans-IO.
"""

from __future__ import annotations

import logging

from moqt.session import Session, SessionHandler
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.tokens import Token
from relay.cache import Cache
from relay.config import Clock, Counters, RelayConfig
from relay.core import Relay
from relay.counted import Numbers
from relay.rights.policy import AllowAll, Policy

logger = logging.getLogger("relay")


def scope_of(path: str | None) -> str:
    """What of a session's path separates scopes; an empty path is that of the root."""
    return (path or "").partition("?")[0] or "/"


class Scopes(SessionHandler):
    """Hands each session, once it is established, to the `Relay` of its scope."""

    def __init__(self, config: RelayConfig | None = None, policy: Policy | None = None) -> None:
        self.config = config or RelayConfig()
        self.policy = policy or AllowAll()
        self.counters = Counters()
        self.cache = Cache(self.config.cache_octets, self.config.transit_octets)
        self.clock = Clock()
        self.relays: dict[str, Relay] = {}
        self._kept: set[str] = set()
        self._counted = Numbers()
        """Of the scopes that are gone."""

    def keep(self, path: str) -> Relay:
        """The scope of `path`, which stays also while nobody uses it."""
        scope = scope_of(path)
        self._kept.add(scope)
        return self._relay(scope)

    def _relay(self, scope: str) -> Relay:
        relay = self.relays.get(scope)
        if relay is None:
            relay = self.relays[scope] = Relay(
                self.config,
                self.policy,
                cache=self.cache,
                counters=self.counters,
                clock=self.clock,
            )
        return relay

    # -- sessions ----------------------------------------------------------------------------

    def check_scope(
        self, session: Session, authority: str | None, path: str | None
    ) -> SessionErrorCode | None:
        """INVALID_PATH for one scope too many; one that only the cache knows makes room."""
        scope = scope_of(path)
        if scope in self.relays or len(self.relays) < self.config.max_scopes or self._displace():
            self._relay(scope)
            return None
        self.counters.scopes_refused += 1
        if self.counters.scopes_refused == 1:
            logger.warning(
                "the relay is at its limit of %d scopes (max_scopes): sessions for more are closed",
                self.config.max_scopes,
            )
        return SessionErrorCode.INVALID_PATH

    def check_token(self, session: Session, token: Token) -> RequestErrorCode | None:
        return self.policy.check(session, token)

    def session_established(self, session: Session) -> None:
        relay = self._relay(scope_of(session.path))
        session.handler = relay
        relay.session_established(session)

    def _displace(self) -> bool:
        for scope, relay in self.relays.items():
            if not relay.sessions and scope not in self._kept:
                self._forget(scope)
                return True
        return False

    def _forget(self, scope: str) -> None:
        relay = self.relays.pop(scope)
        relay.forget_all()
        self._counted = Numbers.total([self._counted, relay.numbers()])

    # -- time and numbers --------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed. Twice a second is enough."""
        self.clock.now = now
        self.cache.expire(now)
        for scope, relay in tuple(self.relays.items()):
            relay.tick(now)
            if not relay.sessions and not relay.tracks and scope not in self._kept:
                self._forget(scope)

    def numbers(self) -> Numbers:
        """What all sessions, ended ones included, have counted."""
        return Numbers.total([self._counted, *(relay.numbers() for relay in self.relays.values())])
