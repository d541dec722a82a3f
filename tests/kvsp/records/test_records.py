"""KVSP "Records": what is read, what is refused and where, and what is written."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.names.codes import DecodeErrorName, InstanceState
from kvsp.names.errors import DecodeError
from kvsp.records import records, sharding
from kvsp.records.members import Record
from kvsp.records.records import (
    LookupResponse,
    PrefetchDirective,
    ReplicaRecord,
    SessionCheckpoint,
    covers,
    replica_digest,
)
from kvsp.records.sharding import ReshardAbort, ReshardCommit, ReshardPlan, ShardMap, parse_reshard
from tests.kvsp.records.samples import CHECKPOINT, H1, KEY, REPLICA, SAMPLES, UUID
from tests.kvsp.support_vectors import geometry, name_of

CLASSES = list(SAMPLES)


def places(tree: Any, pointer: str = "") -> Iterator[str]:
    """The JSON pointers of everything below a tree."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in items:
            yield f"{pointer}/{name}"
            yield from places(value, f"{pointer}/{name}")


def changed(tree: Any, pointer: str, value: Any) -> Any:
    """A copy of a tree with another value at `pointer`, or without it for `...`."""
    tree = copy.deepcopy(tree)
    *way, last = pointer.split("/")[1:]
    below = tree
    for name in way:
        below = below[int(name) if isinstance(below, list) else name]
    key = int(last) if isinstance(below, list) else last
    if value is ...:
        del below[key]
    else:
        below[key] = value
    return tree


def refusal(cls: type[Record], tree: Any, **settings: Any) -> tuple[str, str]:
    with pytest.raises(DecodeError) as caught:
        cls.from_json(json.dumps(tree), **settings)
    return caught.value.name, caught.value.pointer


def test_every_record_has_a_sample() -> None:
    found = {
        value
        for module in (records, sharding)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Record) and value is not Record
    }
    assert found == set(SAMPLES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_record_is_written_as_it_was_read(cls: type[Record]) -> None:
    record = cls.from_json(json.dumps(SAMPLES[cls] | {"unknown": {"x": [1]}}))
    assert record.to_dict() == SAMPLES[cls]
    text = record.to_json()
    assert text == json.dumps(SAMPLES[cls], sort_keys=True, separators=(",", ":")).encode()
    assert cls.from_json(text) == record
    assert cls.from_json(SAMPLES[cls]) == record


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_wrong_type_is_found_where_it_is(cls: type[Record]) -> None:
    for pointer in places(SAMPLES[cls]):
        # what is in these is judged by who uses it, each by itself
        if any(free in pointer for free in ("params", "/records/", "/results/")):
            continue
        for wrong in (True, None, {}, "\u2603", 1.5):
            if pointer.endswith("deterministic") and wrong is True:
                continue
            try:
                cls.from_json(json.dumps(changed(SAMPLES[cls], pointer, wrong)))
            except DecodeError as error:
                # an array of two integers is judged as one
                assert pointer.startswith(error.pointer) or error.pointer.startswith(pointer)
            else:
                assert not isinstance(wrong, bool | dict)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_member_that_is_missing_is_named(cls: type[Record]) -> None:
    optional = {
        "residency", "layer_digests", "read_mbit_per_s", "targets", "links", "requested_state",
        "sessions", "request_ref", "layer_order",
    }  # fmt: skip
    for name in SAMPLES[cls]:
        tree = changed(SAMPLES[cls], f"/{name}", ...)
        if name in optional and cls is not records.StoredBlock:
            cls.from_json(json.dumps(tree))
        else:
            assert refusal(cls, tree) == ("missing-member", f"/{name}")


SCALARS = st.none() | st.booleans() | st.integers(-2, 2**53 - 1) | st.text(max_size=4)
SCALARS |= st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [KEY, H1, UUID, 1e300]
)
TREES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=4), SCALARS)


