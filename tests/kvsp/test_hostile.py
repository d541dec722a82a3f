"""What an attacker can send to the HTTP services, and what it gets.

All roles in one application over real files, with real tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvsp.http.limits import HttpLimits
from kvsp.http.server import Server
from kvsp.names.uris import instance_id, replicas_path, verification_path
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    OTHER_SCOPE,
    SCOPE,
    block_id,
    container,
    lease_request,
    octets,
)
from tests.kvsp.inside import wait_for_locks
from tests.kvsp.support_http import Answer, Client
from tests.kvsp.support_roles import (
    AS_JSON,
    H2,
    II1,
    Roles,
    make_roles,
    path_of,
    record,
    running_roles,
    store_descriptor,
)
from tests.kvsp.support_server import serving

HELD, MISSING = block_id(1), block_id(2)
WHOLE = octets(container(1))
AS_BLOCK = {"content-type": "application/kvsp-block", "if-none-match": "*"}
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
NO_LEASE = "00000000-0000-4000-8000-000000000000"
TOKEN_IDS = [3_141_592_653, 2_718_281_828]


@pytest.fixture
async def roles(tmp_path: Path) -> AsyncIterator[Roles]:
    async with running_roles(tmp_path) as made:
        owner = made.client("owner")
        assert (await store_descriptor(owner)).status == 201
        stored = await owner.request("PUT", f"blocks/{HELD.path}", WHOLE, AS_BLOCK)
        assert stored.status == 201
        assert (await owner.request("PUT", path_of(record()), json_body=record())).status == 201
        yield made


# --- who may do what -----------------------------------------------------------------


def lookup(*numbers: int) -> dict[str, Any]:
    body = lease_request(*numbers)
    del body["ttl_ms"]
    return body


def place(*numbers: int) -> dict[str, Any]:
    return lookup(*numbers) | {"prefetch": False}


SCOPED: dict[str, tuple[Any, Any]] = {
    # what is there, what is not
    "GET block": (("GET", f"blocks/{HELD.path}"), ("GET", f"blocks/{MISSING.path}")),
    "HEAD block": (("HEAD", f"blocks/{HELD.path}"), ("HEAD", f"blocks/{MISSING.path}")),
    "DELETE block": (("DELETE", f"blocks/{HELD.path}"), ("DELETE", f"blocks/{MISSING.path}")),
    "PUT block": (("PUT", f"blocks/{HELD.path}"), ("PUT", f"blocks/{MISSING.path}")),
    "POST verification": (
        ("POST", verification_path(HELD)),
        ("POST", verification_path(MISSING)),
    ),
    "POST leases": (("POST", "leases", lease_request(1)), ("POST", "leases", lease_request(2))),
    "POST lookup": (("POST", "lookup", lookup(1)), ("POST", "lookup", lookup(2))),
    "PUT replica": (
        ("PUT", path_of(record()), record()),
        ("PUT", path_of(record(2)), record(2)),
    ),
    "GET replica": (("GET", path_of(record())), ("GET", path_of(record(2)))),
    "DELETE replica": (("DELETE", path_of(record())), ("DELETE", path_of(record(2)))),
    "GET replicas": (("GET", replicas_path(HELD)), ("GET", replicas_path(MISSING))),
    "list": (
        ("GET", f"replicas/{HELD.compat_id.hex()}/{SCOPE.hex()}"),
        ("GET", f"replicas/{bytes(32).hex()}/{SCOPE.hex()}"),
    ),
    "place": (("POST", "place", place(1)), ("POST", "place", place(2))),
    "cache-state": (
        ("POST", "cats/cache-state", lookup(1)),
        ("POST", "cats/cache-state", lookup(2)),
    ),
    "cache-keys": (
        ("GET", f"cats/cache-keys?scope={SCOPE.hex()}&compat={HELD.compat_id.hex()}"),
        ("GET", f"cats/cache-keys?scope={SCOPE.hex()}&compat={bytes(32).hex()}"),
    ),
}


async def ask(client: Client, method: str, path: str, body: Any = None) -> Answer:
    if method == "PUT" and path.startswith("blocks/"):
        return await client.request(method, path, WHOLE, AS_BLOCK)
    return await client.request(method, path, json_body=body)


@pytest.mark.parametrize("name", ["tenant", "nobody", "ii1"])
@pytest.mark.parametrize("route", SCOPED)
async def test_without_the_scope_what_exists_and_what_does_not_look_the_same(
    roles: Roles, route: str, name: str
) -> None:
    client = roles.client(name)
    answers = [await ask(client, *request) for request in SCOPED[route]]
    seen = []
    for answer in answers:
        assert answer.status == 403
        problem = answer.json
        assert problem["type"].endswith("#kvsp-forbidden")
        assert problem.pop("instance") != ""
        fields = {key: value for key, value in answer.headers.items() if key != "x-request-id"}
        seen.append((problem, fields))
    assert seen[0] == seen[1]


def test_every_operation_on_a_scope_is_in_the_table_above(tmp_path: Path) -> None:
    """`explain` is not: it says of itself that the principal may not read the scope."""
    document = make_roles(tmp_path).app.openapi["paths"]
    in_path = [
        (method.upper(), path)
        for path, methods in document.items()
        for method in methods
        if "{scope}" in path or path in ("/lookup", "/leases", "/place")
    ]
    assert len(in_path) == 13
    assert len(SCOPED) == len(in_path) + len(("cache-state", "cache-keys"))


ROLE_BOUND = [
    ("PUT", f"instances/{instance_id(II1)}", "owner"),
    ("GET", "instances", "ii1"),
    ("GET", f"instances/{instance_id(II1)}", "ii1"),
    ("PUT", f"instances/{instance_id(II1)}/state", "ii1"),
    ("POST", "place", "owner"),
    ("PUT", f"sessions/{SESSION}/checkpoint", "owner"),
    ("GET", f"sessions/{SESSION}/checkpoint", "ii1"),
    ("GET", f"sessions/{SESSION}", "ii1"),
    ("DELETE", f"sessions/{SESSION}", "ii1"),
    ("GET", "maps/m", "ii1"),
    ("PUT", "maps/m", "ii1"),
    ("DELETE", "maps/m", "ii1"),
    ("GET", "cats/metrics", "ii1"),
    ("POST", "cats/cache-state", "owner"),
    ("GET", "cats/cache-keys", "owner"),
    ("PUT", f"status/{instance_id(II1)}", "ii1"),
    ("PUT", f"compat/{DESCRIPTOR.compat_id.hex()}", "nobody"),
    ("DELETE", f"replicas?holder={H2}", "owner"),
    ("GET", "/metrics", "owner"),
]


@pytest.mark.parametrize(("method", "path", "name"), ROLE_BOUND)
async def test_an_operation_of_another_role_is_forbidden_before_anything_is_read(
    roles: Roles, method: str, path: str, name: str
) -> None:
    # the body is no JSON at all: the refusal does not depend on it
    answer = await roles.client(name).request(method, path, b"\xff", AS_JSON)
    assert (answer.status, answer.problem) == (403, "kvsp-forbidden")


async def test_a_holder_publishes_for_no_other_holder(roles: Roles) -> None:
    for holder in (H2, "https://h1.example/kvsp/x/", "https://h1.example:444/kvsp/"):
        tree = record(holder=holder)
        answer = await roles.client("owner").request("PUT", path_of(tree), json_body=tree)
        assert answer.problem == "kvsp-forbidden"


@pytest.mark.parametrize(
    ("member", "value", "error"),
    [
        ("holder", "http://h1.example/kvsp/", "bad-uri"),
        ("holder", "http://127.0.0.1/kvsp/", "bad-uri"),
        ("holder", "HTTPS://h1.example/kvsp/", "bad-uri"),
        ("holder", "https://h1.example/kvsp/../kvsp/", "bad-uri"),
        ("holder", "https://u:p@h1.example/kvsp/", "bad-uri"),
        ("holder", "file:///etc/", "bad-uri"),
        ("holder", "moqt://h1.example/", "missing-member"),
        ("moqt_namespace", "AAAA", "truncated"),
        ("ttl_ms", 0, "out-of-range"),
        ("ttl_ms", -1, "out-of-range"),
        ("ttl_ms", 1.5, "wrong-type"),
        ("ttl_ms", True, "wrong-type"),
        ("ttl_ms", "60000", "wrong-type"),
        ("size", 0, "out-of-range"),
        ("size", 2**53 - 1, "section-length"),
        ("codec", 0, "out-of-range"),
        ("codec", 65_536, "out-of-range"),
        ("residency", [], "out-of-range"),
        ("residency", [{"tier": "host", "layers": [0, 2**31]}], "layer-range"),
        ("layer_digests", [], "layer-range"),
        ("block_key", "A" * 64, "bad-hex"),
    ],
)
async def test_a_hostile_record_is_refused_with_its_error(
    roles: Roles, member: str, value: Any, error: str
) -> None:
    tree = record(**{member: value})
    path = path_of(record())
    answer = await roles.client("owner").request("PUT", path, json_body=tree)
    assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")
    assert answer.json["error"] == error
    assert "u:p" not in answer.body.decode()


async def test_a_huge_ttl_is_cut_and_nothing_else_is(roles: Roles) -> None:
    tree = record(ttl_ms=2**53 - 1)
    answer = await roles.client("owner").request("PUT", path_of(tree), json_body=tree)
    assert answer.json == {"ttl_ms": 3_600_000}


@pytest.mark.parametrize("path", ["lookup", "explain", "leases", "place", "cats/cache-state"])
async def test_a_request_of_65537_block_keys_is_413(roles: Roles, path: str) -> None:
    body = lease_request(1) | {"block_keys": [HELD.block_key.hex()] * 65_537}
    answer = await roles.client("operator").request("POST", path, json_body=body)
    assert (answer.status, answer.problem) == (413, "kvsp-too-large")
    assert answer.json["limit"] == 65_536


async def test_a_refused_lease_takes_nothing_from_the_quota(roles: Roles) -> None:
    owner = roles.client("owner")
    for _ in range(5):
        answer = await owner.request("POST", "leases", json_body=lease_request(1, ttl_ms=60_001))
        assert answer.problem == "kvsp-lease-quota"
    assert len(roles.holder.leases) == 0
    granted = await owner.request("POST", "leases", json_body=lease_request(1))
    path = f"leases/{granted.json['lease']}"
    for other in ("tenant", "nobody", "operator"):
        for method, body in (("GET", None), ("DELETE", None), ("PUT", {"ttl_ms": 1})):
            known = await ask(roles.client(other), method, path, body)
            unknown = await ask(roles.client(other), method, f"leases/{NO_LEASE}", body)
            assert (known.status, known.problem) == (404, "kvsp-unknown-resource")
            assert known.json["detail"] == unknown.json["detail"]
    deleted = await owner.request("DELETE", f"blocks/{HELD.path}")
    assert deleted.problem == "kvsp-leased"


# --- sockets -------------------------------------------------------------------------

LIMITS = HttpLimits(head_s=2.0, stall_s=0.2, request_s=0.3)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Roles, Server]]:
    roles = make_roles(tmp_path, LIMITS)
    async with serving(roles.app) as server:
        yield roles, server


async def raw(server: Server, *parts: bytes) -> bytes:
    """Everything the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with closing(writer):
        for part in parts:
            writer.write(part)
        async with asyncio.timeout(20):
            return await reader.read()


