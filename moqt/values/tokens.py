"""MOQT "Authorization Token Compression": the caches of both directions of a session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from moqt.values.codes import AliasType, RequestErrorCode, SessionErrorCode
from moqt.values.errors import MisuseError, RequestError, SessionError
from moqt.values.messages import AuthorizationToken, Parameters

Token = tuple[int, bytes]
"""(token type, token value). The value is a secret: never log it."""

ENTRY_OVERHEAD = 16
FIRST_ALIAS = 0x4000
"""Aliases from here on are given by `SentTokens`; an application names lower ones."""
WORTH_REGISTERING = 16
"""A token value of fewer octets is sent as it is each time."""
MAX_SENT_SIZE = 256 * 1024
"""Octets of a peer's cache that are used at most, whatever it announces."""


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
        if len(set(resolved)) < len(resolved):
            raise SessionError(
                SessionErrorCode.PROTOCOL_VIOLATION, "the same token twice in one message"
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


class Carried(NamedTuple):
    """What one message of ours says of aliases in the peer's cache."""

    registers: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    deletes: tuple[int, ...] = ()


CARRIES_NOTHING = Carried()


@dataclass(slots=True)
class _Entry:
    """One alias of ours in the peer's cache."""

    size: int
    token: Token | None = None
    """None when the application named the alias."""
    confirmed: bool = False
    """The peer has answered the message that registered it."""
    in_flight: int = 0
    """Messages that use it and have no answer."""
    leaving: bool = False
    """A DELETE is on its way: not used any more, but counted until that is answered."""
    retired: bool = False
    """Its token is of no more use."""


class SentTokens:
    """Our side of the peer's cache: which tokens we registered there, and which it surely has.

    Streams are not ordered: an alias is used only after an answer to the message that
    registered it (until then the value is sent again), and deleted only while no message that
    uses it is unanswered. When the cache is full, the aliases used longest ago make room.
    """

    def __init__(self) -> None:
        self.limit = 0
        """What the peer's MAX_AUTH_TOKEN_CACHE_SIZE lets us use, 0 before its SETUP."""
        self.size = 0
        """Octets of the peer's cache that our aliases may take."""
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """By alias, the one used longest ago first."""
        self._by_token: dict[Token, int] = {}
        self._next_alias = FIRST_ALIAS

    def __len__(self) -> int:
        return len(self._entries)

    def announced(self, limit: int, setup_tokens: Iterable[AuthorizationToken]) -> None:
        """The peer's SETUP has come. What ours registers beyond `limit` it did not keep."""
        self.limit = min(limit, MAX_SENT_SIZE)
        for token in setup_tokens:
            if token.alias_type is AliasType.REGISTER and self.size + _size(token) <= limit:
                self._add(token.alias or 0, _Entry(_size(token)))

    def retire(self, token: AuthorizationToken) -> None:
        """`token`, sent by value before, is of no more use: its alias is deleted with the next
        message that carries tokens. To send it once more takes that back."""
        alias = self._by_token.get(_key(token))
        if alias is not None:
            self._entries[alias].retired = True

    def check(self, parameters: Parameters) -> None:
        """Raise MisuseError for tokens that would end the session at the peer: a REGISTER
        beyond its cache or of an alias in use, or one token twice."""
        tokens = parameters.authorization_tokens
        if len(set(tokens)) < len(tokens):
            raise MisuseError("one message carries the same Authorization Token twice")
        size = self.size
        for token in tokens:
            if token.alias_type is not AliasType.REGISTER:
                continue
            if token.alias in self._entries:
                raise MisuseError(f"token alias {token.alias} is registered already")
            size += _size(token)
            if size > self.limit:
                raise MisuseError(
                    f"a token of {_size(token)} octets cannot be registered: the peer keeps "
                    f"{self.limit}, of which {self.size} are used"
                )

    def compress(
        self, parameters: Parameters, *, register: bool = True
    ) -> tuple[Parameters, Carried]:
        """`parameters` with aliases in place of long tokens, and what they say of aliases.

        `settle` or `release` that when the message is answered or given up.
        """
        asked = parameters.authorization_tokens
        if not asked:
            return parameters, CARRIES_NOTHING
        tokens = [self._compressed(token, register) for token in asked]
        if register:
            missing = sum(
                _size(token)
                for token in tokens
                if _is_worth_it(token) and _key(token) not in self._by_token
            )
            tokens += [AuthorizationToken(AliasType.DELETE, n) for n in self._to_go(missing)]
        for token in tokens:
            entry = self._entries.get(-1 if token.alias is None else token.alias)
            if entry is not None and token.alias_type is AliasType.DELETE:
                entry.leaving = True
            elif entry is not None:
                entry.in_flight += 1

        def aliases(kind: AliasType) -> tuple[int, ...]:
            return tuple(t.alias for t in tokens if t.alias_type is kind and t.alias is not None)

        return replace(parameters, authorization_tokens=tuple(tokens)), Carried(
            aliases(AliasType.REGISTER), aliases(AliasType.USE_ALIAS), aliases(AliasType.DELETE)
        )

    def _compressed(self, token: AuthorizationToken, register: bool) -> AuthorizationToken:
        if token.alias_type is AliasType.REGISTER:
            self._add(token.alias or 0, _Entry(_size(token)))
        if not _is_worth_it(token):
            return token
        alias = self._by_token.get(_key(token))
        if alias is not None:
            entry = self._entries[alias]
            if not entry.confirmed or entry.leaving:
                return token
            self._entries.move_to_end(alias)
            entry.retired = False
            return AuthorizationToken(AliasType.USE_ALIAS, alias)
        if not register or self.size + _size(token) > self.limit:
            return token
        while self._next_alias in self._entries:  # an application has named it
            self._next_alias += 1
        alias, self._next_alias = self._next_alias, self._next_alias + 1
        self._by_token[_key(token)] = alias
        self._add(alias, _Entry(_size(token), _key(token)))
        return AuthorizationToken(AliasType.REGISTER, alias, token.token_type, token.value)

    def _to_go(self, missing: int) -> list[int]:
        """Aliases to delete: those that are retired, and others so that `missing` octets can be
        registered later; none of these when it is not enough. Their room is counted free only
        when the DELETE has been answered."""
        deletable = {
            alias: entry
            for alias, entry in self._entries.items()
            if entry.token is not None
            and (entry.confirmed and not entry.leaving and not entry.in_flight)
        }
        retired = [alias for alias, entry in deletable.items() if entry.retired]
        free = self.limit - self.size + sum(deletable[alias].size for alias in retired)
        free += sum(entry.size for entry in self._entries.values() if entry.leaving)
        chosen = []
        for alias, entry in deletable.items():
            if free >= missing or missing > self.limit:
                break
            if not entry.retired:
                chosen.append(alias)
                free += entry.size
        return retired + (chosen if free >= missing else [])

    def settle(self, carried: Carried) -> None:
        """The message that carried it has been answered."""
        for alias in carried.registers:
            if entry := self._entries.get(alias):
                entry.confirmed = True
        for alias in carried.deletes:
            if entry := self._entries.pop(alias, None):
                self.size -= entry.size
                if entry.token is not None:
                    del self._by_token[entry.token]
        self.release(carried)

    def release(self, carried: Carried) -> None:
        """The message will not be answered: whether the peer has read it is not known."""
        for alias in (*carried.registers, *carried.uses):
            if entry := self._entries.get(alias):
                entry.in_flight -= 1

    def doubt(self) -> None:
        """The peer knows an alias no more: send values from now on."""
        for entry in self._entries.values():
            entry.confirmed = False

    def _add(self, alias: int, entry: _Entry) -> None:
        self._entries[alias] = entry
        self.size += entry.size


def _size(token: AuthorizationToken) -> int:
    return ENTRY_OVERHEAD + len(token.value or b"")


def _key(token: AuthorizationToken) -> Token:
    return token.token_type or 0, token.value or b""


def _is_worth_it(token: AuthorizationToken) -> bool:
    return token.alias_type is AliasType.USE_VALUE and len(token.value or b"") >= WORTH_REGISTERING
