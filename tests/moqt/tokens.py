"""Authorization tokens in each of their forms, and what a client made of them."""

from __future__ import annotations

from moqt.values.codes import AliasType, SetupOptionType
from moqt.values.messages import AuthorizationToken, KeyValue, Setup
from tests.moqt.raw import Client, octets


def register(alias, value=b"secret"):
    return AuthorizationToken(AliasType.REGISTER, alias, 0, value)


def use(alias):
    return AuthorizationToken(AliasType.USE_ALIAS, alias)


def delete(alias):
    return AuthorizationToken(AliasType.DELETE, alias)


def value(octets_, token_type=0):
    return AuthorizationToken(AliasType.USE_VALUE, None, token_type, octets_)


def caching(size=1000):
    option = KeyValue(SetupOptionType.MAX_AUTH_TOKEN_CACHE_SIZE, size)
    return Client(setup=octets(Setup((option,))))


def sent_tokens(client, stream_id):
    return client.answers(stream_id)[0].parameters.authorization_tokens
