"""Long conversations of a peer that has nothing to say, as a target of `tools.fuzz`: many cheap
octets, each of which is to cost a relay little.

Each is recorded once from sessions that mean it, and mutated like any other.
"""

from __future__ import annotations

from collections.abc import Callable

from moqt.session import Session, SessionConfig
from moqt.track.gaps import Gaps
from moqt.track.store import TrackStore
from moqt.values.codes import AliasType
from moqt.values.messages import AuthorizationToken, LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import SubgroupHeader
from relay.config import RelayConfig
from tests.moqt.loose import NAME, Everything
from tests.moqt.peers import Collector
from tests.relay.star import Star
from tools.fuzz_base import CODEC, Case
from tools.fuzz_sessions import EARLY, SETUP, RelayTarget, recorded

MANY = 400
"""Of what a conversation repeats."""
PACKET = 1200
FILLS = 64
"""Of one subscription."""
SESSIONS = SessionConfig(max_requests=2 * MANY, max_track_aliases=MANY, max_held_octets=20_000)


def _ended(*_: object) -> None: ...


def _subscribed(star: Star, subscriber: Session) -> None:
    subscriber.subscribe(NAME, Collector())
    star.run()


def markers(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """A FETCH is answered with range markers alone, of both kinds in turn."""
    store = TrackStore(NAME, authoritative=False, max_intervals=2 * MANY)
    for n in range(0, 4 * MANY, 2):
        store.mark_nonexistent(Location(0, n), Location(0, n))
    store.append(0, 4 * MANY, b"x")
    tracks.add_track(store)
    chosen = LocationFilter.range(Location(0, 0), Location(0, 4 * MANY))
    subscriber.fetch(NAME, Collector(), Parameters(location_filter=chosen))
    star.run()


def gaps(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Each Object declares a gap before itself."""
    store = TrackStore(NAME)
    tracks.add_track(store)
    _subscribed(star, subscriber)
    for n in range(MANY):
        store.append(0, 3 * n + 2, b"", gaps=Gaps(objects=1))
    star.run()


def groups(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Each Object has a Group of its own, and so a subgroup stream."""
    store = TrackStore(NAME)
    tracks.add_track(store)
    _subscribed(star, subscriber)
    for n in range(MANY):
        store.append(2 * n, 1, b"", end_of_group=True)
        store.finish_subgroup(2 * n, 0)
        star.run()


def updates(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """A subscription is updated again and again."""
    tracks.add_track(TrackStore(NAME))
    collector = Collector()
    subscription = subscriber.subscribe(NAME, collector)
    for n in range(MANY):
        star.run()
        subscription.update(Parameters(subscriber_priority=n % 256), _ended)
    star.run()


def aliases(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Tracks are published, each under an alias of its own."""
    for n in range(MANY):
        publisher.publish(TrackStore(FullTrackName((b"demo",), b"%d" % n)))
    star.run()


def tokens(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Requests register tokens and have them deleted."""
    for n in range(MANY):
        kind, alias = (AliasType.DELETE, n - 1) if n % 2 else (AliasType.REGISTER, n)
        token = AuthorizationToken(kind, alias) if n % 2 else _token(kind, alias)
        chosen = Parameters(authorization_tokens=(token,))
        subscriber.track_status(NAME, chosen).on_answer = _ended
        star.run()


def _token(kind: AliasType, alias: int) -> AuthorizationToken:
    return AuthorizationToken(kind, alias, 0, b"%d" % alias)


def namespaces(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Namespaces are published while somebody listens."""
    subscriber.subscribe_namespace((b"demo",), on_namespace=_ended, on_ended=_ended)
    for n in range(MANY):
        publisher.publish_namespace((b"demo", b"%d" % n), on_ended=_ended)
    star.run()


def fetches(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """What nobody has is fetched again and again."""
    for n in range(MANY):
        subscriber.fetch(FullTrackName((b"demo",), b"%d" % n), Collector())
    star.run()


def fills(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Subscriptions ask for more fills than one may have, of what has to be fetched first."""
    store = TrackStore(NAME)
    for n in range(MANY):
        store.append(n, 0, b"x")
    tracks.add_track(store)
    _subscribed(star, subscriber)
    star.delay(star.pairs[0])
    for n in range(MANY):
        if n % (FILLS + 1) == 0:  # one that is refused ends its subscription
            subscription = subscriber.subscribe(NAME, Collector())
            star.run()
        wanted = LocationFilter.range(Location(n, 0), Location(n, 0))
        chosen = Parameters(fill_parameters=Parameters(location_filter=wanted))
        subscription.update(chosen, _ended)
        star.run()


def malformed(star: Star, tracks: Everything, publisher: Session, subscriber: Session) -> None:
    """Of each track one Object comes twice, and is not the same."""
    publications = []
    for n in range(MANY):
        store = TrackStore(FullTrackName((b"demo",), b"%d" % n))
        publications.append(publisher.publish(store))
    star.run()
    transport = publisher.transport
    for each in publications:
        for payload in (b"x", b"yz"):
            stream_id = transport.open_stream(bidirectional=False)
            if stream_id is not None:
                octets = _subgroup(each.message_sent.track_alias, payload)
                transport.send(stream_id, octets, fin=True)
        star.run()


def _subgroup(alias: int, payload: bytes) -> bytes:
    header = CODEC.encode_subgroup_header(SubgroupHeader(alias, 0, 0, 0, False), properties=False)
    begun = CODEC.encode_subgroup_object(None, 0, with_properties=False, length=len(payload))
    return header + begun + payload


Script = Callable[[Star, Everything, Session, Session], None]

RECORDED: tuple[Script, ...] = (
    markers, gaps, groups, updates, aliases, tokens, namespaces, fetches, fills, malformed
)  # fmt: skip


def _joined(steps: Case) -> Case:
    """What came on one stream without a break as one step, up to a packet's worth."""
    joined: Case = []
    for where, octets in steps:
        last, before = joined[-1] if joined else ("", b"")
        if last == where and ":data" in where and len(before) < PACKET:
            joined[-1] = where, before + octets
        else:
            joined.append((where, octets))
    return joined


def _streams(octets: bytes, *, event: str = "data") -> Case:
    """One unidirectional stream after the other of a client, each with these octets."""
    return [(f"0:{event} {4 * n + 6}", octets) for n in range(MANY)]


def _unasked() -> list[Case]:
    """What no session of ours would send."""
    header = CODEC.encode_subgroup_header(SubgroupHeader(9, 0, 0, 0, False), properties=False)
    return [
        _streams(header),
        _streams(header, event="fin"),
        _streams(header[:1]),
        _streams(CODEC.encode_padding_header() + bytes(40)),
        [("0:data 6", CODEC.encode_padding_header())] + [("0:data 6", bytes(100))] * MANY,
        [(f"0:data {4 * n + 4}", b"\x03") for n in range(MANY)],
    ]


def _early() -> list[Case]:
    """What comes before SETUP: on one stream bit by bit, and on many; SETUP comes, or does not."""
    setup = ("0:data 2", SETUP)
    cases = [
        [("0:data 6", b"\x14")] * (2 * MANY),
        [("0:data 0", bytes(100))] * MANY,
        _streams(_subgroup(9, b"x")),
        _streams(_subgroup(9, b"x"), event="fin"),
        [(f"0:data {4 * n}", b"\x03") for n in range(MANY)],
        [("0:datagram 0", bytes(100))] * MANY,
    ]
    return [[EARLY, *steps, *end] for steps in cases for end in ([setup], [])]


class FloodTarget(RelayTarget):
    """A relay between two peers that waste its time and its memory."""

    name = "flood"
    LIMITS = RelayConfig(
        cache_octets=400_000,
        max_tracks=MANY,
        max_pending=MANY,
        max_namespaces=MANY,
        max_intervals_per_track=64,
        pending_fills=FILLS,
        linger=1.0,
    )
    SESSIONS = SESSIONS

    def corpus(self) -> list[Case]:
        return [self._recorded(script) for script in RECORDED] + _unasked() + _early()

    def _recorded(self, script: Script) -> Case:
        star = Star(self.LIMITS)
        tracks = Everything()
        pairs, steps = recorded(star, tracks)
        pairs[0].client.publish_namespace((b"demo",), on_ended=_ended)
        star.run()
        script(star, tracks, pairs[0].client, pairs[1].client)
        return _joined(steps)
