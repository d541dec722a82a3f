"""The Index Service over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from kvsp.http.call import Call, json_response, no_content
from kvsp.http.openapi import hex_schema, object_schema
from kvsp.http.service import Health, Operation, Service
from kvsp.index.answers import MissReason
from kvsp.index.arrivals import Arrivals
from kvsp.index.service import IndexService, withdrawn_meanwhile
from kvsp.index.store import StoreCounts, StoreError
from kvsp.names.codes import JSON_MEDIA_TYPE, MAX_GEOMETRY
from kvsp.names.uris import BlockId, check_uid, instance_id, parse_block_id, parse_compat_id
from kvsp.principals import WRITE
from kvsp.records.members import schema_of
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    InstanceStatus,
    KeptAnswer,
    KeptRecords,
    LookupRequest,
    LookupResponse,
    MatchedBlock,
    ReplicaList,
    ReplicaRecord,
    TtlAnswer,
)

logger = logging.getLogger("kvsp.index")

T = TypeVar("T")
_BLOCK: Final = "replicas/{compat}/{scope}/{block_key}"
_HEX16: Final = hex_schema(16)
_HEX32: Final = hex_schema(32)
_UID: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]{22}$"}
_BLOCK_PARAMETERS: Final = {"compat": _HEX32, "scope": _HEX16, "block_key": _HEX32}
_REPLICA_PARAMETERS: Final = {**_BLOCK_PARAMETERS, "replica_id": _UID}
_NULL: Final = {"type": "null"}
_EXPLANATION: Final = object_schema(
    matched={"type": "integer"},
    block_key={"anyOf": [_HEX32, _NULL]},
    reason={"anyOf": [{"enum": [str(reason) for reason in MissReason]}, _NULL]},
    detail={"type": ["string", "null"]},
)
_KEY_LIST: Final = object_schema(
    blocks={"type": "array", "items": schema_of(MatchedBlock)}, next={"anyOf": [_HEX32, _NULL]}
)
_GEOMETRY: Final = {"type": "integer", "minimum": 1, "maximum": MAX_GEOMETRY}
_DIGEST: Final = {"type": "string", "pattern": "^sha-256:[0-9a-f]{64}$"}
_TEXT: Final = {"type": "string", "minLength": 1}
_DESCRIPTOR: Final = object_schema(
    model={"type": "string", "minLength": 1, "maxLength": 1024},
    model_digest=_DIGEST,
    tokenizer_digest=_DIGEST,
    layers=_GEOMETRY,
    kv_heads=_GEOMETRY,
    head_dim=_GEOMETRY,
    kv_dtype=_TEXT,
    positional=_TEXT,
    block_tokens=_GEOMETRY,
    layout=_TEXT,
)
_INVALID: Final = (ProblemName.INVALID_REQUEST, ProblemName.FORBIDDEN)


_STARTED_NS: Final = time.time_ns() - time.monotonic_ns()


def unix_ms() -> int:
    """Now, in milliseconds since the Unix epoch, by a clock that is never set.

    Should somebody set the machine's clock back, records do not live longer for it.
    """
    return (_STARTED_NS + time.monotonic_ns()) // 1_000_000


class IndexApp(Service):
    """The role "index": routes, threads for the store, and the removal of expired records."""

    role = "index"

    def __init__(
        self,
        service: IndexService,
        *,
        sweep_s: float = 1.0,
        sweep_records: int = 10_000,
        clock_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """Every `sweep_s` seconds at most about `sweep_records` records are removed."""
        self.service = service
        self._sweep_s = sweep_s
        self._sweep_records = sweep_records
        self.clock_ms = clock_ms
        self._pool = ThreadPoolExecutor(service.store.threads, "kvsp-index")
        self._sweeper: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._metrics = _IndexMetrics(service)
        self._arrivals = Arrivals()

    def operations(self) -> Sequence[Operation]:
        too_large = ProblemName.TOO_LARGE
        unknown = ProblemName.UNKNOWN_RESOURCE
        return (
            Operation(
                method="POST",
                path="lookup",
                handler=self._lookup,
                summary="The leading keys that have replicas, and estimates for targets",
                request=LookupRequest,
                response=LookupResponse,
                problems=(*_INVALID, too_large),
            ),
            Operation(
                method="POST",
                path="explain",
                handler=self._explain,
                summary="Why a lookup of the same keys stops where it does",
                request=LookupRequest,
                response=_EXPLANATION,
                problems=(*_INVALID, too_large),
            ),
            Operation(
                method="PUT",
                path=f"{_BLOCK}/{{replica_id}}",
                handler=self._publish,
                summary="Publish or refresh a replica",
                success=(200, 201),
                path_parameters=_REPLICA_PARAMETERS,
                request=ReplicaRecord,
                response=TtlAnswer,
                problems=(*_INVALID, ProblemName.COMPAT_UNKNOWN, ProblemName.DIGEST_MISMATCH),
            ),
            Operation(
                method="GET",
                path=f"{_BLOCK}/{{replica_id}}",
                handler=self._get_replica,
                summary="One Replica Record",
                path_parameters=_REPLICA_PARAMETERS,
                response=ReplicaRecord,
                problems=(*_INVALID, unknown),
            ),
            Operation(
                method="DELETE",
                path=f"{_BLOCK}/{{replica_id}}",
                handler=self._withdraw,
                summary="Withdraw a replica",
                success=(204,),
                path_parameters=_REPLICA_PARAMETERS,
                problems=(*_INVALID, unknown),
            ),
            Operation(
                method="GET",
                path=_BLOCK,
                handler=self._get_replicas,
                summary="All replicas of a block",
                path_parameters=_BLOCK_PARAMETERS,
                response=ReplicaList,
                problems=_INVALID,
            ),
            Operation(
                method="GET",
                path="replicas/{compat}/{scope}",
                handler=self._list_keys,
                summary="The Block Keys that have replicas, in ascending order",
                path_parameters={"compat": _HEX32, "scope": _HEX16},
                query_parameters=PAGE_PARAMETERS,
                response=_KEY_LIST,
                problems=_INVALID,
            ),
            Operation(
                method="POST",
                path="replicas",
                handler=self._keep,
                summary="Publish records of a holder that live as long as it is kept alive, "
                "which this does; none is a keep-alive",
                request=KeptRecords,
                response=KeptAnswer,
                problems=(*_INVALID, too_large),
            ),
            Operation(
                method="DELETE",
                path="replicas",
                handler=self._withdraw_holder,
                summary="Withdraw everything a holder published",
                query_parameters={"holder": {"type": "string"}},
                response=object_schema(withdrawn={"type": "integer"}),
                problems=_INVALID,
            ),
            Operation(
                method="PUT",
                path="compat/{compat}",
                handler=self._put_compat,
                summary="Store a Compatibility Descriptor",
                success=(200, 201),
                path_parameters={"compat": _HEX32},
                request=_DESCRIPTOR,
                response=object_schema(compat_id=_HEX32),
                problems=(*_INVALID, ProblemName.COMPAT_MISMATCH, ProblemName.STORAGE_FULL),
            ),
            Operation(
                method="GET",
                path="compat/{compat}",
                handler=self._get_compat,
                summary="A Compatibility Descriptor",
                path_parameters={"compat": _HEX32},
                response=_DESCRIPTOR,
                problems=(*_INVALID, unknown),
            ),
            Operation(
                method="PUT",
                path="status/{instance_id}",
                handler=self._put_status,
                summary="Pass on an Instance Status Record, for estimates",
                path_parameters={"instance_id": _UID},
                request=InstanceStatus,
                response={"type": "object"},
                problems=_INVALID,
            ),
        )

    # --- handlers --------------------------------------------------------------------

    async def run(self, function: Callable[..., T], *values: Any) -> T:
        """Run a call of the service in a thread of the store. Raises Problem 503."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, partial(function, *values))
        except StoreError as error:
            self._failure = str(error)
            logger.error("%s", error)
            raise Problem.http(503, "the index cannot reach its store", retry_after=5) from error

    async def _lookup(self, call: Call) -> Response:
        request = await self._request(call)
        if len(request.block_keys) <= self.service.limits.lookup_batch:
            return await self.run(self._answer_lookup, call, request)
        looking = self.service.looking(call.principal, request, self.clock_ms())
        while await self.run(looking.step):
            pass  # others have their turn at the store
        return await asyncio.to_thread(lambda: _json(looking.answer().to_json()))

    def _answer_lookup(self, call: Call, request: LookupRequest) -> Response:
        # the answer is put together in the thread too: it can have many megabytes
        return _json(self.service.lookup(call.principal, request, self.clock_ms()).to_json())

    async def _explain(self, call: Call) -> Response:
        request = await self._request(call)
        explanation = await self.run(self.service.explain, call.principal, request, self.clock_ms())
        return json_response(explanation.to_dict())

    async def _request(self, call: Call) -> LookupRequest:
        return await call.read_record(
            LookupRequest, http_loopback=self.service.limits.http_loopback
        )

    async def _publish(self, call: Call) -> Response:
        block, replica = _block(call), _replica(call)
        with self._arrivals.one() as arrival:
            tree = await call.read_object()
            if arrival.is_late(block, replica, str(tree.get("holder"))):
                raise withdrawn_meanwhile()
            published = await self.run(
                self.service.publish,
                call.principal,
                block,
                replica,
                tree,
                self.clock_ms(),
                arrival.age_ms,
            )
        return json_response({"ttl_ms": published.ttl_ms}, 201 if published.created else 200)

    async def _keep(self, call: Call) -> Response:
        with self._arrivals.one() as arrival:
            request = await call.read_record(
                KeptRecords, http_loopback=self.service.limits.http_loopback
            )
            answer = await self.run(
                self.service.publish_kept,
                call.principal,
                request,
                self.clock_ms(),
                arrival.age_ms,
                arrival.is_late,
            )
        return json_response(answer.to_dict())

    async def _withdraw(self, call: Call) -> Response:
        block, replica = _block(call), _replica(call)
        self._arrivals.withdrawn(call.principal, (block, replica))
        await self.run(self.service.withdraw, call.principal, block, replica, self.clock_ms())
        return no_content()

    async def _withdraw_holder(self, call: Call) -> Response:
        holder = call.query("holder")
        if holder is None:
            raise Problem(ProblemName.INVALID_REQUEST, "say whose replicas: ?holder=<base URI>")
        self._arrivals.withdrawn(call.principal, holder)
        count = await self.run(self.service.withdraw_holder, call.principal, holder)
        return json_response({"withdrawn": count})

    async def _get_replica(self, call: Call) -> Response:
        text = await self.run(
            self.service.replica, call.principal, _block(call), _replica(call), self.clock_ms()
        )
        return _json(text)

    async def _get_replicas(self, call: Call) -> Response:
        text = await self.run(self.service.replicas, call.principal, _block(call), self.clock_ms())
        return _json(text)

    async def _list_keys(self, call: Call) -> Response:
        compat_id, scope_id = call.path_hex("compat", 32), call.path_hex("scope", 16)
        after, limit = page_of(call)
        return await self.run(self._answer_list, call, scope_id, compat_id, after, limit)

    def _answer_list(
        self, call: Call, scope_id: bytes, compat_id: bytes, after: bytes, limit: int | None
    ) -> Response:
        part = self.service.list_keys(
            call.principal, scope_id, compat_id, self.clock_ms(), after=after, limit=limit
        )
        return _json(part.to_json())

    async def _put_compat(self, call: Call) -> Response:
        call.principal.require_any_scope(WRITE)
        compat_id = parse_compat_id(call.path_params["compat"])
        call.require_media_type(JSON_MEDIA_TYPE, "application/json")
        text = await call.read_octets(self.service.limits.descriptor_octets)
        created = await self.run(self.service.put_descriptor, compat_id, text)
        return json_response({"compat_id": compat_id.hex()}, 201 if created else 200)

    async def _get_compat(self, call: Call) -> Response:
        compat_id = parse_compat_id(call.path_params["compat"])
        return _json(await self.run(self.service.get_descriptor, compat_id))

    async def _put_status(self, call: Call) -> Response:
        call.principal.require_role("placement")
        status = await call.read_record(
            InstanceStatus, http_loopback=self.service.limits.http_loopback
        )
        if instance_id(status.instance) != call.path_params["instance_id"]:
            raise Problem(
                ProblemName.INVALID_REQUEST,
                f"the path of this record is status/{instance_id(status.instance)}",
            )
        self.service.note_status(call.principal, status, self.clock_ms())
        return json_response({})

    # --- life ------------------------------------------------------------------------

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(self._metrics)

    def health(self) -> Health:
        if self._failure is not None:
            return Health(False, ("the store does not answer",))
        silent = self._metrics.without_replicas
        if silent:
            return Health(True, (f"{silent} reporting instances have no replica",))
        return Health(True)

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="kvsp-index-sweep")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        self._pool.shutdown()
        self.service.store.close()

    async def _sweep_for_ever(self) -> None:
        while True:
            with contextlib.suppress(Problem):  # logged where it is raised
                await self.run(self.sweep)
                self._failure = None
            await asyncio.sleep(self._sweep_s)

    def sweep(self) -> None:
        """Remove a slice of what expired and take the numbers for the metrics."""
        now_ms = self.clock_ms()
        self.service.store.expire(now_ms, self._sweep_records)
        self.service.board.sweep(now_ms)
        self._metrics.update(now_ms)


