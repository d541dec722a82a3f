"""The placement controller over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from kvsp.client.tokens import TokenFile
from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import KeyPage
from kvsp.controller.core.requests import PlaceRequest
from kvsp.controller.core.sessions import Session
from kvsp.controller.shell import Shell
from kvsp.http.call import Call, json_response, no_content
from kvsp.http.openapi import hex_schema, object_schema
from kvsp.http.service import Health, Operation, Service
from kvsp.index.app import PAGE_PARAMETERS, page_of
from kvsp.names.codes import MAX_DIRECTIVE_MS, InstanceState
from kvsp.names.uris import check_uid, check_uuid, instance_id
from kvsp.principals import READ
from kvsp.records import cats
from kvsp.records.estimates import Demand, Found
from kvsp.records.members import schema_of
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    InstanceStatus,
    LookupRequest,
    SessionCheckpoint,
    SessionProgress,
    StateRequest,
)
from kvsp.records.sharding import ShardMap

_UID: Final = {"instance_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{22}$"}}
_UUID: Final = {"session": {"type": "string", "format": "uuid"}}
_MAP: Final = {"map": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}}
_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: Final = {"type": ["integer", "null"], "minimum": 0}
_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_INSTANCES: Final = object_schema(instances={"type": "array", "items": schema_of(InstanceStatus)})
_PLACEMENT: Final = object_schema(
    instance=_TEXT,
    cost_us=_COUNT_OR_NULL,
    fetch_us=_COUNT_OR_NULL,
    matched=_COUNT,
    epoch=_COUNT_OR_NULL,
    directive=_TEXT_OR_NULL,
)
_SESSION: Final = object_schema(
    session=_TEXT, epoch=_COUNT, instance=_TEXT_OR_NULL, state=_TEXT, output_offset=_COUNT
)
_BY_INSTANCE: Final = object_schema(
    instances={"type": "array", "items": object_schema(instance=_TEXT, metrics={"type": "array"})}
)
_CACHE_KEYS: Final = object_schema(
    entries={
        "type": "array",
        "items": object_schema(
            block_key=hex_schema(32),
            size=_COUNT,
            instances={"type": "array", "items": _TEXT},
        ),
    },
    next=_TEXT_OR_NULL,
)
_INVALID: Final = (ProblemName.INVALID_REQUEST, ProblemName.FORBIDDEN)
_UNKNOWN: Final = (*_INVALID, ProblemName.UNKNOWN_RESOURCE)
_OF_CHECKPOINT: Final = (
    *_UNKNOWN,
    ProblemName.STALE_EPOCH,
    ProblemName.UNKNOWN_EPOCH,
    ProblemName.CHECKPOINT_CONFLICT,
)
_MAX_KEYS: Final = 65_536
_RESHARD_MS: Final = 5000
_WATCHERS: Final = ("placement", "operator")


class Lead(Protocol):
    """Who answers: a `Shell` alone, or one `Elected` among several controllers."""

    failure: str | None

    @property
    def leading(self) -> Shell | None:
        """The shell that answers, None while another controller leads."""
        ...

    @property
    def standing_by(self) -> str:
        """Why none does."""
        ...

    def acting(self) -> Shell:
        """The shell that answers. Raises Problem 503 without one."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class ControllerService(Service):
    """The role "placement": routes and who may use them."""

    role = "placement"

    def __init__(
        self, lead: Lead, *, token: TokenFile | None = None, http_loopback: bool = False
    ) -> None:
        """`token` is what instances are shown, when it is in a file."""
        self._lead = lead
        self._token = token
        self._loopback = http_loopback

    @property
    def shell(self) -> Shell:
        """The shell that answers now. Raises Problem 503 while another controller leads."""
        return self._lead.acting()

    @property
    def core(self) -> Controller:
        """Its core, likewise."""
        return self.shell.core

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="PUT",
                path="instances/{instance_id}",
                handler=self._put_status,
                summary="Report an instance's status; the answer is the state it is to have",
                path_parameters=_UID,
                request=InstanceStatus,
                response=StateRequest,
                problems=(*_INVALID, ProblemName.STALE_EPOCH, ProblemName.INSTANCE_FAILED),
            ),
            Operation(
                method="GET",
                path="instances",
                handler=self._get_instances,
                summary="Every known instance",
                response=_INSTANCES,
                problems=_INVALID,
            ),
            Operation(
                method="GET",
                path="instances/{instance_id}",
                handler=self._get_instance,
                summary="One instance",
                path_parameters=_UID,
                response=InstanceStatus,
                problems=_UNKNOWN,
            ),
            Operation(
                method="PUT",
                path="instances/{instance_id}/state",
                handler=self._put_state,
                summary="Have an instance drain or become active",
                path_parameters=_UID,
                request=StateRequest,
                response=StateRequest,
                problems=(*_UNKNOWN, ProblemName.INVALID_TRANSITION),
            ),
            Operation(
                method="POST",
                path="place",
                handler=self._place,
                summary="Choose an instance for a request and begin to load its cache there",
                request=PlaceRequest,
                response=_PLACEMENT,
                problems=(*_INVALID, ProblemName.TOO_LARGE, ProblemName.CHECKPOINT_CONFLICT),
            ),
            Operation(
                method="PUT",
                path="sessions/{session}/checkpoint",
                handler=self._put_checkpoint,
                summary="Publish a Session Checkpoint; the answer acknowledges what is recorded",
                path_parameters=_UUID,
                request=SessionCheckpoint,
                response=SessionProgress,
                problems=_OF_CHECKPOINT,
            ),
            Operation(
                method="PATCH",
                path="sessions/{session}/checkpoint",
                handler=self._patch_checkpoint,
                summary="Publish what a Session Checkpoint adds to the acknowledged one",
                path_parameters=_UUID,
                request=CheckpointDelta,
                response=SessionProgress,
                problems=_OF_CHECKPOINT,
            ),
            Operation(
                method="GET",
                path="sessions/{session}/checkpoint",
                handler=self._get_checkpoint,
                summary="The recorded checkpoint",
                path_parameters=_UUID,
                response=SessionCheckpoint,
                problems=_UNKNOWN,
            ),
            Operation(
                method="GET",
                path="sessions/{session}",
                handler=self._get_session,
                summary="Where a session stands",
                path_parameters=_UUID,
                response=_SESSION,
                problems=_UNKNOWN,
            ),
            Operation(
                method="DELETE",
                path="sessions/{session}",
                handler=self._delete_session,
                summary="A session is over",
                success=(204,),
                path_parameters=_UUID,
                problems=_UNKNOWN,
            ),
            Operation(
                method="GET",
                path="maps/{map}",
                handler=self._get_map,
                summary="The current Shard Map",
                path_parameters=_MAP,
                response=ShardMap,
                problems=_UNKNOWN,
            ),
            Operation(
                method="PUT",
                path="maps/{map}",
                handler=self._put_map,
                summary="Create a Shard Map, or begin to move one to its next version",
                success=(201, 202),
                path_parameters=_MAP,
                query_parameters={"deadline_ms": {"type": "integer"}},
                request=ShardMap,
                response=object_schema(map={"type": "string"}),
                problems=(*_INVALID, ProblemName.MAP_VERSION, ProblemName.NOT_ACTIVE),
            ),
            Operation(
                method="DELETE",
                path="maps/{map}",
                handler=self._delete_map,
                summary="Forget a Shard Map",
                success=(204,),
                path_parameters=_MAP,
                problems=(*_UNKNOWN, ProblemName.MAP_VERSION),
            ),
            Operation(
                method="GET",
                path="cats/metrics",
                shared=True,
                handler=self._cats_metrics,
                summary="The CATS metrics of every instance that has not failed",
                response=_BY_INSTANCE,
                problems=_INVALID,
            ),
            Operation(
                method="POST",
                path="cats/cache-state",
                shared=True,
                handler=self._cats_cache_state,
                summary="Which of the leading keys each instance holds, and its metrics for them",
                request=LookupRequest,
                response=_BY_INSTANCE,
                problems=(*_INVALID, ProblemName.TOO_LARGE),
            ),
            Operation(
                method="GET",
                path="cats/cache-keys",
                shared=True,
                handler=self._cats_cache_keys,
                summary="The Block Keys that have replicas, and at which instances",
                query_parameters={
                    "scope": hex_schema(16),
                    "compat": hex_schema(32),
                    **PAGE_PARAMETERS,
                },
                response=_CACHE_KEYS,
                problems=_INVALID,
            ),
        )

    # --- instances -------------------------------------------------------------------

    async def _put_status(self, call: Call) -> Response:
        call.principal.require_role("instance")
        name = check_uid(call.path_params["instance_id"])
        status = await call.read_record(InstanceStatus, http_loopback=self._loopback)
        if instance_id(status.instance) != name:
            raise Problem(
                ProblemName.INVALID_REQUEST,
                f"the path of this record is instances/{instance_id(status.instance)}",
            )
        call.principal.require_uri(status.instance)
        state = await self.shell.call(self.core.take_status, status, self.shell.clock_ms())
        self.shell.pass_on(status)
        return json_response({"state": state})

    async def _get_instances(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        records = [known.to_record().to_dict() for known in self.core.instances]
        return json_response({"instances": records})

    async def _get_instance(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        known = self.core.instances.get(self._instance(call))
        assert known is not None
        return json_response(known.to_record().to_dict())

    async def _put_state(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        wanted = await call.read_record(StateRequest)
        state: InstanceState = await self.shell.call(
            self.core.set_state, self._instance(call), wanted.state
        )
        return json_response({"state": state})

    def _instance(self, call: Call) -> str:
        """The base URI of a known instance. Raises Problem `kvsp-unknown-resource`."""
        uri = self.core.instances.uri_of(check_uid(call.path_params["instance_id"]))
        if uri is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "no such instance has reported")
        return uri

    async def _place(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        request = await call.read_record(PlaceRequest)
        found = await self._find(call, request)
        placed = await self.shell.call(self.core.place, request, found, self.shell.clock_ms())
        return json_response(placed.to_dict())

    async def _find(self, call: Call, request: PlaceRequest | LookupRequest) -> Found:
        """What the index knows of the keys; nothing when it cannot be asked, so that a
        request is placed all the same, and recomputed.

        Raises Problem `kvsp-too-large`, `kvsp-forbidden`.
        """
        if len(request.block_keys) > _MAX_KEYS:
            raise Problem(
                ProblemName.TOO_LARGE,
                f"block_keys has more than {_MAX_KEYS} entries",
                limit=_MAX_KEYS,
            )
        call.principal.require(request.scope_id, READ)
        found = await self.shell.index.find(request.scope_id, request.compat_id, request.block_keys)
        return found if isinstance(found, Found) else Found()

    # --- CATS ------------------------------------------------------------------------

    async def _cats_metrics(self, call: Call) -> Response:
        call.principal.require_role("cats", "operator")
        shown = [
            {"instance": known.status.instance, "metrics": cats.metrics(known.to_record())}
            for known in self.core.instances
            if known.state is not InstanceState.FAILED
        ]
        return json_response({"instances": shown})

    async def _cats_cache_state(self, call: Call) -> Response:
        call.principal.require_role("cats", "operator")
        request = await call.read_record(LookupRequest)
        found = await self._find(call, request)
        demand = Demand(len(request.block_keys) * found.block_tokens or None, found)
        shown = []
        for known in self.core.instances:
            if known.state is InstanceState.FAILED:
                continue
            entries = cats.cached_entries(known.status.instance, found)
            shown.append(
                {
                    "instance": known.status.instance,
                    "matched": len(entries),
                    "entries": [entry.to_dict() for entry in entries],
                    "metrics": cats.metrics(known.to_record(), demand=demand),
                }
            )
        return json_response({"instances": shown})

    async def _cats_cache_keys(self, call: Call) -> Response:
        call.principal.require_role("cats", "operator")
        scope_id, compat_id = call.query_hex("scope", 16), call.query_hex("compat", 32)
        if scope_id is None or compat_id is None:
            raise Problem(
                ProblemName.INVALID_REQUEST, "say which keys: ?scope=<hex16>&compat=<hex32>"
            )
        call.principal.require(scope_id, READ)
        after, limit = page_of(call)
        part = await self.shell.index.list_keys(scope_id, compat_id, after, limit)
        if not isinstance(part, KeyPage):
            raise Problem.http(503, "the index does not answer", retry_after=5)
        live = {
            known.status.instance
            for known in self.core.instances
            if known.state is not InstanceState.FAILED
        }
        return json_response(
            {
                "entries": [cats.key_entry(replicas, live) for replicas in part.blocks],
                "next": None if part.next is None else part.next.hex(),
            }
        )

    # --- sessions --------------------------------------------------------------------

    async def _put_checkpoint(self, call: Call) -> Response:
        call.principal.require_role("instance")
        name = _session(call)
        checkpoint = await call.read_record(SessionCheckpoint)
        _check_names(name, checkpoint.session)
        progress = await self.shell.call(
            self.core.checkpoint, call.principal, checkpoint, self.shell.clock_ms()
        )
        return json_response(progress.to_dict())

    async def _patch_checkpoint(self, call: Call) -> Response:
        call.principal.require_role("instance")
        name = _session(call)
        delta = await call.read_record(CheckpointDelta)
        _check_names(name, delta.session)
        progress = await self.shell.call(self.core.extend_checkpoint, call.principal, delta)
        return json_response(progress.to_dict())

    async def _get_checkpoint(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        recorded = await self.shell.call(self.core.sessions.recorded, _session(call))
        return json_response(recorded.to_dict())

    async def _get_session(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        name = _session(call)
        session: Session = await self.shell.call(self.core.sessions.get, name)
        return json_response(
            {
                "session": name,
                "epoch": session.epoch,
                "instance": session.instance or None,
                "state": session.state,
                "output_offset": session.output_offset,
            }
        )

    async def _delete_session(self, call: Call) -> Response:
        name = _session(call)
        if not call.principal.has_role(*_WATCHERS):
            known = self.core.sessions.find(name)
            call.principal.require_uri("" if known is None else known.instance)
        await self.shell.call(self.core.end_session, name, self.shell.clock_ms())
        return no_content()

    # --- shard maps ------------------------------------------------------------------

    async def _get_map(self, call: Call) -> Response:
        name = call.path_params["map"]
        if not call.principal.has_role(*_WATCHERS):
            # a member that prepared and heard nothing settles it here
            known = self.core.maps.find(name)
            if known is None or not any(
                call.principal.is_one_of(shard.instance) for shard in known.every_shard()
            ):
                call.principal.require_role(*_WATCHERS)
        entry = await self.shell.call(self.core.maps.get, name)
        return json_response(entry.current.to_dict())

    async def _put_map(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        shard_map = await call.read_record(ShardMap, http_loopback=self._loopback)
        if shard_map.map != call.path_params["map"]:
            raise Problem(ProblemName.INVALID_REQUEST, "the path and the body name different maps")
        created = await self.shell.call(
            self.core.put_map, shard_map, _deadline(call), self.shell.clock_ms()
        )
        return json_response({"map": shard_map.map}, 201 if created else 202)

    async def _delete_map(self, call: Call) -> Response:
        call.principal.require_role(*_WATCHERS)
        await self.shell.call(self.core.maps.delete, call.path_params["map"])
        return no_content()

    # --- life ------------------------------------------------------------------------

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(_ControllerMetrics(self._lead))

    def health(self) -> Health:
        shell = self._lead.leading
        failure = self._lead.failure if shell is None else shell.failure
        if failure is not None:
            return Health(False, (failure,))
        degraded = []
        if shell is None:
            degraded.append(self._lead.standing_by)
        elif not any(known.state is InstanceState.ACTIVE for known in shell.core.instances):
            degraded.append("no instance is active")
        if self._token is not None and not self._token.usable():
            degraded.append("the token for other services cannot be read")
        return Health(True, tuple(degraded))

    async def start(self) -> None:
        await self._lead.start()

    async def stop(self) -> None:
        await self._lead.stop()


class _ControllerMetrics(Collector):
    """The core's tables and counters. Scraped in the thread that runs the core."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    def collect(self) -> list[Metric]:
        shell = self._lead.leading
        leads = GaugeMetricFamily(
            "kvsp_placement_leading",
            "Whether this controller answers: 0 while it stands by.",
            value=shell is not None,
        )
        return [leads, *([] if shell is None else self._of(shell.core))]

    @staticmethod
    def _of(core: Controller) -> list[Metric]:
        by_state = GaugeMetricFamily(
            "kvsp_placement_instances", "Known instances by state.", labels=["state"]
        )
        states = [known.state for known in core.instances]
        for state in InstanceState:
            by_state.add_metric([state.value], states.count(state))
        metrics: list[Metric] = [by_state]
        gauges: dict[str, tuple[str, Any]] = {
            "sessions": ("Known sessions, finished ones included.", len(core.sessions)),
            "checkpoint_octets": ("Octets of checkpoints.", core.sessions.checkpoint_octets),
            "maps": ("Shard maps.", len(core.maps)),
            "directives": ("Prefetch directives under way.", len(core.directives)),
            "commands": ("Commands whose outcome is awaited.", core.ledger.outstanding),
        }
        for name, (text, value) in gauges.items():
            metrics.append(GaugeMetricFamily(f"kvsp_placement_{name}", text, value=value))
        events = CounterMetricFamily(
            "kvsp_placement_events", "What the controller did or saw.", labels=["event"]
        )
        for name, count in sorted(core.ledger.counters.items()):
            events.add_metric([name], count)
        return [*metrics, events]


def _session(call: Call) -> str:
    return check_uuid(call.path_params["session"])


def _check_names(path: str, body: str) -> None:
    if path != body:
        raise Problem(ProblemName.INVALID_REQUEST, "the path and the body name different sessions")


def _deadline(call: Call) -> int:
    return call.query_integer("deadline_ms", 1, MAX_DIRECTIVE_MS) or _RESHARD_MS
