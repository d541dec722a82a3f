"""What a page does with a relay over the browser's WebTransport, and what it has to see."""

from __future__ import annotations

import asyncio
import base64
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import moqt
from interop.browser.listener import serve_sessions, tell
from interop.browser.page import CANCELLED, Page, PageFailed, PageObject, PageSession
from interop.case import DRAFT, SECONDS, Case, Mismatch, Stage
from interop.cases.support import (
    TRACK,
    expect,
    expect_locations,
    framed,
    normal,
    payload,
    publisher,
)
from interop.processes import LOOPBACK, Program
from moqt import RequestErrorCode
from moqt.values.codes import MessageType, SessionErrorCode, StreamErrorCode

OTHER = "moqt-99"
LOOKS, LOOK_SECONDS = 100, 0.05
MANY = 300
LARGE = 4 << 20
CODES = (0x0, 0x1, 0x12, 0x1D, 0x1E, 0x1F, 0xFF)
"""Codes of the draft, both sides of the first code that HTTP/3 reserves, and the largest that
Chromium sends: it has a larger one sent as this, though it reports all that it is sent."""
TOLD_BACK = {0xFF: 0xFFFFFFFF}
"""What the listener answers to a code, when it is not the code itself."""
REASON = "déjà vu"


@dataclass(slots=True)
class Browser:
    """The page, and the relay it is to connect to."""

    page: Page
    url: str
    """With the scheme https."""
    certificate_hash: bytes
    relay_log: Path | None = None
    """What the relay writes to standard error."""

    def logged(self) -> int:
        """How much the relay has logged."""
        return self.relay_log.stat().st_size if self.relay_log is not None else 0

    async def expect_logged(self, begin: int, pattern: str) -> None:
        """What the relay has logged from `begin` on has it, or will; nothing without its log."""
        if self.relay_log is None:
            return
        logged = ""
        for _ in range(LOOKS):
            logged = self.relay_log.read_bytes()[begin:].decode(errors="replace")
            if re.search(pattern, logged):
                return
            await asyncio.sleep(LOOK_SECONDS)
        raise Mismatch(f"{pattern!r} in the relay's log", logged[-500:])

    async def open(self, *protocols: str) -> PageSession:
        return await self.page.open(self.url, self.certificate_hash, protocols or (DRAFT,))


Run = Callable[[Stage, Browser], Awaitable[None]]
_TABLE: dict[str, tuple[Run, float]] = {}


def case(name: str, *, seconds: float = SECONDS) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        if name in _TABLE:
            raise ValueError(f"two cases are called {name}")
        _TABLE[name] = run, seconds
        return run

    return register


def names() -> tuple[str, ...]:
    return tuple(_TABLE)


def cases(browser: Browser) -> list[Case]:
    """The cases with the browser they are for; the page is empty again after each."""

    def bound(run: Run) -> Callable[[Stage], Awaitable[None]]:
        @wraps(run)
        async def performed(stage: Stage) -> None:
            try:
                await run(stage, browser)
            finally:
                await browser.page.reset()

        return performed

    return [Case(name, bound(run), seconds, False) for name, (run, seconds) in _TABLE.items()]


# ---- the session


@case("wt-setup")
async def wt_setup(stage: Stage, browser: Browser) -> None:
    """The browser and the relay choose moqt-22, and both SETUPs cross."""
    session = await browser.open()
    expect(session.protocol == DRAFT, f"the protocol {DRAFT}", session.protocol)
    misplaced = sorted({0x01, 0x05} & session.setup.keys())
    expect(not misplaced, "neither PATH nor AUTHORITY of a server", misplaced)
    expect(0x07 in session.setup, "MOQT_IMPLEMENTATION", session.setup)
    await session.close()
    closed = await session.closed()
    expect(closed == {"code": 0, "reason": ""}, "the session closed with 0", closed)


@case("wt-protocol-chosen")
async def wt_protocol_chosen(stage: Stage, browser: Browser) -> None:
    """Of several protocols that a page offers, the relay chooses the one it speaks."""
    session = await browser.open(OTHER, DRAFT)
    expect(session.protocol == DRAFT, f"the protocol {DRAFT}", session.protocol)