@given(st.data(), TREES)
def test_no_value_in_any_place_crashes_a_record(data: st.DataObject, value: Any) -> None:
    cls = data.draw(st.sampled_from(CLASSES))
    pointer = data.draw(st.sampled_from(list(places(SAMPLES[cls]))))
    small = geometry(layers=2, kv_heads=2, head_dim=2, kv_dtype="fp16", block_tokens=2)
    for settings in ({}, {"descriptor": small, "http_loopback": True}):
        try:
            record = cls.from_json(json.dumps(changed(SAMPLES[cls], pointer, value)), **settings)
        except DecodeError as error:
            assert error.name in DecodeErrorName
        else:
            assert cls.from_json(record.to_json(), **settings) == record


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_no_octets_crash_a_record(data: bytes | str) -> None:
    names = ("not-i-json", "duplicate-member", "not-an-object", "missing-member")
    assert name_of(ReplicaRecord.from_json, data) in names


def test_the_first_fault_in_the_order_of_the_specification_is_named() -> None:
    faults: list[tuple[str, Any, str, str]] = [
        ("digest", "sha-256:" + "00" * 32, "digest-mismatch", "/digest"),
        ("size", 65, "section-length", "/size"),
        ("residency", [{"tier": "host", "layers": [1, 0]}], "layer-range", "/residency/0/layers"),
        ("ttl_ms", 0, "out-of-range", "/ttl_ms"),
        ("holder", "https://h1.example", "bad-uri", "/holder"),
        ("scope_id", "AB" * 16, "bad-hex", "/scope_id"),
        ("codec", "1", "wrong-type", "/codec"),
        ("block_key", ..., "missing-member", "/block_key"),
    ]
    descriptor = geometry(layers=2, kv_heads=2, head_dim=2, kv_dtype="fp16", block_tokens=2)
    tree = REPLICA
    for name, value, error, pointer in faults:
        tree = changed(tree, f"/{name}", value)
        assert refusal(ReplicaRecord, tree, descriptor=descriptor) == (error, pointer)


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_a_record_is_an_object(text: str) -> None:
    assert name_of(ReplicaRecord.from_json, text) == "not-an-object"
    assert name_of(parse_reshard, text) == "not-an-object"


def test_an_empty_residency_is_refused_and_an_absent_one_is_all_layers() -> None:
    tree = changed(REPLICA, "/residency", [])
    assert refusal(ReplicaRecord, tree) == ("out-of-range", "/residency")
    record = ReplicaRecord.from_json(changed(REPLICA, "/residency", ...))
    assert record.held_layers(2) == [range(2)]


def test_without_a_descriptor_layers_are_judged_by_the_number_of_digests() -> None:
    assert refusal(ReplicaRecord, changed(REPLICA, "/residency/1/layers", [1, 2])) == (
        "layer-range",
        "/residency/1/layers",
    )
    assert refusal(ReplicaRecord, changed(REPLICA, "/layer_digests", []))[0] == "layer-range"


def test_replicas_cover_a_block_when_together_they_hold_every_layer() -> None:
    def part(*ranges: list[int]) -> ReplicaRecord:
        tree = changed(REPLICA, "/layer_digests", ...)
        tree["residency"] = [{"tier": "host", "layers": pair} for pair in ranges]
        return ReplicaRecord.from_json(tree)

    assert covers([part([2, 3]), part([0, 1])], 4)
    assert covers([part([0, 1], [3, 3]), part([1, 2])], 4)
    assert not covers([part([0, 1]), part([3, 3])], 4)
    assert not covers([part([1, 3])], 4) and not covers([part([0, 2])], 4) and not covers([], 4)
    assert part([1, 2]).holds(range(1, 3), 4) and not part([1, 2]).holds(range(1, 4), 4)


def test_a_number_with_zero_fraction_is_an_integer_and_a_boolean_is_not() -> None:
    assert records.TtlAnswer.from_json('{"ttl_ms":32.0}').ttl_ms == 32
    for wrong in ("true", '"1"', "1.5", "null"):
        assert name_of(records.TtlAnswer.from_json, f'{{"ttl_ms":{wrong}}}') == "wrong-type"


