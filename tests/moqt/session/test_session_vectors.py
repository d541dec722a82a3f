"""What only a session can refuse: the malformed vectors that need context, fed as raw octets."""

from __future__ import annotations

import json

import pytest

from moqt.receiving.receiver import Receiver
from moqt.session import SessionConfig, SessionHandler, SessionState
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import LocationFilter, Parameters, RequestErrorMessage
from moqt.values.names import FullTrackName
from tests.moqt.raw import VIDEO, Raw
from tests.moqt.vectors import NEEDS_SESSION
from tests.paths import DATA

VECTORS = json.loads((DATA / "moqt-22-vectors.json").read_text())
CASES = {c["name"]: c for c in VECTORS["malformed"] if c["name"] in NEEDS_SESSION}
SUBSCRIBE = bytes.fromhex("03001300020464656d6f046c69766505766964656f00")


class Silent(SessionHandler):
    """Leaves every request unanswered."""

    def subscribe_received(self, request): ...


class Listener(Receiver):
    failed = None

    def request_failed(self, error):
        self.failed = error


def server(name, data):
    raw = Raw(client=False)
    if name == "GOAWAY with URI received by a server":
        raw.session.stream_data(raw.control, data, False)
    else:
        raw.session.stream_data(raw.control, data, False)
    return raw


def on_request(name, data):
    """A server reads it on a request stream of its own."""
    raw = Raw(client=False)
    split = {
        "request ID 0 used twice (two streams)": len(SUBSCRIBE),
        "token REGISTER of an alias already registered": len(data) // 2,
    }.get(name)
    if split:
        raw.send_bidi(data[:split])
        assert raw.session.state is SessionState.ESTABLISHED
        raw.send_bidi(data[split:])
    else:
        raw.send_bidi(data, fin="FIN" in name)
    return raw


def after_subscribe(name, data):
    config = SessionConfig(max_request_updates=1)
    raw = Raw(client=False, handler=Silent(), config=config)
    stream_id = raw.send_bidi(SUBSCRIBE)
    raw.session.stream_data(stream_id, data, False)
    return raw


def no_cache(name, data):
    raw = Raw(client=False, config=SessionConfig(max_auth_token_cache_size=0))
    raw.send_bidi(data)
    return raw


def answering_namespace(name, data):
    """Our SUBSCRIBE_NAMESPACE is answered with it."""
    raw = Raw(client="server" not in name)
    raw.session.subscribe_namespace(
        (b"demo",), on_namespace=lambda *_: None, on_ended=lambda *_: None
    )
    stream_id = max(s for s in raw.transport.out if not s & 2)
    if name == "NAMESPACE_DONE without its NAMESPACE":
        raw.session.stream_data(stream_id, bytes.fromhex("0700020000")[:3] + b"", False)
        raw = Raw(client=True)
        raw.session.subscribe_namespace(
            (b"demo",), on_namespace=lambda *_: None, on_ended=lambda *_: None
        )
        raw.session.stream_data(stream_id, bytes.fromhex("07000100"), False)
    raw.session.stream_data(stream_id, data, False)
    return raw


def answering_fetch(name, data):
    raw = Raw(client=True)
    raw.session.fetch(
        VIDEO, Listener(), Parameters(location_filter=LocationFilter.absolute_start(5))
    )
    raw.session.stream_data(0, data, False)
    return raw


def answering_second_subscribe(name, data):
    raw = Raw(client=True)
    raw.session.subscribe(FullTrackName((b"demo",), b"other"), Listener())
    raw.session.stream_data(0, data, False)
    raw.session.subscribe(VIDEO, Listener())
    raw.session.stream_data(4, data, False)
    return raw


def as_setup(name, data):
    return Raw(client="from a server" in name, setup=data)


def second_control(name, data):
    raw = Raw(client=False)
    raw.send_uni(data)
    return raw


