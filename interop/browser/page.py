"""The page in the browser, as the cases have it: sessions and requests that are elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from interop.browser import chromium
from interop.case import DRAFT
from interop.processes import LOOPBACK, READY_SECONDS, ProgramFailed
from moqt import PublishDoneCode
from moqt.values.names import TrackNamespace

FOLDER = Path(__file__).with_name("static")
FILES = {
    "/": "index.html",
    **{f"/{name}": name for name in ("drive.mjs", "session.mjs", "wire.mjs")},
}
KINDS = {".html": "text/html", ".mjs": "text/javascript"}
RESET_SECONDS = 5.0
CANCELLED = 0x1
"""The code with which a request is cancelled (MOQT "Stream Reset Error Codes")."""

Json = Any
"""What the page said: its shape is that of the call in `static/drive.mjs`."""


class PageFailed(Exception):
    """The page could not do what it was asked; the message is the page's."""


@dataclass(frozen=True, slots=True)
class PageObject:
    """An Object as the page got it. `via` is stream or datagram, `subgroup` None for the latter."""

    group: int
    object: int
    subgroup: int | None
    payload: bytes
    status: int
    via: str

    @classmethod
    def read(cls, said: Json) -> PageObject:
        return cls(
            said["group"],
            said["object"],
            said["subgroup"],
            bytes.fromhex(said["payload"]),
            said.get("status", 0),
            said.get("via", "stream"),
        )


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request of the page, or of the relay to the page, and the answer or opening message."""

    page: Page
    number: int
    message: Json

    async def _call(self, name: str, **arguments: Json) -> Json:
        return await self.page.call(name, request=self.number, **arguments)

    async def take(self, count: int) -> list[PageObject]:
        """The next `count` Objects. Raises PageFailed when fewer come."""
        taken: list[PageObject] = []
        for _ in range(count):
            said = await self._call("next")
            if said is None:
                raise PageFailed(f"{len(taken)} Objects of {count}, then the end")
            taken.append(PageObject.read(said))
        return taken

    async def fetched(self) -> list[PageObject]:
        """All Objects of a FETCH, to the end of its stream."""
        taken: list[PageObject] = []
        while (said := await self._call("next")) is not None:
            if "range" in said:
                raise PageFailed(f"a range that {said['range']} up to {said}")
            taken.append(PageObject.read(said))
        return taken

    async def subscribed(self) -> tuple[list[PageObject], PublishDoneCode]:
        """All Objects of a subscription not taken yet, when every stream has ended, and why."""
        done = await self._call("done")
        await self.streams(done["streams"])
        taken = [PageObject.read(said) for said in await self._call("taken")]
        return [each for each in taken if not each.status], PublishDoneCode(done["status"])

    async def streams(self, count: int) -> list[str | int]:
        """How data streams ended, once `count` have: "fin", or the code of the reset."""
        ends: list[str | int] = await self._call("streams", count=count)
        return ends

    async def cancel(self, code: int = CANCELLED) -> None:
        await self._call("cancel", code=code)

    async def reset_code(self) -> object:
        """The code with which the peer reset this request's stream."""
        return await self._call("reset_code")

    async def subgroup(
        self, group: int, payloads: Iterable[bytes], *, subgroup: int = 0, code: int | None = None
    ) -> None:
        """Publish a Subgroup; a `code` resets its stream instead of ending it."""
        texts = [payload.hex() for payload in payloads]
        await self._call("subgroup", group=group, subgroup=subgroup, payloads=texts, code=code)

    async def datagram(self, group: int, object_id: int, payload: bytes) -> None:
        await self._call("datagram", group=group, object=object_id, payload=payload.hex())

    async def finish(self, octets: bytes) -> None:
        """Send `octets`, which are the last message, and end this direction."""
        await self._call("finish", octets=octets.hex())


