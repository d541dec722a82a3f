"""Breaches a relay has to answer with one code, and things it has to bear."""

from __future__ import annotations

from interop.case import Stage, case
from interop.cases.support import (
    TRACK,
    expect_closed,
    expect_locations,
    expect_refused,
    framed,
    normal,
    publisher,
    send_raw,
    take,
)
from moqt import RequestErrorCode, SessionErrorCode
from moqt.values.codes import MessageType

SUBSCRIBE_START = b"\x00\x01\x01n\x01t"
"""Request ID 0, namespace ("n"), name "t": the beginning of a SUBSCRIBE's body."""


def _subscribe(parameters: bytes, request_id: int = 0) -> bytes:
    return framed(MessageType.SUBSCRIBE, bytes([request_id]) + SUBSCRIBE_START[1:] + parameters)


@case("unknown-filter-type")
async def unknown_filter_type(stage: Stage) -> None:
    """A LOCATION_FILTER of a type that does not exist: PROTOCOL_VIOLATION."""
    session = await stage.connect("subscriber")
    send_raw(session, _subscribe(b"\x01\x21\x06"))
    await expect_closed(session, SessionErrorCode.PROTOCOL_VIOLATION)


@case("unknown-parameter")
async def unknown_parameter(stage: Stage) -> None:
    """A Message Parameter that nobody knows cannot be skipped: PROTOCOL_VIOLATION."""
    session = await stage.connect("subscriber")
    send_raw(session, _subscribe(b"\x01\x7f\x00"))
    await expect_closed(session, SessionErrorCode.PROTOCOL_VIOLATION)


@case("unknown-message")
async def unknown_message(stage: Stage) -> None:
    """A request stream that begins with no request: PROTOCOL_VIOLATION."""
    session = await stage.connect("subscriber")
    send_raw(session, b"\x3f\x00\x00")
    await expect_closed(session, SessionErrorCode.PROTOCOL_VIOLATION)


@case("message-too-short")
async def message_too_short(stage: Stage) -> None:
    """A body that ends before its fields do: PROTOCOL_VIOLATION."""
    session = await stage.connect("subscriber")
    send_raw(session, framed(MessageType.SUBSCRIBE, SUBSCRIBE_START[:4]))
    await expect_closed(session, SessionErrorCode.PROTOCOL_VIOLATION)


@case("request-id-parity")
async def request_id_parity(stage: Stage) -> None:
    """A client's Request ID is even: INVALID_REQUEST_ID."""
    session = await stage.connect("subscriber")
    send_raw(session, _subscribe(b"\x00", request_id=1))
    await expect_closed(session, SessionErrorCode.INVALID_REQUEST_ID)


@case("reserved-namespace")
async def reserved_namespace(stage: Stage) -> None:
    """The namespaces "." and ".session" hold no track: DOES_NOT_EXIST."""
    session = await stage.connect("subscriber")
    for first in (b".", b".session"):
        await expect_refused(session.subscribe((first,), TRACK), RequestErrorCode.DOES_NOT_EXIST)


@case("goaway")
async def goaway(stage: Stage) -> None:
    """GOAWAY of a client alters no request: its subscription goes on to the end."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(source.namespace, TRACK)
    source.group(0)
    got = await take(subscription, 3)
    subscriber.session.send_goaway("", 0)
    source.group(1)
    got += await take(subscription, 3)
    source.end(2)
    got += await normal(subscription)
    expect_locations(got, {(g, o) for g in range(2) for o in range(3)})


@case("goaway-with-uri")
async def goaway_with_uri(stage: Stage) -> None:
    """A client that names a New Session URI in GOAWAY: PROTOCOL_VIOLATION."""
    session = await stage.connect("subscriber")
    uri = b"moqt://elsewhere.example/"
    message = framed(MessageType.GOAWAY, bytes([len(uri)]) + uri + b"\x00")
    send_raw(session, _subscribe(b"\x00") + message)
    await expect_closed(session, SessionErrorCode.PROTOCOL_VIOLATION)


@case("other-requests-go-on")
async def other_requests_go_on(stage: Stage) -> None:
    """A refused request costs its session nothing."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(source.namespace, TRACK)
    for name in (b"a", b"b"):
        await expect_refused(
            subscriber.subscribe(stage.namespace(b"nobody"), name),
            RequestErrorCode.DOES_NOT_EXIST,
        )
    source.group(0)
    source.end(1)
    expect_locations(await normal(subscription), {(0, object_id) for object_id in range(3)})


@case("session-survives-reset")
async def session_survives_reset(stage: Stage) -> None:
    """A subscriber that cancels one subscription keeps the other, and its session."""
    source = await publisher(stage)
    other = source.session.publish_track(source.namespace, b"other")
    subscriber = await stage.connect("subscriber")
    cancelled = await subscriber.subscribe(source.namespace, b"other")
    kept = await subscriber.subscribe(source.namespace, TRACK)
    other.append(0, 0, b"x")
    await take(cancelled, 1)
    cancelled.cancel()
    other.append(0, 1, b"x")
    source.group(0)
    source.end(1)
    expect_locations(await normal(kept), {(0, object_id) for object_id in range(3)})
