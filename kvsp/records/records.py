"""The JSON objects of KVSP: records, requests and answers (KVSP "Records" and section 6).

Identifiers and digests are raw octets here and hexadecimal in JSON. Layers are a `range`
here and an inclusive pair in JSON; token ranges are half-open in both. A member that is
absent is None here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from kvsp.names import uris
from kvsp.names.codes import (
    MAX_CODEC,
    MAX_DIRECTIVE_MS,
    MAX_EPOCH,
    MAX_GEOMETRY,
    MAX_TTL_MS,
    Codec,
    DecodeErrorName,
    DirectiveState,
    InstanceState,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.members import (
    BASE_URI,
    BOOLEAN,
    DIGEST,
    HEX16,
    HEX32,
    HOLDER_URI,
    JSON_OBJECT,
    LAYERS,
    SOURCE_URI,
    TEXT,
    TOKEN_ID,
    TOKEN_IDS,
    UUID,
    Reading,
    Record,
    array,
    integer,
    nullable,
    number,
    one_of,
    record,
    string,
)

_COUNT: Final = integer()
_EPOCH: Final = integer(0, MAX_EPOCH)
_TTL: Final = integer(1, MAX_TTL_MS)
_DEADLINE: Final = integer(1, MAX_DIRECTIVE_MS)
_CODEC: Final = integer(1, MAX_CODEC)
_RATE: Final = number()
_KEYS: Final = array(HEX32)
_MAP: Final = string(r"[A-Za-z0-9._-]{1,64}")


# --- replicas ------------------------------------------------------------------------


def replica_digest(layer_digests: Iterable[bytes]) -> bytes:
    """SHA-256 of the layer digests of all layers, layer 0 first; 32 octets."""
    return hashlib.sha256(b"".join(layer_digests)).digest()


@dataclass(frozen=True, slots=True)
class Residency(Record):
    """Which layers of a replica reside in which tier."""

    tier: Annotated[str, string(r".{1,64}")]
    layers: Annotated[range, LAYERS]
    read_mbit_per_s: Annotated[float | None, _RATE] = None


@dataclass(frozen=True, slots=True)
class ReplicaRecord(Record):
    """A Replica Record (KVSP "Records"): one copy of a block, at a holder, in a codec.

    Checked as a whole: `moqt_namespace` is there exactly for a `moqt` holder and names the
    record's scope and compatibility; residency is not empty, ascending and disjoint; and
    with a descriptor the layers, the number of layer digests and the `size` under codec
    raw. `digest` is that of `layer_digests`.
    """

    block_key: Annotated[bytes, HEX32]
    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    holder: Annotated[str, HOLDER_URI]
    codec: Annotated[int, _CODEC]
    size: Annotated[int, integer(1)]
    digest: Annotated[bytes, DIGEST]
    ttl_ms: Annotated[int, _TTL]
    layer_digests: Annotated[tuple[bytes, ...] | None, _KEYS] = None
    residency: Annotated[tuple[Residency, ...] | None, array(record(Residency), least=1)] = None
    moqt_namespace: Annotated[str | None, TEXT] = None
    position: Annotated[int | None, integer(0)] = None
    """Ours: blocks before it in its prompt, as far as the holder knows."""

    REQUIRED_WHEN: ClassVar = {
        "moqt_namespace": lambda tree: (
            isinstance(holder := tree.get("holder"), str) and uris.is_moqt(holder)
        )
    }

    @property
    def block(self) -> BlockId:
        return BlockId(self.compat_id, self.scope_id, self.block_key)

    @property
    def replica_id(self) -> str:
        """The last part of the record's path at an index service."""
        return uris.replica_id(self.holder, self.codec, self.moqt_namespace)

    @property
    def path(self) -> str:
        """Where an index service keeps the record, relative to its base URI."""
        return uris.replica_path(self.block, self.replica_id)

    def held_layers(self, layers: int) -> list[range]:
        """The layers the holder has, of a block of `layers` layers: ascending, disjoint."""
        if self.residency is None:
            return [range(layers)]
        return [entry.layers for entry in self.residency]

    def holds(self, wanted: range, layers: int) -> bool:
        """Whether every layer of `wanted` is held, of a block of `layers` layers."""
        return covers([self], layers, wanted)

    def check(self, reading: Reading, pointer: str) -> None:
        if self.moqt_namespace is not None:
            self._check_namespace(self.moqt_namespace, reading, pointer + "/moqt_namespace")
        self._check_layers(reading, pointer)
        descriptor = reading.descriptor
        if descriptor is not None and self.codec == Codec.RAW:
            self._check_size(descriptor, reading, pointer + "/size")
        digests = self.layer_digests
        if digests is not None and replica_digest(digests) != self.digest:
            reading.fault(
                DecodeErrorName.DIGEST_MISMATCH,
                pointer + "/digest",
                "not the SHA-256 of layer_digests",
            )

    def _check_namespace(self, text: str, reading: Reading, at: str) -> None:
        try:
            fields = uris.namespace_fields(text)
        except DecodeError as error:
            reading.fault(error.name, at, error.detail)
            return
        if not uris.is_moqt(self.holder):
            detail = "only a record with a moqt holder has a namespace"
            reading.fault(DecodeErrorName.BAD_NAMESPACE, at, detail)
        if (fields.scope_id, fields.compat_id) != (self.scope_id, self.compat_id):
            detail = "names another Scope ID or Compatibility ID than the record"
            reading.fault(DecodeErrorName.BAD_NAMESPACE, at, detail)

    def _check_layers(self, reading: Reading, pointer: str) -> None:
        digests, descriptor = self.layer_digests, reading.descriptor
        limit = MAX_GEOMETRY if digests is None else len(digests)
        if descriptor is not None:
            limit = descriptor.layers
        if digests is not None and (not digests or len(digests) != limit):
            detail = f"{len(digests)} digests are not one for each layer"
            reading.fault(DecodeErrorName.LAYER_RANGE, pointer + "/layer_digests", detail)
        end = 0
        for index, entry in enumerate(self.residency or ()):
            if entry.layers.start < end or entry.layers.stop > limit:
                at = f"{pointer}/residency/{index}/layers"
                detail = f"layers ascend, do not overlap and are below {limit}"
                reading.fault(DecodeErrorName.LAYER_RANGE, at, detail)
            end = entry.layers.stop

    def _check_size(self, descriptor: Descriptor, reading: Reading, at: str) -> None:
        try:
            size = 2 * descriptor.layers * descriptor.section_octets()
        except DecodeError:  # nobody here can tell the length of such sections
            return
        if self.size != size:
            detail = f"a raw replica of this geometry has {size} octets"
            reading.fault(DecodeErrorName.SECTION_LENGTH, at, detail)


