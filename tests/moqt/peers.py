"""What stands at the ends of a pair of sessions: a track, and who collects it."""

from __future__ import annotations

from moqt.receiving.receiver import ObjectReceiver
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location

NAME = FullTrackName((b"demo", b"live"), b"video")


class Collector(ObjectReceiver):
    def __init__(self):
        self.objects = []
        self.accepted = self.failed = self.done = None
        self.streams = []

    def subscribe_accepted(self, request):
        self.accepted = request

    def fetch_accepted(self, request):
        self.accepted = request

    def request_failed(self, error):
        self.failed = error

    def subscription_done(self, code, reason):
        self.done = code

    def object_received(self, received):
        self.objects.append(received)

    def stream_ended(self, stream, error):
        self.streams.append((stream.via, error))

    @property
    def locations(self):
        return [o.location for o in self.objects if o.status is ObjectStatus.NORMAL]


def track(groups=3, objects=4, **kwargs):
    store = TrackStore(NAME)
    publish(store, groups, objects, **kwargs)
    return store


def publish(store, groups=3, objects=4, *, ended=True, size=100):
    """Whole groups, each with its end; `ended`: and that of the track."""
    for g in range(groups):
        for o in range(objects):
            store.append(g, o, [b"h" * 4, bytes([g % 256, o]) * (size // 2)], priority=g % 256)
        store.mark_end(Location(g, objects), ObjectStatus.END_OF_GROUP)
        store.finish_subgroup(g, 0)
    if ended:
        store.mark_end(Location(groups, 0), ObjectStatus.END_OF_TRACK)
        store.finish_subgroup(groups, 0)
        store.finish(PublishDoneCode.TRACK_ENDED)


FILL = Parameters(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0, 0)),
)


class Wanting:
    """A SUBSCRIBE_TRACKS that accepts every offer."""

    def __init__(self, session, prefix, parameters=Parameters(), *, update=None):  # noqa: B008
        self.offers, self.skipped, self.ends = {}, [], []
        self.got = {}
        self.update = update
        self.request = session.subscribe_tracks(
            prefix,
            parameters,
            on_publish=self.offered,
            on_skipped=self.skipped.append,
            on_ended=self.ends.append,
        )

    def offered(self, publish):
        assert publish.name not in self.offers
        self.offers[publish.name] = publish
        collector = self.got[publish.name] = Collector()
        publish.accept(collector, update=self.update)