class _IndexMetrics(Collector):
    """The numbers of the last sweep: a scrape does not wait for the store."""

    def __init__(self, service: IndexService) -> None:
        self._service = service
        self._counts = StoreCounts(0, 0, 0)
        self._reporting = 0
        self.without_replicas = 0

    def update(self, now_ms: int) -> None:
        self._counts = self._service.store.counts()
        self._reporting = len(self._service.board.reporting(now_ms))
        self.without_replicas = len(self._service.instances_without_replicas(now_ms))

    def collect(self) -> list[Metric]:
        metrics: list[Metric] = [
            GaugeMetricFamily(
                "kvsp_index_records",
                "Replica records stored, just expired ones included.",
                value=self._counts.records,
            ),
            GaugeMetricFamily(
                "kvsp_index_instances", "Instances whose status is known.", value=self._reporting
            ),
            GaugeMetricFamily(
                "kvsp_index_instances_without_replicas",
                "Instances whose status is known and that publish nothing.",
                value=self.without_replicas,
            ),
        ]
        counters = self._service.counters
        for name, text, value in (
            ("evicted", "Records removed for want of room.", self._counts.evicted),
            ("expired", "Records removed after their TTL.", self._counts.expired),
            ("published", "New records.", counters["published"]),
            ("refreshed", "Records published again.", counters["refreshed"]),
            ("withdrawn", "Records withdrawn.", counters["withdrawn"]),
            ("lookups", "Lookups answered.", counters["lookups"]),
            ("keys_asked", "Block Keys asked for in lookups.", counters["keys_asked"]),
            ("keys_matched", "Block Keys matched in lookups.", counters["keys_matched"]),
        ):
            metrics.append(CounterMetricFamily(f"kvsp_index_{name}", text, value=value))
        return metrics


def _block(call: Call) -> BlockId:
    path = call.path_params
    return parse_block_id(path["compat"], path["scope"], path["block_key"])


def _replica(call: Call) -> str:
    return check_uid(call.path_params["replica_id"])


PAGE_PARAMETERS: Final = {
    "after": _HEX32,
    "limit": {"type": "integer", "minimum": 1, "maximum": 65_536},
}


def page_of(call: Call) -> tuple[bytes, int | None]:
    """Where a list of Block Keys is to begin, and how many are wanted.

    Raises Problem `kvsp-invalid-request`.
    """
    return call.query_hex("after", 32) or b"", call.query_integer("limit", 1, 65_536)


def _json(text: bytes) -> Response:
    return Response(text, media_type=JSON_MEDIA_TYPE)