@dataclass(frozen=True, slots=True)
class KeptRecords(Record):
    """Replica Records of one holder that are to live as long as it is kept alive, which the
    same request does for `ttl_ms`. A request of ours: one of many, or of none."""

    holder: Annotated[str, HOLDER_URI]
    ttl_ms: Annotated[int, _TTL]
    records: Annotated[tuple[dict[str, Any], ...], array(JSON_OBJECT)]


@dataclass(frozen=True, slots=True)
class KeptAnswer(Record):
    """`records` is how many of the holder live for `ttl_ms` now. `results` has an object for
    each record sent: `created` for one that was taken, `problem`, `status` and `detail` for
    another."""

    ttl_ms: Annotated[int, _TTL]
    records: Annotated[int, _COUNT]
    results: Annotated[tuple[dict[str, Any], ...], array(JSON_OBJECT)]


def covers(replicas: Iterable[ReplicaRecord], layers: int, wanted: range | None = None) -> bool:
    """Whether replicas of one block together hold every layer of `wanted` (KVSP "Lookup").

    `layers` is that of the descriptor; `wanted` defaults to all of them.
    """
    target = range(layers) if wanted is None else wanted
    held = sorted(
        (part for replica in replicas for part in replica.held_layers(layers)),
        key=lambda part: part.start,
    )
    reached = target.start
    for part in held:
        if part.start > reached:
            break
        reached = max(reached, part.stop)
    return reached >= target.stop


@dataclass(frozen=True, slots=True)
class ReplicaList(Record):
    """All replicas of one block."""

    replicas: Annotated[tuple[ReplicaRecord, ...], array(record(ReplicaRecord))]


@dataclass(frozen=True, slots=True)
class TtlAnswer(Record):
    """The TTL in milliseconds: granted to a record, or asked for by a lease renewal."""

    ttl_ms: Annotated[int, _TTL]


@dataclass(frozen=True, slots=True)
class StoredBlock(Record):
    """A holder's answer to a stored block (KVSP "Block Retrieval and Storage")."""

    digest: Annotated[bytes, DIGEST]
    layer_digests: Annotated[tuple[bytes, ...], _KEYS]
    size: Annotated[int, integer(1)]
    codec: Annotated[int, _CODEC]


