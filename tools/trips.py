"""How far a message or an Object walks through the packages: `python -m tools.trips`.

Sessions, a relay and an index run in memory while every call of a function of `moqt`, `relay`,
`kvcs` or `kvsp` is written down, comprehensions and generators (once each) included. A trip is
such a list:

* calls: its length; files: how many files they lie in;
* moves: the next call is in another file; returns: moves into a file where the trip has been;
* climbs: moves to a higher floor. Floors are the `layers` contracts of pyproject.toml; where these
  say nothing, a file is one floor above the highest that it imports, and a circle is one floor.

`--show NAME` prints one trip as an indented list, `--json` all figures for machines. Another
checkout is measured with PYTHONPATH and the path of this file; `--floors` says which of its files
are on the floor of which of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import grimp
import numpy as np

import moqt
from kvcs import Consumer, Descriptor, Mode, Publication, Scope, block_keys
from kvsp.http.app import App
from kvsp.http.auth import DEVELOPER
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from moqt import FullTrackName, LocationFilter, Parameters, Session, SessionHandler, TrackStore
from relay.core import Relay

PACKAGES = ("moqt", "relay", "kvcs", "kvsp")
HERE = Path(__file__).parents[1]
TRACED = Path(moqt.__file__).parents[1]
"""The checkout that runs; another one when PYTHONPATH says so."""


# -- what is measured --------------------------------------------------------------------


class Call(NamedTuple):
    file: str
    function: str
    depth: int
    """Frames below it, those of other libraries too."""


class Recorder:
    """Writes down the calls of a `with` block; a coroutine that goes on is no new call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.recording = False
        self._files: dict[str, str | None] = {}
        self._seen: set[FrameType] = set()

    def __enter__(self) -> Recorder:
        self.recording = True
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.recording = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.recording or frame in self._seen:
            return
        self._seen.add(frame)
        name = frame.f_code.co_filename
        if name not in self._files:
            self._files[name] = _file(name)
        file = self._files[name]
        if file is not None:
            self.calls.append(Call(file, frame.f_code.co_qualname, _depth(frame)))


def _file(name: str) -> str | None:
    """The path from the checkout; None for code that is not of the packages."""
    path = Path(name)
    if not path.is_relative_to(TRACED):
        return None
    path = path.relative_to(TRACED)
    return str(path) if path.parts[0] in PACKAGES else None


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


class Floors:
    """Which of two files is on the higher floor."""

    def __init__(self, checkout: Path, stands_for: Mapping[str, str]) -> None:
        """By the contracts of `checkout`; `stands_for` has paths that count as another path."""
        settings = tomllib.loads((checkout / "pyproject.toml").read_text())
        self._stands_for = stands_for
        self._contracts = [
            _ranks(contract["layers"], container)
            for contract in settings["tool"]["importlinter"]["contracts"]
            if contract["type"] == "layers"
            for container in contract.get("containers", [""])
        ]
        self._graph = grimp.build_graph(*PACKAGES, cache_dir=None)
        self._heights: dict[str, int] = {}

    def climbs(self, lower: str, upper: str) -> bool:
        """Whether `upper` is above `lower`: where their paths part, or by their imports."""
        ways = (_modules(self._stands_for.get(file, file)) for file in (lower, upper))
        here, there = next(((a, b) for a, b in zip(*ways, strict=False) if a != b), ("", ""))
        for ranks in self._contracts:
            if here in ranks and there in ranks:
                return ranks[there] > ranks[here]
        return self._height(_module(upper)) > self._height(_module(lower))

    def _height(self, module: str) -> int:
        if module not in self._heights:
            circle = {module} | {
                other
                for other in self._graph.find_upstream_modules(module)
                if module in self._graph.find_upstream_modules(other)
            }
            imported = {
                each
                for member in circle
                for each in self._graph.find_modules_directly_imported_by(member)
            }
            height = 1 + max(map(self._height, imported - circle), default=0)
            self._heights.update(dict.fromkeys(circle, height))
        return self._heights[module]


def _ranks(layers: Sequence[str], container: str) -> dict[str, int]:
    """Heights by module: the last of `layers` is the lowest."""
    prefix = f"{container}." if container else ""
    return {
        prefix + name.strip(" ()"): height
        for height, layer in enumerate(reversed(layers))
        for name in layer.replace(":", "|").split("|")
    }