def control_fin(name, data):
    raw = Raw(client=False)
    raw.session.stream_data(raw.control, b"", True)
    return raw


def data_stream_fin(name, data):
    raw = Raw(client=True)
    raw.session.subscribe(VIDEO, Listener())
    raw.session.stream_data(0, bytes.fromhex("0400020100"), False)
    raw.send_uni(data, fin=True)
    return raw


CLOSING = {
    "GOAWAY with URI received by a server": server,
    "two GOAWAY on one stream": server,
    "request ID 1 from a client": on_request,
    "request ID 0 used twice (two streams)": on_request,
    "PUBLISH_STATE_NOTIFY from the subscriber": after_subscribe,
    "request stream FIN inside a message": on_request,
    "NAMESPACE_DONE without its NAMESPACE": answering_namespace,
    "NAMESPACE before the response": answering_namespace,
    "Redirect with a Track Name answering SUBSCRIBE_NAMESPACE": answering_namespace,
    "Redirect with a Connect URI received by a server": answering_namespace,
    "FETCH_OK end before the requested start {5,0}": answering_fetch,
    "SUBSCRIBE_OK reusing alias of another established track": answering_second_subscribe,
    "more REQUEST_UPDATE outstanding than MAX_REQUEST_UPDATES": after_subscribe,
    "SETUP token DELETE to a server": as_setup,
    "SETUP with PATH from a server": as_setup,
    "SETUP with AUTHORITY from a server": as_setup,
    "second control stream": second_control,
    "control stream FIN": control_fin,
    "token REGISTER with cache size 0, in SUBSCRIBE": no_cache,
    "token REGISTER of an alias already registered": on_request,
    "subgroup FIN inside a payload": data_stream_fin,
}
REFUSED = {
    "FETCH with End before Start in one group",
    "SUBSCRIBE in namespace (.)",
    "SUBSCRIBE in unknown (.session)",
    "overlapping SUBSCRIBE_NAMESPACE (second of two)",
    "PUBLISH with unknown mandatory property 0x4001",
}


def test_every_vector_that_needs_a_session_is_covered_here():
    assert set(CLOSING) | REFUSED == NEEDS_SESSION.keys() == CASES.keys()


@pytest.mark.parametrize("name", CLOSING)
def test_a_session_is_closed_with_the_code_of_the_rule_that_was_broken(name):
    case = CASES[name]
    raw = CLOSING[name](name, bytes.fromhex(case["hex"]))
    assert raw.closed_with() == case["expect"]["code"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_request_is_refused_with_the_code_of_the_rule_and_the_session_stays_open(name):
    case = CASES[name]
    raw = Raw(client=False)
    if name.startswith("overlapping"):
        raw.send_bidi(bytes.fromhex("50000800010464656d6f00"))
    stream_id = raw.send_bidi(bytes.fromhex(case["hex"]))
    assert raw.session.state is SessionState.ESTABLISHED
    (answer,) = raw.answers(stream_id)
    assert isinstance(answer, RequestErrorMessage)
    assert RequestErrorCode(answer.code) == case["expect"]["code"]


def test_an_alias_may_name_another_track_once_nothing_of_its_old_one_is_on_its_way():
    raw = Raw(client=True)
    old = raw.session.subscribe(FullTrackName((b"demo",), b"old"), Listener())
    raw.session.stream_data(0, bytes.fromhex("0400020100"), False)
    old.cancel()
    data = bytes.fromhex("5001008000016100000003")
    early = raw.send_uni(data)
    assert early in raw.transport.refused
    raw.session.tick(raw.session.config.alias_timeout + 1)
    waiting = raw.send_uni(data)
    assert waiting not in raw.transport.refused
    raw.session.subscribe(VIDEO, Listener())
    raw.session.stream_data(4, bytes.fromhex("0400020100"), False)
    assert waiting not in raw.transport.refused
    assert not raw.session.data_streams.waiting
