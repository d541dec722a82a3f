"""A session whose peer is the test, octet by octet."""

from __future__ import annotations

from moqt.publisher import Publisher
from moqt.session import Session, SessionHandler, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, SessionErrorCode
from moqt.values.messages import Parameters, Publish, Subscribe, SubscribeOk
from moqt.values.names import FullTrackName
from moqt.wire.codec import codec_for
from moqt.wire.objects import ObjectHeader, SubgroupHeader
from tests.moqt.memory import ALPN, MemoryTransport
from tests.moqt.peers import Collector

CODEC = codec_for(ALPN)
VIDEO = FullTrackName((b"demo", b"live"), b"video")
SETUP = bytes.fromhex("af000000")


class Raw:
    """A session whose peer is this test, octet by octet."""

    def __init__(self, *, client: bool, handler=None, config=None, setup: bytes | None = SETUP):
        self.transport = MemoryTransport(client)
        self.transport.peer = MemoryTransport(not client)
        if handler is None:
            handler = Publisher()
            store = TrackStore(VIDEO)
            for object_id in range(3):
                store.append(0, object_id, b"x")
            handler.add_track(store)
        self.session = Session(self.transport, handler, config)
        self.transport.handler = self.session
        self.session.connection_established(ALPN)
        self.uni = 3 if client else 2
        self.bidi = 1 if client else 0
        if setup is not None:
            self.control = self.send_uni(setup)

    def send_uni(self, data: bytes, fin: bool = False) -> int:
        stream_id, self.uni = self.uni, self.uni + 4
        self.session.stream_data(stream_id, data, fin)
        return stream_id

    def send_bidi(self, data: bytes, fin: bool = False) -> int:
        stream_id, self.bidi = self.bidi, self.bidi + 4
        self.transport.out.setdefault(stream_id, type(self.transport.out[self.own_control])())
        self.session.stream_data(stream_id, data, fin)
        return stream_id

    @property
    def own_control(self) -> int:
        return min(s for s in self.transport.out if s & 2)

    def answers(self, stream_id: int) -> list:
        data = b"".join(self.transport.out[stream_id].queue)
        return codec_for(ALPN).message_decoder().feed(data)

    def closed_with(self):
        assert self.session.state is SessionState.CLOSED
        assert self.session.closed is not None and self.session.closed.reason
        return SessionErrorCode(self.transport.closed[0])


def octets(message) -> bytes:
    return CODEC.encode_message(message)


def subgroup(alias, group, *objects, first=0) -> bytes:
    data = CODEC.encode_subgroup_header(SubgroupHeader(alias, group, 0, 128), properties=False)
    previous = None
    for object_id, payload in enumerate(objects, first):
        data += CODEC.encode_subgroup_object(
            previous, object_id, with_properties=False, length=len(payload)
        )
        data += payload
        previous = object_id
    return data


def fetch_stream(request_id, *locations, order=GroupOrder.ASCENDING) -> bytes:
    encoder = CODEC.fetch_encoder(request_id, order)
    data = encoder.header()
    for group, object_id in locations:
        data += encoder.object(ObjectHeader(group, object_id, 0, 128, b"", 1)) + b"x"
    return data


class Manual(SessionHandler):
    """Keeps every request; the test answers."""

    def __init__(self):
        self.requests = []
        self.goaways = []
        self.request_goaways = []

    def subscribe_received(self, request):
        self.requests.append(request)

    fetch_received = track_status_received = subscribe_received
    publish_namespace_received = subscribe_namespace_received = subscribe_received

    def goaway_received(self, session, goaway):
        self.goaways.append(goaway)

    def request_goaway_received(self, request, goaway):
        self.request_goaways.append((request, goaway))


class Client(Raw):
    """A client session; the test is its server."""

    def __init__(self, **kwargs):
        kwargs.setdefault("handler", Manual())
        super().__init__(client=True, **kwargs)

    def subscribe(self, parameters=Parameters(), name=VIDEO, collector=None):  # noqa: B008
        collector = collector or Collector()
        collector.request = self.session.subscribe(name, collector, parameters)
        return collector

    def fetch(self, parameters=Parameters()):  # noqa: B008
        collector = Collector()
        collector.request = self.session.fetch(VIDEO, collector, parameters)
        return collector

    def listing(self, prefix=(b"demo",)):
        events, ends = [], []
        request = self.session.subscribe_namespace(
            prefix, on_namespace=lambda n, p: events.append((n, p)), on_ended=ends.append
        )
        return request, events, ends

    def say(self, request, *messages, fin=False):
        self.session.stream_data(
            request.stream.stream_id, b"".join(octets(m) for m in messages), fin
        )

    def accept(self, collector, alias=7, **kwargs):
        self.say(collector.request, SubscribeOk(alias, **kwargs))

    def reset_code(self, stream_id):
        return self.transport.out[stream_id].reset

    @property
    def stopped(self):
        return [e[1] for e in self.transport.events if e[0] == "stop"]


class Server(Raw):
    def __init__(self, **kwargs):
        kwargs.setdefault("handler", Manual())
        super().__init__(client=False, **kwargs)

    def ask(self, *messages, fin=False):
        return self.send_bidi(b"".join(octets(m) for m in messages), fin)

    def answered(self, stream_id):
        return self.answers(stream_id)

    @property
    def requests(self):
        return self.session.handler.requests


def subscribe_message(request_id=0, **parameters):
    return Subscribe(request_id, VIDEO.namespace, VIDEO.name, Parameters(**parameters))


class Interested(SessionHandler):
    """Keeps every PUBLISH; accepts it when told to."""

    def __init__(self, *, accept=True, update=None):
        self.accept, self.update = accept, update
        self.offers, self.collectors = [], []

    def publish_received(self, request):
        self.offers.append(request)
        if self.accept:
            collector = Collector()
            collector.request = request
            self.collectors.append(collector)
            request.accept(collector, update=self.update)

    @property
    def got(self):
        return self.collectors[-1]


def publish_message(request_id=1, alias=7, *, name=VIDEO, properties=(), **parameters):
    return Publish(
        request_id, name.namespace, name.name, alias, Parameters(**parameters), properties
    )


def offered(raw_handler=None, *messages, config=None):
    """A client session that was sent a PUBLISH on stream 1."""
    client = Client(handler=raw_handler or Interested(), config=config)
    stream_id = client.send_bidi(b"".join(octets(m) for m in messages or (publish_message(),)))
    return client, stream_id