def head(roles: Roles, method: str, path: str, *fields: str, name: str = "operator") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"authorization: Bearer {roles.tokens[name]}",
        "connection: close",
        *fields,
    ]
    if not any(field.startswith("host:") for field in fields):
        lines.append("host: h1.example")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer
    status = int(answer[9:12])
    if status >= 400:
        assert b"application/problem+json" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == status
    return status


JSON_FIELD = "content-type: application/json"
LYING_HEADS = {
    "both lengths": ("content-length: 2", "transfer-encoding: chunked"),
    "two lengths": ("content-length: 2", "content-length: 3"),
    "a negative length": ("content-length: -2",),
    "a length of 30 digits": (f"content-length: {'9' * 30}",),
    "an unknown coding": ("transfer-encoding: gzip",),
    "a folded field": ("x: a\r\n folded",),
    "a space before the colon": ("x : a",),
    "an empty name": (": a",),
    "a control character": ("x: a\x01b\x00",),
    "no host": ("host:a",),
    "two hosts": ("host: a", "host: b"),
}


async def test_a_lying_or_malformed_head_is_400(served: tuple[Roles, Server]) -> None:
    roles, server = served
    for what, fields in LYING_HEADS.items():
        request = head(roles, "POST", "/kvsp/lookup", JSON_FIELD, *fields)
        if what == "no host":
            request = request.replace(b"host:a\r\n", b"")
        assert status_of(await raw(server, request, b"{}")) == 400, what
    for line in (b"GET", b"GET /", b"GET / HTTP/9.9", b"G\x00T / HTTP/1.1", b"\x16\x03\x01\x02"):
        assert status_of(await raw(server, line + b"\r\nhost: x\r\n\r\n")) in (400, 401, 404), line


