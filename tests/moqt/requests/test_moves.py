"""Two sessions and random moves of both: legal ones never close a session, illegal ones do it
with a registered code, and when everything is over nothing of it is left.

`test_session_model` checks *what* arrives for one track; here the moves are of every kind.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moqt.requests import IncomingFetch, RequestState
from moqt.session import Session, SessionConfig, SessionHandler, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    ObjectStatus,
    ParameterType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.values.errors import MisuseError, MoqtError, RequestError, SessionClosed
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import control_of_peer, listeners, streams_sent
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import Collector
from tests.paths import DATA

LIMITS = SessionConfig(max_held_octets=20_000, max_requests=12, max_namespaces_told=8)
NAMESPACES = ((b"a",), (b"a", b"b"), (b"c",))
NAMES = [FullTrackName(namespace, b"t") for namespace in NAMESPACES]
VECTORS = json.loads((DATA / "moqt-22-vectors.json").read_text())
MALFORMED = sorted({bytes.fromhex(case["hex"]) for case in VECTORS["malformed"]})
WELL_FORMED = sorted({bytes.fromhex(case["hex"]) for case in VECTORS["vectors"]})

SIDES = st.sampled_from(["client", "server"])
FILTERS = st.sampled_from(
    [
        None,
        LocationFilter.next_object(),
        LocationFilter.absolute_start(0),
        LocationFilter.relative_start(1),
        LocationFilter.range(Location(0, 1), Location(2, 0)),
    ]
)
PARAMETERS = st.builds(
    Parameters,
    location_filter=FILTERS,
    forward=st.sampled_from([None, 0, 1]),
    subscriber_priority=st.sampled_from([None, 0, 255]),
    fill_parameters=st.none() | st.builds(Parameters, location_filter=FILTERS),
    range_filters=st.sampled_from(
        [(), (RangeFilter(ParameterType.OBJECTID_FILTER, 0, ranges=((0, 1),)),)]
    ),
)


def answer(request: Any, handler: Undecided, how: str) -> None:
    """Accept or refuse a peer's request, as its kind wants it."""
    if how == "reject":
        request.reject(RequestErrorCode.UNAUTHORIZED, "not you", retry_after_ms=5)
        return
    kind = type(request).__name__
    if kind in ("IncomingSubscribe", "IncomingFetch", "IncomingTrackStatus"):
        store = handler.stores.get(request.name)  # an illegal move may ask for any name
        if store is None:
            request.reject(RequestErrorCode.DOES_NOT_EXIST, "no such track")
        else:
            request.accept(store)
    elif kind == "IncomingPublish":
        handler.receivers.append(Collector())
        request.accept(handler.receivers[-1])
    else:
        request.accept()
        if kind == "IncomingSubscribeNamespace":
            for name in NAMES:
                request.add(name.namespace)
        elif kind == "IncomingSubscribeTracks":
            for store in handler.stores.values():
                request.offer(store)


class Undecided(SessionHandler):
    """One side's application: it answers at once, or keeps the request for a later rule."""

    def __init__(self) -> None:
        self.stores = {name: TrackStore(name) for name in NAMES}
        self.receivers: list[Collector] = []
        self.held: list[Any] = []
        self.accepted: list[Any] = []
        self.mode = "accept"

    def decide(self, request: Any) -> None:
        if self.mode == "hold":
            self.held.append(request)
        else:
            answer(request, self, self.mode)
            self.accepted.append(request)

    subscribe_received = fetch_received = track_status_received = decide
    publish_received = publish_namespace_received = decide
    subscribe_namespace_received = subscribe_tracks_received = decide

    def namespace_prefix_changed(self, request: Any) -> None:
        for name in NAMES:
            request.add(name.namespace)

    def subscribe_tracks_changed(self, request: Any) -> None:
        for store in self.stores.values():
            request.offer(store)


