"""A publisher, a relay and two subscribers without sockets, tasks or a clock.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.relay_in_memory

Sessions and the relay are plain objects: octets and calls go in, octets and calls come out. Here
`examples.wires` carries them; in production that is QUIC, in tests a network that loses and delays.
"""

from __future__ import annotations

import moqt
from examples.wires import Wire, join
from moqt.session import SessionHandler
from relay.core import Relay

NAME = moqt.FullTrackName((b"demo", b"live"), b"video")


class Printer(moqt.ObjectReceiver):
    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def object_received(self, received: moqt.ReceivedObject) -> None:
        payload = bytes(received.payload).decode()
        print(f"{self.who}: {tuple(received.location)} {payload} by {received.via.name}")


def settle(wires: list[Wire]) -> None:
    """Until nothing moves any more."""
    while sum(wire.deliver() for wire in wires):
        pass


def main() -> None:
    relay, publisher, track = Relay(), moqt.Publisher(), moqt.TrackStore(NAME)
    publisher.add_track(track)
    handlers = (publisher, SessionHandler(), SessionHandler())
    connections = [join(handler, relay) for handler in handlers]
    wires = [end for ends in connections for end in ends]
    source, first, second = (client.session for client, _ in connections)
    settle(wires)

    source.publish_namespace(NAME.namespace, on_ended=lambda error: print("withdrawn:", error))
    settle(wires)
    live = moqt.Parameters(location_filter=moqt.LocationFilter.next_object())
    first.subscribe(NAME, Printer("first"), live)
    settle(wires)
    track.append(0, 0, b"hello")
    settle(wires)
    source.close()  # from here on the relay's cache is the only source
    settle(wires)
    everything = moqt.LocationFilter.range(moqt.Location(0, 0), moqt.Location(0, 0))
    second.fetch(NAME, Printer("second"), moqt.Parameters(location_filter=everything))
    settle(wires)
    print(f"the relay holds {relay.cache.octets} octets")


if __name__ == "__main__":
    main()