async def test_a_body_that_is_shorter_than_it_says_or_has_no_end_is_408(
    served: tuple[Roles, Server],
) -> None:
    roles, server = served
    path = f"/kvsp/blocks/{HELD.path}"
    block = ("content-type: application/kvsp-block", "if-none-match: *")
    chunk = b"%x\r\n" % len(WHOLE) + WHOLE + b"\r\n"
    for request, sent in (
        (head(roles, "POST", "/kvsp/lookup", JSON_FIELD, "content-length: 10"), b"{}"),
        (head(roles, "POST", "/kvsp/lookup", JSON_FIELD, "transfer-encoding: chunked"), b"1\r\n{"),
        (head(roles, "PUT", path, *block, f"content-length: {len(WHOLE) + 5}"), WHOLE),
        (head(roles, "PUT", path, *block, "transfer-encoding: chunked"), chunk),
    ):
        assert status_of(await raw(server, request, sent)) == 408
    assert len(roles.holder.store) == 0
    assert not list((roles.folder / "blocks" / "incoming").iterdir())
    assert roles.app.bodies.octets == 0


async def test_a_length_over_the_limit_is_413_before_anything_is_sent(
    served: tuple[Roles, Server],
) -> None:
    roles, server = served
    for length in (8 * 2**20 + 1, 9 * 10**18):
        request = head(roles, "POST", "/kvsp/lookup", JSON_FIELD, f"content-length: {length}")
        assert status_of(await raw(server, request)) == 413


