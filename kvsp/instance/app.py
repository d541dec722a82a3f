"""The inference instance over HTTP: what a placement controller, a front end and CATS ask."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.responses import Response, StreamingResponse

from kvsp.http.call import Call, json_response, no_content, too_large
from kvsp.http.openapi import hex_schema
from kvsp.http.service import Health, Operation, Service
from kvsp.instance.core.moves import ServingState
from kvsp.instance.core.sessions import StartSession
from kvsp.instance.metrics import InstanceMetrics
from kvsp.instance.shell import InstanceShell
from kvsp.names.codes import HASH_OCTETS, SCOPE_ID_OCTETS, DecodeErrorName, Tier
from kvsp.names.errors import DecodeError
from kvsp.names.identity import parse_hex
from kvsp.names.uris import BlockId, check_uuid, directive_path
from kvsp.principals import READ, WRITE, Right
from kvsp.records import cats
from kvsp.records.estimates import Demand, Found
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    LookupRequest,
    OutputToken,
    PrefetchDirective,
    ReplicaRecord,
    Residency,
    Resume,
    StateRequest,
)
from kvsp.records.sharding import parse_reshard

_UUID: Final = {"type": "string", "format": "uuid"}
_SESSION: Final = {"session": _UUID}
_DIRECTIVE: Final = {"directive": _UUID}
_MAP: Final = {"map": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}}
_INVALID: Final = (ProblemName.INVALID_REQUEST, ProblemName.FORBIDDEN)
_UNKNOWN: Final = (*_INVALID, ProblemName.UNKNOWN_RESOURCE)
_TAKES: Final = (*_INVALID, ProblemName.NOT_ACTIVE, ProblemName.INCOMPATIBLE)
_CATS: Final = ("cats", "operator")
_PAGE: Final = 1000
_STREAM_PART: Final = 0.8
LINES_MEDIA_TYPE: Final = "application/jsonl"


class InstanceService(Service):
    """The role "instance"."""

    role = "instance"

    def __init__(self, shell: InstanceShell) -> None:
        self.shell = shell
        self._agent = shell.agent
        self._loopback = shell.agent.limits.http_loopback

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                path="prefetch",
                handler=self._prefetch,
                summary="Load blocks in the background",
                success=(202,),
                problems=(*_TAKES, ProblemName.DIRECTIVE_CONFLICT, ProblemName.TOO_LARGE),
            ),
            Operation(
                method="GET",
                path="prefetch/{directive}",
                handler=self._directive,
                summary="How far a directive came",
                path_parameters=_DIRECTIVE,
                problems=_UNKNOWN,
            ),
            Operation(
                method="DELETE",
                path="prefetch/{directive}",
                handler=self._cancel,
                summary="Cancel a directive",
                success=(204,),
                path_parameters=_DIRECTIVE,
                problems=_UNKNOWN,
            ),
            Operation(
                method="PUT",
                path="state",
                handler=self._put_state,
                summary="Have the instance drain or become active",
                problems=(*_INVALID, ProblemName.INVALID_TRANSITION),
            ),
            Operation(
                method="GET",
                path="state",
                handler=self._get_state,
                summary="The instance's state, epoch and sessions",
                problems=_INVALID,
            ),
            Operation(
                method="PUT",
                path="sessions/{session}",
                handler=self._start,
                summary="Begin a session that was placed here",
                success=(200, 201),
                path_parameters=_SESSION,
                problems=(
                    *_TAKES,
                    ProblemName.STALE_EPOCH,
                    ProblemName.SAMPLER_UNSUPPORTED,
                    ProblemName.TOO_LARGE,
                ),
            ),
            Operation(
                method="POST",
                path="sessions/{session}/resume",
                handler=self._resume,
                summary="Continue a session from a checkpoint under a new epoch",
                path_parameters=_SESSION,
                problems=(
                    *_TAKES,
                    ProblemName.STALE_EPOCH,
                    ProblemName.SAMPLER_UNSUPPORTED,
                    ProblemName.CACHE_MISS,
                ),
            ),
            Operation(
                method="GET",
                path="sessions/{session}/tokens",
                handler=self._tokens,
                summary="Output tokens, one JSON object per line, as they may be seen",
                streaming=True,
                path_parameters=_SESSION,
                query_parameters={"from": {"type": "integer", "minimum": 0}},
                response_media_type=LINES_MEDIA_TYPE,
                problems=_UNKNOWN,
            ),
            Operation(
                method="DELETE",
                path="sessions/{session}/tokens",
                handler=self._end_output,
                summary="No more output of the session is wanted",
                success=(204,),
                path_parameters=_SESSION,
                problems=_UNKNOWN,
            ),
            Operation(
                method="POST",
                path="reshard",
                handler=self._reshard,
                summary="A plan (answered when it is loaded), a commit or an abort",
                streaming=True,
                problems=(
                    *_INVALID,
                    ProblemName.INCOMPATIBLE,
                    ProblemName.MAP_VERSION,
                    ProblemName.RESHARD_FAILED,
                ),
            ),
            Operation(
                method="GET",
                path="reshard/{map}",
                handler=self._get_reshard,
                summary="Where this member of a Shard Map stands",
                path_parameters=_MAP,
                problems=_UNKNOWN,
            ),
            *self._cats_operations(),
        )

    def _cats_operations(self) -> Sequence[Operation]:
        # in one process with a placement controller, that one answers for all instances
        return (
            Operation(
                method="GET",
                path="cats/metrics",
                handler=self._cats_metrics,
                summary="The CATS metrics of this instance",
                shared=True,
                problems=_INVALID,
            ),
            Operation(
                method="POST",
                path="cats/cache-state",
                handler=self._cats_cache_state,
                summary="Which of the leading keys are here, and the metrics for them",
                shared=True,
                problems=(*_INVALID, ProblemName.TOO_LARGE),
            ),
            Operation(
                method="GET",
                path="cats/cache-keys",
                handler=self._cats_cache_keys,
                summary="The Block Keys that are here, in ascending order",
                shared=True,
                query_parameters={
                    "scope": hex_schema(16),
                    "compat": hex_schema(32),
                    "limit": {"type": "integer", "minimum": 1, "maximum": 10 * _PAGE},
                    "after": hex_schema(32),
                },
                problems=_INVALID,
            ),
        )

    # --- prefetch --------------------------------------------------------------------

    async def _prefetch(self, call: Call) -> Response:
        call.principal.require_role("placement")
        directive = await call.read_record(PrefetchDirective, http_loopback=self._loopback)
        await self.shell.prefetcher.accept(directive)
        location = call.base_uri + directive_path(directive.directive)
        status = self.shell.prefetcher.status(directive.directive)
        return json_response(status.to_dict(), 202, {"Location": location})

    async def _directive(self, call: Call) -> Response:
        call.principal.require_role("placement")
        return json_response(self.shell.prefetcher.status(_uuid(call, "directive")).to_dict())

    async def _cancel(self, call: Call) -> Response:
        call.principal.require_role("placement")
        await self.shell.prefetcher.cancel(_uuid(call, "directive"))
        return no_content()

    # --- lifecycle -------------------------------------------------------------------

    async def _put_state(self, call: Call) -> Response:
        call.principal.require_role("placement")
        wanted = await call.read_record(StateRequest)
        report = self._agent.set_state(wanted.state, self.shell.clock_ms())
        self.shell.reporter.hurry()
        # GET tells the number of sessions, PUT does not
        return json_response({"state": report.state, "epoch": report.epoch})

    async def _get_state(self, call: Call) -> Response:
        call.principal.require_role("placement", "operator")
        return json_response(self._agent.report().to_dict())

    # --- sessions --------------------------------------------------------------------

    async def _start(self, call: Call) -> Response:
        request = await call.read_record(StartSession)
        call.principal.require(request.scope_id, WRITE)
        name = _uuid(call, "session")
        began = self.shell.sessions.start_session(name, request)
        body = {"session": name, "epoch": request.epoch, "output_offset": 0}
        return json_response(body, 201 if began else 200)

    async def _resume(self, call: Call) -> Response:
        call.principal.require_role("placement")
        request = await call.read_record(Resume)
        if request.checkpoint.session != _uuid(call, "session"):
            raise Problem(
                ProblemName.INVALID_REQUEST, "the path and the body name different sessions"
            )
        progress = await self.shell.sessions.resume_session(request)
        return json_response(progress.to_dict())

    def _readable(self, call: Call, right: Right) -> str:
        """The session of the path, which the sender may read or end."""
        name = _uuid(call, "session")
        serving = self._agent.sessions.find(name)
        if serving is not None:
            call.principal.require(serving.scope.scope_id, right)
        elif not call.principal.scopes:
            raise Problem(ProblemName.FORBIDDEN, "sessions are their scopes' only")
        return name

    async def _tokens(self, call: Call) -> Response:
        name = self._readable(call, READ)
        start = _number(call, "from", 0, 0, 1 << 53)
        serving = self._agent.sessions.get(name)
        if serving.state is ServingState.BROKEN and start >= serving.released:
            # said at once: there will be no more, however long the front end waits
            raise Problem.http(500, f"the session cannot go on here: {serving.why}")
        # ends before the server takes it for a stalled one; the front end asks again
        lines = self._lines(name, start, _STREAM_PART * call.limits.stall_s)
        return StreamingResponse(lines, media_type=LINES_MEDIA_TYPE)

    async def _lines(self, name: str, start: int, seconds: float) -> AsyncIterator[bytes]:
        tokens = self.shell.sessions.tokens(name, start, seconds)
        async with contextlib.aclosing(tokens) as arriving:
            async for token in arriving:
                yield _line(token)

    async def _end_output(self, call: Call) -> Response:
        self.shell.sessions.end_output(self._readable(call, WRITE))
        return no_content()

    # --- shard maps ------------------------------------------------------------------

    async def _reshard(self, call: Call) -> Response:
        call.principal.require_role("placement")
        request = await call.read_json(partial(parse_reshard, http_loopback=self._loopback))
        answer = await self.shell.resharder.handle(request)
        return json_response(answer.to_dict())

    async def _get_reshard(self, call: Call) -> Response:
        call.principal.require_role("placement", "operator")
        member = self._agent.shards.get(call.path_params["map"])
        return json_response(
            {
                "map": member.map,
                "version": member.version,
                "state": member.state,
                "blocks": len(member.held),
            }
        )

    # --- CATS ------------------------------------------------------------------------

    async def _cats_metrics(self, call: Call) -> Response:
        call.principal.require_role(*_CATS)
        shown = cats.metrics(self.shell.status(), cached=self._cached())
        return json_response({"instance": self._agent.base_uri, "metrics": shown})

    async def _cats_cache_state(self, call: Call) -> Response:
        call.principal.require_role(*_CATS)
        request = await call.read_record(LookupRequest)
        call.principal.require(request.scope_id, READ)
        limit = self._agent.limits.blocks
        if len(request.block_keys) > limit:
            raise too_large("the list of block keys", limit)
        found = self._found(request)
        entries = cats.cached_entries(self._agent.base_uri, found)
        demand = Demand(len(request.block_keys) * found.block_tokens, found)
        shown = cats.metrics(self.shell.status(), cached=self._cached(), demand=demand)
        return json_response(
            {
                "matched": len(entries),
                "entries": [entry.to_dict() for entry in entries],
                "metrics": shown,
            }
        )

    async def _cats_cache_keys(self, call: Call) -> Response:
        call.principal.require_role(*_CATS)
        scope_id = _hex_parameter(call, "scope", SCOPE_ID_OCTETS)
        compat_id = _hex_parameter(call, "compat", HASH_OCTETS)
        call.principal.require(scope_id, READ)
        after = b"" if call.query("after") is None else _hex_parameter(call, "after", HASH_OCTETS)
        limit = _number(call, "limit", _PAGE, 1, 10 * _PAGE)
        page, more = self.shell.inventory.keys(compat_id, scope_id, after, limit)
        return json_response(
            {
                "entries": [
                    {"block_key": key.hex(), "size": self.shell.loader.block_octets} for key in page
                ],
                "next": page[-1].hex() if more else None,
            }
        )

    def _cached(self) -> tuple[int, int]:
        """Blocks in the engine's memory or the own store, and their octets."""
        blocks = len(self.shell.inventory)
        return blocks, blocks * self.shell.loader.block_octets

    def _found(self, request: LookupRequest) -> Found:
        """The leading keys that are here, as replicas in the tier they are in."""
        descriptor = self._agent.descriptor
        blocks: list[list[ReplicaRecord]] = []
        for key in request.block_keys:
            record = self._replica(BlockId(request.compat_id, request.scope_id, key))
            if record is None:
                break
            blocks.append([record])
        return Found(blocks, descriptor.layers, descriptor.block_tokens)

    def _replica(self, block: BlockId) -> ReplicaRecord | None:
        agent = self._agent
        if block not in agent.pool:
            return self.shell.loader.holder.record(block, 1)
        layers = range(agent.descriptor.layers)
        return ReplicaRecord(
            block_key=block.block_key,
            compat_id=block.compat_id,
            scope_id=block.scope_id,
            holder=agent.base_uri,
            codec=1,
            size=self.shell.loader.block_octets,
            digest=bytes(HASH_OCTETS),
            ttl_ms=1,
            residency=(Residency(Tier.DEVICE, layers),),
        )

    # --- life ------------------------------------------------------------------------

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(InstanceMetrics(self.shell))

    def health(self) -> Health:
        if self.shell.reporter.unavailable:
            return Health(True, ("the placement controller does not take the status",))
        return Health(True)

    async def start(self) -> None:
        await self.shell.start()

    async def drain(self) -> None:
        await self.shell.drain()

    async def stop(self) -> None:
        await self.shell.stop()


def _line(token: OutputToken) -> bytes:
    return token.to_json() + b"\n"


def _uuid(call: Call, name: str) -> str:
    return check_uuid(call.path_params[name])


def _hex_parameter(call: Call, name: str, octets: int) -> bytes:
    value = call.query(name)
    if value is None:
        raise Problem(ProblemName.INVALID_REQUEST, f"the parameter {name!r} is missing")
    try:
        return parse_hex(value, octets)
    except DecodeError as error:
        raise Problem.from_decode_error(error.within(f"the parameter {name!r}")) from None


def _number(call: Call, name: str, default: int, least: int, most: int) -> int:
    text = call.query(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 17 and least <= int(text) <= most):
        error = DecodeError(DecodeErrorName.OUT_OF_RANGE, f"{name!r} is decimal, {least} to {most}")
        raise Problem.from_decode_error(error)
    return int(text)