async def _expect_refused(opening: Awaitable[PageSession], what: str) -> None:
    try:
        session = await opening
    except PageFailed as why:
        expect("WebTransportError" in str(why), f"{what} refused in the handshake", why)
    else:
        raise Mismatch(f"{what} refused", f"a session for {session.protocol!r}")


@case("wt-wrong-protocol-refused")
async def wt_wrong_protocol_refused(stage: Stage, browser: Browser) -> None:
    """A page that offers only another protocol gets no session; one with ours then does."""
    begin = browser.logged()
    await _expect_refused(browser.open(OTHER), f"a page that offers {OTHER}")
    await browser.expect_logged(begin, rf"refused a client at 127\.0\.0\.1:\d+: .*{OTHER}")
    await browser.open()


@case("wt-no-protocol-refused")
async def wt_no_protocol_refused(stage: Stage, browser: Browser) -> None:
    """A page that offers no protocol at all gets no session."""
    opening = browser.page.open(browser.url, browser.certificate_hash, ())
    await _expect_refused(opening, "a page that offers nothing")


@case("wt-bad-certificate-hash")
async def wt_bad_certificate_hash(stage: Stage, browser: Browser) -> None:
    """A relay whose certificate has another hash gets no session, and the next page does."""
    wrong = bytes(octet ^ 0xFF for octet in browser.certificate_hash)
    begin = browser.logged()
    await _expect_refused(browser.page.open(browser.url, wrong), "a wrong certificate hash")
    await browser.expect_logged(begin, r"refused a client at 127\.0\.0\.1:\d+: .*certificate")
    await browser.open()


@case("wt-self-signed")
async def wt_self_signed(stage: Stage, browser: Browser) -> None:
    """The certificate of `--self-signed-days 13` is taken by the hash in the ready line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "relay.service.cli", "--listen", f"{LOOPBACK}:0"]
        command += ["--self-signed", str(folder), "--self-signed-days", "13"]
        with Program("kvcs-relay", command, folder) as relay:
            line = await asyncio.to_thread(
                relay.wait_for, r"ready on \w+://\S+?:(\d+) .*sha256 \S+ base64 (\S+)", SECONDS / 2
            )
            url = f"https://{LOOPBACK}:{line.group(1)}/"
            session = await browser.page.open(url, base64.b64decode(line.group(2)))
            expect(session.protocol == DRAFT, f"the protocol {DRAFT}", session.protocol)


@case("wt-session-error")
async def wt_session_error(stage: Stage, browser: Browser) -> None:
    """What breaks the draft's rules is told the page by code and reason."""
    session = await browser.open()
    await session.raw(framed(MessageType.SUBSCRIBE_OK, b"\x00\x00"))
    closed = await session.closed()
    code = SessionErrorCode.PROTOCOL_VIOLATION
    expect(closed.get("code") == code, f"the session closed with {code:#x}", closed)
    expect(bool(closed.get("reason")), "a reason", closed)


@case("wt-goaway")
async def wt_goaway(stage: Stage, browser: Browser) -> None:
    """GOAWAY reaches the page, which then leaves with NO_ERROR."""
    with tempfile.TemporaryDirectory() as folder:
        async with serve_sessions(Path(folder)) as (listener, server):
            session = await browser.page.open(listener.url, listener.hash)
            (served,) = server.sessions
            server.goaway(timeout_ms=5000)
            goaway = await session.goaway()
            expect(goaway["timeout"] == 5000, "GOAWAY with 5000 ms", goaway)
            await session.close()
            closed = await served.wait_closed()
            ended = (closed.code, closed.transport)
            expect(ended == (SessionErrorCode.NO_ERROR, False), "the end with NO_ERROR", ended)


# ---- subscribing