async def test_no_path_leads_out_of_the_disk_tier(served: tuple[Roles, Server]) -> None:
    roles, server = served
    zeros = f"{'0' * 64}/{'0' * 32}"
    for path in (
        "blocks/../../principals",
        "blocks/%2e%2e/%2e%2e/principals",
        f"blocks/..%2f..%2fprincipals/{'0' * 32}/{'0' * 64}",
        f"blocks/{zeros}/..%2f..%2f..%2fprincipals",
        f"blocks/{zeros}/%00",
        f"blocks/{zeros}/{'0' * 63}/",
        f"blocks/{'A' * 64}/{'0' * 32}/{'0' * 64}",
        "blocks//etc/passwd",
        "/etc/passwd",
        "%ff%fe",
        "%zz",
    ):
        for method in ("GET", "PUT", "DELETE", "HEAD"):
            request = head(roles, method, "/kvsp/" + path, "content-length: 0")
            answer = await raw(server, request)
            assert int(answer[9:12]) in (400, 404, 405, 428), (method, path)
    folder = roles.folder / "blocks"
    assert sorted(path.name for path in folder.iterdir()) == ["blocks", "incoming", "lock"]


async def test_ranges_are_not_served_and_other_methods_are_405(
    served: tuple[Roles, Server],
) -> None:
    roles, server = served
    path = f"/kvsp/blocks/{HELD.path}"
    assert (await store_descriptor(roles.client("operator"))).status == 201
    put = head(
        roles,
        "PUT",
        path,
        "content-type: application/kvsp-block",
        "if-none-match: *",
        f"content-length: {len(WHOLE)}",
    )
    assert status_of(await raw(server, put, WHOLE)) == 201
    for field in ("range: bytes=0-3", "range: bytes=0-0,1-1,5-", "range: lines=1-", "range: x"):
        answer = await raw(server, head(roles, "GET", path, field))
        assert status_of(answer) == 200
        assert answer.endswith(WHOLE)
        assert b"accept-ranges: none" in answer.lower()
    answer = await raw(server, head(roles, "HEAD", path))
    assert status_of(answer) == 200 and answer.endswith(b"\r\n\r\n")
    for method in ("OPTIONS", "TRACE", "PATCH", "POST"):
        answer = await raw(server, head(roles, method, path, "content-length: 0"))
        assert status_of(answer) == 405
        assert b"allow: DELETE, GET, HEAD, PUT" in answer


async def test_thousands_of_short_fields_count_as_their_octets(
    served: tuple[Roles, Server],
) -> None:
    roles, server = served
    fields = [f"x{number}: y" for number in range(1000)]
    assert status_of(await raw(server, head(roles, "GET", "/kvsp/instances", *fields))) == 200
    request = head(roles, "GET", "/kvsp/instances", *(fields * 4))
    assert status_of(await raw(server, request)) == 431


# --- files and stores that fail ------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", '{"principals": {}}', "\udcff"])
async def test_a_broken_principals_file_lets_nobody_in_while_it_is_broken(
    roles: Roles, text: str
) -> None:
    path = roles.folder / "principals"
    good = path.read_bytes()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for name in ("owner", "operator"):
        answer = await roles.client(name).get("instances")
        assert answer.status == 503 and "retry-after" in answer.headers
        assert str(path) not in answer.body.decode()
    path.write_bytes(good)
    assert (await roles.client("operator").get("instances")).status == 200


async def test_a_principals_file_without_principals_lets_nobody_in(roles: Roles) -> None:
    (roles.folder / "principals").write_text('{"principals": []}')
    assert (await roles.client("operator").get("instances")).status == 401


