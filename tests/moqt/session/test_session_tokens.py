"""Authorization tokens (MOQT "AUTHORIZATION TOKEN Parameter", "…Token Compression")."""

from __future__ import annotations

import pytest

from moqt.requests import RequestState
from moqt.session import SessionConfig, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    AliasType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
)
from moqt.values.errors import MisuseError, RequestError
from moqt.values.messages import (
    AuthorizationToken,
    KeyValue,
    Parameters,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
)
from moqt.values.tokens import FIRST_ALIAS, SentTokens, TokenCache
from tests.moqt.peers import Collector
from tests.moqt.raw import CODEC, VIDEO, Client, Manual, Server, octets, subscribe_message
from tests.moqt.tokens import caching, delete, register, sent_tokens, use, value

SECRET = b"a secret of more than 16 octets"
LONG = AuthorizationToken(AliasType.USE_VALUE, None, 0, SECRET)


class Checking(Manual):
    """Refuses tokens by their value."""

    def __init__(self, **refusals):
        super().__init__()
        self.refusals = refusals

    def check_token(self, session, token):
        return self.refusals.get(token[1].decode())


def asked(server, request_id, *tokens):
    return server.answers(server.ask(subscribe_message(request_id, authorization_tokens=tokens)))


@pytest.mark.parametrize(
    "code",
    [
        RequestErrorCode.EXPIRED_AUTH_TOKEN,
        RequestErrorCode.MALFORMED_AUTH_TOKEN,
        RequestErrorCode.UNAUTHORIZED,
    ],
)
def test_a_token_that_is_not_accepted_refuses_the_request_with_its_code(code):
    server = Server(handler=Checking(bad=code))
    (answer,) = asked(server, 0, value(b"good"), value(b"bad"))
    assert answer.code == code and "bad" not in answer.reason
    assert server.requests == [] and server.session.counters.tokens_refused == 1
    assert server.session.state is SessionState.ESTABLISHED


@pytest.mark.parametrize(
    ("refused", "closed"),
    [
        (RequestErrorCode.EXPIRED_AUTH_TOKEN, SessionErrorCode.EXPIRED_AUTH_TOKEN),
        (RequestErrorCode.MALFORMED_AUTH_TOKEN, SessionErrorCode.MALFORMED_AUTH_TOKEN),
        (RequestErrorCode.UNAUTHORIZED, SessionErrorCode.UNAUTHORIZED),
    ],
)
def test_a_token_in_setup_that_is_not_accepted_closes_the_session(refused, closed):
    option = KeyValue(SetupOptionType.AUTHORIZATION_TOKEN, CODEC.encode_token(value(b"bad")))
    server = Server(handler=Checking(bad=refused), setup=octets(Setup((option,))))
    assert server.closed_with() == closed


def test_an_alias_of_an_expired_token_is_refused_and_keeps_its_place_in_the_cache():
    handler = Checking()
    server = Server(handler=handler)
    asked(server, 0, register(1))
    size = server.session.rules.token_cache.size
    handler.refusals["secret"] = RequestErrorCode.EXPIRED_AUTH_TOKEN
    (answer,) = asked(server, 2, use(1))
    assert answer.code == RequestErrorCode.EXPIRED_AUTH_TOKEN
    assert server.session.rules.token_cache.size == size
    del handler.refusals["secret"]
    assert asked(server, 4, use(1)) == []  # accepted, not answered by this handler


def test_a_registration_takes_effect_although_its_message_is_refused():
    server = Server(handler=Checking(bad=RequestErrorCode.UNAUTHORIZED))
    (answer,) = asked(server, 0, register(1), use(9))
    assert answer.code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
    (answer,) = asked(server, 2, register(2, b"other"), value(b"bad"))
    assert answer.code == RequestErrorCode.UNAUTHORIZED
    assert asked(server, 4, register(3, b"third")) == []
    server.requests[-1].reject(RequestErrorCode.UNAUTHORIZED)
    assert asked(server, 6, use(1), use(2), use(3)) == []
    assert server.requests[-1].tokens == ((0, b"secret"), (0, b"other"), (0, b"third"))


def test_a_deleted_alias_is_unknown_and_gives_its_room_back():
    server = Server(config=SessionConfig(max_auth_token_cache_size=22))
    asked(server, 0, register(1))
    asked(server, 2, delete(1))
    assert server.session.rules.token_cache.size == 0
    for n, token in enumerate((use(1), delete(1))):
        (answer,) = asked(server, 4 + 2 * n, token)
        assert answer.code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
    asked(server, 8, register(1))
    assert server.session.state is SessionState.ESTABLISHED


def test_retiring_an_alias_takes_back_nothing_and_its_token_may_be_registered_again():
    server = Server(config=SessionConfig(max_auth_token_cache_size=22))
    asked(server, 0, register(1))
    (authorized,) = server.requests
    authorized.accept(TrackStore(VIDEO))
    asked(server, 2, delete(1))
    assert authorized.tokens == ((0, b"secret"),)
    assert authorized.state is RequestState.ESTABLISHED
    for n, alias in ((4, 2), (8, 1)):
        assert asked(server, n, register(alias)) == []
        assert server.requests[-1].tokens == ((0, b"secret"),)
        asked(server, n + 2, delete(alias))
    assert server.session.state is SessionState.ESTABLISHED


def test_the_tokens_of_an_update_take_the_place_of_those_before():
    server = Server()
    stream_id = server.ask(subscribe_message(authorization_tokens=(value(b"a"), value(b"b"))))
    (request,) = server.requests
    request.accept(TrackStore(VIDEO))
    for n, tokens, expected in (
        (2, (), ((0, b"a"), (0, b"b"))),
        (4, (value(b"c"),), ((0, b"c"),)),
        (6, (), ((0, b"c"),)),
    ):
        update = RequestUpdate(n, Parameters(authorization_tokens=tokens))
        server.session.stream_data(stream_id, octets(update), False)
        assert request.tokens == expected


