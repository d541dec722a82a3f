"""The instance over HTTP: routes, who may use them, CATS, and the stream of tokens."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager

import pytest

from kvsp.http.app import App
from kvsp.instance.app import InstanceService
from kvsp.instance.engines.toy import ToyEngine
from kvsp.names.codes import InstanceState
from kvsp.principals import Principal
from kvsp.records.records import OutputToken, Resume
from kvsp.records.release import FrontEnd
from tests.kvsp.inside import look_up_with
from tests.kvsp.instance.support import (
    BASE,
    ENGINE,
    OCTETS,
    SCOPE,
    SESSION,
    block_id,
    checkpoint,
    directive,
    keys,
    make_instance,
    plan,
    start_request,
    text,
    until,
)
from tests.kvsp.support_http import Client, Principals, running

BOTH = frozenset({"read", "write"})
PRINCIPALS = (
    Principal("pc", roles=frozenset({"placement"})),
    Principal("front", scopes={SCOPE.scope_id.hex(): BOTH}),
    Principal("other", scopes={"00" * 16: BOTH}),
    Principal("operator", roles=frozenset({"operator"})),
    Principal("cats", roles=frozenset({"cats"}), scopes={SCOPE.scope_id.hex(): BOTH}),
    Principal("blind", roles=frozenset({"cats"})),
)


WHERE = (SCOPE.scope_id.hex(), ENGINE.descriptor.compat_id.hex())


def asked():
    """A lookup of the keys of a prompt."""
    keys_of_prompt = [key.hex() for key in keys()]
    return {"scope_id": WHERE[0], "compat_id": WHERE[1], "block_keys": keys_of_prompt}


@asynccontextmanager
async def serving(**options):
    made = make_instance(**options)
    app = App([InstanceService(made.shell)], base_uri=BASE, authenticator=Principals(*PRINCIPALS))
    async with running(app):
        yield Client(app), made


async def loaded(client, made):
    answer = await client.as_("pc").request("POST", "prefetch", json_body=made.to_dict())
    assert answer.status == 202
    path = answer.headers["location"].removeprefix(BASE)
    for _ in range(10_000):
        if (answer := await client.as_("pc").get(path)).json["state"] != "pending":
            break
        await asyncio.sleep(0.001)
    return answer.json


# --- directives ----------------------------------------------------------------------


async def test_a_directive_is_accepted_with_its_location_and_can_be_read_and_cancelled():
    async with serving() as (client, _):
        made, pc = directive(keys()), client.as_("pc")
        answer = await pc.request("POST", "prefetch", json_body=made.to_dict())
        assert (answer.status, answer.headers["location"]) == (
            202,
            f"{BASE}prefetch/{made.directive}",
        )
        state = await loaded(client, made)
        assert state["state"] == "complete"
        assert state["loaded"] == [key.hex() for key in keys()]
        other = {**made.to_dict(), "lease_ms": 1}
        answer = await pc.request("POST", "prefetch", json_body=other)
        assert (answer.status, answer.problem) == (409, "kvsp-directive-conflict")
        path = f"prefetch/{made.directive}"
        assert (await pc.request("DELETE", path)).status == 204
        assert (await pc.get(path)).problem == "kvsp-unknown-resource"
        assert (await pc.request("DELETE", path)).status == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "prefetch", lambda: directive(keys()).to_dict()),
        ("GET", f"prefetch/{uuid.UUID(int=1)}", lambda: None),
        ("PUT", "state", lambda: {"state": "draining"}),
        ("POST", f"sessions/{SESSION}/resume", lambda: Resume(2, checkpoint(3)).to_dict()),
        ("POST", "reshard", lambda: plan().to_dict()),
        ("GET", "reshard/m", lambda: None),
        ("GET", "cats/metrics", lambda: None),
        ("POST", "cats/cache-state", lambda: asked()),
        ("GET", f"cats/cache-keys?scope={WHERE[0]}&compat={WHERE[1]}", lambda: None),
    ],
)
async def test_only_the_roles_of_an_operation_may_use_it(method, path, body):
    async with serving() as (client, _):
        answer = await client.as_("front").request(method, path, json_body=body())
        assert (answer.status, answer.problem) == (403, "kvsp-forbidden")
        answer = await client.request(method, path, json_body=body())
        assert answer.status == 401


# --- lifecycle -----------------------------------------------------------------------


async def test_the_state_is_set_and_shown_with_the_epoch():
    async with serving() as (client, instance):
        pc = client.as_("pc")
        answer = await pc.request("PUT", "state", json_body={"state": "active"})
        assert answer.json == {"state": "active", "epoch": 7}
        assert (await pc.get("state")).json == {"state": "active", "epoch": 7, "sessions": 0}
        answer = await pc.request("PUT", "state", json_body={"state": "sleeping"})
        assert (answer.status, answer.problem) == (409, "kvsp-invalid-transition")
        assert answer.json["state"] == "active"
        instance.placement.wanted = InstanceState.DRAINING  # as it asks for
        answer = await pc.request("PUT", "state", json_body={"state": "draining"})
        assert answer.json["state"] == "sleeping"
        answer = await pc.request("POST", "prefetch", json_body=directive(keys()).to_dict())
        assert (answer.status, answer.problem) == (409, "kvsp-not-active")


# --- sessions ------------------------------------------------------------------------


def lines(answer):
    return [OutputToken.from_json(line) for line in answer.body.splitlines()]


async def test_a_front_end_reads_each_token_as_one_json_object_per_line():
    async with serving() as (client, _):
        front = client.as_("front")
        request = start_request(12).to_dict()
        path = f"sessions/{SESSION}"
        answer = await front.request("PUT", path, json_body=request)
        assert (answer.status, answer.json["epoch"]) == (201, 1)
        assert (await front.request("PUT", path, json_body=request)).status == 200
        answer = await front.get(f"{path}/tokens")
        first = json.loads(answer.body.splitlines()[0])
        assert first == {"session": SESSION, "epoch": 1, "index": 0, "token": text(1)[0]}
        assert [token.token for token in lines(answer)] == text(12)
        later = lines(await front.get(f"{path}/tokens?from=9"))
        assert [token.index for token in later] == [9, 10, 11]
        answer = await front.get(f"{path}/tokens?from=-1")
        assert (answer.status, answer.json["error"]) == (400, "out-of-range")


class Breaking(ToyEngine):
    """An engine whose contexts fail in a place that a test names."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def context(self):
        context = super().context()

        def fail(*_):
            raise RuntimeError("out of memory at token 12345")

        setattr(context, self.place, fail)
        return context


