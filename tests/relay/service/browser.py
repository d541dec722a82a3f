"""A page in headless Chromium, asked by the protocol of its developer tools."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re

import aiohttp

from interop.browser.chromium import start


@contextlib.asynccontextmanager
async def shown(browser, folder):
    """A `Tab` that shows nothing yet."""
    with start(browser, "about:blank", folder, "--remote-debugging-port=0") as program:
        found = await _until(lambda: _address(program))
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{found}/json/list") as answer:
                (target,) = [each for each in await answer.json() if each["type"] == "page"]
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)


async def _address(program):
    """Where the browser's developer tools listen, once it has said so."""
    found = re.search(r"ws://([\d.:]+)/", program.log.read_text())
    return found and found[1]


async def _until(ask):
    """The first answer that is something. Raises TimeoutError."""
    async with asyncio.timeout(30):
        while True:
            if value := await ask():
                return value
            await asyncio.sleep(0.1)


class Tab:
    def __init__(self, socket):
        self._socket = socket
        self._asked = 0
        self.faults = []
        """What the console and the page's policy complain of."""

    async def __call__(self, method, **parameters):
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json(timeout=30)
            if told.get("id") == self._asked:
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.faults.append(told["params"])

    async def open(self, url):
        for each in ("Page.enable", "Runtime.enable", "Log.enable"):
            await self(each)
        await self("Page.navigate", url=url)

    async def value(self, expression):
        told = await self("Runtime.evaluate", expression=expression, returnByValue=True)
        return told["result"].get("value")

    async def until(self, expression):
        """Wait until `expression` is true in the page, and return its value."""
        try:
            return await _until(lambda: self.value(expression))
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"never: {expression}\n{text}\n{self.faults}") from None

    async def picture(self, path):
        told = await self("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))