async def test_a_principals_file_that_others_may_write_lets_nobody_in(roles: Roles) -> None:
    (roles.folder / "principals").chmod(0o666)
    assert (await roles.client("operator").get("instances")).status == 503


async def test_an_index_that_another_process_locks_is_503_and_works_again(
    roles: Roles,
) -> None:
    wait_for_locks(roles.index.store, 1)
    owner = roles.client("owner")
    with closing(sqlite3.connect(roles.folder / "index.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = await owner.request("PUT", path_of(record()), json_body=record())
        assert answer.status == 503 and "retry-after" in answer.headers
        # reading goes on, and so does placement
        assert (await owner.request("POST", "lookup", json_body=lookup(1))).json["matched"] == 1
        other.execute("ROLLBACK")
    answer = await owner.request("PUT", path_of(record()), json_body=record())
    assert answer.status == 200


async def test_setting_the_clock_of_the_machine_changes_no_ttl(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = roles.client("owner")
    now = time.time_ns()
    for jump_s in (-(10**6), 10**6):
        monkeypatch.setattr(time, "time_ns", lambda jump_s=jump_s: now + jump_s * 10**9)
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now / 10**9 + jump_s)
        found = await owner.request("POST", "lookup", json_body=lookup(1))
        (block,) = found.json["blocks"]
        assert block["replicas"][0]["ttl_ms"] <= 60_000


# --- secrets -------------------------------------------------------------------------


async def test_no_secret_is_in_any_answer_log_or_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    scope_key = bytes(range(32))

    async def send(client: Client, method: str, path: str, body: Any = None) -> None:
        answer = await ask(client, method, path, body)
        seen.append(answer.body.decode("latin-1") + repr(answer.headers))

    async with running_roles(tmp_path) as roles:
        operator = roles.client("operator")
        status = {
            "instance": II1,
            "epoch": 1,
            "state": "active",
            "running": 0,
            "queued": 0,
            "batch_size": 1,
            "kv_utilization": 0.5,
            "prefill_tokens_per_s": 1,
            "decode_tokens_per_s": 1,
            "links": [],
            "requested_state": None,
            "ttl_ms": 3000,
        }
        checkpoint = {
            "session": SESSION,
            "epoch": 1,
            "compat_id": HELD.compat_id.hex(),
            "scope_id": SCOPE.hex(),
            "prompt_blocks": [],
            "prompt_tail": TOKEN_IDS,
            "generated": TOKEN_IDS,
            "output_offset": 2,
            "sampler": {
                "method": "greedy",
                "params": {},
                "seed": 1,
                "step": 2,
                "deterministic": False,
            },
        }
        ii1 = roles.client("ii1")
        await store_descriptor(roles.client("owner"))
        await send(ii1, "PUT", f"instances/{instance_id(II1)}", status)
        path = f"sessions/{SESSION}/checkpoint"
        for changes in (
            {},
            {"generated": [*TOKEN_IDS[:1], 2**32]},
            {"generated": [str(TOKEN_IDS[0])]},
            {"prompt_tail": TOKEN_IDS[0]},
            {"prompt_tail": [TOKEN_IDS], "scope_key": scope_key.hex()},
            {"epoch": 0},
            {"epoch": 9},
            {"prompt_tail": TOKEN_IDS[1:]},
            {"session": str(TOKEN_IDS[0])},
        ):
            await send(ii1, "PUT", path, checkpoint | changes)
        for name, token in roles.tokens.items():
            client = roles.client(name)
            await send(client, "GET", f"blocks/{HELD.path}?codec={token}")
            await send(client, "PUT", f"blocks/{HELD.path}")
            await send(client, "GET", f"{token}/{scope_key.hex()}")
            await send(client, "GET", f"leases/{token}")
            await send(client, "POST", "lookup", {"scope_id": scope_key.hex(), "token": token})
            await send(Client(roles.app, token[:-1] + "x"), "GET", "instances")
        for path in ("/metrics", "/readyz", "/.well-known/kvsp", "openapi.json", "instances"):
            await send(operator, "GET", path)
    printed = capsys.readouterr()
    seen += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    everything = "\n".join([*seen, printed.out, printed.err])
    assert len(caplog.records) > 20
    for secret in (*roles.tokens.values(), scope_key.hex(), *map(str, TOKEN_IDS)):
        assert secret not in everything
    for other in (OTHER_SCOPE.hex(), SCOPE.hex()):
        assert other not in "\n".join(record.getMessage() for record in caplog.records)