def _modules(file: str) -> Iterator[str]:
    """`a/b.py`: `a`, then `a.b`."""
    parts = file.removesuffix(".py").split("/")
    return (".".join(parts[: length + 1]) for length in range(len(parts)))


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Figures(NamedTuple):
    calls: int
    files: int
    moves: int
    returns: int
    climbs: int


def count(calls: Sequence[Call], floors: Floors) -> Figures:
    moves = [(a.file, b.file) for a, b in pairwise(calls) if a.file != b.file]
    files = len({call.file for call in calls})
    climbs = sum(floors.climbs(*move) for move in moves)
    # the first visit of every file but the one that the trip begins in is a move, too
    return Figures(len(calls), files, len(moves), len(moves) - (files - 1), climbs)


# -- sessions in memory ------------------------------------------------------------------


class Wire:
    """One end of a connection: a `moqt.quic.transport.Transport` that loses and delays nothing."""

    authority: str | None = None
    path: str | None = None
    qlog = None
    unsent = 0
    peer: Wire

    def __init__(self, handler: SessionHandler, *, is_client: bool) -> None:
        self.is_client = is_client
        self.sent: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._opened = {True: 0, False: 0}
        self.session = Session(self, handler)

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int:
        number = self._opened[bidirectional]
        self._opened[bidirectional] += 1
        return 4 * number + (0 if bidirectional else 2) + (0 if self.is_client else 1)

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        self.sent.append(("stream_data", (stream_id, bytes(data), fin)))

    def reset(self, stream_id: int, code: int) -> None:
        self.sent.append(("stream_reset", (stream_id, code)))

    def stop_receiving(self, stream_id: int, code: int) -> None:
        self.sent.append(("stop_sending", (stream_id, code)))

    def send_datagram(self, data: bytes) -> bool:
        self.sent.append(("datagram", (data,)))
        return True

    def pause_receiving(self, stream_id: int) -> None: ...

    def resume_receiving(self, stream_id: int) -> None: ...

    def send_room(self, stream_id: int) -> int:
        return 1 << 20

    def acknowledged(self, stream_id: int) -> bool:
        return True

    def take_credited(self) -> Iterable[int]:
        return ()

    packet_sizes = 0, 0

    def wake(self) -> None: ...

    def close(self, code: int, reason: str) -> None:
        self.sent.append(("connection_closed", (code, reason, True)))

    def deliver(self, most: int | None = None) -> bool:
        """Bring what was sent (the first `most`) to the peer; whether there was anything."""
        due = len(self.sent) if most is None else most
        for _ in range(due):
            event, arguments = self.sent.popleft()
            getattr(self.peer.session, event)(*arguments)
        return due > 0


def join(client: SessionHandler, server: SessionHandler) -> tuple[Wire, Wire]:
    """The two ends of a new connection; `settle` lets them shake hands."""
    ends = Wire(client, is_client=True), Wire(server, is_client=False)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends


def settle(*wires: Wire) -> None:
    """Until nothing moves any more."""
    moved = True
    while moved:
        for wire in wires:
            wire.session.connection_established("moqt-22")  # the first time alone does anything
            wire.session.ready_to_send()
        moved = any(wire.deliver() for wire in wires)


class Network:
    """A publisher with one Object, a relay, and a subscriber of what comes after it."""

    NAME = FullTrackName((b"demo", b"live"), b"video")

    def __init__(self, **parameters: Any) -> None:
        publisher, relay = moqt.Publisher(), Relay()
        self.track = TrackStore(self.NAME)
        self.track.append(0, 0, bytes(100))
        publisher.add_track(self.track)
        self.publisher, self.upstream = join(publisher, relay)
        self.subscriber, self.downstream = join(SessionHandler(), relay)
        self.settle()
        self.publisher.session.publish_namespace(self.NAME.namespace, on_ended=print)
        self.settle()
        self.subscription = self.subscriber.session.subscribe(
            self.NAME,
            moqt.ObjectReceiver(),
            Parameters(location_filter=LocationFilter.next_object(), **parameters),
        )
        self.settle()

    def settle(self) -> None:
        settle(self.publisher, self.upstream, self.subscriber, self.downstream)

    def update(self, **parameters: Any) -> None:
        """The subscriber sends a REQUEST_UPDATE."""
        self.subscription.update(Parameters(**parameters), lambda *_: None)
        self.subscriber.session.ready_to_send()


