"""The obligations of the draft whose sentence is no other test's name.

The conformance table (`docs/kvsp-conformance.md`) names the test of every one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvsp.blocks.container import ContainerReader
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.instance.epochs import Epochs
from kvsp.names.codes import Codec, DecodeErrorName, InstanceState
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.records.cats import metrics
from kvsp.records.members import Record
from kvsp.records.problems import ProblemName
from kvsp.records.records import ReplicaRecord
from tests.kvsp.controller.support import B, Desk, refused, status
from tests.kvsp.holder import support as holding
from tests.kvsp.index import support as indexing
from tests.kvsp.instance import support as instances
from tests.kvsp.records.samples import REPLICA, SAMPLES
from tests.kvsp.support_roles import path_of, record, running_roles, store_descriptor
from tests.kvsp.support_vectors import SEED, geometry, name_of

# --- "Compatibility Descriptor and Compatibility ID" ---------------------------------


def test_all_parties_must_use_the_same_string_for_the_same_model() -> None:
    """Nothing is normalized: two spellings are two models, and never match by accident."""
    spellings = ("Model", "model", "model ", "mod\u00e9l", "mode\u0301l", "org/model")
    assert len({geometry(model=each).compat_id for each in spellings}) == len(spellings)


def test_adapters_must_be_absent_when_no_adapter_is_applied() -> None:
    assert name_of(Descriptor.parse, SEED | {"adapters": []}) == DecodeErrorName.EMPTY_ADAPTERS
    assert name_of(Descriptor.parse, SEED | {"adapters": None}) == DecodeErrorName.WRONG_TYPE
    assert b"adapters" not in Descriptor.parse(SEED).jcs


def test_a_descriptor_must_include_positional_parameters_run_with_non_default_values() -> None:
    """They are part of the identity: a cache made with others has another ID."""
    spelled = ("rope", "rope;base=500000", "rope-yarn;factor=4", "rope-yarn;factor=8")
    assert len({geometry(positional=each).compat_id for each in spelled}) == len(spelled)


def test_two_caches_must_not_be_substituted_unless_their_compatibility_ids_are_equal() -> None:
    service = IndexService(SqliteStore(":memory:"))
    service.put_descriptor(indexing.DESCRIPTOR.compat_id, indexing.DESCRIPTOR.jcs)
    indexing.publish(service, indexing.record())
    own = indexing.request(1)
    other = type(own)(own.scope_id, bytes(32), own.block_keys)
    found = [
        len(service.lookup(indexing.CLIENT, asked, indexing.NOW).keys) for asked in (own, other)
    ]
    assert found == [1, 0]


# --- "Scopes and Block Keys" ---------------------------------------------------------


async def test_caches_must_not_be_shared_across_scopes() -> None:
    """The same tokens have other keys; and even the same key is another resource."""
    tokens = range(8)
    mine, theirs = (
        block_keys(Scope(bytes([number]) * 32), holding.DESCRIPTOR, tokens) for number in (1, 2)
    )
    assert not set(mine) & set(theirs)
    world = holding.make_world()
    assert (await world.put(1)).status == 201
    same_key = holding.block_id(1, scope=holding.OTHER_SCOPE)
    answer = await world.client.as_("tenant").get(f"blocks/{same_key.path}")
    assert answer.problem == ProblemName.UNKNOWN_RESOURCE


# --- "Records" -----------------------------------------------------------------------


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda cls: cls.__name__)
def test_unknown_members_of_a_record_must_be_ignored(cls: type[Record]) -> None:
    sample = SAMPLES[cls]
    more = sample | {"x-later": {"deep": [None]}, "tomorrow": 1}
    assert cls.from_json(more) == cls.from_json(sample)
    assert cls.from_json(more).to_dict().keys() & {"x-later", "tomorrow"} == set()


@pytest.mark.parametrize("second", [[15, 31], [0, 0], [14, 15], [3, 4], [0, 31]])
def test_layer_ranges_of_a_residency_must_not_overlap(second: list[int]) -> None:
    residency = [{"tier": "device", "layers": [0, 15]}, {"tier": "host", "layers": second}]
    # without layer digests, whose number would bound the layers, too
    tree = {name: value for name, value in REPLICA.items() if name != "layer_digests"}
    tree |= {"residency": residency}
    assert name_of(ReplicaRecord.from_json, tree) == DecodeErrorName.LAYER_RANGE
    residency[1]["layers"] = [16, 31]
    assert len(ReplicaRecord.from_json(tree).residency or ()) == 2


# --- "Instance Status and Lifecycle" -------------------------------------------------


def test_the_epoch_of_an_instance_must_increase_every_time_it_restarts(tmp_path: Path) -> None:
    """Also when its clock moved backward in between."""
    epochs = [Epochs(tmp_path).next(now_ms=now) for now in (5000, 5000, 10, 0, 6000)]
    assert epochs == sorted(set(epochs))


def test_a_draining_instance_must_not_accept_new_sessions() -> None:
    agent = instances.make_instance().agent
    agent.set_state(InstanceState.DRAINING, 0)
    with refused(ProblemName.NOT_ACTIVE):
        agent.start_session(instances.SESSION, instances.start_request())
    with refused(ProblemName.NOT_ACTIVE):
        agent.accept_prefetch(instances.directive(instances.keys()), 0)


def test_any_message_of_a_failed_instance_carrying_the_old_epoch_must_be_rejected() -> None:
    desk = Desk()
    desk.status()
    desk.status(B)
    desk.checkpoint()
    desk.pass_time(4000, B)
    with refused(ProblemName.INSTANCE_FAILED):
        desk.status()
    with refused(ProblemName.STALE_EPOCH):
        desk.checkpoint(4)


# --- "Prefetch Directives" -----------------------------------------------------------


async def test_prefetch_must_not_block_execution_of_requests_already_admitted() -> None:
    """A source that never answers holds up a directive, and no token."""
    async with instances.running() as instance:
        instance.source.hanging = set(instances.keys())
        await instance.shell.prefetcher.accept(instances.directive(instances.keys()))
        instance.shell.sessions.start_session(instances.SESSION, instances.start_request())
        assert await instance.tokens() == instances.text(8)


# --- "Block Retrieval and Storage" ---------------------------------------------------


def test_clients_must_verify_the_layer_digests_of_the_returned_layers() -> None:
    made = holding.container(1)
    digests = list(made.layer_digests())
    octets = bytearray(holding.octets(made))
    octets[-1] ^= 1
    forged = hashlib.sha256(octets).digest()  # a Repr-Digest that fits the altered octets
    reader = ContainerReader(
        holding.DESCRIPTOR, repr_digest=forged, layer_digests=digests, codec=Codec.RAW
    )
    given = [event.layer for event in reader.feed(bytes(octets)) if hasattr(event, "layer")]
    assert given == [0, 1, 2]  # the altered layer is not given out
    with pytest.raises(DecodeError) as caught:
        reader.close()
    assert caught.value.name == DecodeErrorName.DIGEST_MISMATCH


# --- CATS requirements ---------------------------------------------------------------

FRAMEWORK = {"metric_type", "level", "format", "length", "unit", "source", "statistics", "value"}


def test_cache_state_metrics_must_be_expressible_in_the_cats_metric_framework() -> None:
    shown = metrics(status(), cached=(3, 4096))
    for metric in shown:
        assert metric.keys() - {"format_std"} == FRAMEWORK
        assert metric["level"] in ("L0", "L1", "L2")
        assert (metric["format"] == "float") == ("format_std" in metric)
        if metric["level"] != "L0":
            assert metric["value"] in range(11)
    # cache state stands beside computing and communication in one list
    assert {"kv_cached_octets", "compute_norm", "communication_norm", "norm_fi"} <= {
        metric["metric_type"] for metric in shown
    }


async def test_exposure_of_cache_metrics_must_be_restricted_to_authorized_cats_components(
    tmp_path: Path,
) -> None:
    scope, compat = holding.SCOPE.hex(), holding.DESCRIPTOR.compat_id.hex()
    body = {"scope_id": scope, "compat_id": compat, "block_keys": []}
    async with running_roles(tmp_path) as roles:
        for name in roles.tokens:
            client = roles.client(name)
            for answer in (
                await client.get("cats/metrics"),
                await client.request("POST", "cats/cache-state", json_body=body),
                await client.get(f"cats/cache-keys?scope={scope}&compat={compat}"),
            ):
                assert (answer.status == 200) == (name == "operator")


async def test_an_entry_that_is_evicted_is_gone_from_lookups_and_from_cats_metrics_alike(
    tmp_path: Path,
) -> None:
    advertised, scope, compat = record(), holding.SCOPE.hex(), record()["compat_id"]
    keys = {"scope_id": scope, "compat_id": compat, "block_keys": [advertised["block_key"]]}
    path = path_of(advertised)

    async with running_roles(tmp_path) as roles:
        owner, operator = roles.client("owner"), roles.client("operator")

        async def seen() -> tuple[int, list[str]]:
            """Blocks that a lookup matches, and keys that CATS components see."""
            found = (await operator.request("POST", "lookup", json_body=keys)).json
            shown = await operator.get(f"cats/cache-keys?scope={scope}&compat={compat}")
            return found["matched"], [entry["block_key"] for entry in shown.json["entries"]]

        assert await seen() == (0, [])
        assert (await store_descriptor(owner)).status == 201
        assert (await owner.request("PUT", path, json_body=advertised)).status == 201
        assert await seen() == (1, [advertised["block_key"]])
        assert (await owner.request("DELETE", path)).status == 204
        assert await seen() == (0, [])
