"""The status page, in the browser that people look at it with."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

import moqt
from interop.browser.chromium import browser_version, find_browser
from interop.peers import Unavailable
from relay.service.told.page import page
from tests.relay.service.browser import shown
from tests.relay.service.program import running
from tests.relay.star import publish

TOKEN = "admin-token-of-the-tests-0123456789"
FILLED = "Number((document.querySelector('article canvas') || {dataset: {}}).dataset.filled || 0)"


@pytest.fixture(scope="module")
def browser():
    try:
        found = find_browser()
        browser_version(found)
    except Unavailable as error:
        pytest.skip(str(error))
    return found


def test_the_page_fetches_nothing_from_elsewhere_and_may_not():
    found = page()
    assert not re.search(r"https?://|//\w+\.\w+", found.text.replace("data:,", ""))
    policy = found.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "connect-src 'self'" in policy
    assert "innerHTML" not in found.text  # names of tracks come from publishers


def layers(session, count):
    return [session.publish_track((b"demo", b"<b>x"), f"layer{n}".encode()) for n in range(count)]


def test_a_publication_fills_while_one_looks(tmp_path, browser):
    async def scenario(url, cafile, base):
        async with (
            moqt.connect(url, cafile=cafile) as publisher,
            moqt.connect(url, cafile=cafile) as subscriber,
            shown(browser, tmp_path) as tab,
        ):
            stores = layers(publisher, 4)
            await publisher.publish_namespace((b"demo", b"<b>x"))
            for store in stores:
                publish(store, 0, 0, 2_000, objects=50)
            fill = moqt.LocationFilter.absolute_start(0)
            took = [
                await subscriber.subscribe(
                    (b"demo", b"<b>x"),
                    f"layer{n}".encode(),
                    fill=fill,
                )
                for n in range(4)
            ]
            await tab.open(base)
            assert await tab.until("document.querySelector('article')?.dataset.namespace")
            first = await tab.until(FILLED)
            for number in range(1, 12):
                for store in stores[:3]:
                    publish(store, 0, number, 2_000, objects=50)
            await tab.until(f"{FILLED} > {first}")
            await tab.until(f"{FILLED} === 3 * 12 + 1")
            text = await tab.value("document.body.innerText")
            assert "demo-.3cb.3ex" in text and "4 tracks" in text
            connections = await tab.value(
                "[...document.querySelectorAll('#sessions td:first-child')].map(e => e.textContent)"
            )
            assert len(connections) == 2
            logs = {each.name for each in (tmp_path / "logs").glob("*_server.sqlog")}
            assert {f"{each}_server.sqlog" for each in connections} == logs
            await tab.until("document.querySelector('[data-name=sessions] b').textContent === '2'")
            assert "ready" in text and "None." in await tab.value("upstreams.innerText")
            await tab.picture(Path(os.environ.get("PICTURES", tmp_path)) / "status.png")
            assert tab.faults == []
            del took

    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c", "--admin", "127.0.0.1:0"),
        *("--qlog-dir", tmp_path / "logs"),
    ) as (_, ready):
        base = ready[3].removesuffix("metrics")
        asyncio.run(scenario(f"moqt://{ready[1]}/", ready[2], base))


def test_with_a_token_the_page_asks_for_it_first(tmp_path, browser):
    token = tmp_path / "admin.token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    async def scenario(base):
        async with shown(browser, tmp_path) as tab:
            await tab.open(base)
            await tab.until("!ask.hidden")
            assert await tab.value("document.getElementById('publications').innerText") == ""
            await tab.value(f"document.getElementById('token').value = '{TOKEN}'")
            await tab.value("ask.requestSubmit()")
            await tab.until(
                "ask.hidden && document.getElementById('publications').innerText === 'None.'"
            )

    with running(
        *("--listen", "127.0.0.1:0", "--self-signed", tmp_path / "c", "--admin", "127.0.0.1:0"),
        *("--admin-token-file", token),
    ) as (_, ready):
        asyncio.run(scenario(ready[3].removesuffix("metrics")))