# -- the trips ---------------------------------------------------------------------------


def relay_object() -> list[Call]:
    """From the octets of an Object at the relay to those it sends on; its subgroup is open."""
    network = Network()
    network.track.append(0, 1, bytes(100))
    network.settle()
    network.track.append(0, 2, bytes(100))
    network.publisher.session.ready_to_send()
    with Recorder() as recorder:
        network.publisher.deliver()
        network.upstream.session.ready_to_send()  # as QUIC asks after each batch
        network.downstream.session.ready_to_send()
    assert network.downstream.sent
    return recorder.calls


def relay_priority() -> list[Call]:
    """From a REQUEST_UPDATE of the subscriber's priority at the relay to the answer."""
    network = Network()
    network.update(subscriber_priority=9)
    with Recorder() as recorder:
        network.subscriber.deliver()
    assert network.downstream.sent
    return recorder.calls


def relay_forward() -> list[Call]:
    """A REQUEST_UPDATE with FORWARD 1 at a relay whose upstream is paused, asked first."""
    network = Network(forward=False)
    network.update(forward=True)
    with Recorder() as recorder:
        network.subscriber.deliver()
    assert not network.downstream.sent
    network.upstream.deliver()
    with recorder:
        network.publisher.deliver()
    assert network.downstream.sent
    return recorder.calls


BLOCK = 4
SCOPE = Scope(bytes(range(32)))
TOKENS = range(5 * BLOCK)
DESCRIPTOR = Descriptor.parse(
    {
        "model": "any",
        "model_digest": "sha-256:" + "11" * 32,
        "tokenizer_digest": "sha-256:" + "22" * 32,
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": BLOCK,
        "layout": "kvsp-layout-1",
    }
)
TENSOR = np.zeros((BLOCK, 2, 8), DESCRIPTOR.dtype)


class _Counting(moqt.Publisher):
    subscriptions = 0

    def subscribe_received(self, request: Any) -> None:
        self.subscriptions += 1
        super().subscribe_received(request)


def _served(publication: Publication) -> _Counting:
    publisher = _Counting()
    for track in publication.tracks:
        publisher.add_track(track)
    return publisher


async def _consumer_object() -> list[Call]:
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publisher = _served(publication)
    near, far = join(SessionHandler(), publisher)
    session = moqt.MoqtSession(near.session)
    settle(near, far)
    async with Consumer(session, SCOPE, DESCRIPTOR, TOKENS, mode=Mode.LIVE) as consumer:
        layer = asyncio.ensure_future(anext(consumer.layers()))
        while publisher.subscriptions < len(publication.tracks):
            settle(near, far)
            await asyncio.sleep(0)
        settle(near, far)
        publication.put_block(0, 0, TENSOR, TENSOR)
        settle(near, far)
        publication.put_block(0, 1, TENSOR, TENSOR)
        far.session.ready_to_send()
        far.deliver(1)
        with Recorder() as recorder:
            far.deliver(1)
        layer.cancel()
        await asyncio.wait((layer,))
    return recorder.calls


def consumer_object() -> list[Call]:
    """From the last octets of an Object at the consumer to its place in the layer's array."""
    return asyncio.run(_consumer_object())


def put_layer() -> list[Call]:
    """From `put_layer`, of one block, to the octets of both Objects at the transport."""
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[:BLOCK])
    near, far = join(SessionHandler(), _served(publication))
    settle(near, far)
    for track in publication.tracks:
        near.session.subscribe(track.name, moqt.ObjectReceiver(), Parameters())
    publication.put_layer(0, TENSOR, TENSOR)
    settle(near, far)
    with Recorder() as recorder:
        publication.put_layer(1, TENSOR, TENSOR)
        far.session.ready_to_send()
    assert far.sent
    return recorder.calls


class _Everybody:
    """Settles without any code of ours who asks."""

    def authenticate(self, credentials: Any) -> Any:
        return DEVELOPER


