"""Two relays, one behind the other."""

from __future__ import annotations

from relay.mesh.uplink import Uplink
from tests.relay.star import Star


class Chain:
    """The relay of `bottom` is a client of the relay of `top`."""

    def __init__(self, *, announce=False, **settings):
        self.top, self.bottom = Star(**settings), Star(**settings)
        self.bottom.pairs = self.top.pairs  # whoever runs, runs all
        self.uplink = Uplink(self.bottom.relay, announce=announce)
        self.link = None

    def connect(self):
        link = self.top.connect(self.bottom.relay)
        self.top.run()
        self.uplink.attach(link.client)
        self.top.run()
        self.link = link
        return link

    def cut(self):
        link, self.link = self.link, None
        self.top.kill(link)
        link.client.connection_closed(0, "idle time-out", False)
        self.uplink.detach(link.client)
        self.top.run()

    def pass_time(self, seconds, step=0.5):
        until = self.top.now + seconds
        while self.top.now < until:
            self.top.now = self.bottom.now = min(self.top.now + step, until)
            for relay in (self.top.relay, self.bottom.relay):
                relay.tick(self.top.now)
            self.uplink.tick(self.top.now)
            for pair in self.top.pairs:
                pair.client.tick(self.top.now)
                pair.server.tick(self.top.now)
            self.top.run()
