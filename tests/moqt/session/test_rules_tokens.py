"""Our own tokens in the peer's cache (MOQT "Authorization Token Compression")."""

from __future__ import annotations

import pytest

from moqt.session import SessionConfig, SessionState
from moqt.values.codes import AliasType, RequestErrorCode, SessionErrorCode, SetupOptionType
from moqt.values.errors import MisuseError
from moqt.values.messages import (
    AuthorizationToken,
    KeyValue,
    Parameters,
    RequestErrorMessage,
    RequestOk,
    Setup,
)
from moqt.values.tokens import FIRST_ALIAS, MAX_SENT_SIZE
from tests.moqt.inside import tokens_sent
from tests.moqt.raw import CODEC, Client, Server, octets
from tests.moqt.tokens import caching, delete, register, sent_tokens, use, value

ROOM = 16 + 20
"""What one of the tokens below takes in a cache."""
REFUSED = RequestErrorMessage(RequestErrorCode.DOES_NOT_EXIST)


def token(n):
    return value(b"%020d" % n)


def with_token(n):
    return Parameters(authorization_tokens=(token(n),))


def registered(n, alias):
    return AuthorizationToken(AliasType.REGISTER, alias, 0, b"%020d" % n)


def answered(client, n):
    client.say(client.subscribe(with_token(n)).request, REFUSED)


def last_sent(client):
    return sent_tokens(client, max(s for s in client.transport.out if not s & 2))


def test_a_full_cache_drops_the_alias_used_longest_ago_and_then_takes_the_new_token():
    client = caching(2 * ROOM)
    for n in (1, 2, 1):  # 2 is now the one used longest ago
        answered(client, n)
    answered(client, 3)
    assert last_sent(client) == (token(3), delete(FIRST_ALIAS + 1))
    answered(client, 3)
    assert last_sent(client) == (registered(3, FIRST_ALIAS + 2),)
    answered(client, 1)
    assert last_sent(client) == (use(FIRST_ALIAS),)
    assert client.session.rules.sent_tokens.size == 2 * ROOM


def test_a_token_that_is_retired_is_deleted_with_the_next_message_that_carries_another():
    client = caching(10 * ROOM)
    for n in (1, 2):
        answered(client, n)
    tokens = client.session.rules.sent_tokens
    tokens.retire(token(1))
    tokens.retire(token(7))  # that the peer has never had
    answered(client, 3)
    assert last_sent(client) == (registered(3, FIRST_ALIAS + 2), delete(FIRST_ALIAS))
    assert tokens.size == 2 * ROOM
    answered(client, 2)
    assert last_sent(client) == (use(FIRST_ALIAS + 1),), "nothing is deleted twice"


def test_a_token_that_is_retired_and_sent_again_stays():
    client = caching(10 * ROOM)
    for n in (1, 2):
        answered(client, n)
    client.session.rules.sent_tokens.retire(token(1))
    answered(client, 1)
    assert last_sent(client) == (use(FIRST_ALIAS),)
    answered(client, 2)
    assert last_sent(client) == (use(FIRST_ALIAS + 1),)


def test_a_retired_token_in_flight_is_deleted_later():
    client = caching(10 * ROOM)
    for n in (1, 2):
        answered(client, n)
    uses = client.subscribe(with_token(1))
    client.session.rules.sent_tokens.retire(token(1))
    answered(client, 2)
    assert last_sent(client) == (use(FIRST_ALIAS + 1),)
    client.say(uses.request, REFUSED)
    answered(client, 2)
    assert last_sent(client) == (use(FIRST_ALIAS + 1), delete(FIRST_ALIAS))


def test_the_room_of_a_deleted_alias_is_used_only_after_the_delete_was_answered():
    client = caching(ROOM)
    answered(client, 1)
    first = client.subscribe(with_token(2))
    assert last_sent(client) == (token(2), delete(FIRST_ALIAS))
    client.subscribe(with_token(3))
    assert last_sent(client) == (token(3),)  # one DELETE is enough
    client.subscribe(with_token(1))
    assert last_sent(client) == (token(1),)  # its alias is leaving
    client.say(first.request, REFUSED)
    assert client.session.rules.sent_tokens.size == 0
    client.subscribe(with_token(3))
    assert last_sent(client) == (registered(3, FIRST_ALIAS + 1),)