async def _lookup(recorder: Recorder) -> None:
    index = IndexApp(IndexService(SqliteStore(":memory:")), sweep_s=3600)
    app = App([index], base_uri="http://127.0.0.1:8080/kvsp/", authenticator=_Everybody())
    keys = block_keys(SCOPE, DESCRIPTOR, TOKENS[:BLOCK])
    request = {
        "scope_id": SCOPE.scope_id.hex(),
        "compat_id": DESCRIPTOR.compat_id.hex(),
        "block_keys": [key.hex() for key in keys],
    }
    async with app.lifespan():
        await _post(app, "lookup", request)  # its thread starts
        await asyncio.sleep(0.1)  # and its first sweep is over
        with recorder:
            await _post(app, "lookup", request)


async def _post(app: App, path: str, body: Any) -> None:
    """One request to an ASGI application. There is no server; it has its answer at the end."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": f"/kvsp/{path}",
        "raw_path": f"/kvsp/{path}".encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1:8080"), (b"content-type", b"application/kvsp+json")],
        "client": ("127.0.0.1", 1234),
        "server": ("127.0.0.1", 8080),
        "extensions": {},
    }
    parts = iter((json.dumps(body).encode(), b""))
    statuses = []

    async def receive() -> dict[str, Any]:
        part = next(parts)
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    await app(scope, receive, send)
    assert statuses[0] == 200, statuses


def kvsp_lookup() -> list[Call]:
    """A lookup of one Block Key, from ASGI to ASGI, on the event loop alone."""
    recorder = Recorder()
    asyncio.run(_lookup(recorder))
    return recorder.calls


def kvsp_lookup_whole() -> list[Call]:
    """The same with what the index does in its own thread."""
    recorder = Recorder()
    threading.setprofile(recorder.profile)
    try:
        asyncio.run(_lookup(recorder))
    finally:
        threading.setprofile(None)
    return recorder.calls


TRIPS: dict[str, tuple[str, Callable[[], list[Call]]]] = {
    "relay-object": ("a small Object through the relay to a subscriber", relay_object),
    "relay-priority": ("REQUEST_UPDATE of the priority, at the relay", relay_priority),
    "relay-forward": ("with FORWARD 1, upstream paused", relay_forward),
    "consumer-object": ("an Object at the consumer, to its array", consumer_object),
    "put-layer": ("put_layer at the publisher", put_layer),
    "kvsp-lookup": ("KVSP lookup, on the event loop", kvsp_lookup),
    "kvsp-lookup-whole": ("KVSP lookup, with the index's thread", kvsp_lookup_whole),
}


# -- what is shown -----------------------------------------------------------------------


def table(figures: dict[str, Figures]) -> str:
    names = " ".join(f"{name:>7}" for name in Figures._fields)
    lines = [f"{'trip':<49} {'name':<17} {names}"]
    for name, each in figures.items():
        numbers = " ".join(f"{number:>7}" for number in each)
        lines.append(f"{TRIPS[name][0]:<49} {name:<17} {numbers}")
    return "\n".join(lines)


def listing(calls: Sequence[Call], floors: Floors) -> str:
    """One call a line; `>` marks a move, `^` a climb."""
    depths: list[int] = []  # of the callers of the call at hand
    file, lines = calls[0].file, []
    for call in calls:
        while depths and depths[-1] >= call.depth:
            depths.pop()
        mark = " " if call.file == file else "^" if floors.climbs(file, call.file) else ">"
        lines.append(f"{mark} {'  ' * len(depths)}{call.file}:{call.function}")
        depths.append(call.depth)
        file = call.file
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How far a message or an Object walks.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--show", choices=TRIPS, metavar="NAME", help="print every call of a trip")
    parser.add_argument(
        "--floors",
        type=Path,
        metavar="FILE",
        help='JSON {"path": "path"}: a file of another checkout and whose floor it has here',
    )
    options = parser.parse_args(arguments)
    stands_for = json.loads(options.floors.read_text()) if options.floors is not None else {}
    floors = Floors(TRACED if options.floors is None else HERE, stands_for)
    if options.show is not None:
        print(listing(TRIPS[options.show][1](), floors))
        return 0
    figures = {name: count(trip(), floors) for name, (_, trip) in TRIPS.items()}
    if options.json:
        print(json.dumps({name: each._asdict() for name, each in figures.items()}, indent=2))
    else:
        print(table(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