@pytest.mark.parametrize("place", ["prefill", "next_token", "block"])
async def test_a_session_whose_engine_fails_ends_with_a_problem_at_once_and_the_instance_lives(
    place,
):
    async with serving(engine=Breaking(place)) as (client, instance):
        front, path = client.as_("front"), f"sessions/{SESSION}"
        request = start_request(12).to_dict()
        assert (await front.request("PUT", path, json_body=request)).status == 201
        # who reads already is let go, and who asks again is told
        assert (await front.get(f"{path}/tokens")).status in (200, 500)
        answer = await front.get(f"{path}/tokens")
        assert answer.status == 500
        assert "the engine failed" in answer.json["detail"] and b"12345" not in answer.body
        assert (await front.get("/healthz")).status == 200
        assert instance.agent.sessions.live == 0


async def test_a_prompt_the_model_cannot_read_is_refused_without_telling_the_token():
    async with serving() as (client, _):
        request = start_request(4, prompt=[1, 4_000_000_000]).to_dict()
        answer = await client.as_("front").request("PUT", f"sessions/{SESSION}", json_body=request)
        assert (answer.status, answer.json["error"]) == (400, "bad-token")
        assert b"4000000000" not in answer.body


async def test_a_session_is_its_scopes_only():
    async with serving() as (client, _):
        path, request = f"sessions/{SESSION}", start_request(4).to_dict()
        refused = await client.as_("other").request("PUT", path, json_body=request)
        assert refused.problem == "kvsp-forbidden"
        await client.as_("front").request("PUT", path, json_body=request)
        for method in ("GET", "DELETE"):
            answer = await client.as_("other").request(method, f"{path}/tokens")
            assert answer.problem == "kvsp-forbidden"
        assert (await client.as_("front").request("DELETE", f"{path}/tokens")).status == 204