@dataclass(frozen=True, slots=True)
class PageSession:
    """A session of the page; `setup` has the Setup Options of the relay by their type."""

    page: Page
    number: int
    protocol: str
    setup: dict[int, Json]

    async def _call(self, name: str, **arguments: Json) -> Json:
        return await self.page.call(name, session=self.number, **arguments)

    async def _ask(self, name: str, **arguments: Json) -> PageRequest:
        said = await self._call(name, **arguments)
        return PageRequest(self.page, said["request"], said["answer"])

    async def subscribe(
        self, namespace: TrackNamespace, track: bytes, *location_filter: int
    ) -> PageRequest:
        """`location_filter` is the Filter Type and its fields."""
        return await self._ask(
            "subscribe",
            namespace=_texts(namespace),
            track=_text(track),
            filter=location_filter or None,
        )

    async def fetch(
        self, namespace: TrackNamespace, track: bytes, *location_filter: int
    ) -> PageRequest:
        return await self._ask(
            "fetch",
            namespace=_texts(namespace),
            track=_text(track),
            filter=location_filter or None,
        )

    async def publish_namespace(self, namespace: TrackNamespace) -> PageRequest:
        return await self._ask("publish_namespace", namespace=_texts(namespace))

    async def accept(self, alias: int) -> PageRequest:
        """The relay's next SUBSCRIBE, accepted with this Track Alias."""
        return await self._ask("accept", alias=alias)

    async def raw(self, octets: bytes) -> None:
        """Octets on a request stream of their own."""
        await self._call("raw", octets=octets.hex())

    async def goaway(self) -> Json:
        return await self._call("goaway")

    async def faults(self) -> list[str]:
        """What arrived in this session and should not have, in the page's words."""
        said: list[str] = await self._call("faults")
        return said

    async def close(self, code: int = 0, reason: str = "") -> None:
        await self._call("close", code=code, reason=reason)

    async def closed(self) -> Json:
        """`{"code": …, "reason": …}` as the browser tells it, `{"error": …}` without a code."""
        return await self._call("closed")


class Page:
    """The page itself: calls go out with a number, answers come back in any order."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Json]] = {}

    async def call(self, name: str, **arguments: Json) -> Json:
        """What `calls[name]` of the page returns. Raises PageFailed for what it throws."""
        number = next(self._numbers)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._socket.send_str(json.dumps({"id": number, "call": name, "args": arguments}))
            return await answer
        except ConnectionError:
            raise PageFailed("the browser has gone") from None
        finally:
            del self._answers[number]

    async def open(
        self, url: str, certificate_hash: bytes, protocols: Iterable[str] = (DRAFT,)
    ) -> PageSession:
        """A session in which both SETUPs have crossed. Raises PageFailed when it is refused."""
        said = await self.call(
            "open", url=url, hash=certificate_hash.hex(), protocols=list(protocols)
        )
        options = {each["type"]: each.get("value", each.get("value_hex")) for each in said["setup"]}
        return PageSession(self, said["session"], said["protocol"], options)

    async def reset(self) -> None:
        """End every session of the page."""
        async with asyncio.timeout(RESET_SECONDS):
            await self.call("reset")

    async def follow(self) -> None:
        """Hand answers on until the page has gone; what waits then fails."""
        async for came in self._socket:
            if came.type is not WSMsgType.TEXT:
                break
            said = json.loads(came.data)
            answer = self._answers.get(said["id"])
            if answer is None or answer.done():
                continue  # of a case that is over
            if "error" in said:
                answer.set_exception(PageFailed(said["error"]))
            else:
                answer.set_result(said["result"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PageFailed("the browser has gone"))


@asynccontextmanager
async def open_page(browser: Path, folder: Path) -> AsyncIterator[Page]:
    """The browser with the page open, its files in `folder`. Raises ProgramFailed."""
    opened: asyncio.Future[Page] = asyncio.get_running_loop().create_future()

    async def file(request: web.Request) -> web.Response:
        path = FOLDER / FILES[request.path]
        return web.Response(body=path.read_bytes(), content_type=KINDS[path.suffix])

    async def drive(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        page = Page(socket)
        if not opened.done():
            opened.set_result(page)
        await page.follow()
        return socket

    application = web.Application()
    application.router.add_get("/drive", drive)
    for path in FILES:
        application.router.add_get(path, file)
    runner = web.AppRunner(application, shutdown_timeout=RESET_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        port = runner.addresses[0][1]
        with chromium.start(browser, f"http://{LOOPBACK}:{port}/", folder) as program:
            try:
                async with asyncio.timeout(READY_SECONDS):
                    page = await opened
            except TimeoutError:
                raise ProgramFailed(
                    f"{browser.name} did not open the page: {program.last_words}"
                ) from None
            yield page
    finally:
        await runner.cleanup()


def _text(octets: bytes) -> str:
    return octets.decode("latin-1")


def _texts(namespace: TrackNamespace) -> list[str]:
    return [_text(field) for field in namespace]
