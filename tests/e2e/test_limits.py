"""`kvcs-relay --limit NAME=VALUE`: who goes beyond is told, it is counted, the log hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import moqt
from moqt.client import connect
from tests.e2e.support import relay

Ask = Callable[[moqt.MoqtSession, int], Awaitable[object]]


async def namespace(session: moqt.MoqtSession, number: int) -> object:
    return await session.publish_namespace((b"limits", b"%d" % number))


async def listing(session: moqt.MoqtSession, number: int) -> object:
    return await session.subscribe_namespace((b"limits", b"%d" % number))


async def track(session: moqt.MoqtSession, number: int) -> object:
    return await session.publish(session.publish_track((b"limits",), b"%d" % number))


LIMITS: dict[str, tuple[Ask, str]] = {
    "max_requests": (namespace, "session_requests_over_limit"),
    "max_track_aliases": (track, "session_requests_over_limit"),
    "max_tracks": (track, "requests_over_limit"),
    "max_namespaces": (listing, "requests_over_limit"),
    "max_namespaces_per_session": (namespace, "requests_over_limit"),
}


async def beyond(url: str, cafile, ask: Ask) -> list[str]:
    """The reasons of what is refused, of five that are asked for by one session."""
    refused = []
    async with connect(url, cafile=cafile) as session:
        for number in range(5):
            try:
                await ask(session, number)
            except moqt.RequestError as error:
                assert error.code == moqt.RequestErrorCode.EXCESSIVE_LOAD
                assert error.retry_after_ms
                refused.append(error.reason)
    return refused


@pytest.mark.parametrize("limit", LIMITS)
def test_who_goes_beyond_a_limit_is_told_which_and_it_is_counted_and_logged_once(limit, tmp_path):
    ask, metric = LIMITS[limit]
    with relay(tmp_path, "--limit", f"{limit}=3") as hub:
        refused = asyncio.run(asyncio.wait_for(beyond(hub.url, hub.cafile, ask), 60))
        assert len(refused) == 2
        assert all("3" in reason and f"({limit})" in reason for reason in refused)
        hub.reaches(**{f"{metric}_total": 2})
        warnings = [line for line in hub.process.stderr.splitlines() if f"({limit})" in line]
        assert len(warnings) == 1 and "WARNING" in warnings[0] and "limit of 3" in warnings[0]
