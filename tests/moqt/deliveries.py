"""A publisher, its store and a subscriber that remembers every stream: for tests of deliveries."""

from __future__ import annotations

from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.track.store import TrackStore
from moqt.values.codes import PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from tests.moqt.inside import listeners
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector

ALL = Parameters(location_filter=LocationFilter.absolute_start(0))
NEXT = Parameters(location_filter=LocationFilter.next_object())


class Recorder(Collector):
    """Also remembers each stream: its header, its Objects, how it ended."""

    def __init__(self):
        super().__init__()
        self.opened = []
        self.ends = []
        self.answers = []

    def stream_opened(self, stream):
        self.opened.append(stream)

    def stream_ended(self, stream, error):
        super().stream_ended(stream, error)
        self.ends.append((stream.via, stream.subgroup.group if stream.subgroup else None, error))

    def live(self):
        return [o.location for o in self.objects if o.via is not Via.FILL and not o.status]

    def filled(self):
        return [o.location for o in self.objects if o.via is Via.FILL]


class World:
    def __init__(self, store=None, parameters=ALL, *, seed=None, name=NAME, **kwargs):
        self.store = store if store is not None else TrackStore(name)
        self.publisher = Publisher()
        self.publisher.add_track(self.store)
        self.pair = Pair(server=self.publisher, seed=seed, **kwargs)
        self.got = Recorder()
        if parameters is not None:
            self.request = self.pair.client.subscribe(self.store.name, self.got, parameters)
            self.run()

    def run(self):
        self.pair.run()

    def put(self, *locations):
        for group, object_id in locations:
            self.store.append(group, object_id, b"%d/%d" % (group, object_id))
        self.run()

    def update(self, **parameters):
        self.request.update(Parameters(**parameters), self.got.answers.append)
        self.run()

    def fetch(self, **parameters):
        got = Recorder()
        self.pair.client.fetch(self.store.name, got, Parameters(**parameters))
        self.run()
        return got

    def end(self):
        for group_id, group in self.store.groups.items():
            for subgroup in tuple(group.subgroups):
                self.store.finish_subgroup(group_id, subgroup)
        self.store.finish(PublishDoneCode.TRACK_ENDED)
        self.run()
        assert self.got.done == PublishDoneCode.TRACK_ENDED
        assert self.request.done.stream_count == len(self.got.ends)
        self.clean()

    def clean(self):
        assert_clean(self.pair.client)
        assert_clean(self.pair.server)
        assert not listeners(self.store)
        for group in self.store.groups.values():
            assert all(log.readers == 0 for log in group.subgroups.values())


def locations(*pairs):
    return [Location(*p) for p in pairs]


def grow(store, location, length=10, **kwargs):
    return store.begin(
        Location(*location),
        subgroup=kwargs.pop("subgroup", 0),
        priority=128,
        properties=b"",
        length=length,
        **kwargs,
    )