def _check(got: Iterable[PageObject], wanted: dict[tuple[int, int], int | None]) -> None:
    """Exactly the Objects of `wanted`, Location to Subgroup, with the payloads as published."""
    listed = list(got)
    found = {(each.group, each.object): each.subgroup for each in listed}
    expect(len(found) == len(listed), "every Object once", f"{len(listed) - len(found)} again")
    expect(found == wanted, f"{len(wanted)} Objects with their Subgroups", found)
    for each in listed:
        if each.payload != payload(each.group, each.object, len(each.payload)) or not each.payload:
            raise Mismatch(f"the payload of {each.group}/{each.object}", each.payload[:32].hex())


async def _expect_faultless(session: PageSession) -> None:
    faults = await session.faults()
    expect(not faults, "nothing the page cannot read", faults)


@case("wt-subscribe")
async def wt_subscribe(stage: Stage, browser: Browser) -> None:
    """A page gets every Object of three Groups of three Subgroups, then PUBLISH_DONE."""
    source = await publisher(stage)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK)
    answer = subscription.message
    expect(answer["msg"] == "SUBSCRIBE_OK", "SUBSCRIBE_OK", answer)
    wanted: dict[tuple[int, int], int | None] = {}
    for group in range(3):
        for object_id in range(12):
            subgroup = object_id % 3
            wanted[group, object_id] = subgroup
            source.store.append(group, object_id, payload(group, object_id), subgroup=subgroup)
        for subgroup in range(3):
            source.store.finish_subgroup(group, subgroup)
    first = await subscription.take(5)
    source.end(3)
    rest, status = await subscription.subscribed()
    _check([*first, *rest], wanted)
    expect(status is moqt.PublishDoneCode.TRACK_ENDED, "PUBLISH_DONE TRACK_ENDED", status)
    ends = await subscription.streams(9)
    expect(set(ends) == {"fin"}, "every stream ended with FIN", ends)
    await _expect_faultless(session)


@case("wt-subscribe-largest")
async def wt_subscribe_largest(stage: Stage, browser: Browser) -> None:
    """SUBSCRIBE_OK names the Largest Object, and Absolute Start begins where it says."""
    source = await publisher(stage)
    for group in range(3):
        source.group(group)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK, 2, 1, 0)
    largest = [each for each in subscription.message["params"] if each["type"] == 0x09]
    expect(largest == [{"type": 9, "value": [2, 2]}], "LARGEST_OBJECT 2/2", largest)
    source.group(3)
    source.end(4)
    got, _ = await subscription.subscribed()
    expect({each.group for each in got} <= {1, 2, 3}, "Groups from 1 on", got)
    expect(any(each.group == 3 for each in got), "Group 3, which was published later", got)


@case("wt-subscribe-refused")
async def wt_subscribe_refused(stage: Stage, browser: Browser) -> None:
    """A track that nobody has is refused, and the session goes on."""
    session = await browser.open()
    refused = (await session.subscribe(stage.namespace(b"nobody"), TRACK)).message
    wanted = {"msg": "REQUEST_ERROR", "code": int(RequestErrorCode.DOES_NOT_EXIST)}
    expect(wanted.items() <= refused.items(), "REQUEST_ERROR DOES_NOT_EXIST", refused)
    source = await publisher(stage)
    answer = (await session.subscribe(source.namespace, TRACK)).message
    expect(answer["msg"] == "SUBSCRIBE_OK", "SUBSCRIBE_OK", answer)


@case("wt-datagrams")
async def wt_datagrams(stage: Stage, browser: Browser) -> None:
    """Objects in Delivery Mode Datagram reach the page as datagrams, none of them twice."""
    source = await publisher(stage)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK)
    for object_id in range(20):
        source.datagram(0, object_id)
    # Datagrams may be lost, though hardly all of them on one machine.
    got = await subscription.take(1)
    source.end(1)
    got += (await subscription.subscribed())[0]
    _check(got, {(each.group, each.object): None for each in got})
    expect({each.via for each in got} == {"datagram"}, "datagrams", got)


@case("wt-many-streams", seconds=30)
async def wt_many_streams(stage: Stage, browser: Browser) -> None:
    """300 Groups, a stream each, all arrive: more than the browser lets be open at a time."""
    source = await publisher(stage)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK)
    for group in range(MANY):
        source.group(group, range(2))
    source.end(MANY)
    got, _ = await subscription.subscribed()
    _check(got, {(group, object_id): 0 for group in range(MANY) for object_id in range(2)})


