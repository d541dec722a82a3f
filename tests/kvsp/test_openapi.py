"""Every role answers as its OpenAPI document says, whatever is sent (schemathesis).

Cases come from the document; half of their identifiers are replaced by ones that exist,
so that they reach what lies behind the first checks. No sockets.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.transport import Response
from schemathesis.specs.openapi import checks

from kvsp.http.app import App
from kvsp.instance.app import InstanceService
from kvsp.names.uris import instance_id
from kvsp.principals import ROLES, Principal
from kvsp.records.records import ReplicaRecord
from tests.kvsp.controller import support as placement
from tests.kvsp.controller.deployment import Deployment
from tests.kvsp.holder import support as holding
from tests.kvsp.instance import support as instances
from tests.kvsp.support_http import BASE, Answer, Client, Principals, running

EXAMPLES = 100
"""Requests to each role. Which they are depends on the modules that other tests imported, so
there are enough for any luck to get past the checks."""

ROOT = Principal(
    "root",
    roles=ROLES,
    uris=frozenset({placement.A, placement.H1, BASE}),
    scopes={"*": frozenset({"read", "write"})},
)
DESCRIPTOR = holding.DESCRIPTOR
BLOCK = holding.block_id(1)
RECORD = ReplicaRecord(
    block_key=BLOCK.block_key,
    compat_id=BLOCK.compat_id,
    scope_id=BLOCK.scope_id,
    holder=placement.H1,
    codec=1,
    size=2 * DESCRIPTOR.layers * DESCRIPTOR.section_octets(),
    digest=bytes(32),
    ttl_ms=60_000,
)
KNOWN: dict[str, Any] = {
    "compat": BLOCK.compat_id.hex(),
    "scope": BLOCK.scope_id.hex(),
    "block_key": BLOCK.block_key.hex(),
    "replica_id": RECORD.replica_id,
    "instance_id": instance_id(placement.A),
    "session": placement.SESSION,
    "map": "m",
    # in bodies
    "compat_id": BLOCK.compat_id.hex(),
    "scope_id": BLOCK.scope_id.hex(),
    "block_keys": [BLOCK.block_key.hex()],
    "holder": placement.H1,
    "instance": placement.A,
    "digest": "sha-256:" + bytes(32).hex(),
    "size": RECORD.size,
    "codec": 1,
    "epoch": 1,
}
ALL = 2 ** len(KNOWN) - 1
WHOLE = holding.octets(holding.container(1))


def damaged(spot: int, octet: int, octets: bytes = WHOLE) -> bytes:
    return octets[: spot % len(octets)] + bytes([octet]) + octets[spot % len(octets) + 1 :]


schemathesis.openapi.media_type(
    "application/kvsp-block",
    st.one_of(
        st.integers(0, 9).map(lambda number: holding.octets(holding.container(number))),
        st.builds(damaged, st.integers(0, 100), st.integers(0, 255)),
        st.integers(0, len(WHOLE)).map(lambda size: WHOLE[:size]),
        st.binary(max_size=200),
    ),
)


@schemathesis.serializer("application/kvsp-block")
def block_body(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def holder_app(_: Path) -> App:
    world = holding.make_world()
    world.app.authenticator = Principals(ROOT)
    return world.app


def controller_app(folder: Path) -> App:
    """The placement controller and the Index Service, as one process serves them."""
    app = Deployment(folder).app
    app.authenticator = Principals(ROOT)
    return app


async def fill(client: Client) -> None:
    """Make what the known identifiers stand for; roles that are not there answer 404."""
    as_json = {"content-type": "application/json"}
    for method, path, body, headers in (
        ("PUT", f"compat/{KNOWN['compat']}", DESCRIPTOR.jcs, as_json),
        ("PUT", RECORD.path, RECORD.to_json(), as_json),
        ("PUT", f"instances/{KNOWN['instance_id']}", placement.status().to_json(), as_json),
        (
            "PUT",
            f"sessions/{placement.SESSION}/checkpoint",
            placement.checkpoint().to_json(),
            as_json,
        ),
        ("PUT", "maps/m", placement.shard_map(1, (32, placement.A)).to_json(), as_json),
        (
            "PUT",
            f"blocks/{BLOCK.path}",
            WHOLE,
            {"content-type": "application/kvsp-block", "if-none-match": "*"},
        ),
    ):
        answer = await client.request(method, path, body, headers)
        assert answer.status < 500, (path, answer.body)


def instance_app(_: Path) -> App:
    shell = instances.make_instance().shell
    return App([InstanceService(shell)], base_uri=BASE, authenticator=Principals(ROOT))


ROLE_APPS = {"holder": holder_app, "controller": controller_app, "instance": instance_app}


REACHED = {"holder": 4, "controller": 8, "instance": 1}
"""How many operations have to answer with success at least once."""


@contextmanager
def started(app: App) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        lifespan = running(app)
        runner.run(lifespan.__aenter__())
        try:
            yield runner
        finally:
            runner.run(lifespan.__aexit__(None, None, None))


@pytest.mark.parametrize("role", ROLE_APPS)
def test_every_role_answers_as_its_openapi_document_says(role: str, tmp_path: Path) -> None:
    app = ROLE_APPS[role](tmp_path)
    schema = schemathesis.openapi.from_dict(app.openapi)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == sum(map(len, app.openapi["paths"].values()))
    positive, negative = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    modes = st.sampled_from([positive, positive, negative])
    reached: set[str] = set()
    made = functools.cache(cases)  # operations of two documents compare as equal

    with started(app) as runner:
        client = Client(app, "root")
        runner.run(fill(client))

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def answers_are_documented(data: st.DataObject) -> None:
            operation = data.draw(st.sampled_from(operations))
            case = data.draw(made(operation, data.draw(modes)))
            steer(case, data.draw(st.sampled_from((ALL, ALL, 0)) | st.integers(0, ALL)))
            if operation.label in reached:
                runner.run(fill(client))
            request = requests.Request(**case.as_transport_kwargs(base_url=BASE)).prepare()
            answer = runner.run(send(client, request))
            check(case, request, answer)
            if answer.status < 400:
                reached.add(operation.label)

        answers_are_documented()
    # the cases get past the checks: many operations have answered with success
    assert len(reached) >= REACHED[role], reached


def cases(operation: Any, mode: GenerationMode) -> st.SearchStrategy[Any]:
    strategy: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    return strategy


def steer(case: Any, bits: int) -> None:
    """Replace some identifiers, by the bits of a number, with ones that exist."""
    for values in (case.path_parameters, case.body):
        if not isinstance(values, dict):
            continue
        for place, name in enumerate(KNOWN):
            if name in values and bits >> place & 1:
                values[name] = KNOWN[name]
    if bits & 1 and case.media_type == "application/kvsp-block":
        case.headers["If-None-Match"] = "*"


async def send(client: Client, request: requests.PreparedRequest) -> Answer:
    assert request.method is not None
    path = request.path_url.removeprefix("/kvsp/")
    body = request.body.encode() if isinstance(request.body, str) else request.body
    fields = {str(name): value for name, value in request.headers.items()}
    headers = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in fields.items()
        if name.lower() != "content-length"
    }
    headers.pop("Authorization", None)
    return await client.request(request.method, path, body, headers)


def check(case: Any, request: requests.PreparedRequest, answer: Answer) -> None:
    assert answer.status != 500, (case.method, request.url, request.body)
    if answer.status >= 400 and case.method != "HEAD":
        assert answer.problem is not None
        assert {"type", "title", "status", "detail", "instance"} <= answer.json.keys()
    response = Response(
        status_code=answer.status,
        headers={name: [value] for name, value in answer.headers.items()},
        content=answer.body,
        request=request,
        elapsed=0.0,
        verify=False,
    )
    case.validate_response(
        response,
        checks=[
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )


@pytest.mark.parametrize("role", ROLE_APPS)
def test_no_operation_is_answered_without_a_credential(role: str, tmp_path: Path) -> None:
    app = ROLE_APPS[role](tmp_path)

    asked: list[int] = []

    async def ask_all() -> None:
        for path, methods in app.openapi["paths"].items():
            for method in methods:
                for token in (None, "stranger", "root "):
                    client = Client(app, token, address=f"192.0.2.{len(asked)}")
                    answer = await client.request(method.upper(), path.lstrip("/"))
                    asked.append(answer.status)
                    assert answer.status == 401, (method, path)
                    assert "www-authenticate" in answer.headers

    with started(app) as runner:
        runner.run(ask_all())


@pytest.mark.parametrize("role", ROLE_APPS)
def test_an_openapi_document_is_valid(role: str, tmp_path: Path) -> None:
    document = ROLE_APPS[role](tmp_path).openapi
    schemathesis.openapi.from_dict(document).validate()
    names = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(set(names)) == len(names)
    for schema in schemas_of(document):
        jsonschema_rs.Draft202012Validator(resolved(schema, document))


def schemas_of(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Everything that stands where a schema does."""
    if isinstance(tree, Mapping):
        yield from (tree["schema"] for _ in range(1) if "schema" in tree)
        for value in tree.values():
            yield from schemas_of(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from schemas_of(value)


def resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found
