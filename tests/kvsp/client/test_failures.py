"""Slow, stuck and vanishing sources; deadlines; cancellation leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvsp.client import (
    BadAnswerError,
    Client,
    Fault,
    LeaseLostError,
    NotAuthorizedError,
    NoTokenError,
    RequestTimeoutError,
    UnavailableError,
    VerificationError,
)
from kvsp.client.caller import Caller
from kvsp.names.errors import FileError
from kvsp.records.problems import PROBLEM_MEDIA_TYPE
from kvsp.records.records import Link
from tests.kvsp.client.support import (
    DESCRIPTOR,
    FAST,
    KEYS,
    SCOPE,
    Fake,
    Memory,
    block_answer,
    block_of,
    container,
    problem,
    record_at,
    select,
    serving,
    world,
)
from tests.kvsp.inside import in_use

NUMBERS = range(4)
LEASE = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"


def right(request):
    """A holder of every block."""
    key = request.url.path.rpartition("/")[2]
    number = [each.hex() for each in KEYS].index(key)
    return block_answer(select(request, container(number)))


async def never(request):
    await asyncio.Event().wait()


async def headers_only(request):
    """An answer that begins and then stays away."""

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    fields = dict(right(request).headers)
    return StreamingResponse(nothing(), headers=fields)


@contextlib.asynccontextmanager
async def holders(*answers, limits=FAST):
    async with contextlib.AsyncExitStack() as stack:
        fakes = [Fake(answer) for answer in answers]
        uris = [await stack.enter_async_context(serving(fake.app)) for fake in fakes]
        client = Client(uris[0], http_loopback=True, limits=limits)
        yield await stack.enter_async_context(client), uris, fakes


def records(uris):
    return [[record_at(uri, container(n), n) for uri in uris] for n in NUMBERS]


def prefer(*uris):
    """Links that make each source look much better than the one after it."""
    return [Link(uri, 10.0 ** (9 - 3 * place), 1) for place, uri in enumerate(uris)]


# --- stuck and slow sources ----------------------------------------------------------


@pytest.mark.parametrize("stuck", [never, headers_only])
async def test_a_stuck_source_does_not_hold_up_what_others_have(stuck):
    async with holders(stuck, right) as (client, uris, (asked, _)):
        memory = Memory()
        result = await client.get_blocks(
            records(uris), memory, descriptor=DESCRIPTOR, links=prefer(*uris), deadline_s=60
        )
        assert result.complete and asked.requests
        assert all(memory.holds(n, container(n)) for n in NUMBERS)
    assert result.counters["hedges"] and {each.source for each in result.arrived} == {uris[1]}


async def test_at_the_deadline_the_rest_is_missing_and_what_came_is_kept():
    def half(request):
        return never(request) if request.url.path.endswith(KEYS[3].hex()) else right(request)

    async with holders(half) as (client, uris, _):
        memory = Memory()
        result = await client.get_blocks(
            records(uris), memory, descriptor=DESCRIPTOR, deadline_s=0.5
        )
    assert {(gap.block, gap.reason) for gap in result.missing} == {(3, Fault.TIMEOUT)}
    assert result.complete_blocks == 3 and memory.holds(2, container(2))


async def test_each_request_has_its_own_time():
    limits = replace(FAST, request_s=0.1, attempts=1)
    async with holders(never, limits=limits) as (client, (uri,), _):
        with pytest.raises(RequestTimeoutError, match=uri):
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)


async def test_one_consumer_that_never_reads_does_not_block_another():
    async with holders(right) as (client, (uri,), _):
        lazy = client.get(record_at(uri, container(0)), descriptor=DESCRIPTOR)
        await anext(lazy)
        result = await client.get_blocks(records([uri]), Memory(), descriptor=DESCRIPTOR)
        assert result.complete
        await lazy.aclose()


async def test_what_is_asked_for_at_once_is_bounded(monkeypatch):
    open_, most, enough = 0, 0, asyncio.Event()
    request = Caller.open

    @contextlib.asynccontextmanager
    async def counting(self, *args, **how):
        # at the client: for its server a request ends later
        nonlocal open_, most
        open_ += 1
        most = max(most, open_)
        if open_ == limits.requests:
            enough.set()
        try:
            async with request(self, *args, **how) as response:
                yield response
        finally:
            open_ -= 1

    async def slow(request):
        await enough.wait()
        return right(request)

    monkeypatch.setattr(Caller, "open", counting)
    limits = replace(FAST, requests=3, requests_per_source=2)
    async with holders(slow, slow, limits=limits) as (client, uris, _):
        blocks = records(uris) * 5
        result = await client.get_blocks(blocks, Memory(), descriptor=DESCRIPTOR)
    assert result.complete and most == 3


# --- retries -------------------------------------------------------------------------


async def test_retry_after_is_waited_for_and_the_request_made_again():
    answers = [problem(503, None, retry_after=1), JSONResponse({"matched": 0, "blocks": []})]
    async with holders(lambda request: answers.pop(0)) as (client, _, (fake,)):
        found = await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)
    assert found.matched == 0 and len(fake.requests) == 2


async def test_a_retry_after_that_is_too_long_is_not_waited_for():
    answer = problem(503, None, retry_after=60)
    async with holders(lambda request: answer) as (client, _, (fake,)):
        with pytest.raises(UnavailableError, match="so it is"):
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)
    assert len(fake.requests) == 1


async def test_a_service_that_fails_is_tried_a_bounded_number_of_times():
    async with holders(lambda request: problem(500, None)) as (client, _, (fake,)):
        with pytest.raises(UnavailableError):
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)
    assert len(fake.requests) == FAST.attempts


async def test_a_block_is_sent_again_after_a_failure_and_412_then_is_success():
    answers = [problem(503, None), problem(412, "kvsp-block-exists")]

    async def store(request):
        assert await request.body() and request.headers["if-none-match"] == "*"
        return answers.pop(0)

    async with holders(store) as (client, (uri,), (fake,)):
        assert not (await client.put(uri, block_of(0), container(0))).created
    assert len(fake.requests) == 2


async def test_a_holder_that_stored_something_else_is_not_believed():
    other = container(1)
    stored = {"digest": "sha-256:" + "0" * 64, "size": 1, "codec": 1}
    answer = stored | {"layer_digests": [each.hex() for each in other.layer_digests()]}
    async with holders(lambda request: JSONResponse(answer, 201)) as (client, (uri,), _):
        with pytest.raises(VerificationError, match="other layers than were sent"):
            await client.put(uri, block_of(0), container(0))


# --- answers that are not right ------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"matched": 1, "blocks": []}',
        b'{"matched": 1, "blocks": [{"block_key": "%s", "replicas": []}]}' % (b"ab" * 32),
        b" " * 5000,
    ],
)
async def test_an_index_that_answers_nonsense_is_a_bad_answer(body):
    limits = replace(FAST, answer_octets=4096)
    async with holders(lambda request: Response(body), limits=limits) as (client, _, _):
        with pytest.raises(BadAnswerError):
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)


async def test_unknown_members_must_be_ignored():
    record = record_at("https://h9.example/kvsp/", container(0)).to_dict() | {"x-new": [1]}
    block = {"block_key": KEYS[0].hex(), "replicas": [record], "x-more": None}
    answer = JSONResponse({"matched": 1, "blocks": [block], "x-other": {}})
    async with holders(lambda request: answer) as (client, _, _):
        found = await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)
    assert found.blocks[0].replicas == (record_at("https://h9.example/kvsp/", container(0)),)


async def test_a_record_of_another_block_is_not_taken():
    record = record_at("https://h9.example/kvsp/", container(0), 1).to_dict()
    block = {"block_key": KEYS[0].hex(), "replicas": [record]}
    answer = JSONResponse({"matched": 1, "blocks": [block]})
    async with holders(lambda request: answer) as (client, _, _):
        with pytest.raises(BadAnswerError, match="another block"):
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)


async def test_the_compatibility_id_must_be_computed_from_the_descriptor():
    async with holders(lambda request: Response(DESCRIPTOR.jcs)) as (client, _, _):
        with pytest.raises(VerificationError, match="another Compatibility ID"):
            await client.get_descriptor(bytes(32))


async def test_a_credential_that_a_server_echoes_is_not_repeated():
    echo = problem(403, "kvsp-forbidden", detail="no: Bearer geheim-42")
    async with (
        holders(lambda request: echo) as (_, (uri,), _),
        Client(uri, token="geheim-42", http_loopback=True) as client,
    ):
        with pytest.raises(NotAuthorizedError, match="credential") as caught:
            await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)
    assert "geheim-42" not in f"{caught.value!r}{caught.value}"


async def test_not_even_one_that_is_echoed_in_escapes_of_json():
    escaped = "".join(f"\\u{ord(each):04x}" for each in "geheim-42")
    body = f'{{"type":"x#{escaped}","detail":"no: {escaped}","{escaped}":["{escaped}"]}}'
    echo = Response(body, 403, media_type=PROBLEM_MEDIA_TYPE)
    async with (
        holders(lambda request: echo) as (_, (uri,), _),
        Client(uri, token="geheim-42", http_loopback=True) as client,
    ):
        with pytest.raises(NotAuthorizedError) as caught:
            await client.get_descriptor(DESCRIPTOR.compat_id)
    assert "[credential]" in str(caught.value)
    assert "geheim-42" not in f"{caught.value!r} {caught.value} {caught.value.problem}"


async def test_without_a_token_to_show_nothing_is_sent_and_the_next_request_asks_for_it_again():
    sent = []

    def answer(request):
        sent.append(request.headers["authorization"])
        return Response(DESCRIPTOR.jcs)

    there = {}

    def token(base):
        if base not in there:
            raise FileError("token: others than its owner have access")
        return there[base]

    async with (
        holders(answer) as (_, (uri,), _),
        Client(uri, token=token, http_loopback=True) as client,
    ):
        with pytest.raises(NoTokenError, match="no token to show it: token: others") as caught:
            await client.get_descriptor(DESCRIPTOR.compat_id)
        assert caught.value.source == uri and sent == []
        record = record_at(uri, container(0))
        result = await client.get_blocks([[record]], Memory(), descriptor=DESCRIPTOR)
        assert result.missing[0].reason is Fault.NOT_AUTHORIZED and sent == []
        there[uri] = "t"
        assert await client.get_descriptor(DESCRIPTOR.compat_id) == DESCRIPTOR
        assert sent == ["Bearer t"]


# --- cancellation --------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.01, 0.02])
async def test_a_cancelled_retrieval_leaves_no_task_and_no_connection(delay):
    answers = [right, never, headers_only]
    async with holders(*answers) as (client, uris, _):
        work = asyncio.create_task(
            client.get_blocks(records(uris), Memory(), descriptor=DESCRIPTOR, deadline_s=30)
        )
        await asyncio.sleep(delay)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        assert not [task for task in asyncio.all_tasks() if "Retrieval" in repr(task)]
        assert not in_use(client)


async def test_a_generator_that_is_left_early_lets_go_of_its_connection():
    async with holders(right) as (client, (uri,), _):
        async with contextlib.aclosing(
            client.get(record_at(uri, container(0)), descriptor=DESCRIPTOR)
        ) as layers:
            assert (await anext(layers)).layer == 0
        assert not in_use(client)


async def test_a_lease_is_given_back_when_the_request_for_it_is_cancelled():
    granted, asked = asyncio.Event(), asyncio.Event()

    async def slow(request):
        if request.method == "POST":
            asked.set()
            await granted.wait()
            return _grant(201)
        return Response(status_code=204)

    async with holders(slow) as (client, (uri,), (fake,)):
        task = asyncio.create_task(
            client.lease(uri, SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS).__aenter__()
        )
        await asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        granted.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [request.method for request in fake.requests] == ["POST", "DELETE"]


def _grant(status, ttl_ms=60_000):
    grant = {"lease": LEASE, "ttl_ms": ttl_ms, "leased": [KEYS[0].hex()], "missing": []}
    return JSONResponse(grant, status)


async def test_a_lease_that_cannot_be_renewed_is_lost_and_says_so():
    def forgetful(request):
        if request.method == "PUT":
            return problem(404, "kvsp-unknown-resource")
        return _grant(201, 30) if request.method == "POST" else Response(status_code=204)

    async with holders(forgetful) as (client, (uri,), _):
        lease = client.lease(uri, SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS, ttl_ms=30)
        with pytest.raises(LeaseLostError):
            async with lease:
                await lease.lost.wait()


async def test_cancelling_at_every_await_leaves_no_lease_and_a_usable_client(tmp_path):
    async with world(tmp_path) as made:
        await made.fill(0)
        found = await made.records(1)

        async def use():
            async with made.client.lease(
                made.uris[0], SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[:1], ttl_ms=60_000
            ):
                await made.client.get_blocks(found, Memory(), descriptor=DESCRIPTOR)

        for steps in range(0, 60, 3):
            task = asyncio.create_task(use())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await made.client.delete(made.uris[0], block_of(0))
