"""One relay in the middle of any number of in-memory sessions, with a clock in the hand."""

from __future__ import annotations

from collections import Counter

from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from moqt.values.codes import EndOfRange, ObjectStatus, ParameterType, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import FullTrackName, Location
from relay.config import RelayConfig
from relay.core import Relay
from tests.moqt.memory import Pair
from tests.moqt.peers import Collector as PairCollector
from tests.relay.inside import aging, is_empty, publishers

NAMESPACE = (b"demo", b"live")
NAME = FullTrackName(NAMESPACE, b"video")

JOIN = Parameters(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0, 0)),
)
LIVE = Parameters(location_filter=LocationFilter.next_object())
NEXT = LocationFilter.next_object()


def objects(*ranges, set_id=0):
    return RangeFilter(ParameterType.OBJECTID_FILTER, set_id, ranges=ranges)


def subgroups(*ranges, set_id=0):
    return RangeFilter(ParameterType.SUBGROUP_FILTER, set_id, ranges=ranges)


def wants(*filters, location=NEXT, fill=None):
    return Parameters(location_filter=location, range_filters=filters, fill_parameters=fill)


class Collector(PairCollector):
    """Everything one SUBSCRIBE or FETCH brought, part by part."""

    def __init__(self):
        super().__init__()
        self.parts = 0
        self.open_streams = 0
        self.unknown = []
        """Ends of the ranges a fetch stream marked as unknown or timed out."""

    def stream_opened(self, stream):
        self.open_streams += 1

    def object_part(self, stream, part):
        self.parts += len(part)
        super().object_part(stream, part)

    def stream_ended(self, stream, error):
        self.open_streams -= 1
        super().stream_ended(stream, error)

    def range_marker(self, stream, marker):
        if marker.kind is not EndOfRange.NON_EXISTENT:
            self.unknown.append(marker.location)

    @property
    def normal(self):
        return [o for o in self.objects if o.status is ObjectStatus.NORMAL]

    @property
    def payloads(self):
        return {o.location: bytes(o.payload) for o in self.normal}

    @property
    def repeated(self):
        return [at for at, count in Counter(self.locations).items() if count > 1]

    @property
    def fetch_resets(self):
        return [e for via, e in self.streams if via in (Via.FETCH, Via.FILL) and e is not None]


