"""Relays that know each other by name, each a client of the next one."""

from __future__ import annotations

from moqt.values.config import SessionConfig
from relay.mesh.uplink import Uplink
from tests.relay.star import Star


class Named(Star):
    """The relay number `number`, which says so (RELAY_ID)."""

    def __init__(self, number, **settings):
        super().__init__(**settings)
        self.session = SessionConfig(relay_id=number)

    def connect(self, handler=None, **transport):
        return super().connect(handler, server_config=self.session, **transport)


class Ring:
    """`count` relays; the upstream relay of each is the next one, of the last the first."""

    def __init__(self, count, **settings):
        self.relays = [Named(number + 1, **settings) for number in range(count)]
        self.uplinks = []
        for relay in self.relays:
            relay.pairs = self.relays[0].pairs  # whoever runs, runs all
        for relay, above in zip(self.relays, [*self.relays[1:], self.relays[0]], strict=True):
            self.join(relay, above)

    def join(self, relay, above, place=0):
        uplink = Uplink(relay.relay, place=place)
        link = above.connect(relay.relay, client_config=relay.session)
        self.run()
        uplink.attach(link.client)
        self.uplinks.append(uplink)
        self.run()
        return link

    def run(self):
        self.relays[0].run()

    def pass_time(self, seconds, step=0.5):
        first = self.relays[0]
        until = first.now + seconds
        while first.now < until:
            now = min(first.now + step, until)
            for each in self.relays:
                each.now = now
                each.relay.tick(now)
            for uplink in self.uplinks:
                uplink.tick(now)
            for pair in first.pairs:
                pair.client.tick(now)
                pair.server.tick(now)
            self.run()
