"""A session alone, whose peer is whoever calls it: for octets that no session would send."""

from __future__ import annotations

from typing import Any

from moqt.publisher import Publisher
from moqt.requests import IncomingPublish, IncomingPublishNamespace
from moqt.session import Session, SessionConfig, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import SessionErrorCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName
from tests.moqt.memory import ALPN, MemoryTransport, assert_clean
from tests.moqt.peers import Collector

NAME = FullTrackName((b"demo", b"live"), b"video")
SETUP = bytes.fromhex("af000000")
LIMITS = SessionConfig(max_held_octets=20_000, max_requests=50, max_namespaces_told=50)


class Everything(Publisher):
    """Accepts whatever can be accepted."""

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        request.accept()

    def publish_received(self, request: IncomingPublish) -> None:
        request.accept(Collector())


class Streams(dict[int, Any]):
    def __missing__(self, stream_id: int) -> Any:
        other = MemoryTransport(True)
        other.peer = MemoryTransport(False)
        self[stream_id] = stream = other.out[other.open_stream(bidirectional=False)]
        return stream


class Loose(MemoryTransport):
    """Knows every stream a peer may think of, and what may still come on which."""

    def __init__(self, is_client: bool) -> None:
        super().__init__(is_client)
        self.peer = MemoryTransport(not is_client)
        self.out = self.peer.out = Streams()
        self.over: set[int] = set()

    def send(self, stream_id, data, fin=False) -> None:
        super().send(stream_id, data, fin)
        self.out[stream_id].queue.clear()

    def give(self, what: str, stream_id: int, data: bytes) -> None:
        """One event for the handler, unless QUIC could not bring it any more."""
        handler = self.handler
        if what == "datagram":
            handler.datagram(data)
        elif what == "stop":
            if not stream_id & 2 or (stream_id & 1) != self.is_client:
                handler.stop_sending(stream_id, len(data))
        elif stream_id in self.over or stream_id in self.refused:
            return
        elif stream_id & 2 and (stream_id & 1) != self.is_client:
            return  # our own unidirectional stream: nothing comes on it
        elif what == "reset":
            self.over.add(stream_id)
            handler.stream_reset(stream_id, len(data))
        else:
            if what == "fin":
                self.over.add(stream_id)
            handler.stream_data(stream_id, data, what == "fin")


def video(groups: int = 3, objects: int = 3) -> TrackStore:
    store = TrackStore(NAME)
    for group in range(groups):
        for object_id in range(objects):
            store.append(group, object_id, b"payload")
    return store


def ask(session: Session) -> list[Collector]:
    """One request of each kind; the first three have a Collector."""
    collectors = [Collector() for _ in range(3)]
    fill = Parameters(
        location_filter=LocationFilter.next_object(), fill_parameters=Parameters(group_order=1)
    )
    session.subscribe(NAME, collectors[0], fill)
    session.fetch(NAME, collectors[1])
    session.subscribe(NAME, collectors[2])
    session.subscribe_namespace((b"demo",), on_namespace=lambda *_: None, on_ended=lambda *_: None)
    session.publish_namespace((b"demo",), on_ended=lambda *_: None)
    session.track_status(NAME)
    session.subscribe_tracks(
        (b"demo",),
        on_publish=lambda request: request.accept(Collector()),
        on_ended=lambda *_: None,
    )
    session.publish(video(1, 2))
    return collectors


class Lone:
    """An established session that has a track and has asked for everything."""

    def __init__(self, client: bool, *, asks: bool = True, config: SessionConfig = LIMITS) -> None:
        publisher = Everything()
        publisher.add_track(video())
        self.transport = Loose(client)
        self.session = Session(self.transport, publisher, config)
        self.transport.handler = self.session
        self.session.connection_established(ALPN)
        self.uni, self.bidi, self.ours = (3, 1, 0) if client else (2, 0, 1)
        self.transport.give("data", self.uni, SETUP)
        self.collectors = ask(self.session) if asks else []

    def check(self) -> None:
        """What holds at any time, whatever the peer did."""
        session = self.session
        assert session.data_streams.held_octets <= session.config.max_held_octets
        assert len(session.requests.incoming) <= session.config.max_requests + 1

    def end(self) -> None:
        """The session is over, by now or by the peer's doing: nothing is left of it."""
        if self.session.state is SessionState.CLOSED:
            assert self.transport.closed is not None
            code, reason = self.transport.closed
            assert SessionErrorCode(code) is not SessionErrorCode.INTERNAL_ERROR
            assert reason or code == SessionErrorCode.NO_ERROR
        self.session.close()
        assert_clean(self.session)
        for each in self.collectors:
            assert each.failed is not None or each.done is not None or each.streams
