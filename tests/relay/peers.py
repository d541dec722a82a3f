"""Peers of a relay: who lists namespaces, who wants every track, who offers one."""

from __future__ import annotations

from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import Parameters
from tests.relay.star import Collector, CountingPublisher


class Listing:
    def __init__(self, star, pair, prefix):
        self.events, self.ended = [], []
        self.request = pair.client.subscribe_namespace(
            prefix,
            on_namespace=lambda namespace, present: self.events.append((namespace, present)),
            on_ended=self.ended.append,
        )
        star.run()


class Wanting:
    """A SUBSCRIBE_TRACKS whose offers are kept, and accepted unless told otherwise."""

    def __init__(self, star, pair, prefix=(b"demo",), parameters=Parameters(), *, accept=True):  # noqa: B008
        self.offers, self.got, self.skipped, self.ended = [], {}, [], []
        self.accept = accept
        self.request = pair.client.subscribe_tracks(
            prefix,
            parameters,
            on_publish=self.offered,
            on_skipped=self.skipped.append,
            on_ended=self.ended.append,
        )
        star.run()

    def offered(self, request):
        self.offers.append(request)
        if self.accept:
            collector = self.got[request.name] = Collector()
            collector.request = request
            request.accept(collector)

    @property
    def names(self):
        return [offer.name for offer in self.offers]


class Publishing(Publisher):
    """Serves FETCHes for what it publishes, and counts SUBSCRIBEs, which it refuses."""

    def __init__(self):
        super().__init__()
        self.subscribes = []

    def subscribe_received(self, request):
        self.subscribes.append(request)
        request.reject(RequestErrorCode.NOT_SUPPORTED, "only published tracks")


class Refusing(CountingPublisher):
    """Has published the namespace, and refuses every track of it."""

    def __init__(self, code=RequestErrorCode.DOES_NOT_EXIST):
        super().__init__()
        self.code = code

    def subscribe_received(self, request):
        self.subscribes.append(request)
        request.reject(self.code, "not here")

    fetch_received = subscribe_received


def offering(star, store, parameters=Parameters(), *, handler=None, **transport):  # noqa: B008
    """A peer that offers `store` with PUBLISH and nothing else."""
    handler = handler or Publishing()
    handler.add_track(store)
    pair = star.connect(handler, **transport)
    pair.handler, pair.ended, pair.answers = handler, [], []
    pair.publication = pair.client.publish(store, parameters, on_ended=pair.ended.append)
    pair.publication.on_answer = pair.answers.append
    star.run()
    return pair


def paused(pair):
    """Whether the relay has paused the publication."""
    return pair.publication.delivery.paused