def test_registering_beyond_the_size_that_was_announced_closes_the_session():
    server = Server(config=SessionConfig(max_auth_token_cache_size=22))
    asked(server, 0, register(1))
    asked(server, 2, value(bytes(100)))  # not stored
    assert server.session.rules.token_cache.size == 22
    asked(server, 4, register(2, b""))
    assert server.closed_with() == SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW


def test_registering_an_alias_in_use_closes_the_session():
    server = Server()
    asked(server, 0, register(1))
    asked(server, 2, register(1))
    assert server.closed_with() == SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS


@pytest.mark.parametrize("again", [use(1), value(b"secret"), register(2)])
def test_the_same_token_twice_in_one_message_after_resolving_closes_the_session(again):
    server = Server()
    asked(server, 0, register(1), again)
    assert server.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_equal_values_of_different_types_are_different_tokens():
    server = Server()
    assert asked(server, 0, value(b"x", 0), value(b"x", 1)) == []
    assert server.requests[0].tokens == ((0, b"x"), (1, b"x"))


def test_too_large_a_registration_in_setup_is_used_but_not_kept():
    cache = TokenCache(10)
    assert cache.resolve([register(1)], setup=True) == ((0, b"secret"),)
    with pytest.raises(RequestError):
        cache.resolve([use(1)])


def test_an_expired_token_in_an_update_ends_the_subscription_with_update_failed():
    server = Server(handler=Checking(old=RequestErrorCode.EXPIRED_AUTH_TOKEN))
    stream_id = server.ask(subscribe_message())
    server.requests[0].accept(TrackStore(VIDEO))
    server.session.stream_data(
        stream_id,
        octets(RequestUpdate(2, Parameters(authorization_tokens=(value(b"old"),)))),
        False,
    )
    _, error, done = server.answers(stream_id)
    assert error.code == RequestErrorCode.EXPIRED_AUTH_TOKEN
    assert done.code == PublishDoneCode.UPDATE_FAILED


# -- our own tokens ------------------------------------------------------------------------


def test_a_long_token_is_registered_and_its_alias_used_only_after_an_answer():
    client = caching()
    parameters = Parameters(authorization_tokens=(LONG,))
    first = client.subscribe(parameters)
    client.subscribe(parameters)
    client.say(first.request, RequestErrorMessage(RequestErrorCode.DOES_NOT_EXIST))
    third = client.subscribe(parameters)
    third.request.update(parameters, lambda answer: None)
    assert sent_tokens(client, 0) == (
        AuthorizationToken(AliasType.REGISTER, FIRST_ALIAS, 0, SECRET),
    )
    assert sent_tokens(client, 4) == (LONG,)
    assert sent_tokens(client, 8) == (use(FIRST_ALIAS),)
    assert client.answers(8)[1].parameters.authorization_tokens == (use(FIRST_ALIAS),)


@pytest.mark.parametrize("size", [0, 16 + len(SECRET) - 1])
def test_no_token_is_registered_that_the_peers_cache_does_not_hold(size):
    client = caching(size)
    client.subscribe(Parameters(authorization_tokens=(LONG,)))
    assert sent_tokens(client, 0) == (LONG,)


def test_both_ends_may_register_the_same_alias():
    option = KeyValue(SetupOptionType.MAX_AUTH_TOKEN_CACHE_SIZE, 100)
    server = Server(setup=octets(Setup((option,))))
    server.session.fetch(
        VIDEO, Collector(), Parameters(authorization_tokens=(register(1, b"ours"),))
    )
    assert asked(server, 0, register(1, b"theirs")) == []
    assert asked(server, 2, use(1)) == []
    assert server.requests[-1].tokens == ((0, b"theirs"),)
    assert asked(server, 4, register(2, b"other")) == []
    server.session.fetch(
        VIDEO, Collector(), Parameters(authorization_tokens=(register(2, b"ours too"),))
    )
    assert server.session.state is SessionState.ESTABLISHED


def test_a_short_token_is_not_worth_an_alias():
    client = caching()
    client.subscribe(Parameters(authorization_tokens=(value(b"short"),)))
    assert sent_tokens(client, 0) == (value(b"short"),)


def test_an_alias_the_peer_does_not_know_is_not_used_again():
    client = caching()
    parameters = Parameters(authorization_tokens=(LONG,))
    namespace, _, _ = client.listing()
    for n in range(2):
        collector = client.subscribe(parameters)
        code = (RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS)[n]
        client.say(collector.request, RequestErrorMessage(code))
    client.subscribe(parameters)
    assert sent_tokens(client, 8) == (use(FIRST_ALIAS),)
    assert sent_tokens(client, 12) == (LONG,)
    client.say(namespace, RequestOk())


def test_an_explicit_registration_beyond_the_peers_cache_is_refused_here():
    for client in (caching(20), Client(setup=None)):
        with pytest.raises(MisuseError) as refused:
            client.subscribe(Parameters(authorization_tokens=(register(1),)))
        assert "secret" not in str(refused.value)
        assert client.session.requests.outgoing == {}


def test_sent_tokens_are_as_many_as_the_peers_cache_holds():
    sent = SentTokens()
    sent.limit = 3 * (16 + 20)
    for n in range(10):
        token = value(b"%020d" % n)
        sent.compress(Parameters(authorization_tokens=(token,)))
    assert len(sent) == 3 and sent.size == sent.limit
