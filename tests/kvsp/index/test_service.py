"""KVSP "Publishing and Withdrawing Replicas" and "Lookup", as the Index Service keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvsp.index.answers import MissReason
from kvsp.index.service import IndexLimits, IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.status import StatusBoard
from kvsp.index.store import StoreLimits
from kvsp.names.identity import Descriptor
from kvsp.principals import Principal
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    Link,
    LookupResponse,
    ReplicaRecord,
    Residency,
)
from tests.kvsp.index.support import (
    CLIENT,
    DESCRIPTOR,
    H1,
    H2,
    HOLDER,
    II7,
    KEYS,
    NOW,
    OTHER_SCOPE,
    principal,
    publish,
    record,
    request,
    status,
)
from tests.paths import DATA

VECTORS = json.loads((DATA / "kvsp-vectors.json").read_text())


@pytest.fixture
def service() -> IndexService:
    made = IndexService(SqliteStore(":memory:", StoreLimits(linger_ms=60_000)))
    assert made.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    return made


def matched(service: IndexService, count: int = 5, now: int = NOW) -> int:
    answer = service.lookup(CLIENT, request(count), now)
    return LookupResponse.from_json(answer.to_json(), descriptor=DESCRIPTOR).matched


def refused(name: ProblemName) -> Any:
    return pytest.raises(Problem, match=name.value)


# --- publishing ----------------------------------------------------------------------


def test_the_is_must_verify_that_the_client_is_the_holder_named_in_the_record(
    service: IndexService,
) -> None:
    with refused(ProblemName.FORBIDDEN):
        publish(service, record(), principal(H2))
    assert publish(service, record()).created


def test_a_client_authorized_to_publish_on_behalf_of_the_holder_may(service: IndexService) -> None:
    agent = principal(II7, publishes_for=frozenset({H1}))
    assert publish(service, record(), agent).created


def test_the_is_must_verify_that_the_client_is_authorized_for_the_records_scope(
    service: IndexService,
) -> None:
    for who in (principal(H1, scope=OTHER_SCOPE), principal(H1, rights="read")):
        with refused(ProblemName.FORBIDDEN):
            publish(service, record(), who)
    assert matched(service) == 0


def test_the_body_cannot_name_another_scope_than_the_path(service: IndexService) -> None:
    made = record()
    tree = made.to_dict() | {"scope_id": OTHER_SCOPE.scope_id.hex()}
    with refused(ProblemName.INVALID_REQUEST):
        service.publish(HOLDER, made.block, made.replica_id, tree, NOW)


def test_the_is_caps_ttl_ms_at_its_maximum_and_says_what_it_granted(service: IndexService) -> None:
    assert publish(service, record(ttl_ms=9_999_999)).ttl_ms == 3_600_000
    assert matched(service, now=NOW + 3_599_999) == 1
    assert matched(service, now=NOW + 3_600_000) == 0


def test_a_ttl_of_a_replica_is_cut_to_an_hour_and_is_no_less_than_1_ms(
    service: IndexService,
) -> None:
    assert publish(service, record(ttl_ms=3_600_001)).ttl_ms == 3_600_000
    assert publish(service, record(ttl_ms=1)).ttl_ms == 1
    with refused(ProblemName.INVALID_REQUEST):
        publish(service, record(ttl_ms=0))


def test_a_refresh_is_idempotent_and_extends_the_record(service: IndexService) -> None:
    assert publish(service, record(ttl_ms=1000)) == (True, 1000)
    assert publish(service, record(ttl_ms=1000), now=NOW + 900) == (False, 1000)
    assert matched(service, now=NOW + 1800) == 1
    assert service.store.counts().records == 1


def test_a_record_is_published_after_its_descriptor(service: IndexService) -> None:
    bare = IndexService(SqliteStore(":memory:"))
    with refused(ProblemName.COMPAT_UNKNOWN):
        publish(bare, record())


def test_layer_digests_that_do_not_make_the_digest_are_refused(service: IndexService) -> None:
    with refused(ProblemName.DIGEST_MISMATCH):
        publish(service, record(digest=bytes(32)))


@pytest.mark.parametrize("case", VECTORS["replica_record"]["invalid"], ids=lambda c: c["id"])
def test_a_malformed_record_is_refused_with_its_name(case: dict[str, Any]) -> None:
    descriptor = Descriptor.parse(VECTORS["replica_record"]["descriptor"])
    valid = ReplicaRecord.from_json(VECTORS["replica_record"]["valid"][0]["record"])
    service = IndexService(SqliteStore(":memory:"))
    service.put_descriptor(descriptor.compat_id, descriptor.jcs)
    everything = Principal("all", uris=frozenset({H1}), scopes={"*": frozenset({"write"})})
    with pytest.raises(Problem) as caught:
        service.publish(everything, valid.block, valid.replica_id, case["record"], NOW)
    assert caught.value.members["error"] == case["error"]


def test_withdrawing_takes_one_record_and_repeats_are_harmless(service: IndexService) -> None:
    agent = principal(H1, H2)
    publish(service, record(), agent)
    publish(service, record(holder=H2), agent)
    service.withdraw(agent, record().block, record().replica_id, NOW)
    assert matched(service) == 1
    with refused(ProblemName.UNKNOWN_RESOURCE):
        service.withdraw(agent, record().block, record().replica_id, NOW)


def test_only_its_holder_withdraws_a_record(service: IndexService) -> None:
    publish(service, record())
    with refused(ProblemName.FORBIDDEN):
        service.withdraw(principal(H2), record().block, record().replica_id, NOW)
    with refused(ProblemName.FORBIDDEN):
        service.withdraw_holder(principal(H2), H1)
    assert matched(service) == 1


def test_a_holder_withdraws_everything_at_once(service: IndexService) -> None:
    for number in range(3):
        publish(service, record(number))
    publish(service, record(0, H2), principal(H2))
    assert service.withdraw_holder(HOLDER, H1) == 3
    assert matched(service) == 1
    assert service.withdraw_holder(HOLDER, H1) == 0


def test_a_holder_withdraws_only_in_scopes_it_may_write(service: IndexService) -> None:
    publish(service, record())
    assert service.withdraw_holder(principal(H1, rights="read"), H1) == 0
    assert service.withdraw_holder(principal(H1, scope=OTHER_SCOPE), H1) == 0
    assert matched(service) == 1


def test_an_index_that_starts_empty_is_filled_by_refreshes() -> None:
    service = IndexService(SqliteStore(":memory:"))
    service.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    assert publish(service, record()).created
    assert matched(service) == 1


# --- descriptors ---------------------------------------------------------------------


def test_the_is_computes_the_compatibility_id_from_the_descriptor(service: IndexService) -> None:
    with refused(ProblemName.COMPAT_MISMATCH):
        service.put_descriptor(bytes(32), DESCRIPTOR.jcs)
    assert not service.put_descriptor(DESCRIPTOR.compat_id, b" " + DESCRIPTOR.jcs)
    assert service.get_descriptor(DESCRIPTOR.compat_id) == DESCRIPTOR.jcs
    with refused(ProblemName.UNKNOWN_RESOURCE):
        service.get_descriptor(bytes(32))


# --- lookup --------------------------------------------------------------------------


def test_the_is_must_stop_at_the_first_key_without_a_replica(service: IndexService) -> None:
    for number in (0, 1, 3, 4):
        publish(service, record(number))
    answer = LookupResponse.from_json(service.lookup(CLIENT, request(), NOW).to_json())
    assert answer.matched == 2
    assert [block.block_key for block in answer.blocks] == KEYS[:2]


def test_a_lookup_that_misses_early_asks_the_store_for_one_batch_only() -> None:
    store = SqliteStore(":memory:")
    service = IndexService(store, limits=IndexLimits(lookup_batch=2))
    service.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    asked: list[int] = []
    get = store.get
    store.get = lambda s, c, keys, now: asked.append(len(keys)) or get(s, c, keys, now)  # type: ignore[method-assign,func-returns-value]
    for number in (0, 1, 2):
        publish(service, record(number))
    assert matched(service) == 3
    assert asked == [2, 2]


@pytest.mark.parametrize("hole", [0, 511, 512, 513, 900])
def test_the_is_must_stop_at_a_key_without_a_replica_also_beyond_one_batch(hole: int) -> None:
    service = IndexService(SqliteStore(":memory:"))
    assert service.limits.lookup_batch == 512
    service.put_descriptor(DESCRIPTOR.compat_id, DESCRIPTOR.jcs)
    keys = tuple(number.to_bytes(32) for number in range(1100))
    for number, key in enumerate(keys):
        if number != hole:
            publish(service, record(block_key=key))
    asked = replace(request(), block_keys=keys)
    assert service.lookup(CLIENT, asked, NOW).keys == keys[:hole]


def test_answers_carry_the_ttl_that_remains_and_every_member(service: IndexService) -> None:
    made = record(residency=(Residency("device", range(16)), Residency("host", range(16, 32), 4e5)))
    publish(service, made)
    answer = LookupResponse.from_json(service.lookup(CLIENT, request(1), NOW + 1000).to_json())
    assert answer.blocks[0].replicas == (replace(made, ttl_ms=599_000),)


def test_no_keys_match_nothing(service: IndexService) -> None:
    assert matched(service, 0) == 0


def test_a_key_matches_when_its_replicas_together_hold_every_layer(service: IndexService) -> None:
    both = principal(H1, H2)
    publish(service, record(residency=(Residency("device", range(16)),)), both)
    assert matched(service) == 0
    publish(service, record(holder=H2, residency=(Residency("host", range(16, 32)),)), both)
    assert matched(service) == 1


def test_replicas_are_ordered_by_holder_then_codec_and_at_most_64(service: IndexService) -> None:
    holders = [f"https://h{number:03}.example/kvsp/" for number in range(70)]
    for number, holder in enumerate(reversed(holders)):
        part = (Residency("device", range(16)),) if number % 2 else None
        publish(service, record(holder=holder, residency=part), principal(holder))
    publish(service, record(holder=holders[0], codec=0xF001), principal(holders[0]))
    answer = LookupResponse.from_json(service.lookup(CLIENT, request(1), NOW).to_json())
    found = [(r.holder, r.codec) for r in answer.blocks[0].replicas]
    assert len(found) == 64
    assert all(first < second for first, second in pairwise(found))
    assert sum(r.residency is None for r in answer.blocks[0].replicas) == 36  # all whole ones


def test_keys_of_another_compatibility_id_do_not_match(service: IndexService) -> None:
    publish(service, record())
    asked = replace(request(), compat_id=bytes(32))
    assert service.lookup(CLIENT, asked, NOW).keys == ()


def test_the_is_must_not_return_replicas_of_a_scope_the_client_may_not_read(
    service: IndexService,
) -> None:
    publish(service, record())
    stranger = principal(H1, scope=OTHER_SCOPE)
    with refused(ProblemName.FORBIDDEN):
        service.lookup(stranger, request(), NOW)
    with refused(ProblemName.FORBIDDEN):
        service.replicas(stranger, record().block, NOW)
    with refused(ProblemName.FORBIDDEN):
        service.replica(stranger, record().block, record().replica_id, NOW)
    own = replace(request(), scope_id=OTHER_SCOPE.scope_id)
    assert service.lookup(stranger, own, NOW).keys == ()


def test_the_same_scope_is_shared_between_its_principals(service: IndexService) -> None:
    publish(service, record())
    assert matched(service) == 1
    assert json.loads(service.replicas(CLIENT, record().block, NOW))["replicas"] == [
        record().to_dict()
    ]
    assert json.loads(service.replica(CLIENT, record().block, record().replica_id, NOW)) == (
        record().to_dict()
    )


def test_a_lookup_over_its_limits_is_refused_and_not_cut(service: IndexService) -> None:
    small = IndexService(service.store, limits=IndexLimits(block_keys=2, targets=1))
    with pytest.raises(Problem) as caught:
        small.lookup(CLIENT, request(3), NOW)
    assert (caught.value.name, caught.value.members["limit"]) == (ProblemName.TOO_LARGE, 2)
    with refused(ProblemName.TOO_LARGE):
        small.lookup(CLIENT, request(1, H1, H2), NOW)
    few = IndexService(service.store, limits=IndexLimits(estimates=3))
    with refused(ProblemName.TOO_LARGE):
        few.lookup(CLIENT, request(2, H1, H2), NOW)
    publish(service, record())
    short = IndexService(service.store, limits=IndexLimits(answer_octets=1000))
    with refused(ProblemName.TOO_LARGE):
        short.lookup(CLIENT, request(1), NOW)


# --- estimates -----------------------------------------------------------------------


def estimates(service: IndexService, now: int = NOW) -> Any:
    answer = service.lookup(CLIENT, request(2, II7, H2), now)
    return json.loads(answer.to_json())["targets"]


def test_targets_get_the_estimates_of_the_draft_in_the_order_asked(service: IndexService) -> None:
    for number in range(2):
        publish(service, record(number))
    service.board.put(status(Link(H1, 200_000, 12)), NOW)
    assert estimates(service) == [
        {"target": II7, "fetch_us": 180, "recompute_us": 762},
        {"target": H2, "fetch_us": None, "recompute_us": None},
    ]
    assert estimates(service, NOW + 3000)[0]["fetch_us"] is None  # the status expired


def test_a_residency_split_over_tiers_is_read_at_the_speed_of_each(service: IndexService) -> None:
    split = (Residency("device", range(16)), Residency("host", range(16, 32), 100_000))
    publish(service, record(residency=split))
    service.board.put(status(Link(H1, 200_000, 12)), NOW)
    assert estimates(service)[0]["fetch_us"] == 138


def test_only_a_placement_controller_passes_on_status(service: IndexService) -> None:
    with refused(ProblemName.FORBIDDEN):
        service.note_status(HOLDER, status(), NOW)
    service.note_status(principal(roles=frozenset({"placement"})), status(), NOW)
    assert service.board.get(II7, NOW) == status()


def test_a_status_of_a_lower_epoch_does_not_replace_a_newer_one() -> None:
    board = StatusBoard(size=2)
    board.put(status(epoch=2), NOW)
    board.put(status(epoch=1), NOW)
    assert board.get(II7, NOW) == status(epoch=2)
    for holder in (H1, H2):
        board.put(status(instance=holder), NOW)
    assert len(board) == 2


def test_a_reporting_instance_without_replicas_is_seen(service: IndexService) -> None:
    service.board.put(status(), NOW)
    service.board.put(status(instance=H1), NOW)
    publish(service, record())
    assert service.instances_without_replicas(NOW) == [II7]
    assert service.instances_without_replicas(NOW + 3000) == []


# --- explanations --------------------------------------------------------------------


def reason(service: IndexService, who: Principal = CLIENT, now: int = NOW, **changes: Any) -> Any:
    explained = service.explain(who, replace(request(2), **changes), now)
    assert (explained.to_dict()["detail"] is None) == (explained.reason is None)
    return explained.matched, explained.reason


def test_every_miss_has_its_reason(service: IndexService) -> None:
    assert reason(service) == (0, MissReason.UNKNOWN_KEY)
    publish(service, record(0, ttl_ms=1000))
    assert reason(service) == (1, MissReason.UNKNOWN_KEY)
    assert reason(service, compat_id=bytes(32)) == (0, MissReason.OTHER_COMPAT)
    assert reason(service, now=NOW + 1000) == (0, MissReason.EXPIRED)
    assert reason(service, principal(scope=OTHER_SCOPE)) == (0, MissReason.UNAUTHORIZED)
    publish(service, record(1, residency=(Residency("device", range(5)),)))
    assert reason(service) == (1, MissReason.LAYERS_MISSING)
    publish(service, record(1))
    assert reason(service) == (2, None)
    service.board.put(status(instance=H1, ttl_ms=500), NOW)
    assert reason(service, now=NOW + 600) == (0, MissReason.HOLDER_DOWN)
