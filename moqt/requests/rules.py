"""The rules that need to know both ends: what a peer may ask, and what may be asked of it."""

from __future__ import annotations

from typing import Protocol

from moqt.track.filters import RangeFilters, check_range_filters
from moqt.values.codes import MessageType, RequestErrorCode, SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import MisuseError, RequestError, SessionError, protocol_violation
from moqt.values.intervals import IntervalSet
from moqt.values.messages import (
    AuthorizationToken,
    Goaway,
    Message,
    Parameters,
    RequestErrorMessage,
)
from moqt.values.names import FullTrackName, Location
from moqt.values.tokens import Carried, SentTokens, Token, TokenCache
from moqt.wire.primitives import full_name_fault

MAX_REQUEST_ID_GAPS = 4096
"""Runs of the peer's Request IDs told apart; beyond it the oldest gap counts as used."""

_TOKEN_REFUSED = {
    RequestErrorCode.EXPIRED_AUTH_TOKEN: SessionErrorCode.EXPIRED_AUTH_TOKEN,
    RequestErrorCode.MALFORMED_AUTH_TOKEN: SessionErrorCode.MALFORMED_AUTH_TOKEN,
}


class Judge(Protocol):
    """Who decides what no rule of the draft does: the application, for this session."""

    def check_token(self, token: Token) -> RequestErrorCode | None:
        """Why the token cannot be accepted, None when it can."""
        ...

    def check_scope(self, authority: str | None, path: str | None) -> SessionErrorCode | None:
        """Why what the client dialled is not served, None when it is."""
        ...


