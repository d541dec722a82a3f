"""Tokens as a relay's policy: rights by Scope ID, from a file of digests."""

from __future__ import annotations

import os

import pytest

from kvcs.simple.names import NAMESPACE_TAG
from kvsp.principals import PrincipalsFileError
from moqt.session import SessionConfig
from moqt.token_file import TokenFileError, bearer, read_token_file
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import Parameters
from relay.rights.policy import Action
from relay.rights.tokens import MODELS_PREFIX, RIGHTS, TokenPolicy
from tests.relay.rights.principals import (
    NAME,
    NAMESPACE,
    OPERATOR,
    READER,
    RECORDS,
    SCOPE,
    STRANGER,
    WRITER,
    entry,
    parameters,
    show,
    write,
)
from tests.relay.star import JOIN, Collector, Star, track


def answer(star, make):
    answers = []
    make().on_answer = answers.append
    star.run()
    return answers[0].code if answers[0] is not None else None


ALLOWED, DENIED = None, RequestErrorCode.UNAUTHORIZED


@pytest.mark.parametrize(
    ("token", "publishing", "reading"),
    [
        (None, DENIED, DENIED),
        (b"unknown-token-of-nobody-here", DENIED, DENIED),
        (STRANGER, DENIED, DENIED),
        (READER, DENIED, ALLOWED),
        (WRITER, ALLOWED, DENIED),
        (OPERATOR, DENIED, ALLOWED),
    ],
)
def test_write_is_for_publishing_and_read_for_the_rest_in_that_scope_only(
    path, token, publishing, reading
):
    star = Star(policy=TokenPolicy(path))
    session, shown = star.connect().client, parameters(token)
    ignore = {"on_ended": lambda error: None}
    for make in (
        lambda: session.publish_namespace(NAMESPACE, shown, **ignore),
        lambda: session.publish(track(1, name=NAME), shown),
    ):
        assert answer(star, make) == publishing
    for make in (
        lambda: session.subscribe_namespace(
            NAMESPACE[:2], shown, on_namespace=lambda *event: None, **ignore
        ),
        lambda: session.subscribe_tracks(NAMESPACE[:2], shown, on_publish=lambda p: None, **ignore),
    ):
        assert answer(star, make) == reading
    for make in (
        lambda: session.track_status(NAME, shown),
        lambda: session.subscribe(NAME, Collector(), shown),
        lambda: session.fetch(NAME, Collector(), shown),
    ):
        refused = answer(star, make)
        # Whoever may read learns whether it exists, nobody else does.
        assert (refused == RequestErrorCode.UNAUTHORIZED) == (reading == DENIED)


@pytest.mark.parametrize(
    "prefix", [(), (b"kvcs-1",), (b"other",), (b"kvcs-1", b"short"), (b"kvcs-1", SCOPE + b"x")]
)
def test_what_is_not_one_scope_needs_every_scope(path, prefix):
    star = Star(policy=TokenPolicy(path))
    session = star.connect().client

    def listing(token):
        return answer(
            star,
            lambda: session.subscribe_namespace(
                prefix,
                parameters(token),
                on_namespace=lambda *event: None,
                on_ended=lambda error: None,
            ),
        )

    assert listing(READER) == DENIED
    assert listing(OPERATOR) == ALLOWED


@pytest.mark.parametrize(
    ("namespace", "of_model", "of_scope", "of_all"),
    [
        ((MODELS_PREFIX, b"m"), True, False, True),
        ((MODELS_PREFIX, b"m", b"a prompt"), True, False, True),
        ((MODELS_PREFIX, b"m2", b"a prompt"), False, False, True),
        ((MODELS_PREFIX, b"\xff", b"a prompt"), False, False, True),
        ((MODELS_PREFIX,), False, False, True),
        ((b"moq://kvcache.moq.arpa/v2/", b"m", b"a prompt"), False, False, True),
        ((MODELS_PREFIX, SCOPE, b"a prompt"), False, False, True),
        (NAMESPACE, False, True, True),
    ],
)
def test_a_model_of_the_second_profile_is_a_unit_like_a_scope(
    path, namespace, of_model, of_scope, of_all
):
    reader, _, *others = RECORDS
    of_models = entry(WRITER, "*", ["read"]) | {"scopes": {}, "models": {"m": ["read"]}}
    write(path, [reader, of_models, *others])
    policy = TokenPolicy(path)
    session = Star(policy=policy).connect().server
    for token, due in ((WRITER, of_model), (READER, of_scope), (OPERATOR, of_all)):
        assert policy.allow(session, Action.SUBSCRIBE, namespace, ((0, token),)) is due
        assert not policy.allow(session, Action.PUBLISH, namespace, ((0, token),))


