"""The controller's ways to instances and to an index in another process, over sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from kvsp.controller.callers import HttpIndex, HttpInstances, LocalIndex
from kvsp.controller.core.effects import Done, KeyPage, Refused, Unreachable
from kvsp.http.app import App
from kvsp.http.auth import LoopbackOnly
from kvsp.http.call import Call, json_response
from kvsp.http.service import Operation, Service
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem, ProblemName
from tests.kvsp.index.support import DESCRIPTOR, II7, KEYS, NOW, SCOPE, record, status
from tests.kvsp.index.support import publish as publish_record
from tests.kvsp.support_http import caller
from tests.kvsp.support_server import serving


class Instance(Service):
    role = "instance"

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(method="PUT", path="state", handler=self._state, summary="state"),
            Operation(method="GET", path="text", handler=self._text, summary="text"),
            Operation(method="GET", path="large", handler=self._large, summary="large"),
        )

    async def _state(self, call: Call) -> Response:
        body: dict[str, Any] = await call.read_object()
        if body["state"] == "sleeping":
            raise Problem(ProblemName.INVALID_TRANSITION, "no", state="active")
        return json_response(body | {"epoch": 3})

    async def _text(self, call: Call) -> Response:
        return Response("no JSON " * 1000)

    async def _large(self, call: Call) -> Response:
        return Response(" " * (1 << 20) + "{}")


def app_of(service: Service) -> App:
    return App([service], base_uri="http://127.0.0.1/kvsp/", authenticator=LoopbackOnly())


async def test_commands_are_answered_refused_or_unreachable() -> None:
    instances = HttpInstances(caller("t" * 43))
    try:
        async with serving(app_of(Instance())) as server:
            base = f"http://127.0.0.1:{server.port}/kvsp/"
            done = await instances.send("PUT", base, "state", {"state": "active"}, 5)
            assert done == Done({"state": "active", "epoch": 3})
            refused = await instances.send("PUT", base, "state", {"state": "sleeping"}, 5)
            assert isinstance(refused, Refused)
            assert refused.name == ProblemName.INVALID_TRANSITION
            assert isinstance(await instances.send("GET", base, "text", None, 5), Unreachable)
            large = await instances.send("GET", base, "large", None, 5)
            assert large == Unreachable(f"{base}: its answer is larger than 1048576 octets")
            elsewhere = await instances.send("GET", "http://h.example/kvsp/", "text", None, 5)
            assert isinstance(elsewhere, Unreachable), "plain HTTP is for this machine"
        gone = await instances.send("GET", base, "text", None, 5)
        assert isinstance(gone, Unreachable)
    finally:
        await instances.close()


def index_app() -> IndexApp:
    service = IndexService(SqliteStore(":memory:"))
    service.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    publish_record(service, record())
    return IndexApp(service, clock_ms=lambda: NOW)


def check(found: Any) -> None:
    assert isinstance(found, Found)
    assert (found.layers, found.block_tokens) == (32, 16)
    ((replica,),) = found.blocks
    assert (replica.holder, replica.block_key) == (record().holder, KEYS[0])


async def check_list(index: HttpIndex | LocalIndex) -> None:
    part = await index.list_keys(SCOPE.scope_id, DESCRIPTOR.compat_id, b"", 1)
    assert isinstance(part, KeyPage)
    assert [replicas[0].block_key for replicas in part.blocks] == [KEYS[0]]
    assert part.next == KEYS[0]
    end = await index.list_keys(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[0], 1)
    assert end == KeyPage([], None)


async def test_an_index_in_another_process_is_asked_over_http() -> None:
    app = index_app()
    index = HttpIndex("http://127.0.0.1:1/kvsp/", caller())
    keys = tuple(KEYS[:2])
    try:
        away = await index.find(SCOPE.scope_id, DESCRIPTOR.compat_id, keys)
        assert isinstance(away, Unreachable)
        async with serving(app_of(app)) as server:
            await index.close()
            index = HttpIndex(f"http://127.0.0.1:{server.port}/kvsp/", caller())
            for _ in range(2):
                check(await index.find(SCOPE.scope_id, DESCRIPTOR.compat_id, keys))
            await index.note_status(status())
            assert app.service.board.get(II7, NOW) == status()
            await check_list(index)
        assert isinstance(await index.list_keys(SCOPE.scope_id, bytes(32), b"", 1), Unreachable)
    finally:
        await index.close()


async def test_an_index_of_the_same_process_is_asked_directly() -> None:
    app = index_app()
    local = LocalIndex(app)
    check(await local.find(SCOPE.scope_id, DESCRIPTOR.compat_id, tuple(KEYS[:2])))
    await check_list(local)
    await local.note_status(status())
    assert app.service.board.get(II7, NOW) == status()
    await app.stop()