class Rules:
    """The rules of one session, and the memory they need of both ends."""

    def __init__(self, config: SessionConfig, judge: Judge, *, is_client: bool) -> None:
        self._config = config
        self._judge = judge
        self._is_client = is_client
        self.token_cache = TokenCache(config.max_auth_token_cache_size)
        """What the peer registered here."""
        self.sent_tokens = SentTokens()
        self._ids_in_order = 0
        """Request IDs of the peer, counted in steps of two, that came without a gap."""
        self._ids_ahead = IntervalSet()
        """Those that came after a gap, which may stay for ever."""
        self.peer_max_filter_ranges = 0

    # -- of the peer -----------------------------------------------------------------------

    def use_request_id(self, request_id: int) -> None:
        """Check parity and that the ID is new (MOQT "Request ID"). Kept as intervals: IDs may
        be skipped for good, when a request is cancelled before it was ever read."""
        if request_id & 1 != self._is_client:
            raise SessionError(
                SessionErrorCode.INVALID_REQUEST_ID,
                f"Request ID {request_id} has the wrong least significant bit",
            )
        number, ahead = request_id >> 1, self._ids_ahead
        if number == self._ids_in_order and not ahead:
            self._ids_in_order += 1
            return
        mark = Location(0, number)
        if number < self._ids_in_order or mark in ahead:
            raise SessionError(
                SessionErrorCode.INVALID_REQUEST_ID, f"Request ID {request_id} was used before"
            )
        ahead.add(mark, mark)
        if number == self._ids_in_order or len(ahead) > MAX_REQUEST_ID_GAPS:
            # The first run joins what came in order; a gap before it counts as used.
            self._ids_in_order = ahead.pop_first()[1].object + 1

    @property
    def request_id_gaps(self) -> int:
        """Runs of the peer's Request IDs that are told apart, beyond those without a gap."""
        return len(self._ids_ahead)

    def check_filters(self, parameters: Parameters) -> None:
        """Raise RequestError INVALID_FILTER; MAX_FILTER_RANGES counts a request and its fill."""
        limit = self._config.max_filter_ranges
        check_range_filters(parameters.range_filters, limit)
        fill = parameters.fill_parameters
        if fill is not None:
            used = sum(len(each.ranges) for each in parameters.range_filters)
            check_range_filters(fill.range_filters, limit - used)

    def resolve_tokens(self, parameters: Parameters) -> tuple[Token, ...]:
        """The tokens a message carries. Raises RequestError when one cannot be accepted."""
        tokens = self.token_cache.resolve(parameters.authorization_tokens)
        if len(tokens) > self._config.max_tokens:
            raise RequestError(
                RequestErrorCode.EXCESSIVE_LOAD,
                f"{len(tokens)} Authorization Tokens in one message, at most "
                f"{self._config.max_tokens} are looked at",
            )
        for token in tokens:
            refused = self._judge.check_token(token)
            if refused is not None:
                raise RequestError(refused, "an Authorization Token is not accepted")
        return tokens

    def check_goaway(self, goaway: Goaway) -> None:
        if goaway.uri and not self._is_client:
            raise protocol_violation("a client's GOAWAY carries a URI")

    def check_redirect(self, message: RequestErrorMessage, opening: MessageType) -> None:
        redirect = message.redirect
        if redirect is None:
            return
        if redirect.uri and not self._is_client:
            raise protocol_violation("a client's REDIRECT carries a URI")
        namespace_scoped = opening in (
            MessageType.PUBLISH_NAMESPACE,
            MessageType.SUBSCRIBE_NAMESPACE,
            MessageType.SUBSCRIBE_TRACKS,
        )
        if redirect.name and namespace_scoped:
            raise protocol_violation("a REDIRECT of a namespace request carries a track name")

    def check_scope(self, authority: str | None, path: str | None) -> None:
        """Raise SessionError for an authority or path that is not served here."""
        refused = self._judge.check_scope(authority, path)
        if refused is not None:
            raise SessionError(refused, "what the client dialled is not served here")

    def setup_tokens(self, tokens: list[AuthorizationToken]) -> tuple[Token, ...]:
        """The tokens of SETUP. Raises SessionError when one cannot be accepted."""
        resolved = self.token_cache.resolve(tokens, setup=True)
        if len(resolved) > self._config.max_tokens:
            raise SessionError(
                SessionErrorCode.UNAUTHORIZED,
                f"{len(resolved)} Authorization Tokens in SETUP, at most "
                f"{self._config.max_tokens} are looked at",
            )
        for token in resolved:
            refused = self._judge.check_token(token)
            if refused is not None:
                raise SessionError(
                    _TOKEN_REFUSED.get(refused, SessionErrorCode.UNAUTHORIZED),
                    "an Authorization Token in SETUP is not accepted",
                )
        return resolved

    # -- to the peer -----------------------------------------------------------------------

    def check_name(self, name: FullTrackName) -> None:
        """Raise MisuseError for what is no Full Track Name, such as text where octets belong."""
        if fault := full_name_fault(name.namespace, name.name):
            raise MisuseError(fault)

    def check_ranges_to_peer(self, filters: RangeFilters, fill: Parameters | None) -> None:
        """Raise RequestError INVALID_FILTER beyond the peer's MAX_FILTER_RANGES."""
        ranges = sum(len(each.ranges) for each in filters)
        if fill is not None:
            ranges += sum(len(each.ranges) for each in fill.range_filters)
        if ranges > self.peer_max_filter_ranges:
            raise RequestError(
                RequestErrorCode.INVALID_FILTER,
                f"{ranges} filter ranges, the peer allows {self.peer_max_filter_ranges}",
            )

    def check_tokens_to_peer(self, parameters: Parameters) -> None:
        """Raise MisuseError when the tokens would end the session at the peer."""
        self.sent_tokens.check(parameters)

    def settle_tokens(self, carried: Carried, answer: Message | None) -> None:
        """What carried aliases of ours was answered, or (None) never will be."""
        unknown = isinstance(answer, RequestErrorMessage) and (
            answer.code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
        )
        if answer is None or unknown:
            self.sent_tokens.release(carried)
        else:
            self.sent_tokens.settle(carried)
        if unknown:
            self.sent_tokens.doubt()

    def check_uri_to_peer(self, uri: str, what: str) -> None:
        """Raise MisuseError when a client names a URI: only a server may."""
        if uri and self._is_client:
            raise MisuseError(f"a client's {what} carries no URI")