@case("wt-large-object", seconds=30)
async def wt_large_object(stage: Stage, browser: Browser) -> None:
    """An Object of 4 MiB reaches the page byte for byte: the browser's flow control is heeded."""
    source = await publisher(stage)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK)
    source.group(0, range(1), octets=LARGE)
    source.end(1)
    (received,), _ = await subscription.subscribed()
    size = len(received.payload)
    expect(received.payload == payload(0, 0, LARGE), "4 MiB as published", f"{size} octets, other")


@case("wt-unsubscribe")
async def wt_unsubscribe(stage: Stage, browser: Browser) -> None:
    """A page that cancels a subscription has its open streams reset, and keeps its session."""
    source = await publisher(stage)
    session = await browser.open()
    subscription = await session.subscribe(source.namespace, TRACK)
    source.put(0, 0)
    source.put(1, 0)
    await subscription.take(2)
    await subscription.cancel()
    ends = await subscription.streams(2)
    expect(ends == [CANCELLED] * 2, "both streams reset with CANCELLED", ends)
    source.put(0, 1)
    again = await session.subscribe(source.namespace, TRACK, 5)
    source.put(2, 0)
    (later,) = await again.take(1)
    expect((later.group, later.object) == (2, 0), "the next Object, 2/0", later)
    await _expect_faultless(session)


# ---- fetching


@case("wt-fetch")
async def wt_fetch(stage: Stage, browser: Browser) -> None:
    """FETCH without a filter brings the page the whole track, in ascending order."""
    source = await publisher(stage)
    for group in range(4):
        source.group(group)
    session = await browser.open()
    fetch = await session.fetch(source.namespace, TRACK)
    answer = fetch.message
    expect(answer["msg"] == "FETCH_OK" and answer["end"] == [3, 2], "FETCH_OK to 3/2", answer)
    got = await fetch.fetched()
    _check(got, {(group, object_id): 0 for group in range(4) for object_id in range(3)})
    order = [(each.group, each.object) for each in got]
    expect(order == sorted(order), "ascending order", order)
    await _expect_faultless(session)


@case("wt-fetch-range")
async def wt_fetch_range(stage: Stage, browser: Browser) -> None:
    """Both ends of a range are inclusive, and a range beyond the end is INVALID_RANGE."""
    source = await publisher(stage)
    for group in range(4):
        source.group(group)
    session = await browser.open()
    fetch = await session.fetch(source.namespace, TRACK, 4, 1, 1, 1, 1)
    _check(await fetch.fetched(), dict.fromkeys([(1, 1), (1, 2), (2, 0), (2, 1)], 0))
    refused = (await session.fetch(source.namespace, TRACK, 2, 9, 0)).message
    wanted = {"msg": "REQUEST_ERROR", "code": int(RequestErrorCode.INVALID_RANGE)}
    expect(wanted.items() <= refused.items(), "REQUEST_ERROR INVALID_RANGE", refused)


# ---- publishing


@case("wt-publish")
async def wt_publish(stage: Stage, browser: Browser) -> None:
    """A page announces a namespace, is asked for a track and publishes it to our subscriber."""
    session = await browser.open()
    announced = (await session.publish_namespace(stage.namespace())).message
    expect(announced["msg"] == "REQUEST_OK", "REQUEST_OK", announced)
    subscriber = await stage.connect("subscriber")
    asking = asyncio.create_task(subscriber.subscribe(stage.namespace(), TRACK))
    asked = await session.accept(alias=7)
    wanted = {"ns": [field.decode("latin-1") for field in stage.namespace()], "name": "test-track"}
    expect(wanted.items() <= asked.message.items(), f"SUBSCRIBE of {wanted}", asked.message)
    subscription = await asking
    for group in range(3):
        await asked.subgroup(group, [payload(group, object_id) for object_id in range(4)])
    await asked.finish(_track_ended(streams=3))
    got = await normal(subscription)
    expect_locations(got, {(group, object_id) for group in range(3) for object_id in range(4)})
    code = subscription.done_code
    expect(code == moqt.PublishDoneCode.TRACK_ENDED, "PUBLISH_DONE TRACK_ENDED", code)
    await _expect_faultless(session)