async def test_a_front_end_sees_one_text_when_a_session_moves_under_a_new_epoch():
    """The old instance's late tokens are dropped, and what it sent already is not repeated."""
    async with serving() as (client, instance):
        front = FrontEnd(SESSION)
        delivered = []
        for index, token in enumerate(text(7)):
            delivered += front.receive(OutputToken(SESSION, 1, index, token))
        # after a gap: held back, and dropped for good by the higher epoch
        late = OutputToken(SESSION, 1, 9, 1)
        assert front.receive(OutputToken(SESSION, 1, 8, text(9)[8])) == []

        async def lookup(blocks):
            return []

        look_up_with(instance.shell.sessions, lookup)
        resume = Resume(2, checkpoint(5, count=16, prompt_tokens=None))
        instance.agent.pool.reserve(3 * OCTETS)
        for key, block in instance.source.blocks.items():
            instance.agent.pool.add(block_id(key), block, OCTETS)
        answer = await client.as_("pc").request(
            "POST", f"sessions/{SESSION}/resume", json_body=resume.to_dict()
        )
        assert answer.json == {"session": SESSION, "epoch": 2, "output_offset": 5}
        again = await client.as_("pc").request(
            "POST", f"sessions/{SESSION}/resume", json_body=resume.to_dict()
        )
        assert again.json == answer.json
        stale = await client.as_("pc").request(
            "POST", f"sessions/{SESSION}/resume", json_body=Resume(1, checkpoint(5)).to_dict()
        )
        assert (stale.status, stale.problem, stale.json["epoch"]) == (409, "kvsp-stale-epoch", 2)
        for token in lines(await client.as_("front").get(f"sessions/{SESSION}/tokens?from=5")):
            delivered += front.receive(token)
        assert front.receive(late) == []
        assert [token.index for token in delivered] == list(range(16))
        assert [token.token for token in delivered] == text(16)


async def test_a_resume_names_one_session():
    async with serving() as (client, _):
        path = f"sessions/{uuid.UUID(int=5)}/resume"
        body = Resume(2, checkpoint(3)).to_dict()
        answer = await client.as_("pc").request("POST", path, json_body=body)
        assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")


# --- shard maps ----------------------------------------------------------------------


async def test_plan_commit_and_abort_are_answered_in_the_form_of_the_draft():
    async with serving() as (client, _):
        pc = client.as_("pc")
        await loaded(client, directive(keys()[:1]))
        answer = await pc.request("POST", "reshard", json_body=plan(release=()).to_dict())
        assert answer.json == {"map": "m", "version": 2, "state": "prepared"}
        assert (await pc.get("reshard/m")).json["state"] == "prepared"
        answer = await pc.request("POST", "reshard", json_body={"map": "m", "commit": 3})
        assert (answer.status, answer.problem, answer.json["version"]) == (
            409,
            "kvsp-map-version",
            1,
        )
        for _ in range(2):
            answer = await pc.request("POST", "reshard", json_body={"map": "m", "commit": 2})
            assert answer.json == {"map": "m", "version": 2, "state": "committed"}
        answer = await pc.get("reshard/m")
        assert answer.json == {"map": "m", "version": 2, "state": "stable", "blocks": 2}


# --- CATS ----------------------------------------------------------------------------


def values(metrics):
    return {each["metric_type"]: each["value"] for each in metrics}


async def test_metrics_tell_what_is_cached_and_how_loaded_the_instance_is():
    async with serving(pool_blocks=6) as (client, _):
        await loaded(client, directive(keys()))
        answer = await client.as_("cats").get("cats/metrics")
        assert answer.json["instance"] == BASE
        shown = values(answer.json["metrics"])
        assert (shown["kv_cached_blocks"], shown["kv_cached_octets"]) == (3, 3 * OCTETS)
        assert (shown["kv_utilization"], shown["kv_running"], shown["kv_queue_length"]) == (
            0.5,
            0,
            0,
        )
        # no load: 10; no link: 0; half used: 5; 0.4 x 10 + 0.4 x 5 = 6
        scores = ("compute_norm", "communication_norm", "service_norm", "norm_fi")
        assert [shown[name] for name in scores] == [10, 0, 5, 6]
        await client.as_("pc").request("PUT", "state", json_body={"state": "draining"})
        shown = values((await client.as_("operator").get("cats/metrics")).json["metrics"])
        assert (shown["compute_norm"], shown["norm_fi"]) == (10, 0)


