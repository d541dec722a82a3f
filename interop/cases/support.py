"""What the cases share: a publisher behind the relay, what a subscriber got, and expectations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Iterable
from dataclasses import dataclass

import moqt
from interop.case import Mismatch, Stage
from moqt import Location, LocationFilter, ObjectStatus, ReceivedObject
from moqt.values.codes import MessageType, SessionErrorCode, code_name
from moqt.values.messages import Properties

TRACK = b"test-track"
Locations = list[tuple[int, int]]


def payload(group: int, object_id: int, octets: int = 64) -> bytes:
    """Octets that tell every Object from every other."""
    stamp = b"%d/%d." % (group, object_id)
    return (stamp * (octets // len(stamp) + 1))[:octets]


@dataclass(slots=True)
class Source:
    """A publisher's session and its track."""

    session: moqt.MoqtSession
    store: moqt.TrackStore

    @property
    def namespace(self) -> moqt.TrackNamespace:
        return self.store.name.namespace

    def put(self, group: int, object_id: int) -> None:
        self.store.append(group, object_id, payload(group, object_id))

    def datagram(self, group: int, object_id: int) -> None:
        """An Object in Delivery Mode Datagram."""
        octets = payload(group, object_id)
        stored = self.store.begin(
            Location(group, object_id),
            subgroup=None,
            priority=1,
            properties=b"",
            length=len(octets),
        )
        assert stored is not None  # the Location is new
        self.store.grow(stored, octets)
        self.store.complete(stored)

    def group(self, group: int, objects: Iterable[int] = range(3), *, octets: int = 64) -> None:
        """A whole Group in one Subgroup."""
        for object_id in objects:
            self.store.append(group, object_id, payload(group, object_id, octets))
        self.store.finish_subgroup(group, 0)

    def end(self, group: int) -> None:
        """End of Track at the start of `group`, then PUBLISH_DONE TRACK_ENDED."""
        self.store.mark_end(Location(group, 0), ObjectStatus.END_OF_TRACK)
        self.store.finish_subgroup(group, 0)
        self.store.finish(moqt.PublishDoneCode.TRACK_ENDED)


async def publisher(
    stage: Stage, *, properties: Properties = (), namespace: moqt.TrackNamespace | None = None
) -> Source:
    """Connect, PUBLISH_NAMESPACE, and have a track to fill."""
    session = await stage.connect("publisher")
    name = stage.namespace() if namespace is None else namespace
    store = session.publish_track(name, TRACK, properties)
    await session.publish_namespace(name)
    return Source(session, store)


async def normal(objects: AsyncIterable[ReceivedObject]) -> list[ReceivedObject]:
    """All Objects that are no status markers, to the end."""
    return [each async for each in objects if each.status is ObjectStatus.NORMAL]


async def take(objects: AsyncIterable[ReceivedObject], count: int) -> list[ReceivedObject]:
    """The next `count` Objects that are no status markers."""
    taken: list[ReceivedObject] = []
    async for each in objects:
        if each.status is ObjectStatus.NORMAL:
            taken.append(each)
            if len(taken) == count:
                return taken
    raise Mismatch(f"{count} Objects", f"{len(taken)}, then the end")


def expect_locations(objects: Iterable[ReceivedObject], wanted: Iterable[tuple[int, int]]) -> None:
    """Exactly the Locations `wanted`, each once, in any order; payloads as published."""
    got = list(objects)
    locations = sorted((each.location.group, each.location.object) for each in got)
    if locations != sorted(wanted):
        raise Mismatch(_listed(sorted(wanted)), _listed(locations))
    for each in got:
        group, object_id = each.location
        octets = bytes(each.payload)
        if octets != payload(group, object_id, len(octets)) or not octets:
            raise Mismatch(f"the payload of {group}/{object_id} as published", "other octets")


def expect_order(objects: Iterable[ReceivedObject], wanted: Locations) -> None:
    """These Locations in this order."""
    got = [(each.location.group, each.location.object) for each in objects]
    expect(got == wanted, _listed(wanted), _listed(got))


def expect(condition: bool, expected: str, received: object) -> None:
    if not condition:
        raise Mismatch(expected, str(received))


def _listed(locations: Locations) -> str:
    """Locations for a person, long lists cut in the middle."""
    shown = [f"{group}/{object_id}" for group, object_id in locations]
    if len(shown) > 24:
        shown = [*shown[:12], f"... {len(shown) - 24} more ...", *shown[-12:]]
    return f"{len(locations)} Objects: {' '.join(shown)}" if shown else "no Object"


async def expect_refused(
    request: Awaitable[object], code: moqt.RequestErrorCode
) -> moqt.RequestError:
    """REQUEST_ERROR with this very code."""
    wanted = f"REQUEST_ERROR {code.name}"
    try:
        await request
    except moqt.RequestError as error:
        expect(error.code == code, wanted, f"REQUEST_ERROR {error}")
        return error
    raise Mismatch(wanted, "success")


async def expect_closed(session: moqt.MoqtSession, *codes: SessionErrorCode) -> None:
    """The relay closes the session with one of these codes."""
    closed = await session.wait_closed()
    wanted = " or ".join(code.name for code in codes)
    received = hex(closed.code) if closed.transport else code_name(SessionErrorCode, closed.code)
    expect(not closed.transport and closed.code in codes, f"the session closed: {wanted}", received)


def send_raw(session: moqt.MoqtSession, octets: bytes) -> None:
    """Octets on a request stream of their own, as a peer with a fault would send them."""
    transport = session.session.transport
    stream_id = transport.open_stream(bidirectional=True)
    if stream_id is None:
        raise Mismatch("credit for a request stream", "none")
    transport.send(stream_id, octets)
    transport.wake()


def framed(kind: MessageType, body: bytes) -> bytes:
    """A control message whose type takes one octet."""
    return bytes([kind]) + len(body).to_bytes(2) + body


async def update(subscription: moqt.Subscription, parameters: moqt.Parameters) -> None:
    """REQUEST_UPDATE, and wait for its REQUEST_OK."""
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    subscription.request.update(parameters, answer.set_result)
    result = await answer
    if isinstance(result, moqt.RequestError):
        raise Mismatch("REQUEST_OK for a REQUEST_UPDATE", f"REQUEST_ERROR {result}")


FROM_START = LocationFilter.absolute_start(0)
