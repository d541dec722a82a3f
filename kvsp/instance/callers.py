"""The instance's way to its placement controller."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from kvsp.client.caller import Answer, Caller
from kvsp.client.errors import (
    ClientError,
    NotFoundError,
    RequestRefusedError,
    RequestTimeoutError,
    UnavailableError,
    UnreachableError,
)
from kvsp.names.codes import InstanceState
from kvsp.names.errors import KvspError
from kvsp.names.uris import checkpoint_path, instance_path, session_path
from kvsp.records.problems import ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    InstanceStatus,
    SessionCheckpoint,
    SessionProgress,
    StateRequest,
)
from kvsp.records.sharding import ShardMap


class PlacementUnavailableError(KvspError):
    """The placement controller does not answer, or not now."""


class PlacementRefusedError(KvspError):
    """The placement controller said no; `epoch` is the one it tells of, 0 for none."""

    def __init__(self, name: ProblemName | None, status: int, detail: str, epoch: int = 0) -> None:
        super().__init__(f"{name or status}: {detail}")
        self.name = name
        self.status = status
        self.epoch = epoch


class PlacementCaller(Protocol):
    """What an instance tells and asks. Each raises PlacementUnavailableError and
    PlacementRefusedError."""

    async def report(self, status: InstanceStatus) -> InstanceState:
        """Send a status; the state the instance is to have."""
        ...

    async def checkpoint(self, checkpoint: SessionCheckpoint | CheckpointDelta) -> SessionProgress:
        """Publish a checkpoint, or what it adds to the acknowledged one; the acknowledgement."""
        ...

    async def end_session(self, session: str) -> None:
        """A session is over; harmless when it is not known."""
        ...

    async def map_version(self, name: str) -> int | None:
        """The authoritative version of a Shard Map, None for an unknown one."""
        ...

    async def close(self) -> None: ...


class HttpPlacement:
    """The placement controllers at some base URIs, of which one leads."""

    def __init__(self, base_uris: Sequence[str], caller: Caller, *, timeout_s: float = 5.0) -> None:
        """`caller` is its own, one that asks once: who asks comes again by itself. All of them
        together have `timeout_s` to answer."""
        self._base_uris = base_uris
        self._caller = caller
        self._timeout_s = timeout_s
        self._answering = 0
        """Which of them answered last, or is the next to be asked."""

    async def report(self, status: InstanceStatus) -> InstanceState:
        path = instance_path(status.instance)
        answer = await self._ask("PUT", path, status.to_json(), StateRequest)
        return InstanceState(answer.state)

    async def checkpoint(self, checkpoint: SessionCheckpoint | CheckpointDelta) -> SessionProgress:
        path = checkpoint_path(checkpoint.session)
        method = "PATCH" if isinstance(checkpoint, CheckpointDelta) else "PUT"
        progress = await self._ask(method, path, checkpoint.to_json(), SessionProgress)
        assert isinstance(progress, SessionProgress)
        return progress

    async def end_session(self, session: str) -> None:
        try:
            await self._lead("DELETE", session_path(session), None, (204, 404))
        except ClientError as error:
            raise _failure(error) from None

    async def map_version(self, name: str) -> int | None:
        try:
            shard_map: ShardMap = await self._ask("GET", f"maps/{name}", None, ShardMap)
        except PlacementRefusedError as error:
            if error.name is ProblemName.UNKNOWN_RESOURCE:
                return None
            raise
        return shard_map.version

    async def close(self) -> None:
        """Close the connections."""
        await self._caller.close()

    async def _ask(self, method: str, path: str, body: bytes | None, kind: Any) -> Any:
        try:
            answer = await self._lead(method, path, body, (200,))
            return answer.record(kind, http_loopback=self._caller.http_loopback)
        except ClientError as error:
            raise _failure(error) from None

    async def _lead(
        self, method: str, path: str, body: bytes | None, expected: Collection[int]
    ) -> Answer:
        """The answer of whichever leads: one that does not answer, or that says it cannot, is
        followed by the next, which is asked first from then on. Raises ClientError."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._timeout_s
        first, count = self._answering, len(self._base_uris)
        for tried in range(count):
            place = (first + tried) % count
            # one that hangs leaves time for the others
            seconds = max(0.0, ends - loop.time()) / (count - tried)
            try:
                answer = await self._caller.ask(
                    method,
                    self._base_uris[place],
                    path,
                    body=body,
                    expected=expected,
                    seconds=seconds,
                )
            except (UnavailableError, UnreachableError, RequestTimeoutError) as error:
                failure = error
                if self._answering == place:
                    self._answering = (place + 1) % count
            else:
                self._answering = place
                return answer
        raise failure


def _failure(error: ClientError) -> PlacementUnavailableError | PlacementRefusedError:
    if not isinstance(error, RequestRefusedError) or isinstance(error, UnavailableError):
        return PlacementUnavailableError(str(error))
    problem = error.problem
    epoch = problem.members.get("epoch")
    name = problem.name
    if name is None and isinstance(error, NotFoundError):
        name = ProblemName.UNKNOWN_RESOURCE
    return PlacementRefusedError(
        name, problem.status, problem.detail, epoch if type(epoch) is int else 0
    )
