"""JSON bodies: what all of them together may cost, and who reads the large ones."""

from __future__ import annotations

import asyncio
import json
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
from kvsp.principals import Principal
from tests.kvsp.support_http import BASE, Answer, Client, Principals

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
    app = app_of(bodies_octets=6000)
    service = app.services[0]
    assert isinstance(service, Count)
    service.go_on.clear()
    body = b"[" + b" " * 1998 + b"]"
    first = asyncio.create_task(post(app, body))
    await service.arrived.wait()
    held = app.bodies.octets
    assert 4000 <= held <= 4500  # the text, and what was read of it
    assert b"kvsp_http_held_body_octets %d.0" % held in generate_latest(app.registry)
    refused = await post(app, body)
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    assert b'kvsp_http_bodies_refused_total{of="all"} 1.0' in generate_latest(app.registry)
    assert app.bodies.octets == held
    service.go_on.set()
    assert (await first).status == 200
    assert app.bodies.octets == 0


async def test_a_principal_has_its_share_and_others_are_not_refused_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = app_of(bodies_octets=100_000, bodies_octets_per_principal=5000)
    app.authenticator = Principals(Principal("a"), Principal("b"))
    service = app.services[0]
    assert isinstance(service, Count)
    service.go_on.clear()

    async def by(name: str, octets: int) -> Answer:
        body = b"[" + b" " * (octets - 2) + b"]"
        return await Client(app, name).request("POST", "count", body, JSON)

    async def held_by(name: str, octets: int) -> asyncio.Task[Answer]:
        service.arrived.clear()
        task = asyncio.create_task(by(name, octets))
        await service.arrived.wait()
        return task

    # a body larger than the share is taken when it is the only one
    held = [await held_by("a", 9000)]
    for _ in range(3):
        refused = await by("a", 100)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "5000" in refused.json["detail"]
    held.append(await held_by("b", 100))
    held.append(await held_by("b", 100))
    text = generate_latest(app.registry)
    assert b'kvsp_http_bodies_refused_total{of="principal"} 3.0' in text
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    service.go_on.set()
    assert [(await task).status for task in held] == [200, 200, 200]
    assert (await by("a", 100)).status == 200
    assert app.bodies.octets == 0


async def test_one_principal_has_one_large_body_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = app_of()
    app.authenticator = Principals(Principal("a"), Principal("b"))
    reading: list[str] = []
    most: list[int] = []
    go_on = threading.Event()

    def loads(text: bytes) -> Any:
        reading.append("a" if b"a" in text else "b")
        most.append(reading.count("a"))
        if b"a" in text:
            go_on.wait(30)
            reading.remove("a")
        return ijson.loads(text)

    monkeypatch.setattr(bodies, "ijson", type("spy", (), {"loads": staticmethod(loads)}))
    large = json.dumps(["a"] * 20_000).encode()
    asked = [
        asyncio.create_task(Client(app, "a").request("POST", "count", large, JSON))
        for _ in range(6)
    ]
    other = json.dumps(["b"] * 20_000).encode()
    # with the threads of one principal's six bodies, another's would wait for them
    assert (await Client(app, "b").request("POST", "count", other, JSON)).status == 200
    go_on.set()
    assert [(await task).status for task in asked] == [200] * 6
    assert max(most) == 1


async def test_what_a_body_took_is_given_back_however_its_request_ends() -> None:
    app = app_of(bodies_octets=4000)
    for text in (b"{", b"[" * 3000, b"[" * 3001, b"[]"):
        await post(app, text)
        assert app.bodies.octets == 0