# --- lookup --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupRequest(Record):
    """KVSP "Lookup": Block Keys in prefix order, and instances to estimate for.

    Also the body of a CATS cache-state request, which has no targets.
    """

    scope_id: Annotated[bytes, HEX16]
    compat_id: Annotated[bytes, HEX32]
    block_keys: Annotated[tuple[bytes, ...], _KEYS]
    targets: Annotated[tuple[str, ...] | None, array(BASE_URI)] = None


@dataclass(frozen=True, slots=True)
class MatchedBlock(Record):
    """A matched key and its replicas."""

    block_key: Annotated[bytes, HEX32]
    replicas: Annotated[tuple[ReplicaRecord, ...], array(record(ReplicaRecord))]


@dataclass(frozen=True, slots=True)
class TargetEstimate(Record):
    """What fetching and recomputing the matched blocks takes at a target, in microseconds."""

    target: Annotated[str, BASE_URI]
    fetch_us: Annotated[int | None, nullable(_COUNT)]
    recompute_us: Annotated[int | None, nullable(_COUNT)]


@dataclass(frozen=True, slots=True)
class LookupResponse(Record):
    """The index service's answer: exactly `matched` blocks, in request order."""

    matched: Annotated[int, _COUNT]
    blocks: Annotated[tuple[MatchedBlock, ...], array(record(MatchedBlock))]
    targets: Annotated[tuple[TargetEstimate, ...] | None, array(record(TargetEstimate))] = None

    def check(self, reading: Reading, pointer: str) -> None:
        if self.matched != len(self.blocks):
            detail = f"{len(self.blocks)} blocks are listed"
            reading.fault(DecodeErrorName.OUT_OF_RANGE, pointer + "/matched", detail)


# --- instances -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link(Record):
    """What an instance measured towards a holder."""

    holder: Annotated[str, HOLDER_URI]
    mbit_per_s: Annotated[float, _RATE]
    rtt_us: Annotated[float, _RATE]


@dataclass(frozen=True, slots=True)
class InstanceStatus(Record):
    """An Instance Status Record (KVSP "Records")."""

    instance: Annotated[str, BASE_URI]
    epoch: Annotated[int, _EPOCH]
    state: Annotated[InstanceState, one_of(InstanceState)]
    running: Annotated[int, _COUNT]
    queued: Annotated[int, _COUNT]
    batch_size: Annotated[int, _COUNT]
    kv_utilization: Annotated[float, number(0, 1)]
    prefill_tokens_per_s: Annotated[float, _RATE]
    decode_tokens_per_s: Annotated[float, _RATE]
    ttl_ms: Annotated[int, _TTL]
    links: Annotated[tuple[Link, ...], array(record(Link))] = ()
    requested_state: Annotated[InstanceState | None, nullable(one_of(InstanceState))] = None
    mean_service_us: Annotated[float | None, _RATE] = None
    compat_ids: Annotated[tuple[bytes, ...] | None, _KEYS] = None


@dataclass(frozen=True, slots=True)
class StateRequest(Record):
    """The state an instance is to take, or the one a status PUT is answered with."""

    state: Annotated[InstanceState, one_of(InstanceState)]


@dataclass(frozen=True, slots=True)
class StateReport(Record):
    """The state an instance has."""

    state: Annotated[InstanceState, one_of(InstanceState)]
    epoch: Annotated[int, _EPOCH]
    sessions: Annotated[int | None, _COUNT] = None


# --- prefetch and leases -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DirectiveBlock(Record):
    """A block to load and where from, best source first."""

    block_key: Annotated[bytes, HEX32]
    sources: Annotated[tuple[str, ...], array(SOURCE_URI)]


@dataclass(frozen=True, slots=True)
class PrefetchDirective(Record):
    """A prefetch directive (KVSP "Prefetch Directives")."""

    directive: Annotated[str, UUID]
    scope_id: Annotated[bytes, HEX16]
    compat_id: Annotated[bytes, HEX32]
    blocks: Annotated[tuple[DirectiveBlock, ...], array(record(DirectiveBlock))]
    deadline_ms: Annotated[int, _DEADLINE]
    lease_ms: Annotated[int, _DEADLINE]
    request_ref: Annotated[str | None, string()] = None
    layer_order: Annotated[str, string("ascending")] = "ascending"


@dataclass(frozen=True, slots=True)
class FailedBlock(Record):
    """A block a directive could not load; `reason` is a problem name or a word of gaps 11.3."""

    block_key: Annotated[bytes, HEX32]
    reason: Annotated[str, string()]