def test_the_prefix_of_the_second_profile_is_that_of_its_publishers():
    assert MODELS_PREFIX == NAMESPACE_TAG


def test_a_token_in_setup_counts_for_every_request_of_the_session(path):
    star = Star(policy=TokenPolicy(path))
    publisher = star.connect(client_config=SessionConfig(setup_tokens=(bearer(WRITER),)))
    star.run()
    assert answer(star, lambda: publisher.client.publish(track(1, name=NAME))) == ALLOWED


@pytest.mark.parametrize(
    ("token", "believed"), [(OPERATOR, True), (READER, False), (b"unknown", False), (None, False)]
)
def test_a_relay_is_a_principal_with_that_role(path, token, believed):
    records = [each for each in RECORDS if each["principal"] != OPERATOR.decode()]
    write(path, [*records, entry(OPERATOR, "*", ["read"], roles=["relay"])])
    star = Star(policy=TokenPolicy(path))
    tokens = () if token is None else (bearer(token),)
    pair = star.connect(client_config=SessionConfig(relay_id=7, setup_tokens=tokens))
    star.run()
    assert pair.server.peer_relay == (7 if believed else None, False)


def test_a_subscriber_is_served_what_a_publisher_with_the_right_has_published(path):
    star = Star(policy=TokenPolicy(path))
    publisher = star.connect()
    publisher.client.publish(track(1, name=NAME), parameters(WRITER))
    star.run()
    reader = star.connect()
    collector = star.subscribe(
        reader, Parameters(authorization_tokens=(show(READER),), forward=1), NAME
    )
    assert collector.accepted
    assert star.subscribe(star.connect(), JOIN, NAME).failed.code == DENIED


def test_the_file_is_read_again_when_it_changes_and_denies_all_while_it_cannot_be(path, caplog):
    policy = TokenPolicy(path)
    star = Star(policy=policy)
    session = star.connect().server

    def reader():
        return policy.allow(session, Action.FETCH, NAMESPACE, ((0, READER),))

    assert reader()
    write(path, [])
    assert reader(), "not before it has looked"
    policy.reload()
    assert not reader()
    write(path, RECORDS)
    policy.reload()
    assert reader()
    path.write_text("{")
    policy.reload()
    policy.reload()
    assert not reader()
    assert caplog.text.count("new requests are denied") == 1
    write(path, RECORDS)
    policy.reload()
    assert reader()
    path.unlink()
    policy.reload()
    assert not reader() and policy.denied == 3


def test_a_file_that_others_may_write_is_refused_at_the_start_and_while_the_relay_runs(
    path, caplog
):
    path.chmod(0o664)
    with pytest.raises(PrincipalsFileError, match=f"chmod go-w {path}"):
        TokenPolicy(path)
    path.chmod(0o644)
    policy = TokenPolicy(path)
    session = Star(policy=policy).connect().server

    def reader():
        return policy.allow(session, Action.FETCH, NAMESPACE, ((0, READER),))

    assert reader()
    path.chmod(0o646)
    # False: nothing is withdrawn from what is open
    assert not policy.reload() and not policy.reload()
    assert not reader()
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "chmod go-w" in said.getMessage() and "denied" in said.getMessage()
    path.chmod(0o644)
    assert policy.reload() and reader()


def test_a_token_of_another_type_gives_no_right(path):
    policy = TokenPolicy(path)
    session = Star().connect().server
    assert not policy.allow(session, Action.FETCH, NAMESPACE, ((1, READER),))


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 1025, b"two words " * 4, b"\xff" * 30])
def test_a_token_file_holds_one_token_and_its_content_is_never_said(content, tmp_path):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TokenFileError) as error:
        read_token_file(path)
    assert str(path) in str(error.value)
    assert not content or content.decode("latin-1") not in str(error.value)


def test_a_token_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(READER + b"\n")
    path.chmod(0o600)
    assert read_token_file(path) == READER
    path.chmod(0o640)
    with pytest.raises(TokenFileError, match="chmod 600"):
        read_token_file(path)
    with pytest.raises(TokenFileError, match="No such file"):
        read_token_file(tmp_path / "none")


def test_what_is_no_token_file_is_refused_without_waiting_and_leaves_nothing_open(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    opened = len(os.listdir("/proc/self/fd"))
    for name, words in (("pipe", "not a regular file"), (".", "Is a directory")):
        for _ in range(3):
            with pytest.raises(TokenFileError, match=words):
                read_token_file(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_every_action_needs_a_right():
    assert set(RIGHTS) == set(Action)
