"""MOQT "Authorization Token Compression": the cache of one direction of a session."""

from __future__ import annotations

from collections.abc import Iterable

from moqt.codes import AliasType, RequestErrorCode, SessionErrorCode
from moqt.errors import RequestError, SessionError
from moqt.messages import AuthorizationToken

Token = tuple[int, bytes]
"""(token type, token value). The value is a secret: never log it."""

ENTRY_OVERHEAD = 16


class TokenCache:
    """Registered aliases of the peer; bounded by the size we announced in SETUP."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.size = 0
        self._entries: dict[int, Token] = {}

    def resolve(
        self, tokens: Iterable[AuthorizationToken], *, setup: bool = False
    ) -> tuple[Token, ...]:
        """The tokens a message carries; registrations and deletions take effect.

        Raises SessionError for what ends the session and RequestError for an alias
        that is not known, after all registrations of the message took effect.
        """
        resolved: list[Token] = []
        unknown: int | None = None
        for token in tokens:
            match token.alias_type:
                case AliasType.USE_VALUE:
                    resolved.append((token.token_type or 0, token.value or b""))
                case AliasType.REGISTER:
                    resolved.append(self._register(token, setup=setup))
                case _ if setup:
                    raise SessionError(
                        SessionErrorCode.PROTOCOL_VIOLATION,
                        f"{token.alias_type.name} of a token alias in SETUP",
                    )
                case _:
                    alias = token.alias or 0
                    entry = self._entries.get(alias)
                    if entry is None:
                        unknown = alias
                    elif token.alias_type is AliasType.USE_ALIAS:
                        resolved.append(entry)
                    else:
                        del self._entries[alias]
                        self.size -= ENTRY_OVERHEAD + len(entry[1])
        if unknown is not None:
            raise RequestError(
                RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS, f"token alias {unknown} is not known"
            )
        return tuple(resolved)

    def _register(self, token: AuthorizationToken, *, setup: bool) -> Token:
        alias, entry = token.alias or 0, (token.token_type or 0, token.value or b"")
        if alias in self._entries:
            raise SessionError(
                SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS, f"token alias {alias} is in use"
            )
        size = ENTRY_OVERHEAD + len(entry[1])
        if self.size + size > self.max_size:
            if setup:
                return entry
            raise SessionError(
                SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW,
                f"registered tokens exceed {self.max_size} octets",
            )
        self._entries[alias] = entry
        self.size += size
        return entry