@dataclass(frozen=True, slots=True)
class PrefetchStatus(Record):
    """The state of a directive."""

    directive: Annotated[str, UUID]
    state: Annotated[DirectiveState, one_of(DirectiveState)]
    loaded: Annotated[tuple[bytes, ...], _KEYS]
    failed: Annotated[tuple[FailedBlock, ...], array(record(FailedBlock))]
    remaining_ms: Annotated[int, _COUNT]


@dataclass(frozen=True, slots=True)
class LeaseRequest(Record):
    """A request for a lease (KVSP "Leases")."""

    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    block_keys: Annotated[tuple[bytes, ...], array(HEX32, least=1)]
    ttl_ms: Annotated[int, _TTL]


@dataclass(frozen=True, slots=True)
class LeaseGrant(Record):
    """A lease: what it holds and for how long from receipt."""

    lease: Annotated[str, UUID]
    ttl_ms: Annotated[int, _TTL]
    leased: Annotated[tuple[bytes, ...], _KEYS]
    missing: Annotated[tuple[bytes, ...], _KEYS]


# --- sessions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampler(Record):
    """The state of a sampler, so that another instance continues with it."""

    method: Annotated[str, string(r".{1,64}")]
    params: Annotated[dict[str, Any], JSON_OBJECT]
    seed: Annotated[int, integer()]
    step: Annotated[int, _COUNT]
    deterministic: Annotated[bool, BOOLEAN]


@dataclass(frozen=True, slots=True)
class SessionCheckpoint(Record):
    """A Session Checkpoint (KVSP "Records"). Token ids are never in its repr.

    `generated` holds every output token so far. Members of ours: `prompt_tokens` is there
    only where the deployment allows prompts at the placement controller; `max_tokens` is
    how many output tokens there are to be, which a resumed instance would not know.
    """

    session: Annotated[str, UUID]
    epoch: Annotated[int, _EPOCH]
    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    prompt_blocks: Annotated[tuple[bytes, ...], _KEYS]
    prompt_tail: Annotated[tuple[int, ...], TOKEN_IDS] = field(repr=False)
    generated: Annotated[tuple[int, ...], TOKEN_IDS] = field(repr=False)
    output_offset: Annotated[int, _COUNT]
    sampler: Annotated[Sampler, record(Sampler)]
    prompt_tokens: Annotated[tuple[int, ...] | None, TOKEN_IDS] = field(default=None, repr=False)
    max_tokens: Annotated[int | None, integer(1)] = None

    def check(self, reading: Reading, pointer: str) -> None:
        if self.output_offset != len(self.generated):
            detail = f"{len(self.generated)} tokens are in 'generated'"
            reading.fault(DecodeErrorName.OUT_OF_RANGE, pointer + "/output_offset", detail)


@dataclass(frozen=True, slots=True)
class CheckpointDelta(Record):
    """What a Session Checkpoint adds to an acknowledged one (ours, as a PATCH of it).

    `after` is the `output_offset` that was acknowledged, `generated` the output tokens from
    there on. Token ids are never in its repr.
    """

    session: Annotated[str, UUID]
    epoch: Annotated[int, _EPOCH]
    after: Annotated[int, _COUNT]
    generated: Annotated[tuple[int, ...], TOKEN_IDS] = field(repr=False)
    output_offset: Annotated[int, _COUNT]
    sampler: Annotated[Sampler, record(Sampler)]

    def check(self, reading: Reading, pointer: str) -> None:
        if self.output_offset != self.after + len(self.generated):
            detail = f"{len(self.generated)} tokens after {self.after} are in 'generated'"
            reading.fault(DecodeErrorName.OUT_OF_RANGE, pointer + "/output_offset", detail)


@dataclass(frozen=True, slots=True)
class SessionProgress(Record):
    """What is recorded of a session: the answer to a checkpoint and to a resume."""

    session: Annotated[str, UUID]
    epoch: Annotated[int, _EPOCH]
    output_offset: Annotated[int, _COUNT]


@dataclass(frozen=True, slots=True)
class Resume(Record):
    """A request to continue a session from a checkpoint under a new epoch."""

    epoch: Annotated[int, _EPOCH]
    checkpoint: Annotated[SessionCheckpoint, record(SessionCheckpoint)]


@dataclass(frozen=True, slots=True)
class OutputToken(Record):
    """An output token on its way to the front end."""

    session: Annotated[str, UUID]
    epoch: Annotated[int, _EPOCH]
    index: Annotated[int, _COUNT]
    token: Annotated[int, TOKEN_ID] = field(repr=False)
