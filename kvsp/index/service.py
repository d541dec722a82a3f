"""What an Index Service decides, without a socket (KVSP "Publishing and Withdrawing
Replicas", "Lookup").

Calls block as the store does, and come from as many threads as the store allows. Times
are milliseconds since the Unix epoch. Refusals are `Problem`s.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvsp.index.answers import Explanation, KeyList, Lookup, MissReason, Published
from kvsp.index.status import StatusBoard
from kvsp.index.store import KEPT_MS, Entry, Replica, ReplicaStore, StoreFull
from kvsp.index.stored import answer_form, brief_record, is_whole, order_of, stored_form
from kvsp.names.bounds import Count
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.principals import EVERY_SCOPE, READ, WRITE, Principal
from kvsp.records import costs, spreading
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    InstanceStatus,
    KeptAnswer,
    KeptRecords,
    LookupRequest,
    ReplicaRecord,
    TargetEstimate,
    covers,
)

_DESCRIPTORS_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLimits:
    """What one request may ask for, and how long records live."""

    max_ttl_ms: Count = 3_600_000
    """Longest TTL of a record; a longer one is cut to it."""

    block_keys: Count = 65_536
    """Block Keys in one request; beyond, 413."""

    targets: Count = 256
    """Targets of one lookup; beyond, 413."""

    replicas_per_block: Count = 64
    """Replicas of one block in an answer, whole ones first."""

    lookup_batch: Count = 512
    """Keys asked of the store at a time: a lookup that misses early costs one batch."""

    estimates: Count = 262_144
    """Keys times targets of one lookup; beyond, 413."""

    answer_octets: Count = 256 << 20
    """Records of one answer together; beyond, 413."""

    records: Count = 1024
    """Replica Records in one request; beyond, 413."""

    listed_keys: Count = 1024
    """Keys in one part of a list; records looked at for it, too."""

    descriptor_octets: Count = 64 << 10
    """Of a Compatibility Descriptor: all that are stored are kept for good."""

    http_loopback: bool = False


class IndexService:
    """The Index Service over a store; `board` is what it knows of instances."""

    def __init__(
        self,
        store: ReplicaStore,
        board: StatusBoard | None = None,
        limits: IndexLimits | None = None,
    ) -> None:
        self.store = store
        self.board = board if board is not None else StatusBoard()
        self.limits = limits or IndexLimits()
        self.counters: Counter[str] = Counter()
        self._descriptors: dict[bytes, Descriptor] = {}
        self._lock = threading.Lock()

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self.counters[name] += number

    # --- descriptors -----------------------------------------------------------------

    def put_descriptor(self, compat_id: bytes, text: bytes) -> bool:
        """Store a descriptor under the ID computed from it; whether it is new.

        Raises Problem `kvsp-invalid-request`, `kvsp-too-large`, `kvsp-compat-mismatch`,
        `kvsp-storage-full`.
        """
        if len(text) > self.limits.descriptor_octets:
            limit = self.limits.descriptor_octets
            raise Problem(
                ProblemName.TOO_LARGE, f"a descriptor has at most {limit} octets", limit=limit
            )
        try:
            descriptor = Descriptor.parse(text)
        except DecodeError as error:
            raise Problem.from_decode_error(error) from None
        if descriptor.compat_id != compat_id:
            raise Problem(
                ProblemName.COMPAT_MISMATCH,
                "the Compatibility ID in the path is not that of the descriptor; compute it "
                "from the descriptor",
            )
        try:
            return self.store.put_descriptor(compat_id, descriptor.jcs)
        except StoreFull as error:
            raise Problem(ProblemName.STORAGE_FULL, str(error)) from error

    def get_descriptor(self, compat_id: bytes) -> bytes:
        """The JCS form of a descriptor. Raises Problem `kvsp-unknown-resource`."""
        text = self.store.descriptor(compat_id)
        if text is None:
            raise _unknown("no descriptor is stored for this Compatibility ID")
        return text

    def descriptor(self, compat_id: bytes) -> Descriptor | None:
        """The descriptor of a Compatibility ID, when it is stored."""
        known = self._descriptors.get(compat_id)
        if known is not None:
            return known
        text = self.store.descriptor(compat_id)
        if text is None:
            return None
        descriptor = Descriptor.parse(text)
        with self._lock:
            if len(self._descriptors) >= _DESCRIPTORS_KEPT:
                self._descriptors.clear()
            self._descriptors[compat_id] = descriptor
        return descriptor

    # --- publishing ------------------------------------------------------------------

    def publish(
        self,
        principal: Principal,
        block: BlockId,
        replica: str,
        tree: Mapping[str, Any],
        now_ms: int,
        age_ms: Callable[[], int] = lambda: 0,
    ) -> Published:
        """Publish or refresh a replica; `block` and `replica` are those of the path, `age_ms` is
        how long ago the request began to arrive, asked when it is filed.

        Raises Problem: `kvsp-forbidden` unless the principal may write the scope and is,
        or publishes for, the holder; `kvsp-invalid-request`; `kvsp-digest-mismatch`;
        `kvsp-compat-unknown`; 409 when it was withdrawn meanwhile.
        """
        principal.require(block.scope_id, WRITE)
        descriptor = self.descriptor(block.compat_id)
        record = self._read_record(tree, descriptor)
        if record.block != block or record.replica_id != replica:
            raise Problem(
                ProblemName.INVALID_REQUEST,
                f"the path of this record is {record.path}",
            )
        principal.require_holder(record.holder)
        ttl_ms = min(record.ttl_ms, self.limits.max_ttl_ms)
        entry = _entry(record, descriptor, now_ms + ttl_ms)
        (created,) = self.store.put([entry], now_ms, age_ms())
        if created is None:
            raise withdrawn_meanwhile()
        self._count("published" if created else "refreshed", 1)
        return Published(created, ttl_ms)

    def publish_kept(
        self,
        principal: Principal,
        request: KeptRecords,
        now_ms: int,
        age_ms: Callable[[], int] = lambda: 0,
        is_late: Callable[[BlockId, str, str], bool] = lambda block, replica, holder: False,
    ) -> KeptAnswer:
        """Publish records that live as long as their holder is kept alive, which this does, too.

        Each record has its own result. `is_late` tells of records that were withdrawn while
        they arrived. Raises Problem: `kvsp-forbidden` unless the principal is, or publishes
        for, the holder; `kvsp-too-large`.
        """
        principal.require_holder(request.holder)
        if len(request.records) > self.limits.records:
            raise _too_large("the list of records", self.limits.records, "records")
        entries: list[Entry] = []
        results: list[dict[str, Any] | None] = []
        for tree in request.records:
            try:
                entry = self._kept_entry(principal, request.holder, tree)
                if is_late(entry.block, entry.replica_id, entry.holder):
                    raise withdrawn_meanwhile()
            except Problem as problem:
                results.append(_refusal(problem))
            else:
                results.append(None)
                entries.append(entry)
        filed = iter(self.store.put(entries, now_ms, age_ms()) if entries else ())
        for place, result in enumerate(results):
            if result is None:
                created = next(filed)
                if created is None:
                    results[place] = _refusal(withdrawn_meanwhile())
                else:
                    results[place] = {"created": created}
                    self._count("published" if created else "refreshed", 1)
        ttl_ms = min(request.ttl_ms, self.limits.max_ttl_ms)
        kept = self.store.keep_alive(request.holder, now_ms + ttl_ms, now_ms)
        return KeptAnswer(ttl_ms, kept, tuple(each or {} for each in results))

    def _kept_entry(self, principal: Principal, holder: str, tree: Mapping[str, Any]) -> Entry:
        compat, descriptor = tree.get("compat_id"), None
        if isinstance(compat, str) and re.fullmatch("[0-9a-f]{64}", compat):
            descriptor = self.descriptor(bytes.fromhex(compat))
        record = self._read_record(tree, descriptor)
        principal.require(record.scope_id, WRITE)
        if record.holder != holder:
            raise Problem(ProblemName.INVALID_REQUEST, "the record is of another holder")
        return _entry(record, descriptor, KEPT_MS)

    def _read_record(self, tree: Mapping[str, Any], descriptor: Descriptor | None) -> ReplicaRecord:
        try:
            return ReplicaRecord.from_json(
                tree, descriptor=descriptor, http_loopback=self.limits.http_loopback
            )
        except DecodeError as error:
            if error.name is DecodeErrorName.DIGEST_MISMATCH:
                raise Problem(
                    ProblemName.DIGEST_MISMATCH, error.detail, error=str(error.name)
                ) from None
            raise Problem.from_decode_error(error) from None

    def withdraw(self, principal: Principal, block: BlockId, replica: str, now_ms: int) -> None:
        """Withdraw one replica.

        Raises Problem `kvsp-forbidden`, also for a record of another holder, and
        `kvsp-unknown-resource` when it is gone already, which is harmless.
        """
        principal.require(block.scope_id, WRITE)
        record = self._find(block, replica, now_ms)
        if record is not None:
            principal.require_holder(record.holder)
        # of one that is not here the store may hear from elsewhere, later
        self.store.delete(block, replica, now_ms)
        if record is None:
            raise _unknown("this replica is not published")
        self._count("withdrawn", 1)

    def withdraw_holder(self, principal: Principal, holder: str) -> int:
        """Withdraw everything a holder published, in the scopes the principal may write.

        Raises Problem `kvsp-forbidden` unless the principal is or publishes for the holder.
        """
        principal.require_holder(holder)
        scopes = [bytes.fromhex(key) for key in principal.scopes if key != EVERY_SCOPE]
        everywhere = principal.may(None, WRITE)
        writable = [scope for scope in scopes if principal.may(scope, WRITE)]
        count = self.store.delete_holder(holder, None if everywhere else writable)
        self._count("withdrawn", count)
        return count

    # --- reading ---------------------------------------------------------------------

    def replica(self, principal: Principal, block: BlockId, replica: str, now_ms: int) -> bytes:
        """One Replica Record as JSON. Raises Problem `kvsp-forbidden`, `kvsp-unknown-resource`."""
        principal.require(block.scope_id, READ)
        for found in self._replicas(block, now_ms):
            if brief_record(found, now_ms).replica_id == replica:
                return bytes(answer_form(found, now_ms))
        raise _unknown("this replica is not published")

    def replicas(self, principal: Principal, block: BlockId, now_ms: int) -> bytes:
        """`{"replicas": […]}` of a block. Raises Problem `kvsp-forbidden`."""
        principal.require(block.scope_id, READ)
        found = self._answerable(self._replicas(block, now_ms))
        return msgspec.json.encode(
            {"replicas": [answer_form(replica, now_ms) for replica in found]}
        )

    def _replicas(self, block: BlockId, now_ms: int) -> list[Replica]:
        (found,) = self.store.get(block.scope_id, block.compat_id, [block.block_key], now_ms)
        return found

    def _find(self, block: BlockId, replica: str, now_ms: int) -> ReplicaRecord | None:
        for found in self._replicas(block, now_ms):
            record = brief_record(found, now_ms)
            if record.replica_id == replica:
                return record
        return None

    def list_keys(
        self,
        principal: Principal,
        scope_id: bytes,
        compat_id: bytes,
        now_ms: int,
        *,
        after: bytes = b"",
        limit: int | None = None,
    ) -> KeyList:
        """The Block Keys above `after` that have replicas, in ascending order.

        A part may be short, or empty, and still have a `next`. Raises Problem
        `kvsp-forbidden`.
        """
        principal.require(scope_id, READ)
        most = min(limit or self.limits.listed_keys, self.limits.listed_keys)
        keys, following = self.store.list_keys(scope_id, compat_id, after, most)
        found = self.store.get(scope_id, compat_id, keys, now_ms)
        shown = [
            (key, self._answerable(replicas))
            for key, replicas in zip(keys, found, strict=True)
            if replicas
        ]
        return KeyList([key for key, _ in shown], [each for _, each in shown], now_ms, following)

    def lookup(self, principal: Principal, request: LookupRequest, now_ms: int) -> Lookup:
        """The leading keys that have replicas, and estimates for the targets.

        Stops at the first key whose unexpired replicas do not together hold every layer.
        Raises Problem `kvsp-forbidden`, `kvsp-too-large`.
        """
        looking = self.looking(principal, request, now_ms)
        while looking.step():
            pass
        return looking.answer()

    def looking(self, principal: Principal, request: LookupRequest, now_ms: int) -> Looking:
        """A lookup that has not begun. Raises as `lookup`."""
        self._check_size(request)
        principal.require(request.scope_id, READ)
        return Looking(self, request, now_ms)

    def looked(self, request: LookupRequest, matched: int) -> None:
        """A lookup has ended."""
        self._count("lookups", 1)
        self._count("keys_asked", len(request.block_keys))
        self._count("keys_matched", matched)

    def _check_size(self, request: LookupRequest) -> None:
        keys, targets = len(request.block_keys), len(request.targets or ())
        for what, size, limit in (
            ("block_keys", keys, self.limits.block_keys),
            ("targets", targets, self.limits.targets),
            ("block_keys times targets", keys * targets, self.limits.estimates),
        ):
            if size > limit:
                raise _too_large(what, limit)

    def leading(
        self, request: LookupRequest, keys: Sequence[bytes], now_ms: int
    ) -> list[list[Replica]]:
        found = self.store.get(request.scope_id, request.compat_id, keys, now_ms)
        leading: list[list[Replica]] = []
        for replicas in found:
            usable = self._answerable(replicas)
            if not self._covered(request.compat_id, usable, now_ms):
                break
            leading.append(usable)
        return leading

    def _answerable(self, replicas: list[Replica]) -> list[Replica]:
        """At most as many as an answer holds, whole ones first; ordered by holder and codec."""
        if len(replicas) > 1:
            replicas = sorted(replicas, key=order_of)
            if len(replicas) > self.limits.replicas_per_block:
                replicas.sort(key=lambda replica: not is_whole(replica))
                replicas = sorted(replicas[: self.limits.replicas_per_block], key=order_of)
        return replicas

    def _covered(self, compat_id: bytes, replicas: Sequence[Replica], now_ms: int) -> bool:
        """Whether replicas together hold every layer of the block."""
        if any(is_whole(replica) for replica in replicas):
            return True
        descriptor = self.descriptor(compat_id) if replicas else None
        if descriptor is None:
            return False
        return covers((brief_record(replica, now_ms) for replica in replicas), descriptor.layers)

    def estimates(
        self,
        request: LookupRequest,
        answer: Lookup,
        descriptor: Descriptor | None,
        now_ms: int,
    ) -> list[TargetEstimate]:
        """What fetching and recomputing costs each target."""
        targets = request.targets or ()
        statuses = [self.board.get(target, now_ms) for target in targets]
        if descriptor is None:
            return [TargetEstimate(target, None, None) for target in targets]
        runs = costs.runs(answer.records(), descriptor.layers)
        known = [each for each in statuses if each is not None]
        fetches = iter(
            spreading.fetch_us(
                [(each.instance, each.links) for each in known], runs, descriptor.layers
            )
        )
        tokens = len(answer.keys) * descriptor.block_tokens
        return [
            TargetEstimate(target, None, None)
            if status is None
            else TargetEstimate(
                target, next(fetches), costs.recompute_us(tokens, status.prefill_tokens_per_s)
            )
            for target, status in zip(targets, statuses, strict=True)
        ]

    def explain(self, principal: Principal, request: LookupRequest, now_ms: int) -> Explanation:
        """Why a lookup of the same keys stops where it does. Raises Problem `kvsp-too-large`."""
        self._check_size(request)
        if not principal.may(request.scope_id, READ):
            first = request.block_keys[0] if request.block_keys else None
            return Explanation(0, first, MissReason.UNAUTHORIZED)
        matched = self.lookup(principal, request, now_ms)
        for place, records in enumerate(matched.records()):
            if all(self.board.is_down(record.holder, now_ms) for record in records):
                return Explanation(place, request.block_keys[place], MissReason.HOLDER_DOWN)
        place = len(matched.keys)
        if place == len(request.block_keys):
            return Explanation(place)
        key = request.block_keys[place]
        return Explanation(place, key, self._miss_reason(request, key, now_ms))

    def _miss_reason(self, request: LookupRequest, key: bytes, now_ms: int) -> MissReason:
        traces = self.store.traces(request.scope_id, key)
        same = [replica for compat, replica in traces if compat == request.compat_id]
        if any(replica.expires_ms > now_ms for replica in same):
            return MissReason.LAYERS_MISSING
        if same:
            return MissReason.EXPIRED
        return MissReason.OTHER_COMPAT if traces else MissReason.UNKNOWN_KEY

    # --- status ----------------------------------------------------------------------

    def note_status(self, principal: Principal, status: InstanceStatus, now_ms: int) -> None:
        """Take an Instance Status Record a placement controller passes on.

        Raises Problem `kvsp-forbidden`.
        """
        principal.require_role("placement")
        self.board.put(status, now_ms)

    def instances_without_replicas(self, now_ms: int) -> list[str]:
        """Reporting instances that publish nothing: none of their caches is ever found."""
        return [
            instance
            for instance in self.board.reporting(now_ms)
            if not self.store.has_replicas(instance, now_ms)
        ]


class Looking:
    """A lookup that goes on step by step, so that others have their turn between."""

    def __init__(self, service: IndexService, request: LookupRequest, now_ms: int) -> None:
        self._service = service
        self._request = request
        self._now_ms = now_ms
        self._matched: list[list[Replica]] = []
        self._octets = 0
        self._descriptor: Descriptor | None = None

    def step(self) -> bool:
        """Ask the store for the next keys; whether there is another step. Raises Problem
        `kvsp-too-large`."""
        service, request, at = self._service, self._request, len(self._matched)
        if not at and request.targets is not None:
            self._descriptor = service.descriptor(request.compat_id)
        part = request.block_keys[at : at + service.limits.lookup_batch]
        found = service.leading(request, part, self._now_ms) if part else []
        self._matched += found
        self._octets += sum(len(replica.data) for replicas in found for replica in replicas)
        if self._octets > service.limits.answer_octets:
            raise _too_large("the answer", service.limits.answer_octets)
        if len(found) == len(part) and len(self._matched) < len(request.block_keys):
            return True
        service.looked(request, len(self._matched))
        return False

    def answer(self) -> Lookup:
        """What was found: asks the store for nothing."""
        request, now_ms = self._request, self._now_ms
        keys = request.block_keys[: len(self._matched)]
        answer = Lookup(keys, self._matched, now_ms)
        if request.targets is None:
            return answer
        estimates = self._service.estimates(request, answer, self._descriptor, now_ms)
        return Lookup(keys, self._matched, now_ms, estimates)


def _entry(record: ReplicaRecord, descriptor: Descriptor | None, expires_ms: int) -> Entry:
    """Raises Problem `kvsp-compat-unknown`."""
    if descriptor is None:
        raise Problem(
            ProblemName.COMPAT_UNKNOWN,
            f"PUT the descriptor to compat/{record.compat_id.hex()} before its replicas",
        )
    data = stored_form(record, descriptor)
    position = record.position or 0
    return Entry(record.block, record.replica_id, record.holder, expires_ms, data, position)


def withdrawn_meanwhile() -> Problem:
    """409 for a record whose withdrawal overtook it."""
    return Problem.http(409, "the record was withdrawn while it was on its way")


def _refusal(problem: Problem) -> dict[str, Any]:
    """The result of a record that was not taken."""
    return {"problem": problem.name, "status": problem.status, "detail": problem.detail}


def _too_large(what: str, limit: int, things: str = "keys") -> Problem:
    detail = f"{what} is over {limit}; ask for fewer {things} at a time"
    return Problem(ProblemName.TOO_LARGE, detail, limit=limit)


def _unknown(detail: str) -> Problem:
    return Problem(ProblemName.UNKNOWN_RESOURCE, detail)
