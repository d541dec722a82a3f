"""What is logged of a session: every message and Object, and never a secret."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from moqt.log.describe import describe, line, without_secrets
from moqt.log.logged_transport import LoggedTransport
from moqt.publisher import Publisher
from moqt.quic.qlog import QlogWriter
from moqt.session import Session, SessionConfig, SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import AliasType, ParameterType, SetupOptionType
from moqt.values.messages import (
    AuthorizationToken,
    Goaway,
    KeyValue,
    LocationFilter,
    Namespace,
    Parameters,
    PublishDone,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    Setup,
    Subscribe,
    SubscribeOk,
)
from moqt.values.names import Location
from moqt.wire.codec import codec_for
from tests.moqt.inside import streams_read_along
from tests.moqt.memory import ALPN, MemoryTransport, Pair
from tests.moqt.peers import FILL, NAME, Collector, track

SECRET = b"hunter2-is-secret"
TOKEN = AuthorizationToken(AliasType.USE_VALUE, None, 7, SECRET)


class Logged:
    """A pair of sessions, of which both keep an event log in memory."""

    def __init__(self, server: SessionHandler | None = None, **config: Any) -> None:
        self.files = {True: io.BytesIO(), False: io.BytesIO()}
        self.writers = {side: QlogWriter(file, 0.0) for side, file in self.files.items()}
        self.pair = Pair(server=server or Publisher(), start=False)
        for side, name in ((True, "client"), (False, "server")):
            transport: MemoryTransport = getattr(self.pair, f"{name}_transport")
            transport.qlog = self.writers[side]
            old: Session = getattr(self.pair, name)
            session = Session(transport, old.handler, SessionConfig(**config))
            setattr(self.pair, name, session)
            transport.handler = session
        self.pair.client.connection_established(ALPN)
        self.pair.server.connection_established(ALPN)
        self.pair.run()

    def events(self, client: bool, name: str = "") -> list[dict[str, Any]]:
        self.writers[client].flush()
        records = self.files[client].getvalue().split(b"\x1e")[1:]
        found = [json.loads(record) for record in records]
        return [e["data"] for e in found if e["name"] == f"moqt:{name}"] if name else found

    @property
    def text(self) -> str:
        return json.dumps([*self.events(True), *self.events(False)])


def test_a_session_without_a_log_has_the_bare_transport():
    pair = Pair()
    assert pair.client.event_log is None
    assert pair.client.transport is pair.client_transport


def test_every_control_message_is_created_on_one_side_and_parsed_on_the_other():
    log = Logged()
    log.pair.server.handler.add_track(track(1, 1))
    got = Collector()
    log.pair.client.subscribe(NAME, got, FILL)
    log.pair.run()
    for one, other in ((True, False), (False, True)):
        created = log.events(one, "control_message_created")
        assert created == log.events(other, "control_message_parsed")
        assert created[0]["message"]["type"] == "setup"
    types = [e["message"]["type"] for e in log.events(False, "control_message_created")]
    assert types == ["setup", "subscribe_ok", "publish_done"]
    subscribe = log.events(False, "control_message_parsed")[1]
    assert subscribe == {
        "stream_id": 0,
        "message": {
            "type": "subscribe",
            "request_id": 0,
            "track_namespace": [{"value": "demo"}, {"value": "live"}],
            "track_name": {"value": "video"},
            "number_of_parameters": 2,
            "parameters": [
                {"name": "location_filter", "filter_type": "next_object"},
                {
                    "name": "fill_parameters",
                    "value": [{"name": "location_filter", "filter_type": "absolute_start"}],
                },
            ],
        },
    }


def test_streams_headers_and_objects_are_created_on_one_side_and_parsed_on_the_other():
    store = track(2, 2, ended=False)
    publisher = Publisher()
    publisher.add_track(store)
    log = Logged(publisher)
    log.pair.client.subscribe(NAME, Collector(), FILL)
    log.pair.client.fetch(NAME, Collector(), Parameters(group_order=2))
    log.pair.run()
    store.append(2, 0, b"live", subgroup=5, priority=9)
    store.append(3, 0, b"datagram", subgroup=None)
    log.pair.run()
    for name in (
        "subgroup_header",
        "subgroup_object",
        "fetch_header",
        "fetch_object",
        "object_datagram",
    ):
        created, parsed = (
            sorted(log.events(client, f"{name}_{done}"), key=lambda e: e.get("stream_id", 0))
            for client, done in ((False, "created"), (True, "parsed"))
        )
        assert created and created == parsed, name
    types = [e["stream_type"] for e in log.events(True, "stream_type_set") if e["owner"] == "local"]
    assert types == ["control"]
    remote = [e["stream_type"] for e in log.events(True, "stream_type_set")]
    assert set(remote[1:]) == {"control", "fetch_header", "subgroup_header"}
    header, object_ = (log.events(True, f"subgroup_{n}_parsed")[-1] for n in ("header", "object"))
    assert header["group_id"] == 2 and header["subgroup_id"] == 5
    assert header["publisher_priority"] == 9
    assert object_["object_id"] == 0 and object_["object_payload_length"] == 4
    fetched = [e["group_id"] for e in log.events(True, "fetch_object_parsed")]
    assert sorted(fetched) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert log.events(True, "object_datagram_parsed")[0]["object_payload"] == {"length": 8}


def test_a_reset_stream_is_forgotten_by_the_log():
    store = track(5, 2, ended=False)
    publisher = Publisher()
    publisher.add_track(store)
    log = Logged(publisher)
    subscription = log.pair.client.subscribe(NAME, Collector(), FILL)
    log.pair.run()
    store.append(9, 0, b"open")
    log.pair.run()
    transport = log.pair.server.transport
    assert isinstance(transport, LoggedTransport)
    assert len(streams_read_along(transport)) == 2  # the control stream and the open subgroup
    subscription.cancel()
    log.pair.run()
    assert len(streams_read_along(transport)) == 1


def test_tokens_are_in_no_event_and_in_no_line(caplog: pytest.LogCaptureFixture):
    encoded = codec_for(ALPN).encode_token(TOKEN)
    with caplog.at_level(logging.DEBUG):
        log = Logged(setup_tokens=(encoded,), path="/live?token=" + SECRET.decode())
        parameters = Parameters(authorization_tokens=(TOKEN,))
        request = log.pair.client.subscribe(NAME, Collector(), parameters)
        log.pair.server.handler.add_track(TrackStore(NAME))
        request = log.pair.client.subscribe(NAME, Collector(), parameters)
        log.pair.run()
        request.update(parameters, lambda answer: None)
        log.pair.run()
    assert log.pair.server.peer_tokens == ((7, SECRET),)
    option = KeyValue(SetupOptionType.AUTHORIZATION_TOKEN, encoded)
    for message in (Setup((option,)), Subscribe(0, NAME.namespace, NAME.name, parameters)):
        assert "hunter2" not in repr(message)
    for text in (log.text, caplog.text):
        assert "authorization_token" in text and "hunter2" not in text
        assert encoded.hex() not in text and SECRET.hex() not in text
        assert "/live?..." in text
    assert "SUBSCRIBE request_id=" in caplog.text


def test_what_is_not_known_to_be_harmless_is_shown_by_its_length():
    setup = Setup(
        (
            KeyValue(SetupOptionType.AUTHORITY, b"me:" + SECRET + b"@host:4433"),
            KeyValue(0x7001, SECRET),
            KeyValue(0x7002, 5),
        )
    )
    ok = SubscribeOk(1, properties=(KeyValue(0x8001, SECRET),))
    redirect = Redirect("https://u:hunter2@b/x?t=hunter2#hunter2", (b"n",), b"t")
    messages = [setup, ok, Goaway("moqt://h/p?hunter2"), RequestErrorMessage(1, 0, "", redirect)]
    for message in messages:
        assert "hunter2" not in json.dumps(describe(message)) + line(message)
    assert line(setup) == "SETUP authority=host:4433 0x7001=(length=17) 0x7002=5"
    assert line(ok) == "SUBSCRIBE_OK track_alias=1 0x8001=(header_length=17)"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            Subscribe(
                4,
                (b"a", b"\xff"),
                b"t",
                Parameters(
                    location_filter=LocationFilter.range(Location(1, 2), Location(3, 4)),
                    subscriber_priority=7,
                    range_filters=(
                        RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, 5), (9, None))),
                    ),
                    authorization_tokens=(TOKEN,),
                    fill_parameters=Parameters(group_order=2),
                ),
            ),
            "SUBSCRIBE request_id=4 track_namespace=[a, 0xff] track_name=t "
            "authorization_token=(alias_type=use_value token_type=7 token_value=(length=17)) "
            "subscriber_priority=7 "
            "location_filter=(filter_type=absolute_range start_group=1 start_object=2 "
            "end_group_delta=2 end_object=4) "
            "fill_parameters=(group_order=2) "
            "objectid_filter=(ranges=[[1, 5], [9, None]])",
        ),
        (RequestOk(Parameters(largest_object=Location(3, 9))), "REQUEST_OK largest_object=3/9"),
        (
            RequestErrorMessage(0x10, 0, "no\nsuch"),
            "REQUEST_ERROR error=does_not_exist retry_interval=0 reason=no\\nsuch",
        ),
        (PublishDone(2, 5, ""), "PUBLISH_DONE status=track_ended stream_count=5"),
        (Namespace((b"x",)), "NAMESPACE track_namespace_suffix=[x]"),
        (Goaway("", 100), "GOAWAY timeout=100"),
    ],
)
def test_a_message_is_one_readable_line(message, text):
    assert line(message) == text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("moqt://relay.example:4433/live", "moqt://relay.example:4433/live"),
        ("moqt://user:pass@relay.example/a?b=c", "moqt://relay.example/a?..."),
        ("/path?key", "/path?..."),
        ("relay.example#frag", "relay.example?..."),
        ("/a@b/c", "/a@b/c"),
        ("", ""),
    ],
)
def test_a_uri_is_shown_without_user_information_query_and_fragment(uri, shown):
    assert without_secrets(uri) == shown


def test_the_debug_logger_alone_is_enough_for_lines(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "moqt.wire"):
        pair = Pair()
    assert pair.client.event_log is not None
    assert [r.getMessage().split(" ")[1] for r in caplog.records] == ["->", "->", "<-", "<-"]
    assert "SETUP" in caplog.text and "max_request_updates=16" in caplog.text