def test_http_is_for_loopback_and_only_when_allowed() -> None:
    tree = changed(REPLICA, "/holder", "http://127.0.0.1:8001/kvsp/")
    assert refusal(ReplicaRecord, tree) == ("bad-uri", "/holder")
    assert ReplicaRecord.from_json(tree, http_loopback=True).holder == tree["holder"]
    tree = changed(REPLICA, "/holder", "http://h1.example/kvsp/")
    assert refusal(ReplicaRecord, tree, http_loopback=True) == ("bad-uri", "/holder")


def test_a_wrong_uri_is_repeated_without_credentials_and_not_at_any_length() -> None:
    for uri, shown in (
        ("https://h1.example", "/holder: 'https://h1.example': a base URI ends in /"),
        ("h1.example/", "/holder: 'h1.example/': a base URI starts with https://"),
        ("https://me:secret@h1.example/", "/holder: 'https://h1.example/': "),
        ("me:secret@h1.example/", "/holder: 'h1.example/': "),
        ("https://h1.example/?secret", "/holder: 'https://h1.example/?…': "),
        ("x\n" * 5000, r"/holder: 'x\nx\n"),
    ):
        with pytest.raises(DecodeError) as caught:
            ReplicaRecord.from_json(changed(REPLICA, "/holder", uri))
        assert caught.value.name == "bad-uri" and caught.value.detail.startswith(shown)
        assert "secret" not in caught.value.detail and len(caught.value.detail) < 800


def test_a_state_that_is_none_of_the_four_is_refused() -> None:
    assert refusal(records.StateRequest, {"state": "busy"}) == ("out-of-range", "/state")
    sample = changed(SAMPLES[records.InstanceStatus], "/requested_state", "sleeping")
    status = records.InstanceStatus.from_json(sample)
    assert status.requested_state is InstanceState.SLEEPING
    assert refusal(records.InstanceStatus, changed(sample, "/kv_utilization", 1.01)) == (
        "out-of-range",
        "/kv_utilization",
    )


def test_a_lookup_answer_has_exactly_the_matched_blocks() -> None:
    tree = changed(SAMPLES[LookupResponse], "/matched", 2)
    assert refusal(LookupResponse, tree) == ("out-of-range", "/matched")
    tree = changed(SAMPLES[LookupResponse], "/blocks/0/replicas/0/digest", "sha-256:" + KEY)
    assert refusal(LookupResponse, tree) == ("digest-mismatch", "/blocks/0/replicas/0/digest")


def test_a_checkpoint_has_every_output_token_and_tells_none() -> None:
    assert refusal(SessionCheckpoint, CHECKPOINT | {"output_offset": 2}) == (
        "out-of-range",
        "/output_offset",
    )
    secret = 987654321
    for name in ("prompt_tail", "generated", "prompt_tokens"):
        tree = CHECKPOINT | {name: [1, secret, 3]}
        assert str(secret) not in repr(SessionCheckpoint.from_json(json.dumps(tree)))
        for bad in (-secret, secret * 1000, str(secret), True, secret + 0.5):
            with pytest.raises(DecodeError) as caught:
                SessionCheckpoint.from_json(json.dumps(CHECKPOINT | {name: [1, 2, bad]}))
            assert (caught.value.name, caught.value.pointer) == ("bad-token", f"/{name}/2")
            assert str(secret) not in str(caught.value)
    token = records.OutputToken.from_json(SAMPLES[records.OutputToken])
    assert "1296" not in repr(token)


def test_a_session_is_named_in_lower_case() -> None:
    tree = SAMPLES[records.OutputToken] | {"session": UUID.upper()}
    assert records.OutputToken.from_json(tree).session == UUID
    tree = SAMPLES[records.OutputToken] | {"session": UUID.replace("-", "")}
    assert refusal(records.OutputToken, tree) == ("bad-hex", "/session")


def test_layers_are_prefetched_in_ascending_order_by_default() -> None:
    sample = SAMPLES[PrefetchDirective]
    plain = PrefetchDirective.from_json(changed(sample, "/layer_order", ...))
    assert plain == PrefetchDirective.from_json(sample)
    assert refusal(PrefetchDirective, sample | {"layer_order": "descending"}) == (
        "out-of-range",
        "/layer_order",
    )
    for name in ("deadline_ms", "lease_ms"):
        for bad in (0, 600_001):
            assert refusal(PrefetchDirective, sample | {name: bad}) == ("out-of-range", f"/{name}")


