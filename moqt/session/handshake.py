"""The states of a session, and SETUP: what is announced in it, and what the peer's means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moqt.quic.transport import Transport
from moqt.values.codes import SessionErrorCode, SetupOptionType
from moqt.values.config import SessionConfig
from moqt.values.errors import SessionError
from moqt.values.messages import (
    AuthorizationToken,
    KeyValue,
    PeerRelay,
    Properties,
    Setup,
    property_value,
)
from moqt.wire.codec import Codec

IMPLEMENTATION = b"kvcs/0"


class SessionState(IntEnum):
    CONNECTING = 0
    """The QUIC handshake runs."""
    SETUP = 1
    """Our SETUP is sent, the peer's has not come."""
    ESTABLISHED = 2
    CLOSED = 3


_S = SessionState
SESSION_MOVES: dict[SessionState, frozenset[SessionState]] = {
    _S.CONNECTING: frozenset({_S.SETUP, _S.CLOSED}),
    _S.SETUP: frozenset({_S.ESTABLISHED, _S.CLOSED}),
    _S.ESTABLISHED: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}


def setup_options(config: SessionConfig, transport: Transport) -> Properties:
    """What we say in SETUP (MOQT "SETUP")."""
    option = SetupOptionType
    pairs: list[KeyValue] = []
    named_by_setup = transport.is_client and transport.path is None
    if named_by_setup:
        pairs.append(KeyValue(option.PATH, config.path.encode()))
    pairs += [KeyValue(option.AUTHORIZATION_TOKEN, token) for token in config.setup_tokens]
    if config.max_auth_token_cache_size:
        pairs.append(KeyValue(option.MAX_AUTH_TOKEN_CACHE_SIZE, config.max_auth_token_cache_size))
    if named_by_setup:
        pairs.append(KeyValue(option.AUTHORITY, config.authority.encode()))
    pairs.append(KeyValue(option.MAX_FILTER_RANGES, config.max_filter_ranges))
    pairs.append(KeyValue(option.MOQT_IMPLEMENTATION, IMPLEMENTATION))
    pairs.append(KeyValue(option.MAX_REQUEST_UPDATES, config.max_request_updates))
    if config.relay_id is not None:
        pairs.append(KeyValue(option.RELAY_ID, config.relay_id))
    if config.first_hand:
        pairs.append(KeyValue(option.FIRST_HAND, 1))
    if config.grease is not None:
        kind = 0x7F * config.grease + 0x9D
        pairs.append(KeyValue(kind, b"" if kind & 1 else 0))
    return tuple(sorted(pairs, key=lambda pair: pair.type))


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What the peer's SETUP said; what it did not say has its default."""

    tokens: list[AuthorizationToken]
    max_filter_ranges: int
    max_request_updates: int
    """0 is no limit."""
    max_auth_token_cache_size: int
    authority: str | None
    """From WebTransport's CONNECT or the AUTHORITY option; None when the peer named none."""
    path: str | None
    """As it was dialled, with its query."""
    relay: PeerRelay | None


def read_setup(setup: Setup, codec: Codec, transport: Transport) -> PeerSetup:
    """Raises SessionError for options that this peer may not send."""
    options = setup.options
    for kind, code in (
        (SetupOptionType.PATH, SessionErrorCode.INVALID_PATH),
        (SetupOptionType.AUTHORITY, SessionErrorCode.INVALID_AUTHORITY),
    ):
        if property_value(options, kind) is None:
            continue
        if transport.is_client:
            raise SessionError(code, f"{kind.name} from a server")
        if transport.path is not None:
            raise SessionError(code, f"{kind.name} over WebTransport")
    return PeerSetup(
        tokens=[
            codec.decode_token(pair.value)
            for pair in options
            if pair.type == SetupOptionType.AUTHORIZATION_TOKEN and isinstance(pair.value, bytes)
        ],
        max_filter_ranges=_number(options, SetupOptionType.MAX_FILTER_RANGES),
        max_request_updates=_number(options, SetupOptionType.MAX_REQUEST_UPDATES),
        max_auth_token_cache_size=_number(options, SetupOptionType.MAX_AUTH_TOKEN_CACHE_SIZE),
        authority=transport.authority or _text(options, SetupOptionType.AUTHORITY),
        path=transport.path or _text(options, SetupOptionType.PATH),
        relay=_relay(options),
    )


def _relay(options: Properties) -> PeerRelay | None:
    relay_id = property_value(options, SetupOptionType.RELAY_ID)
    if not isinstance(relay_id, int):
        return None
    return PeerRelay(relay_id, bool(_number(options, SetupOptionType.FIRST_HAND)))


def _text(options: Properties, kind: SetupOptionType) -> str | None:
    value = property_value(options, kind)
    return value.decode() if isinstance(value, bytes) else None


def _number(options: Properties, kind: SetupOptionType) -> int:
    value = property_value(options, kind)
    return value if isinstance(value, int) else 0
