"""Bearer tokens as a relay's policy: who holds which right in which scope.

The unit of authorization is the prefix ("kvcs-1", Scope ID) (KVCS "Track Namespace"), and that
of "KVCache over MoQT", tag and model; whatever is under neither needs the right in every scope.
A token of type 0 is looked up in the file of principals, which KVSP services read too: this is
the one place of the relay that knows anything of KVSP, and it knows no more than that file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvsp.principals import (
    Principal,
    Principals,
    Right,
    load_principals,
    principals_version,
)
from kvsp.principals import (
    PrincipalsFileError as PrincipalsFileError,
)
from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.names import TrackNamespace
from moqt.values.tokens import Token
from relay.rights.policy import Action

logger = logging.getLogger("relay")

PREFIX: Final = b"kvcs-1"
SCOPE_ID_OCTETS: Final = 16
MODELS_PREFIX: Final = b"moq://kvcache.moq.arpa/v1/"
TOKEN_TYPE: Final = 0
"""Agreed out of band (MOQT "Authorization Token")."""

RELAY: Final = "relay"
"""The role of a principal that is a relay."""

RIGHTS: Final[Mapping[Action, Right]] = {
    Action.PUBLISH_NAMESPACE: Right.WRITE,
    Action.PUBLISH: Right.WRITE,
    Action.SUBSCRIBE_NAMESPACE: Right.READ,
    Action.SUBSCRIBE_TRACKS: Right.READ,
    Action.SUBSCRIBE: Right.READ,
    Action.FETCH: Right.READ,
    Action.TRACK_STATUS: Right.READ,
}


class TokenPolicy:
    """A `relay.rights.policy.Policy` that reads its principals from a file, again when it changes.

    A file that cannot be used denies every new request until it can (fail closed).
    """

    def __init__(self, path: Path) -> None:
        """Raises PrincipalsFileError: a relay does not start with a file it cannot use."""
        self.path = path
        self.denied = 0
        self._version = principals_version(path)
        self._principals = load_principals(path)

    def reload(self) -> bool:
        """Look whether the file has changed; call it every now and then.

        True when there are new principals: what is open has to be looked at again
        (`relay.withdrawals`). A file that cannot be used withdraws nothing from what is open.
        """
        version = principals_version(self.path)
        if version and version == self._version:
            return False
        first_failure = len(self._principals) > 0 or version != self._version
        self._version = version
        try:
            self._principals = load_principals(self.path)
        except PrincipalsFileError as error:
            self._principals = Principals()
            if first_failure:
                logger.error("%s; new requests are denied until that is mended", error)
            return False
        logger.info("%s: %d principals", self.path, len(self._principals))
        return True

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        right = RIGHTS[action]
        shown = {value for type_, value in (*tokens, *session.peer_tokens) if type_ == TOKEN_TYPE}
        known = [self._principals.by_token(token) for token in shown]
        allowed = any(who is not None and _may(who, namespace, right) for who in known)
        self.denied += not allowed
        return allowed

    def is_relay(self, session: Session) -> bool:
        """By the tokens of its SETUP: it says there which relay it is."""
        known = [
            self._principals.by_token(value)
            for type_, value in session.peer_tokens
            if type_ == TOKEN_TYPE
        ]
        return any(who is not None and who.has_role(RELAY) for who in known)

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        """An unknown token gives no right, and is no fault by itself."""
        return None


def _may(who: Principal, namespace: TrackNamespace, right: Right) -> bool:
    """Whether it has the right in the scope, or for the model, of a namespace; in all of them
    when the namespace is not of just one."""
    tag, unit = namespace[:2] if len(namespace) > 1 else (b"", b"")
    if tag == PREFIX and len(unit) == SCOPE_ID_OCTETS:
        return who.may(unit, right)
    if tag == MODELS_PREFIX:
        # what is no text is the name of no model
        return who.may_of_model(unit.decode("utf-8", "replace"), right)
    return who.may(None, right)