async def test_the_cache_state_lists_the_leading_keys_that_are_here():
    async with serving() as (client, _):
        await loaded(client, directive([keys()[0], keys()[2]]))
        body = {
            "scope_id": SCOPE.scope_id.hex(),
            "compat_id": ENGINE.descriptor.compat_id.hex(),
            "block_keys": [key.hex() for key in keys()],
        }
        answer = await client.as_("cats").request("POST", "cats/cache-state", json_body=body)
        # on the device: nothing to retrieve
        entry = {"block_key": keys()[0].hex(), "size": OCTETS, "retrieval_us": 0}
        assert (answer.json["matched"], answer.json["entries"]) == (1, [entry])
        shown = values(answer.json["metrics"])
        assert (shown["kv_matched_blocks"], shown["kv_matched_tokens"]) == (1, 4)
        refused = await client.as_("blind").request("POST", "cats/cache-state", json_body=body)
        assert refused.problem == "kvsp-forbidden"


async def test_the_set_of_keys_is_read_in_ascending_pages():
    async with serving() as (client, _):
        await loaded(client, directive(keys()))
        where = f"scope={SCOPE.scope_id.hex()}&compat={ENGINE.descriptor.compat_id.hex()}"
        answer = await client.as_("cats").get(f"cats/cache-keys?{where}&limit=2")
        pages = [entry["block_key"] for entry in answer.json["entries"]]
        assert len(pages) == 2
        assert answer.json["next"] == pages[-1]
        answer = await client.as_("cats").get(f"cats/cache-keys?{where}&after={pages[-1]}")
        assert answer.json["next"] is None
        pages += [entry["block_key"] for entry in answer.json["entries"]]
        assert pages == sorted(key.hex() for key in keys())
        for query in (where + "&limit=0", where + "&after=zz", "scope=1"):
            answer = await client.as_("cats").get(f"cats/cache-keys?{query}")
            assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")
        foreign = where.replace(SCOPE.scope_id.hex(), "ff" * 16)
        answer = await client.as_("cats").get(f"cats/cache-keys?{foreign}")
        assert answer.problem == "kvsp-forbidden"


async def test_a_server_that_is_told_to_end_completes_its_sessions_and_takes_no_more():
    async with serving() as (client, instance):
        service, front = client.app.services[0], client.as_("front")
        request = start_request(60).to_dict()
        await front.request("PUT", f"sessions/{SESSION}", json_body=request)
        await service.drain()
        assert instance.agent.sessions.get(SESSION).generated == text(60)
        # the controller answered "active", and was asked to let it sleep
        told = instance.placement.statuses[-1]
        assert told.state in ("draining", "sleeping")
        assert told.requested_state == "sleeping"
        path = f"sessions/{uuid.UUID(int=9)}"
        answer = await front.request("PUT", path, json_body=request)
        assert answer.problem == "kvsp-not-active"


# --- health and metrics --------------------------------------------------------------


async def test_a_controller_that_is_away_degrades_the_instance_and_does_not_end_it():
    async with serving(status_ttl_ms=300) as (client, instance):
        instance.placement.away = True
        instance.shell.reporter.hurry()
        await until(lambda: instance.shell.reporter.unavailable)
        assert (await client.get("/healthz")).status == 200
        answer = await client.get("/readyz")
        assert (answer.status, answer.json["status"]) == (200, "degraded")


async def test_metrics_show_bounds_and_what_fills_them():
    async with serving(pool_blocks=8) as (client, _):
        await loaded(client, directive([*keys(), bytes(32)]))
        shown = (await client.as_("operator").get("/metrics")).body.decode()
        for line in (
            f"kvsp_instance_pool_budget_octets {8.0 * OCTETS}",
            f"kvsp_instance_pool_octets {3.0 * OCTETS}",
            'kvsp_instance_directives_events_total{event="partial"} 1.0',
            'kvsp_instance_blocks_events_total{event="failed_kvsp-unknown-resource"} 1.0',
            'kvsp_instance_state{state="active"} 1.0',
        ):
            assert line in shown, line
