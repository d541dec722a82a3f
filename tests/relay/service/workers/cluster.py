"""A home and its edges in memory, with a clock in the hand."""

from __future__ import annotations

from moqt.session import SessionConfig
from relay.config import Clock, RelayConfig
from relay.rights.policy import AllowAll
from relay.service.workers.edge import EdgeRelay
from relay.service.workers.home import HomeScopes
from relay.service.workers.settings import Secret, Way, of_edge, of_home
from tests.moqt.memory import Pair
from tests.relay.star import Star

SECRET = Secret(key=b"of this start")


class Edge(Star):
    """One edge, in the place of a relay."""

    def __init__(self, number, config, policy):
        super().__init__(config)
        self.number = number
        self.relay = EdgeRelay(config, policy)


class Cluster:
    def __init__(self, edges=2, policy=None, **settings):
        settings.setdefault("publisher_linger", 0)
        config = RelayConfig(**settings)
        self.scopes = HomeScopes(of_home(config, edges), SECRET, edges, clock=Clock())
        policy = policy or AllowAll()
        self.edges = [Edge(n, of_edge(config, edges), policy) for n in range(edges)]
        self.pairs = self.edges[0].pairs
        for edge in self.edges:
            edge.pairs = self.pairs  # whoever runs, runs all
        self.links = {}
        self.now = 0.0

    @property
    def home(self):
        return self.scopes.relays["/"]

    def connect(self):
        """Every edge, to the home."""
        for edge in self.edges:
            self.link(edge)
        return self.edges

    def link(self, edge):
        ways = {
            Way.SERVING: (edge.relay, edge.relay.uplink, 10),
            Way.BRINGING: (edge.relay.taking, edge.relay.announced, 20),
        }
        pairs = []
        for way, (relay, uses, base) in ways.items():
            pair = Pair(
                relay,
                self.scopes,
                client_config=SessionConfig(
                    setup_tokens=(SECRET.token(way, edge.number),), relay_id=base + edge.number
                ),
                server_config=SessionConfig(relay_id=1),
            )
            self.pairs.append(pair)
            uses.attach(pair.client)
            edge.run()
            pairs.append((pair, uses))
        self.links[edge] = pairs

    def cut(self, edge):
        """The home dies, for this edge."""
        for pair, uses in self.links.pop(edge):
            edge.kill(pair)
            pair.client.connection_closed(0, "reset", False)
            uses.detach(pair.client)
        edge.run()

    def pass_time(self, seconds, step=0.5):
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + step, until)
            self.scopes.tick(self.now)
            for edge in self.edges:
                edge.now = self.now
                edge.relay.tick(self.now)
            for pair in self.pairs:
                pair.client.tick(self.now)
                pair.server.tick(self.now)
            self.edges[0].run()