class Moves(RuleBasedStateMachine):
    """Legal moves of two sessions, among them what QUIC may do to any stream."""

    broken = False
    """Whether a move broke a rule of the protocol."""

    @initialize(
        seed=st.none() | st.integers(0, 9),
        window=st.sampled_from([40, 1 << 20]),
        streams=st.sampled_from([3, 200]),
    )
    def begin(self, seed: int | None, window: int, streams: int) -> None:
        self.handlers = {"client": Undecided(), "server": Undecided()}
        self.pair = Pair(
            self.handlers["client"],
            self.handlers["server"],
            client_config=LIMITS,
            server_config=LIMITS,
            seed=seed,
            stream_window=window,
            max_streams=streams,
        )
        self.requests: dict[str, list[Any]] = {"client": [], "server": []}
        self.now = 0.0
        for handler in self.handlers.values():
            for object_id in range(3):
                handler.stores[NAMES[0]].append(0, object_id, b"early")

    def session(self, side: str) -> Session:
        session: Session = getattr(self.pair, side)
        return session

    def transport(self, side: str) -> Any:
        return getattr(self.pair, f"{side}_transport")

    def ask(self, side: str, make: Any) -> None:
        try:
            self.requests[side].append(make(self.session(side)))
        except (RequestError, SessionClosed) as error:
            assert str(error)

    def some(self, data: st.DataObject, requests: list[Any], *states: RequestState) -> Any | None:
        found = [r for r in requests if not states or r.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    # -- requests

    @rule(
        side=SIDES,
        kind=st.sampled_from(["subscribe", "subscribe", "fetch", "publish", "track_status"]),
        name=st.sampled_from(NAMES),
        parameters=PARAMETERS,
        order=st.sampled_from([None, 1, 2]),
        rest=st.booleans(),
    )
    def ask_for_a_track(
        self,
        side: str,
        kind: str,
        name: FullTrackName,
        parameters: Parameters,
        order: int | None,
        rest: bool,
    ) -> None:
        store = self.handlers[side].stores[name]
        fetched = Parameters(location_filter=parameters.location_filter, group_order=order)
        offered = Parameters(forward=parameters.forward)
        makers: dict[str, Any] = {
            "subscribe": lambda session: session.subscribe(name, Collector(), parameters),
            "fetch": lambda session: session.fetch(name, Collector(), fetched),
            "publish": lambda session: session.publish(store, offered),
            "track_status": lambda session: session.track_status(name),
        }
        self.ask(side, makers[kind])
        if rest:
            self.pair.run()

    @rule(
        side=SIDES,
        kind=st.sampled_from(["publish_namespace", "subscribe_namespace", "subscribe_tracks"]),
        namespace=st.sampled_from(NAMESPACES),
        fill=st.booleans(),
        rest=st.booleans(),
    )
    def ask_about_namespaces(
        self, side: str, kind: str, namespace: tuple[bytes, ...], fill: bool, rest: bool
    ) -> None:
        handler = self.handlers[side]
        parameters = Parameters(fill_parameters=Parameters() if fill else None)
        makers: dict[str, Any] = {
            "publish_namespace": lambda session: session.publish_namespace(
                namespace, on_ended=lambda error: None
            ),
            "subscribe_namespace": lambda session: session.subscribe_namespace(
                namespace, on_namespace=lambda *_: None, on_ended=lambda error: None
            ),
            "subscribe_tracks": lambda session: session.subscribe_tracks(
                namespace, parameters, on_publish=handler.decide, on_ended=lambda error: None
            ),
        }
        self.ask(side, makers[kind])
        if rest:
            self.pair.run()

    # -- what happens to requests

    @rule(side=SIDES, data=st.data(), parameters=PARAMETERS)
    def update(self, side: str, data: st.DataObject, parameters: Parameters) -> None:
        request = self.some(data, self.requests[side], RequestState.ESTABLISHED)
        kind = type(request).__name__
        if kind not in ("OutgoingSubscribe", "OutgoingFetch"):
            return
        if kind == "OutgoingFetch":
            parameters = Parameters(subscriber_priority=parameters.subscriber_priority)
        with contextlib.suppress(MisuseError):  # it sent FIN, or the request is over
            request.update(parameters, lambda given: None)

    @rule(side=SIDES, data=st.data())
    def cancel(self, side: str, data: st.DataObject) -> None:
        request = self.some(data, self.requests[side])
        if request is not None:
            request.cancel()

    @rule(side=SIDES, data=st.data())
    def say_no_more(self, side: str, data: st.DataObject) -> None:
        request = self.some(data, self.requests[side], RequestState.ESTABLISHED)
        if type(request).__name__ in ("OutgoingSubscribe", "OutgoingFetch"):
            request.stream.finish()

    @rule(side=SIDES, mode=st.sampled_from(["accept", "accept", "hold", "reject"]))
    def change_mind(self, side: str, mode: str) -> None:
        self.handlers[side].mode = mode

    @rule(side=SIDES, how=st.sampled_from(["accept", "accept", "reject"]))
    def answer_late(self, side: str, how: str) -> None:
        handler = self.handlers[side]
        if handler.held:
            request = handler.held.pop(0)
            answer(request, handler, how)
            handler.accepted.append(request)

    @rule(side=SIDES, data=st.data())
    def revoke(self, side: str, data: st.DataObject) -> None:
        handler = self.handlers[side]
        request = self.some(data, handler.accepted + handler.held)
        if request is not None:
            request.revoke()

    @rule(side=SIDES, data=st.data())
    def end_or_abort(self, side: str, data: st.DataObject) -> None:
        request = self.some(data, self.handlers[side].accepted, RequestState.ESTABLISHED)
        if isinstance(request, IncomingFetch):
            request.abort(StreamErrorCode.INTERNAL_ERROR)
        elif type(request).__name__ == "IncomingSubscribe":
            request.end(PublishDoneCode.EXPIRED, "for now")

    # -- Objects

    @rule(
        side=SIDES,
        name=st.sampled_from(NAMES),
        size=st.sampled_from([0, 5, 300]),
        datagram=st.booleans(),
        end_group=st.booleans(),
        rest=st.booleans(),
    )
    def append(
        self,
        side: str,
        name: FullTrackName,
        size: int,
        datagram: bool,
        end_group: bool,
        rest: bool,
    ) -> None:
        store = self.handlers[side].stores[name]
        if store.ended:
            return
        group = store.largest.group if store.largest else 0
        object_id = store.largest.object + 1 if store.largest else 0
        if store.largest and object_id > 3:
            group, object_id = group + 1, 0
        store.append(group, object_id, bytes(size), subgroup=None if datagram else 0)
        if end_group and not datagram:
            store.mark_end(Location(group, object_id + 1), ObjectStatus.END_OF_GROUP)
            store.finish_subgroup(group, 0)
            store.append(group + 1, 0, b"next")
        if rest:
            self.pair.run()

    @rule(side=SIDES, name=st.sampled_from(NAMES))
    def end_track(self, side: str, name: FullTrackName) -> None:
        store = self.handlers[side].stores[name]
        if not store.ended:
            store.finish(PublishDoneCode.TRACK_ENDED)

    # -- the transport, and time

    @rule(steps=st.integers(1, 4))
    def some_steps(self, steps: int) -> None:
        for _ in range(steps):
            for side in ("client", "server"):
                self.session(side).ready_to_send()
            for side in ("client", "server"):
                self.transport(side).deliver()

    @rule()
    def rest(self) -> None:
        self.pair.run()

    @rule(seconds=st.sampled_from([0.5, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for side in ("client", "server"):
            self.session(side).tick(self.now)

    @rule(side=SIDES, data=st.data())
    def stop_a_data_stream(self, side: str, data: st.DataObject) -> None:
        """STOP_SENDING for a stream of Objects, as by a reader that has had enough."""
        session = self.session(side)
        sending = sorted(streams_sent(session))
        if sending:
            stream_id = data.draw(st.sampled_from(sending))
            self.transport(side).reset(stream_id, StreamErrorCode.CANCELLED)
            session.stop_sending(stream_id, StreamErrorCode.CANCELLED)

    @rule(side=SIDES, alias=st.integers(50, 60))
    def stray_stream(self, side: str, alias: int) -> None:
        """A subgroup stream, or a datagram, of an alias that nobody has or will have."""
        transport = self.transport(side)
        if self.transport("client").closed or self.transport("server").closed:
            return
        stream_id = transport.open_stream(bidirectional=False)
        if stream_id is not None:
            transport.send(stream_id, bytes([0x10, alias, 0, 0x80, 0, 1, 65]), fin=True)
        transport.send_datagram(bytes([0x00, alias, 0, 0, 0x80, 65]))

    @rule(side=SIDES)
    def padding(self, side: str) -> None:
        transport = self.transport(side)
        if self.transport("client").closed or self.transport("server").closed:
            return
        stream_id = transport.open_stream(bidirectional=False)
        if stream_id is not None:
            octets = next(
                bytes.fromhex(v["hex"]) for v in VECTORS["vectors"] if v["kind"] == "padding_stream"
            )
            transport.send(stream_id, octets, fin=True)

    @rule(side=SIDES)
    def goaway(self, side: str) -> None:
        self.session(side).send_goaway()

    # -- what holds

    @invariant()
    def limits_are_kept(self) -> None:
        if not hasattr(self, "pair"):
            return
        for side in ("client", "server"):
            session = self.session(side)
            assert session.data_streams.held_octets <= LIMITS.max_held_octets
            assert len(session.requests.incoming) <= LIMITS.max_requests + 1
            self.check_open(side)

    def check_open(self, side: str) -> None:
        transport = self.transport(side)
        assert transport.closed is None, transport.closed
        assert self.session(side).state is SessionState.ESTABLISHED

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for handler in self.handlers.values():
            handler.mode = "reject"
            for store in handler.stores.values():
                if not store.ended:
                    store.finish(PublishDoneCode.TRACK_ENDED)
            for request in (*handler.held, *handler.accepted):
                request.revoke()
        for requests in self.requests.values():
            for request in requests:
                request.cancel()
        self.pair.run()
        for _ in range(4):
            self.wait(400.0)
            self.pair.run()
        self.limits_are_kept()
        for side in ("client", "server"):
            assert_clean(self.session(side))
            for store in self.handlers[side].stores.values():
                assert not listeners(store)
                assert all(
                    log.readers == 0 for g in store.groups.values() for log in g.subgroups.values()
                )


class IllegalMoves(Moves):
    """The same, with a peer that now and then sends what no session would send."""

    def raw(self, side: str, bidirectional: bool, octets: bytes, fin: bool) -> None:
        transport = self.transport(side)
        if self.transport("client").closed or self.transport("server").closed:
            return
        stream_id = transport.open_stream(bidirectional=bidirectional)
        if stream_id is not None:
            self.broken = True
            transport.send(stream_id, octets, fin)

    @rule(
        side=SIDES,
        bidirectional=st.booleans(),
        octets=st.sampled_from(MALFORMED) | st.sampled_from(WELL_FORMED) | st.binary(max_size=30),
        fin=st.booleans(),
    )
    def octets_on_a_new_stream(
        self, side: str, bidirectional: bool, octets: bytes, fin: bool
    ) -> None:
        self.raw(side, bidirectional, octets, fin)

    @rule(
        side=SIDES,
        data=st.data(),
        octets=st.sampled_from(MALFORMED) | st.sampled_from(WELL_FORMED) | st.binary(max_size=30),
        fin=st.booleans(),
    )
    def octets_on_an_open_stream(
        self, side: str, data: st.DataObject, octets: bytes, fin: bool
    ) -> None:
        """Into the middle of whatever is said there: the control stream, a request, Objects."""
        transport = self.transport(side)
        streams = sorted(
            stream_id
            for stream_id, stream in transport.out.items()
            if not stream.fin and stream.reset is None and not stream.over
        )
        if streams and self.transport("client").closed is None:
            self.broken = True
            stream = transport.out[data.draw(st.sampled_from(streams))]
            stream.queue.append(octets or b"\0")
            stream.written += len(octets or b"\0")

    @rule(side=SIDES, octets=st.sampled_from(MALFORMED) | st.binary(max_size=20))
    def a_datagram(self, side: str, octets: bytes) -> None:
        self.broken = True
        self.transport(side).send_datagram(octets)

    @rule(side=SIDES)
    def the_control_stream_is_reset(self, side: str) -> None:
        session = self.session(side)
        control = control_of_peer(session)
        if control is not None:
            self.broken = True
            session.stream_reset(control, 0)

    @precondition(lambda self: self.broken)
    @rule(side=SIDES)
    def close(self, side: str) -> None:
        self.session(side).close(SessionErrorCode.NO_ERROR, "enough")

    def ask(self, side: str, make: Any) -> None:
        with contextlib.suppress(MoqtError):
            super().ask(side, make)

    def check_open(self, side: str) -> None:
        if not self.broken:
            super().check_open(side)
        closed = self.transport(side).closed
        if closed is not None:
            code = SessionErrorCode(closed[0])
            assert code is not SessionErrorCode.INTERNAL_ERROR, closed

    def teardown(self) -> None:
        if not self.broken:
            super().teardown()
            return
        self.pair.run()
        for side in ("client", "server"):
            self.session(side).close()
        self.pair.run()
        self.limits_are_kept()
        for side in ("client", "server"):
            assert_clean(self.session(side))
            for store in self.handlers[side].stores.values():
                assert not listeners(store)


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMoves = Moves.TestCase
TestMoves.settings = SETTINGS
TestIllegalMoves = IllegalMoves.TestCase
TestIllegalMoves.settings = SETTINGS
