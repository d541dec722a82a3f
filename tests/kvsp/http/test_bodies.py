"""JSON bodies: what all of them together may cost, and who reads the large ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.responses import Response

from kvsp.http import bodies
from kvsp.http.app import App
from kvsp.http.auth import LoopbackOnly
from kvsp.http.call import Call, json_response
from kvsp.http.limits import HttpLimits
from kvsp.http.service import Operation, Service
from kvsp.names import ijson
from tests.kvsp.support_http import BASE, Answer, Client

JSON = {"content-type": "application/json"}


class Count(Service):
    role = "index"

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    def operations(self) -> Sequence[Operation]:
        return (Operation(method="POST", path="count", handler=self.count, summary="count"),)

    async def count(self, call: Call) -> Response:
        tree = await call.read_json()
        self.arrived.set()
        await self.go_on.wait()
        return json_response(len(tree))


def app_of(**limits: Any) -> App:
    return App(
        [Count()],
        base_uri=BASE,
        authenticator=LoopbackOnly(),
        limits=HttpLimits(**limits),
    )


async def post(app: App, body: Any) -> Answer:
    return await Client(app, address="127.0.0.1").request("POST", "count", body, JSON)


@pytest.mark.parametrize(("items", "elsewhere"), [(10, False), (100_000, True)])
async def test_a_large_body_is_not_parsed_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, items: int, elsewhere: bool
) -> None:
    threads = []

    def loads(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return ijson.loads(text)

    monkeypatch.setattr(bodies, "ijson", type("spy", (), {"loads": staticmethod(loads)}))
    answer = await post(app_of(), b"[" + b"1," * (items - 1) + b"1]")
    assert answer.json == items
    assert [each is not threading.main_thread() for each in threads] == [elsewhere]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 5000 + b"]" * 5000,
        b"[" + b"{}," * 1000 + b"{}]",
        b"[" + b"[]," * 1000 + b"[]]",
        b"[" + b"1," * 2001 + b"1]",
    ],
)
async def test_a_body_of_more_arrays_or_items_than_any_request_needs_is_413(body: bytes) -> None:
    answer = await post(app_of(json_containers=1000, json_items=2000), body)
    assert (answer.status, answer.problem) == (413, "kvsp-too-large")
    assert answer.json["limit"] in (1000, 2000)


async def test_a_deeply_nested_body_is_a_malformed_one() -> None:
    answer = await post(app_of(), b"[" * 100_000 + b"]" * 100_000)
    assert (answer.status, answer.json["error"]) == (400, "not-i-json")


async def test_bodies_together_are_bounded_and_one_more_is_503() -> None:
    app = app_of(bodies_octets=3000)
    service = app.services[0]
    assert isinstance(service, Count)
    service.go_on.clear()
    body = b"[" + b" " * 1998 + b"]"
    first = asyncio.create_task(post(app, body))
    await service.arrived.wait()
    assert app.bodies.octets == 2000
    assert b"kvsp_http_held_body_octets 2000.0" in generate_latest(app.registry)
    refused = await post(app, body)
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    assert app.bodies.octets == 2000
    service.go_on.set()
    assert (await first).status == 200
    assert app.bodies.octets == 0


async def test_what_a_body_took_is_given_back_however_its_request_ends() -> None:
    app = app_of(bodies_octets=3000)
    for text in (b"{", b"[" * 3000, b"[" * 3001, b"[]"):
        await post(app, text)
        assert app.bodies.octets == 0