@pytest.mark.parametrize("how", ["request", "update"])
def test_no_alias_is_deleted_while_something_that_uses_it_is_in_flight(how):
    client = caching(ROOM)
    answered(client, 1)
    if how == "request":
        busy = client.subscribe(with_token(1)).request
    else:
        collector = client.subscribe()
        client.accept(collector)
        busy = collector.request
        busy.update(with_token(1), lambda answer: None)
        sent = client.answers(busy.stream.stream_id)[-1]
        assert sent.parameters.authorization_tokens == (use(FIRST_ALIAS),)
    also_busy = client.subscribe(with_token(1)).request
    client.subscribe(with_token(2))
    assert last_sent(client) == (token(2),)
    client.say(busy, RequestOk() if how == "update" else REFUSED)
    client.subscribe(with_token(2))
    assert last_sent(client) == (token(2),)
    client.say(also_busy, REFUSED)
    client.subscribe(with_token(2))
    assert last_sent(client) == (token(2), delete(FIRST_ALIAS))


@pytest.mark.parametrize("end", ["cancel", "session"])
def test_a_request_that_is_given_up_holds_no_alias(end):
    client = caching(ROOM)
    answered(client, 1)
    collector = client.subscribe(with_token(1))
    (entry,) = tokens_sent(client.session)
    assert entry.in_flight == 1
    if end == "cancel":
        collector.request.cancel()
    else:
        client.session.close()
    assert entry.in_flight == 0


def test_nothing_is_deleted_for_a_token_that_no_cache_of_this_size_holds():
    client = caching(ROOM)
    answered(client, 1)
    long = value(b"x" * 100)
    client.subscribe(Parameters(authorization_tokens=(long,)))
    assert last_sent(client) == (long,)


def test_aliases_the_application_named_are_not_deleted_and_give_room_when_it_does():
    client = caching(ROOM)
    named = client.subscribe(Parameters(authorization_tokens=(register(5, b"%020d" % 1),)))
    client.say(named.request, REFUSED)
    client.subscribe(with_token(2))
    assert last_sent(client) == (token(2),)
    with pytest.raises(MisuseError, match="registered already"):
        client.subscribe(Parameters(authorization_tokens=(register(5, b""),)))
    gone = client.subscribe(Parameters(authorization_tokens=(delete(5),)))
    assert client.session.rules.sent_tokens.size == ROOM
    client.say(gone.request, REFUSED)
    client.subscribe(with_token(2))
    assert last_sent(client) == (registered(2, FIRST_ALIAS),)


def test_what_setup_registers_beyond_the_peers_cache_is_forgotten_when_its_size_is_known():
    tokens = [register(1, b"%020d" % 1), register(2, b"%020d" % 2)]
    option = KeyValue(SetupOptionType.MAX_AUTH_TOKEN_CACHE_SIZE, 2 * ROOM - 1)
    client = Client(
        config=SessionConfig(setup_tokens=tuple(map(CODEC.encode_token, tokens))),
        setup=octets(Setup((option,))),
    )
    assert client.session.rules.sent_tokens.size == ROOM
    client.subscribe(with_token(3))
    assert last_sent(client) == (token(3),)  # a REGISTER would overflow the peer's cache


def test_one_token_twice_in_a_message_is_misuse():
    client = caching()
    with pytest.raises(MisuseError, match="twice"):
        client.subscribe(Parameters(authorization_tokens=(token(1), token(1))))


def test_a_peer_with_an_enormous_cache_costs_bounded_memory():
    client = caching(1 << 60)
    sent = client.session.rules.sent_tokens
    for n in range(2 * MAX_SENT_SIZE // (16 + 2000)):
        parameters = Parameters(authorization_tokens=(value(b"%02000d" % n),))
        client.say(client.subscribe(parameters).request, REFUSED)
        assert sent.size <= MAX_SENT_SIZE
    assert len(sent) <= MAX_SENT_SIZE // (16 + 2000)


def test_a_peer_that_deletes_and_registers_all_the_time_stays_within_our_cache():
    """Both ends together: what one sends, the other takes."""
    client, server = (
        caching(2 * ROOM),
        Server(config=SessionConfig(max_auth_token_cache_size=2 * ROOM)),
    )
    for n in range(40):
        answered(client, n % 5)
        stream_id = max(s for s in client.transport.out if not s & 2)
        server.send_bidi(octets(client.answers(stream_id)[0]))
        assert server.session.state is SessionState.ESTABLISHED
        assert server.requests[-1].tokens == ((0, b"%020d" % (n % 5)),)
        assert server.session.rules.token_cache.size <= 2 * ROOM


@pytest.mark.parametrize("token_", [delete(1), use(1)])
@pytest.mark.parametrize("client", [True, False])
def test_setup_can_neither_use_nor_delete_an_alias(token_, client):
    option = KeyValue(SetupOptionType.AUTHORIZATION_TOKEN, CODEC.encode_token(token_))
    raw = (Client if client else Server)(setup=octets(Setup((option,))))
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION
