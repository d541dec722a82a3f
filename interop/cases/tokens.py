"""Authorization Tokens (MOQT "Authorization Token Compression"): aliases and their errors."""

from __future__ import annotations

import moqt
from interop.case import NotOffered, Stage, case
from interop.cases.support import expect_closed, expect_refused, framed, send_raw
from moqt import Parameters, RequestErrorCode, SessionErrorCode
from moqt.values.codes import AliasType, MessageType, ParameterType
from moqt.values.messages import AuthorizationToken

SECRET = b"not-a-real-token"
UNUSED_ID = b"\x40"
"""A Request ID that no request of these sessions has."""


def _carrying(*tokens: AuthorizationToken) -> Parameters:
    return Parameters(authorization_tokens=tokens)


def _registered(alias: int, value: bytes = SECRET) -> AuthorizationToken:
    return AuthorizationToken(AliasType.REGISTER, alias, 0, value)


def _publish_namespace_with(token: bytes) -> bytes:
    """PUBLISH_NAMESPACE of ("t") with this Token structure, whatever the peer can keep."""
    length = 0xC00000 | len(token)  # three octets of vi64, which need not be the shortest
    parameters = bytes([1, ParameterType.AUTHORIZATION_TOKEN]) + length.to_bytes(3) + token
    return framed(MessageType.PUBLISH_NAMESPACE, UNUSED_ID + b"\x01\x01t" + parameters)


async def _offering_aliases(stage: Stage) -> moqt.MoqtSession:
    """A session in which alias 1 is registered."""
    session = await stage.connect("publisher")
    parameters = _carrying(_registered(1))
    try:
        await session.publish_namespace(stage.namespace(b"register"), parameters=parameters)
    except moqt.MisuseError:  # it is refused here, before it is sent
        raise NotOffered("the relay caches no tokens") from None
    return session


@case("token-value")
async def token_value(stage: Stage) -> None:
    """A token given by value is taken, whatever the relay thinks of it."""
    session = await stage.connect("publisher")
    token = AuthorizationToken(AliasType.USE_VALUE, None, 0, SECRET)
    await session.publish_namespace(stage.namespace(), parameters=_carrying(token))


@case("token-alias")
async def token_alias(stage: Stage) -> None:
    """A registered alias can be used in a later request, deleted, and registered again."""
    session = await _offering_aliases(stage)
    for step, token in enumerate(
        (
            AuthorizationToken(AliasType.USE_ALIAS, 1),
            AuthorizationToken(AliasType.DELETE, 1),
            _registered(1),
        )
    ):
        name = stage.namespace(b"use", b"%d" % step)
        await session.publish_namespace(name, parameters=_carrying(token))


@case("token-unknown-alias")
async def token_unknown_alias(stage: Stage) -> None:
    """An alias that was never registered: REQUEST_ERROR, and the session goes on."""
    session = await stage.connect("publisher")
    unknown = _carrying(AuthorizationToken(AliasType.USE_ALIAS, 9))
    await expect_refused(
        session.publish_namespace(stage.namespace(b"x"), parameters=unknown),
        RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS,
    )
    await session.publish_namespace(stage.namespace(b"y"))


@case("token-duplicate-alias")
async def token_duplicate_alias(stage: Stage) -> None:
    """Registering an alias that is in use closes the session: DUPLICATE_AUTH_TOKEN_ALIAS."""
    session = await _offering_aliases(stage)
    send_raw(session, _publish_namespace_with(b"\x01\x01\x00another"))
    await expect_closed(session, SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS)


@case("token-cache-overflow")
async def token_cache_overflow(stage: Stage) -> None:
    """Registering more than the relay announced: AUTH_TOKEN_CACHE_OVERFLOW."""
    session = await stage.connect("publisher")
    send_raw(session, _publish_namespace_with(b"\x01\x01\x00" + bytes(60_000)))
    await expect_closed(session, SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW)


@case("token-malformed")
async def token_malformed(stage: Stage) -> None:
    """A Token structure that cannot be decoded: KEY_VALUE_FORMATTING_ERROR."""
    session = await stage.connect("publisher")
    send_raw(session, _publish_namespace_with(b"\x09"))  # there is no alias type 9
    await expect_closed(session, SessionErrorCode.KEY_VALUE_FORMATTING_ERROR)