def _track_ended(streams: int) -> bytes:
    return framed(MessageType.PUBLISH_DONE, bytes([moqt.PublishDoneCode.TRACK_ENDED, streams, 0]))


@case("wt-publish-datagrams")
async def wt_publish_datagrams(stage: Stage, browser: Browser) -> None:
    """Datagrams of a page reach our subscriber as datagrams."""
    session = await browser.open()
    await session.publish_namespace(stage.namespace())
    subscriber = await stage.connect("subscriber")
    asking = asyncio.create_task(subscriber.subscribe(stage.namespace(), TRACK))
    asked = await session.accept(alias=1)
    subscription = await asking
    for object_id in range(10):
        await asked.datagram(0, object_id, payload(0, object_id))
    # Datagrams may be lost, though hardly all of them on one machine.
    received = await anext(aiter(subscription))
    expect(received.via is moqt.Via.DATAGRAM, "a datagram", received.via)
    expect_locations([received], [(received.location.group, received.location.object)])


@case("wt-publish-cancelled")
async def wt_publish_cancelled(stage: Stage, browser: Browser) -> None:
    """When our subscriber cancels, the page's request stream is reset with CANCELLED."""
    with tempfile.TemporaryDirectory() as folder:
        async with serve_sessions(Path(folder)) as (listener, server):
            session = await browser.page.open(listener.url, listener.hash)
            (served,) = server.sessions
            asking = asyncio.create_task(served.subscribe(stage.namespace(), TRACK))
            asked = await session.accept(alias=1)
            (await asking).cancel()
            code = await asked.reset_code()
            expect(code == StreamErrorCode.CANCELLED, "RESET_STREAM with CANCELLED", code)


# ---- codes


@case("wt-stream-codes")
async def wt_stream_codes(stage: Stage, browser: Browser) -> None:
    """The codes of resets and stops arrive as they were sent, in both directions."""
    with tempfile.TemporaryDirectory() as folder:
        async with tell(Path(folder), told_back=TOLD_BACK) as listener:
            said = await browser.page.call(
                "codes",
                url=listener.url,
                hash=listener.hash.hex(),
                protocols=[DRAFT],
                codes=CODES,
            )
            (teller,) = listener.tellers
            for came, what in ((teller.resets, "resets"), (teller.stops, "stops")):
                told = list(dict.fromkeys(came))
                expect(told == list(CODES), f"{what} of the page with {CODES}", told)
            wanted = [[TOLD_BACK.get(code, code)] * 2 for code in CODES]
            expect(said == wanted, f"the page told back {wanted}", said)


@case("wt-close-codes")
async def wt_close_codes(stage: Stage, browser: Browser) -> None:
    """The code and reason with which either side closes arrive as they were sent."""
    codes = (int(SessionErrorCode.GOAWAY_TIMEOUT), 0xFFFFFFFF)
    with tempfile.TemporaryDirectory() as folder:
        for code in codes:
            async with tell(Path(folder)) as listener:
                await _end(browser, listener.url, listener.hash, (code, REASON))
                ended = await listener.tellers[0].ended
                expect(ended == (code, REASON, True), f"{code:#x} from the page", ended)
            async with tell(Path(folder), leave=(code, REASON)) as listener:
                told = await _end(browser, listener.url, listener.hash, (None, ""))
                expect(told == {"code": code, "reason": REASON}, f"{code:#x} at the page", told)


async def _end(
    browser: Browser, url: str, certificate_hash: bytes, close: tuple[int | None, str]
) -> object:
    """A session that the page closes, or waits to have closed: how it ended for the page."""
    code, reason = close
    return await browser.page.call(
        "end",
        url=url,
        hash=certificate_hash.hex(),
        protocols=[DRAFT],
        code=code,
        reason=reason,
    )