def test_a_directives_source_is_a_holder_or_a_publication() -> None:
    sample = SAMPLES[PrefetchDirective]
    for source, name in (
        ("moqt://relay.example/", "bad-uri"),
        ("moqt://relay.example/#kvcs:AA", "truncated"),
        ("ftp://h1.example/", "bad-uri"),
    ):
        tree = changed(sample, "/blocks/0/sources/0", source)
        assert refusal(PrefetchDirective, tree) == (name, "/blocks/0/sources/0")


# --- shard maps ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "value", "at"),
    [
        ("/shards/0/tokens", [4, 8], "/shards/0/tokens"),  # does not start at 0
        ("/shards/1/tokens", [0, 11], "/shards/1/tokens"),  # overlaps
        ("/shards/1/tokens", [8, 11], "/shards/1/tokens"),  # leaves a gap
        ("/shards/1/tokens", [4, 4], "/shards/1/tokens"),  # is empty
        ("/block_keys", [KEY], "/block_keys"),
        ("/shards", [], "/shards"),
        ("/map", "a/b", "/map"),
        ("/map", "x" * 65, "/map"),
    ],
)
def test_the_ranges_of_a_map_follow_each_other_from_zero(pointer: str, value: Any, at: str) -> None:
    tree = changed(SAMPLES[ShardMap], pointer, value)
    assert refusal(ShardMap, tree) == ("out-of-range", at)


def test_a_range_ends_on_a_border_of_blocks_but_for_the_last() -> None:
    tree = changed(SAMPLES[ShardMap], "/shards/0/tokens", [0, 5])
    tree = changed(tree, "/shards/1/tokens", [5, 11])
    assert refusal(ShardMap, tree) == ("out-of-range", "/shards/1/tokens")


def test_a_reshard_request_is_a_plan_a_commit_or_an_abort() -> None:
    for cls in (ReshardPlan, ReshardCommit, ReshardAbort):
        assert type(parse_reshard(json.dumps(SAMPLES[cls]))) is cls
    both = SAMPLES[ReshardCommit] | {"abort": 5}
    assert name_of(parse_reshard, both) == "wrong-type"
    plan = SAMPLES[ReshardPlan]
    assert refusal(ReshardPlan, plan | {"to": 6}) == ("out-of-range", "/to")
    assert refusal(ReshardPlan, plan | {"retain": [[1, 4]]}) == ("out-of-range", "/retain/0")


def test_a_map_and_a_plan_name_the_complete_blocks_of_the_whole_context() -> None:
    keys = SAMPLES[ShardMap]["block_keys"]
    for wrong in (keys[:-1], [*keys, KEY]):
        tree = SAMPLES[ShardMap] | {"block_keys": wrong}
        assert refusal(ShardMap, tree) == ("out-of-range", "/block_keys")
    for record in (ShardMap, ReshardPlan):
        for member in ("compat_id", "scope_id", "block_tokens", "block_keys"):
            tree = {name: value for name, value in SAMPLES[record].items() if name != member}
            assert refusal(record, tree) == ("missing-member", f"/{member}")


def test_the_replica_digest_covers_the_layer_digests_in_their_order() -> None:
    first, second = bytes([2]) * 32, bytes([1]) * 32
    assert replica_digest([first, second]) == hashlib.sha256(first + second).digest()
    assert replica_digest([second, first]) != replica_digest([first, second])


def test_an_array_is_read_up_to_its_first_wrong_item() -> None:
    tree = CHECKPOINT | {"prompt_blocks": [KEY, "AB", 7], "generated": [1, -1, True]}
    # the wrong type that follows is not reached
    assert refusal(SessionCheckpoint, tree) == ("bad-hex", "/prompt_blocks/1")
    tree = SAMPLES[records.ReplicaList] | {"replicas": [REPLICA, {"holder": 1}, 7]}
    assert refusal(records.ReplicaList, tree) == ("missing-member", "/replicas/1/block_key")
