"""What every KVSP service owes its clients."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.responses import Response

from kvsp.http.app import App
from kvsp.http.auth import Credentials, LoopbackOnly
from kvsp.http.call import Call, Pace, json_response, no_content
from kvsp.http.limits import HttpLimits, TokenBuckets
from kvsp.http.service import Health, Operation, Service
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.principals import Principal
from kvsp.records.problems import PROBLEMS, Problem, ProblemName, problem_name
from tests.kvsp.support_http import BASE, Answer, Client, Principals, running

READER = Principal("reader", scopes={"00" * 16: frozenset({"read"})})
OPERATOR = Principal("operator", roles=frozenset({"operator"}))
LIMITS = HttpLimits(json_octets=64, header_octets=1024, requests_per_s=1000, burst=100)


class Echo(Service):
    role = "index"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.state = Health(ready=True)

    def operations(self) -> Sequence[Operation]:
        def operation(method: str, path: str, handler: Any, **more: Any) -> Operation:
            return Operation(method=method, path=path, handler=handler, summary=path, **more)

        return (
            operation("POST", "echo", self.echo, request={"type": "object"}),
            operation("DELETE", "echo", self.nothing, success=(204,)),
            operation("GET", "fail/{how}", self.fail),
            operation("GET", "slow", self.slow),
            operation("PUT", "stream", self.stream, streaming=True),
            operation("GET", "big", self.big, streaming=True),
            operation("GET", "key/{key}", self.key),
        )

    async def echo(self, call: Call) -> Response:
        return json_response(await call.read_object())

    async def nothing(self, call: Call) -> Response:
        return no_content()

    async def key(self, call: Call) -> Response:
        return json_response([call.path_hex("key", 2).hex(), call.query("q")])

    async def fail(self, call: Call) -> Response:
        match call.path_params["how"]:
            case "problem":
                raise Problem(ProblemName.STALE_EPOCH, "epoch 1 is over", epoch=2, retry_after=0.2)
            case "decode":
                raise DecodeError(DecodeErrorName.BAD_HEX, "no hex", "/block_keys/1")
            case _:
                raise RuntimeError("the secret is xyzzy")

    async def slow(self, call: Call) -> Response:
        await asyncio.Event().wait()
        return no_content()

    async def stream(self, call: Call) -> Response:
        return json_response([len(chunk) async for chunk in call.stream_body(100)])

    async def big(self, call: Call) -> Response:
        return Response(b"x" * 1000)

    def health(self) -> Health:
        return self.state

    def describe(self) -> dict[str, Any]:
        return {"codecs": [1]}

    async def start(self) -> None:
        self.events.append("start")

    async def drain(self) -> None:
        self.events.append("drain")

    async def stop(self) -> None:
        self.events.append("stop")


def make(limits: HttpLimits = LIMITS, **more: Any) -> tuple[Echo, Client]:
    service = Echo()
    app = App(
        [service],
        base_uri=BASE,
        authenticator=more.pop("authenticator", Principals(READER, OPERATOR)),
        limits=limits,
        **more,
    )
    return service, Client(app, "reader")


@pytest.fixture
def client() -> Client:
    return make()[1]


async def post(client: Client, body: bytes, **headers: str) -> Answer:
    fields = {"content-type": "application/kvsp+json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return await client.request("POST", "echo", body, fields)


async def test_json_goes_in_and_out_as_kvsp_json(client: Client) -> None:
    answer = await post(client, b'{"a": 1}')
    assert (answer.status, answer.json) == (200, {"a": 1})
    assert answer.headers["content-type"] == "application/kvsp+json"
    assert (await post(client, b"{}", content_type="application/json; charset=utf-8")).status == 200


async def test_another_media_type_or_content_coding_is_415(client: Client) -> None:
    assert (await post(client, b"{}", content_type="text/plain")).status == 415
    assert (await client.request("POST", "echo", b"{}")).status == 415
    answer = await post(client, b"{}", content_encoding="gzip")
    assert answer.status == 415 and answer.problem == "about:blank"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "not-i-json"),
        (b"{", "not-i-json"),
        (b'{"a": 1, "a": 2}', "duplicate-member"),
        (b"[]", "not-an-object"),
        (b"\xff", "not-i-json"),
    ],
)
async def test_a_malformed_body_is_an_invalid_request_with_its_error(
    client: Client, body: bytes, error: str
) -> None:
    answer = await post(client, body)
    assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")
    assert answer.json["error"] == error


async def test_a_body_over_the_limit_is_413_whatever_content_length_says(client: Client) -> None:
    body = [b'{"a": "', b"x" * 80, b'"}']
    fields = {"content-type": "application/kvsp+json", "content-length": "10"}
    for headers in (fields, {"content-type": fields["content-type"]}):
        answer = await client.request("POST", "echo", body, headers)
        assert (answer.status, answer.problem) == (413, "kvsp-too-large")
        assert answer.json["limit"] == 64
    honest = await post(client, b"", content_length=str(10**30))
    assert honest.status == 413


async def test_a_streamed_body_is_counted_as_it_comes(client: Client) -> None:
    answer = await client.request("PUT", "stream", [b"a" * 40] * 2)
    assert answer.json == [40, 40]
    assert (await client.request("PUT", "stream", [b"a" * 40] * 3)).status == 413


async def test_a_body_that_stops_coming_is_408() -> None:
    _, client = make(HttpLimits(stall_s=0.01))

    def chunks() -> Iterator[bytes]:
        yield b"a"

    original = client.app

    async def stalling(scope: Any, receive: Any, send: Any) -> None:
        first = True

        async def stalled() -> Any:
            nonlocal first
            if not first:
                await asyncio.Event().wait()
            first = False
            return {"type": "http.request", "body": b"a", "more_body": True}

        await original(scope, stalled, send)

    client.app = stalling  # type: ignore[assignment]
    assert (await client.request("PUT", "stream", chunks())).status == 408


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    _, client = make(HttpLimits(stall_s=0.01))
    aborted: list[bool] = []

    class Connection:
        certificate_uris = ()

        def abort(self) -> None:
            aborted.append(True)

    scope_sends: list[Any] = []

    async def send(message: Any) -> None:
        scope_sends.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    original = client.app

    async def app(scope: Any, receive: Any, _: Any) -> None:
        await original(scope, receive, send)

    client.app = app  # type: ignore[assignment]
    client.extensions = {"kvsp.connection": Connection()}
    await client.get("big")
    assert aborted == [True]


async def test_a_request_that_takes_too_long_is_503_with_retry_after() -> None:
    _, client = make(HttpLimits(request_s=0.01))
    answer = await client.get("slow")
    assert answer.status == 503 and answer.headers["retry-after"] == "1"


async def test_problems_have_type_title_status_detail_instance_and_members(client: Client) -> None:
    answer = await client.get("fail/problem")
    assert answer.status == 409 and answer.headers["retry-after"] == "1"
    instance = answer.json.pop("instance")
    document = dict(answer.json)
    assert document.pop("instance") == instance
    assert document == {
        "type": "https://iana.org/assignments/http-problem-types#kvsp-stale-epoch",
        "title": "The epoch is lower than the known one",
        "status": 409,
        "detail": "epoch 1 is over",
        "epoch": 2,
    }
    assert problem_name(answer.json) == "kvsp-stale-epoch"


async def test_a_decode_error_becomes_an_invalid_request_with_error_and_pointer(
    client: Client,
) -> None:
    answer = await client.get("fail/decode")
    assert answer.problem == "kvsp-invalid-request"
    assert (answer.json["error"], answer.json["pointer"]) == ("bad-hex", "/block_keys/1")


async def test_a_fault_of_the_server_is_500_and_tells_nothing(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await client.get("fail/badly")
    assert answer.status == 500 and b"xyzzy" not in answer.body
    request_id = answer.headers["x-request-id"]
    assert any(request_id in record.getMessage() for record in caplog.records)
    assert request_id in answer.json["instance"]


async def test_an_unknown_route_is_404_and_another_method_405_with_allow(client: Client) -> None:
    assert (await client.get("nothing/here")).status == 404
    assert (await client.get("/")).status == 404
    for method in ("GET", "PATCH", "OPTIONS", "BREW"):
        answer = await client.request(method, "echo")
        assert (answer.status, answer.headers["allow"]) == (405, "DELETE, POST")
        assert answer.problem == "about:blank"


async def test_nobody_is_answered_without_a_credential(client: Client) -> None:
    for token in (None, "stranger"):
        answer = await client.as_(token).get("key/0102")
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith('Bearer realm="kvsp"')


async def test_path_and_query_parameters_are_checked(client: Client) -> None:
    assert (await client.get("key/0a0b?q=1&unknown=2")).json == ["0a0b", "1"]
    assert (await client.get("key/0A0B")).json["error"] == "bad-hex"
    assert (await client.get("key/0a0b?q=1&q=1")).problem == "kvsp-invalid-request"


async def test_a_header_section_over_the_limit_is_431(client: Client) -> None:
    assert (await client.get("key/0a0b", {"x": "y" * 2000})).status == 431


async def test_a_principal_over_its_rate_waits_and_others_do_not() -> None:
    now = 0.0
    _, client = make(HttpLimits(requests_per_s=1, burst=2), clock=lambda: now)
    assert [(await client.get("key/0a0b")).status for _ in range(3)] == [200, 200, 429]
    answer = await client.get("key/0a0b")
    assert answer.headers["retry-after"] == "1"
    assert (await client.as_("operator").get("key/0a0b")).status == 200
    now = 1.0
    assert (await client.get("key/0a0b")).status == 200


async def test_an_address_that_guesses_tokens_is_slowed_down() -> None:
    _, client = make(HttpLimits(failures_per_s=1, failure_burst=3), clock=lambda: 0.0)
    guesser = client.as_("guess")
    assert [(await guesser.get("key/0a0b")).status for _ in range(4)] == [401, 401, 401, 429]
    elsewhere = Client(client.app, "guess", "192.0.2.2")
    assert (await elsewhere.get("key/0a0b")).status == 401
    assert (await client.get("key/0a0b")).status == 200


def test_buckets_are_bounded_and_refill() -> None:
    buckets = TokenBuckets(rate=2, burst=1, size=3)
    for key in "abcd":
        assert buckets.take(key, 0.0) == 0.0
    assert len(buckets) == 3
    assert buckets.take("d", 0.0) == 0.5
    assert buckets.take("d", 0.25) == 0.25
    assert buckets.take("d", 0.5) == 0.0


def test_a_stream_keeps_a_mean_rate_once_it_had_time_to_start() -> None:
    pace = Pace(HttpLimits(stall_s=10, min_octets_per_s=100), started=5.0)
    assert not pace.too_slow(0, 15.0)
    assert pace.too_slow(1099, 16.0)
    assert not pace.too_slow(1100, 16.0)


async def test_common_fields_are_on_every_answer(client: Client) -> None:
    for path in ("key/0a0b", "nowhere", "/healthz"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert len(headers["x-request-id"]) == 16


async def test_the_access_log_has_the_request_and_no_secret(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvsp.access"):
        answer = await client.get("key/0a0b?token=hunter2", {"x-secret": "hunter2"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvsp.access"]
    assert line.startswith(f"{answer.headers['x-request-id']} reader GET /kvsp/key/{{key}} 200")
    assert "hunter2" not in line and "Bearer" not in line and "0a0b" not in line


async def test_health_is_independent_of_peers_and_readiness_shows_them() -> None:
    service, client = make()
    anybody = client.as_(None)
    assert (await anybody.get("/readyz")).json["status"] == "ready"
    service.state = Health(ready=True, degraded=("the index does not answer",))
    assert (await anybody.get("/healthz")).status == 200
    answer = await anybody.get("/readyz")
    assert (answer.status, answer.json["status"]) == (200, "degraded")
    assert answer.json["reasons"] == ["index: the index does not answer"]
    service.state = Health(ready=False)
    assert (await anybody.get("/readyz")).status == 503
    assert (await anybody.get("/healthz")).status == 200


async def test_services_start_drain_and_stop_in_turn() -> None:
    service, client = make()
    async with running(client.app) as app:
        await app.drain()
        assert (await client.as_(None).get("/readyz")).json == {
            "status": "unready",
            "reasons": ["draining"],
        }
        assert (await client.get("key/0a0b")).status == 200
    assert service.events == ["start", "drain", "stop"]


async def test_the_well_known_resource_names_services_without_a_credential() -> None:
    _, client = make(moqt=["moqt://relay.example/"])
    assert (await client.as_(None).get("/.well-known/kvsp")).json == {
        "kvsp": 1,
        "services": {"index": BASE},
        "codecs": [1],
        "moqt": ["moqt://relay.example/"],
    }


async def test_metrics_are_for_operators(client: Client) -> None:
    await client.get("key/0a0b")
    assert (await client.as_(None).get("/metrics")).status == 401
    assert (await client.get("/metrics")).problem == "kvsp-forbidden"
    text = (await client.as_("operator").get("/metrics")).body.decode()
    assert 'kvsp_http_requests_total{method="GET",outcome="200",path="/kvsp/key/{key}"} 1.0' in text
    assert 'kvsp_http_credentials_refused_total{status="401"} 1.0' in text


async def test_the_openapi_document_lists_every_operation(client: Client) -> None:
    document = (await client.as_(None).get("openapi.json")).json
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]["/echo"]) == {"post", "delete"}
    parameters = document["paths"]["/key/{key}"]["get"]["parameters"]
    assert [each["name"] for each in parameters] == ["key"]
    json.dumps(document)


def test_two_roles_cannot_answer_to_one_resource_unless_one_shares_it() -> None:
    def app(*shared: bool) -> App:
        services = []
        for share in shared:
            service = Echo()
            operation = Operation(
                method="GET", path="x", handler=service.key, summary=str(share), shared=share
            )
            service.operations = lambda operation=operation: [operation]  # type: ignore[method-assign]
            services.append(service)
        return App(services, base_uri=BASE, authenticator=LoopbackOnly())

    with pytest.raises(ValueError, match="two roles"):
        app(False, False)
    for order in ((True, False), (False, True)):
        assert app(*order).openapi["paths"]["/x"]["get"]["summary"] == "False"


async def test_the_certificate_of_the_connection_is_a_credential() -> None:
    seen: list[Credentials] = []

    class Recorder:
        def authenticate(self, credentials: Credentials) -> Principal:
            seen.append(credentials)
            return READER

    class Connection:
        certificate_uris = ("https://h1.example/kvsp/",)

    _, client = make(authenticator=Recorder())
    client.extensions = {"kvsp.connection": Connection()}
    await client.get("key/0a0b")
    assert seen[0].certificate_uris == ("https://h1.example/kvsp/",)
    assert not seen[0].loopback
    await Client(client.app, None, "127.0.0.1").get("key/0a0b")
    assert seen[1].loopback


def test_every_problem_has_a_status_and_a_title() -> None:
    assert set(PROBLEMS) == set(ProblemName)
    for name in ProblemName:
        problem = Problem(name, "x")
        assert 400 <= problem.status < 600 and problem.title
        assert problem.type.endswith("#" + name)
