"""KVSP "Records" and "Placement Inputs": every record, identifier and estimate of the vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvsp.names import uris
from kvsp.names.identity import Descriptor
from kvsp.records.costs import assign_sources, fetch_us, recompute_us
from kvsp.records.records import Link, ReplicaRecord
from tests.kvsp.records.samples import H1, H2, TARGET, replica
from tests.kvsp.support_vectors import KVCS_VECTORS, VECTORS, by_id, name_of

REPLICAS = VECTORS["replica_record"]
DESCRIPTOR = Descriptor.parse(REPLICAS["descriptor"])
PLACEMENT = {case["id"]: case for case in VECTORS["placement"]["cases"]}


@pytest.mark.parametrize("vector", REPLICAS["valid"], ids=by_id)
def test_a_replica_record_is_read_and_named(vector: dict[str, Any]) -> None:
    text = json.dumps(vector["record"])
    record = ReplicaRecord.from_json(text, descriptor=DESCRIPTOR)
    known = {name: value for name, value in vector["record"].items() if name != "note"}
    assert json.loads(record.to_json()) == known
    assert ReplicaRecord.from_json(text) == record
    if "path" in vector:
        assert record.path == vector["path"]
        assert uris.block_path(record.block) == vector["block_path"]


@pytest.mark.parametrize("vector", REPLICAS["invalid"], ids=by_id)
def test_a_malformed_replica_record_has_one_error(vector: dict[str, Any]) -> None:
    text = json.dumps(vector["record"])
    assert name_of(ReplicaRecord.from_json, text, descriptor=DESCRIPTOR) == vector["error"]


@pytest.mark.parametrize("vector", VECTORS["resource_ids"]["vectors"], ids=lambda v: v["id"])
def test_identifiers_of_resources_are_digests_of_what_they_name(vector: dict[str, Any]) -> None:
    if vector["kind"] == "instance":
        assert uris.instance_id(vector["uri"]) == vector["id"]
    else:
        assert uris.replica_id(**vector["object"]) == vector["id"]
    assert uris.check_uid(vector["id"]) == vector["id"]


NAMESPACES = KVCS_VECTORS["moqt_namespace_member"]


@pytest.mark.parametrize("vector", NAMESPACES["valid"], ids=range(len(NAMESPACES["valid"])))
def test_a_moqt_namespace_text_holds_five_fields(vector: dict[str, Any]) -> None:
    fields = uris.namespace_fields(vector["text"])
    assert b"".join(bytes([len(f)]) + f for f in fields).hex() == vector["octets_hex"]
    uri = f"moqt://relay.example/#kvcs:{vector['text']}"
    assert uris.split_moqt_source(uri) == ("moqt://relay.example/", vector["text"])


@pytest.mark.parametrize("vector", NAMESPACES["invalid"], ids=range(len(NAMESPACES["invalid"])))
def test_a_malformed_moqt_namespace_text_has_one_error(vector: dict[str, Any]) -> None:
    assert name_of(uris.namespace_fields, vector["text"]) == vector["error"]
    record = moqt_record() | {"moqt_namespace": vector["text"]}
    assert name_of(ReplicaRecord.from_json, json.dumps(record)) == vector["error"]


def moqt_record() -> dict[str, Any]:
    fields = uris.namespace_fields(NAMESPACES["valid"][0]["text"])
    record: dict[str, Any] = REPLICAS["valid"][0]["record"] | {
        "holder": "moqt://relay.example/",
        "scope_id": fields.scope_id.hex(),
        "compat_id": fields.compat_id.hex(),
        "moqt_namespace": NAMESPACES["valid"][0]["text"],
    }
    return record


def test_a_moqt_holder_has_a_namespace_that_names_the_record() -> None:
    tree = moqt_record()
    record = ReplicaRecord.from_json(json.dumps(tree))
    assert json.loads(record.to_json()) == tree
    assert record.replica_id != uris.replica_id(record.holder, record.codec)
    without = {name: value for name, value in tree.items() if name != "moqt_namespace"}
    assert name_of(ReplicaRecord.from_json, without) == "missing-member"
    for other in ({"scope_id": "00" * 16}, {"compat_id": "00" * 32}, {"holder": TARGET}):
        assert name_of(ReplicaRecord.from_json, tree | other) == "bad-namespace"


# --- placement -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "one-source",
        "storage-tier-slower-than-link",
        "storage-tier-faster-than-link",
        "all-resident",
        "no-link-reported",
    ],
)
def test_fetching_takes_a_round_trip_and_the_octets_at_the_slowest_rate(name: str) -> None:
    case = PLACEMENT[name]
    record = replica(H1, case.get("block_octets", 2097152), case.get("residency"))
    source = case.get("source")
    links = [Link(H1, source["mbit_per_s"], source["rtt_us"])] if source else []
    blocks = [[record]] * case["blocks"]
    assert fetch_us(TARGET, blocks, links, case.get("layers", 32)) == case["fetch_us"]


def test_fetching_from_two_sources_takes_as_long_as_the_slower_one() -> None:
    case = PLACEMENT["two-sources-max"]
    links = [
        Link(holder, source["mbit_per_s"], source["rtt_us"])
        for holder, source in zip((H1, H2), case["sources"], strict=True)
    ]
    blocks = [
        [replica(holder, source["octets"])]
        for holder, source in zip((H1, H2), case["sources"], strict=True)
    ]
    assert fetch_us(TARGET, blocks, links, 32) == case["fetch_us"]


def test_recomputing_takes_the_tokens_at_the_rate_of_prefill() -> None:
    case = PLACEMENT["recompute"]
    assert recompute_us(case["tokens"], case["prefill_tokens_per_s"]) == case["recompute_us"]


def test_blocks_are_spread_over_equal_sources_in_prefix_order() -> None:
    case = PLACEMENT["spread-over-equal-sources"]
    links = {holder: Link(holder, 1000, 10) for holder in case["holders"]}
    # listed the other way round: the order of an answer does not matter
    block = [replica(holder, 1000) for holder in reversed(case["holders"])]
    assignment = assign_sources([block] * 3, links, 32)
    assert assignment is not None
    assert [record.holder for record in assignment] == case["assigned"]


def test_every_placement_case_of_the_vectors_is_tested_here() -> None:
    tested = {
        "one-source",
        "storage-tier-slower-than-link",
        "storage-tier-faster-than-link",
        "all-resident",
        "no-link-reported",
        "two-sources-max",
        "recompute",
        "spread-over-equal-sources",
    }
    assert set(PLACEMENT) == tested
