"""The placement controller over HTTP, with an index and instances in memory."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvsp.controller.core.effects import Done, Key, KeyPage, Unreachable
from kvsp.controller.journal import Journal, JournalError
from kvsp.names.codes import InstanceState
from kvsp.names.uris import instance_id
from kvsp.records.estimates import Found
from tests.kvsp.controller.deployment import Deployment
from tests.kvsp.controller.support import (
    COMPAT,
    KEYS,
    SCOPE,
    SESSION,
    A,
    B,
    checkpoint,
    delta,
    replica,
    shard_map,
    status,
)
from tests.kvsp.support_http import running


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    made = Deployment(tmp_path)
    async with running(made.app):
        yield made


async def test_a_status_put_is_answered_with_the_state_the_pc_wants(
    deployment: Deployment,
) -> None:
    answer = await deployment.report()
    assert (answer.status, answer.json) == (200, {"state": "active"})
    await deployment.report("b", B)
    answer = await deployment.report(requested_state=InstanceState.SLEEPING)
    assert answer.json == {"state": "draining"}


async def test_only_the_instance_itself_reports_its_status(deployment: Deployment) -> None:
    assert (await deployment.report("b", A)).problem == "kvsp-forbidden"
    assert (await deployment.report("operator", A)).problem == "kvsp-forbidden"
    path = f"instances/{instance_id(B)}"
    answer = await deployment.client("a").request("PUT", path, json_body=status(A).to_dict())
    assert answer.problem == "kvsp-invalid-request"


async def test_instances_are_shown_with_the_pcs_state(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.pass_time(3000)
    for path in ("instances", f"instances/{instance_id(A)}"):
        answer = await deployment.client("operator").get(path)
        shown = answer.json["instances"][0] if path == "instances" else answer.json
        assert (shown["instance"], shown["state"]) == (A, "failed")
        assert (await deployment.client("a").get(path)).problem == "kvsp-forbidden"
    answer = await deployment.client("operator").get(f"instances/{instance_id(B)}")
    assert answer.problem == "kvsp-unknown-resource"


async def test_the_operator_has_an_instance_drain(deployment: Deployment) -> None:
    await deployment.report()
    path = f"instances/{instance_id(A)}/state"
    operator = deployment.client("operator")
    answer = await operator.request("PUT", path, json_body={"state": "draining"})
    assert answer.json == {"state": "draining"}
    assert await deployment.instances.wait_for("state") == {"state": "draining"}
    answer = await operator.request("PUT", path, json_body={"state": "sleeping"})
    assert answer.problem == "kvsp-invalid-transition"


async def test_a_checkpoint_is_durable_before_it_is_acknowledged(
    deployment: Deployment, tmp_path: Path
) -> None:
    await deployment.report()
    answer = await deployment.checkpoint()
    assert answer.json == {"session": SESSION, "epoch": 1, "output_offset": 3}
    stored = dict(deployment.journal.documents())[Key("session", SESSION)]
    assert stored["checkpoint"]["output_offset"] == 3
    shown = await deployment.client("operator").get(f"sessions/{SESSION}")
    assert shown.json == {
        "session": SESSION,
        "epoch": 1,
        "instance": A,
        "state": "running",
        "output_offset": 3,
    }
    shown = await deployment.client("operator").get(f"sessions/{SESSION}/checkpoint")
    assert shown.json == checkpoint().to_dict()
    assert (await deployment.client("a").get(f"sessions/{SESSION}")).problem == "kvsp-forbidden"


async def test_what_a_checkpoint_adds_is_a_patch_of_it(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.checkpoint()
    path, body = f"sessions/{SESSION}/checkpoint", delta(3, 9).to_dict()
    answer = await deployment.client("a").request("PATCH", path, json_body=body)
    assert answer.json == {"session": SESSION, "epoch": 1, "output_offset": 9}
    shown = await deployment.client("operator").get(path)
    assert shown.json == checkpoint(9).to_dict()
    refused = await deployment.client("operator").request("PATCH", path, json_body=body)
    assert refused.problem == "kvsp-forbidden"
    elsewhere = path.replace("6", "7", 1)
    other = await deployment.client("a").request("PATCH", elsewhere, json_body=body)
    assert other.problem == "kvsp-invalid-request"


async def test_a_failed_instances_session_is_resumed_and_its_old_epoch_rejected(
    deployment: Deployment,
) -> None:
    def accept(body: Any) -> Done:
        return Done({"session": SESSION, "epoch": body["epoch"], "output_offset": 3})

    deployment.instances.answers["resume"] = accept
    await deployment.report()
    await deployment.checkpoint()
    deployment.now += 1000
    await deployment.report("b", B)
    await deployment.pass_time(2000)
    body = await deployment.instances.wait_for(f"sessions/{SESSION}/resume")
    assert body == {"epoch": 2, "checkpoint": checkpoint().to_dict()}
    assert deployment.instances.sent[-1][1].startswith(B)
    late = await deployment.checkpoint(9)
    assert (late.status, late.problem, late.json["epoch"]) == (409, "kvsp-stale-epoch", 2)
    assert (await deployment.checkpoint(9, "b", epoch=2)).status == 200


async def test_a_session_is_ended_by_its_instance_or_the_operator(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.checkpoint()
    path = f"sessions/{SESSION}"
    assert (await deployment.client("b").request("DELETE", path)).problem == "kvsp-forbidden"
    assert (await deployment.client("a").request("DELETE", path)).status == 204
    again = await deployment.client("operator").request("DELETE", path)
    assert again.problem == "kvsp-unknown-resource"


async def test_a_request_is_placed_with_what_the_index_knows(deployment: Deployment) -> None:
    await deployment.report()
    deployment.instances.answers["prefetch"] = Done()
    found = Found([[replica(0)], [replica(1)]], layers=32, block_tokens=16)

    async def find(*_: Any) -> Found:
        return found

    deployment.shell.index.find = find  # type: ignore[method-assign]
    request = {
        "scope_id": SCOPE.hex(),
        "compat_id": COMPAT.hex(),
        "block_keys": [key.hex() for key in KEYS[:3]],
        "tokens": 48,
        "session": SESSION,
    }
    answer = await deployment.client("operator").request("POST", "place", json_body=request)
    directive = await deployment.instances.wait_for("prefetch")
    assert answer.json == {
        "instance": A,
        "cost_us": 561,
        "fetch_us": 180,
        "matched": 2,
        "epoch": 1,
        "directive": directive["directive"],
    }
    for name in ("router", "a"):  # no read access to the scope; not the role
        refused = await deployment.client(name).request("POST", "place", json_body=request)
        assert refused.problem == "kvsp-forbidden"


async def test_a_status_reaches_the_index_for_its_estimates(deployment: Deployment) -> None:
    await deployment.report()
    await asyncio.sleep(0)
    assert deployment.index.board.get(A, deployment.now) == status(A)


async def test_a_shard_map_moves_from_version_to_version(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.report("b", B)

    def prepared(body: Any) -> Done:
        if "commit" in body:
            return Done({"map": "m", "version": 2, "state": "committed"})
        return Done({"map": "m", "version": 2, "state": "prepared"})

    deployment.instances.answers["reshard"] = prepared
    operator = deployment.client("operator")
    first, second = shard_map(1, (64, A)), shard_map(2, (32, A), (64, B))
    assert (await operator.request("PUT", "maps/m", json_body=first.to_dict())).status == 201
    answer = await operator.request("PUT", "maps/m?deadline_ms=200", json_body=second.to_dict())
    assert answer.status == 202
    assert (await deployment.instances.wait_for("reshard", 4)) == {"map": "m", "commit": 2}
    assert (await deployment.client("b").get("maps/m")).json == second.to_dict()
    assert (await deployment.client("h1").get("maps/m")).problem == "kvsp-forbidden"
    assert (await operator.get("maps/other")).problem == "kvsp-unknown-resource"
    for bad in ("0", "x", "600001"):
        answer = await operator.request(
            "PUT", f"maps/m?deadline_ms={bad}", json_body=second.to_dict()
        )
        assert answer.problem == "kvsp-invalid-request"


async def test_a_controller_that_restarts_knows_everything_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    first = Deployment(tmp_path)
    async with running(first.app):
        await first.report()
        await first.checkpoint(9)
    second = Deployment(tmp_path)
    async with running(second.app):
        assert second.shell.core.sessions.recorded(SESSION) == checkpoint(9)
        assert (await second.checkpoint(5)).json["output_offset"] == 9


async def test_a_second_controller_on_the_same_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    with pytest.raises(JournalError, match="locked"):
        Journal(tmp_path / "journal.db")
    journal.close()


async def test_a_journal_that_fails_fails_closed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.report()

    def fail(_: Any) -> None:
        raise JournalError("disk full")

    monkeypatch.setattr(deployment.journal, "write", fail)
    assert (await deployment.checkpoint()).status == 503
    assert (await deployment.report()).status == 503
    assert (await deployment.client("operator").get(f"sessions/{SESSION}")).status == 503
    ready = await deployment.client("operator").get("/readyz")
    assert ready.status == 503
    assert (await deployment.client("operator").get("/healthz")).status == 200


async def test_an_instance_that_hangs_holds_up_no_other(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.report("b", B)
    deployment.instances.hanging.add(A)
    operator = deployment.client("operator")
    for uri in (A, B):
        path = f"instances/{instance_id(uri)}/state"
        await operator.request("PUT", path, json_body={"state": "draining"})
    await deployment.instances.wait_for("state", 2)
    assert {uri for _, uri, _ in deployment.instances.sent} == {A + "state", B + "state"}


async def test_the_numbers_are_shown_and_hold_no_token(deployment: Deployment) -> None:
    await deployment.report()
    await deployment.checkpoint()
    text = (await deployment.client("operator").get("/metrics")).body.decode()
    assert 'kvsp_placement_instances{state="active"} 1.0' in text
    assert "kvsp_placement_sessions 1.0" in text
    # a number alone, not the digits of another one
    assert not re.search(r"(?<![\d.])1001(?![\d.])", text)


async def test_cats_metrics_are_for_those_with_the_role(deployment: Deployment) -> None:
    await deployment.report()
    operator = deployment.client("operator")
    answer = await operator.get("cats/metrics")
    (shown_all,) = answer.json["instances"]
    assert shown_all["instance"] == A
    body = {"scope_id": SCOPE.hex(), "compat_id": COMPAT.hex(), "block_keys": [KEYS[0].hex()]}
    answer = await operator.request("POST", "cats/cache-state", json_body=body)
    (shown,) = answer.json["instances"]
    assert (shown["matched"], shown["entries"]) == (0, [])
    assert (await deployment.client("blind").get("cats/metrics")).json == {"instances": [shown_all]}
    for name in ("a", "router"):
        client = deployment.client(name)
        assert (await client.get("cats/metrics")).problem == "kvsp-forbidden"
        refused = await client.request("POST", "cats/cache-state", json_body=body)
        assert refused.problem == "kvsp-forbidden"


async def test_cache_keys_are_the_keys_of_a_scope_with_the_instances_that_hold_them(
    deployment: Deployment,
) -> None:
    await deployment.report()
    page = KeyPage([[replica(0), replica(0, A)], [replica(1, B)]], KEYS[1])
    asked: list[Any] = []

    async def list_keys(*values: Any) -> KeyPage | Unreachable:
        asked.append(values)
        return page if len(asked) == 1 else Unreachable("away")

    deployment.shell.index.list_keys = list_keys  # type: ignore[method-assign]
    path = f"cats/cache-keys?scope={SCOPE.hex()}&compat={COMPAT.hex()}"
    answer = await deployment.client("operator").get(f"{path}&after={KEYS[7].hex()}&limit=2")
    assert asked == [(SCOPE, COMPAT, KEYS[7], 2)]
    assert answer.json == {
        "entries": [
            {"block_key": KEYS[0].hex(), "size": 2_097_152, "instances": [A]},
            # B has not reported, so it is no instance a request could be steered to
            {"block_key": KEYS[1].hex(), "size": 2_097_152, "instances": []},
        ],
        "next": KEYS[1].hex(),
    }
    assert (await deployment.client("operator").get(path)).status == 503
    assert (await deployment.client("operator").get("cats/cache-keys")).status == 400


async def test_cache_keys_need_the_role_and_the_right_to_read_the_scope(
    deployment: Deployment,
) -> None:
    path = f"cats/cache-keys?scope={SCOPE.hex()}&compat={COMPAT.hex()}"
    for name in ("a", "router", "h1", "blind"):
        assert (await deployment.client(name).get(path)).problem == "kvsp-forbidden"
    assert (await deployment.client("operator").get(path)).json == {"entries": [], "next": None}


async def test_a_request_that_is_cut_off_at_any_moment_leaves_the_controller_consistent(
    deployment: Deployment,
) -> None:
    await deployment.report()
    for turns in range(12):
        offset = turns + 1
        task = asyncio.create_task(deployment.checkpoint(offset))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        again = await deployment.checkpoint(offset)
        assert again.json["output_offset"] == offset
        stored = dict(deployment.journal.documents())[Key("session", SESSION)]
        assert stored["checkpoint"]["output_offset"] == offset


@pytest.mark.parametrize("damage", ["garbage", "cut", "folder", "version"])
def test_a_damaged_journal_is_a_clear_error_and_not_an_empty_one(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.write({Key("session", f"{number}"): b"{}" * 2000 for number in range(20)})
    journal.close()
    if damage == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:20_000])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match=str(path)):
        list(Journal(path).documents())