class CountingPublisher(Publisher):
    """A Publisher that remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.subscribes = []
        self.fetches = []

    def subscribe_received(self, request):
        self.subscribes.append(request)
        super().subscribe_received(request)

    def fetch_received(self, request):
        self.fetches.append(request)
        super().fetch_received(request)

    @property
    def fetch_ranges(self):
        return [r.parameters.location_filter.resolve(None) for r in self.fetches]


class SilentPublisher(SessionHandler):
    """Takes SUBSCRIBEs and never answers."""

    def __init__(self):
        self.requests = []

    def subscribe_received(self, request):
        self.requests.append(request)

    fetch_received = subscribe_received


class Star:
    def __init__(self, config=None, *, policy=None, seed=None, **settings):
        """Unless told otherwise nobody waits for a publisher that is lost."""
        settings.setdefault("publisher_linger", 0)
        self.relay = Relay(config or RelayConfig(**settings), policy)
        self.seed = seed
        self.pairs = []
        self.delayed = set()
        self.now = 0.0

    def connect(self, handler=None, **transport):
        """A peer's Pair; its `client` is the peer's session."""
        seed = None if self.seed is None else self.seed + len(self.pairs)
        pair = Pair(handler, self.relay, seed=seed, **transport)
        self.pairs.append(pair)
        return pair

    def publisher(self, *stores, namespace=NAMESPACE, handler=None, **transport):
        """A peer that has published `namespace`."""
        handler = handler or CountingPublisher()
        for store in stores:
            handler.add_track(store)
        pair = self.connect(handler, **transport)
        pair.handler = handler
        pair.ended = []
        pair.published = pair.client.publish_namespace(namespace, on_ended=pair.ended.append)
        self.run()
        return pair

    def subscriber(self, parameters=JOIN, name=NAME, **transport):
        pair = self.connect(**transport)
        return pair, self.subscribe(pair, parameters, name)

    def subscribe(self, pair, parameters=JOIN, name=NAME):
        collector = Collector()
        collector.request = pair.client.subscribe(name, collector, parameters)
        self.run()
        return collector

    def fetch(self, pair, start=None, end=None, name=NAME, **parameters):
        collector = Collector()
        if start is not None:
            parameters["location_filter"] = LocationFilter.range(Location(*start), Location(*end))
        collector.request = pair.client.fetch(name, collector, Parameters(**parameters))
        self.run()
        return collector

    def run(self, rounds=200_000):
        """Deliver until nothing moves anywhere."""
        for _ in range(rounds):
            if not self.step():
                return
        raise AssertionError("the sessions never came to rest")

    def step(self):
        moved = False
        for pair in self.pairs:
            pair.client.ready_to_send()
            pair.server.ready_to_send()
            if pair not in self.delayed:
                moved |= pair.client_transport.deliver()
            moved |= pair.server_transport.deliver()
        return moved

    def delay(self, pair):
        """What the peer sends is on its way until `arrive`."""
        self.delayed.add(pair)

    def arrive(self, pair):
        self.delayed.remove(pair)
        self.run()

    def pass_time(self, seconds, step=0.5):
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + step, until)
            self.relay.tick(self.now)
            for pair in self.pairs:
                pair.client.tick(self.now)
                pair.server.tick(self.now)
            self.run()

    def kill(self, pair):
        """The peer's process dies; the relay's QUIC finds out."""
        pair.server.connection_closed(0, "idle time-out", False)
        pair.server_transport.closed = pair.client_transport.closed = (0, "")
        self.pairs.remove(pair)
        self.run()

    def assert_empty(self):
        """No session, request, namespace or track is left, and no memory billed."""
        relay = self.relay
        assert relay.sessions == set()
        assert not relay.tracks and not relay.active and not relay.waiting.pending
        names = relay.namespaces
        assert names.publications == 0 and not publishers(names) and not names.listings
        assert not relay.offers.wanted and relay.upstream_subscriptions == 0
        for table in (
            *names.tables,
            relay.tracks_by_namespace,
            relay.waiting.rendezvous,
            relay.offers.by_prefix,
        ):
            assert is_empty(table)
        assert relay.cache.billed == relay.cache.octets == relay.cache.objects == 0
        assert not aging(relay.cache)


def payload(group, object_, size=100):
    return (b"%d/%d;" % (group, object_) * size)[:size]


def publish(store, group, object_, size=100, *, objects=4):
    """Append one Object; the last of `objects` ends its group."""
    store.append(group, object_, payload(group, object_, size))
    if object_ == objects - 1:
        store.mark_end(Location(group, objects), ObjectStatus.END_OF_GROUP)
        store.finish_subgroup(group, 0)


def end_track(store, groups):
    store.mark_end(Location(groups, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(groups, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)


def track(groups=0, objects=4, *, size=100, ended=False, name=NAME, properties=()):
    store = TrackStore(name, properties)
    for group in range(groups):
        for object_ in range(objects):
            publish(store, group, object_, size, objects=objects)
    if ended:
        end_track(store, groups)
    return store


def everything(groups, objects=4, size=100):
    return {Location(g, o): payload(g, o, size) for g in range(groups) for o in range(objects)}


class Denying:
    """Refuses some actions to some sessions, and remembers what it was asked."""

    def __init__(self, denied):
        self.denied = denied
        self.asked = []
        self.strangers = set()

    def allow(self, session, action, namespace, tokens=()):
        self.asked.append((action, namespace))
        return action not in self.denied and session not in self.strangers

    def is_relay(self, session):
        return session not in self.strangers

    def check(self, session, token):
        return None
