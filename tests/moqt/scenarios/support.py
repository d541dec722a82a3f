"""The beginning of most stories."""

from __future__ import annotations

from moqt.publisher import Publisher
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from tests.moqt.simulator import Host, Path, Simulation

HOSTILE = Path(latency=0.03, loss=0.1, reorder=0.3, duplicate=0.1)


def world(
    seed: int = 1,
    *,
    path: Path | None = None,
    handler: SessionHandler | None = None,
    **quic: object,
) -> tuple[Simulation, Host, Host]:
    """A publisher and a subscriber that has connected to it."""
    simulation = Simulation(seed, path=path)
    server = simulation.serve("publisher", handler or Publisher(), **quic)
    return simulation, server, simulation.connect("subscriber", server, **quic)


def served(
    store: TrackStore, seed: int = 1, *, path: Path | None = None, **quic: object
) -> tuple[Simulation, Host, Host]:
    """The same, where the publisher has one track."""
    publisher = Publisher()
    publisher.add_track(store)
    return world(seed, path=path, handler=publisher, **quic)
