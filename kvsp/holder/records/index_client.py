"""The index service over HTTP, as a holder sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from kvsp.client.caller import Answer, Caller
from kvsp.client.errors import ClientError, NotFoundError, RequestRefusedError, UnavailableError
from kvsp.holder.records.index import (
    CompatUnknownError,
    IndexRefusedError,
    IndexUnavailableError,
    Kept,
    ManyUnsupportedError,
    OvertakenError,
    TooManyError,
)
from kvsp.holder.records.table import Published
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import compat_path
from kvsp.records.problems import ProblemName
from kvsp.records.records import KeptAnswer, ReplicaRecord, TtlAnswer

_ANSWER_OCTETS: Final = 1 << 20
_REPLICAS: Final = "replicas"
_CONFLICT: Final = 409
_TOO_LARGE: Final = 413


class HttpIndexClient:
    """One index service. What it raises is said in the words of `kvsp.client.errors`."""

    def __init__(self, base_uri: str, caller: Caller, *, timeout_s: float = 10.0) -> None:
        """`caller` is its own, one that asks once: the publisher comes again by itself."""
        self._base_uri = base_uri
        self._caller = caller
        self._timeout_s = timeout_s

    async def publish(self, record: ReplicaRecord) -> Published:
        try:
            answer = await self._ask("PUT", record.path, record.to_json(), expected=(200, 201))
            granted = answer.record(TtlAnswer)
        except ClientError as error:
            raise _failure(error) from error
        return Published(granted.ttl_ms, created=answer.status == 201)

    async def keep(self, holder: str, ttl_ms: int, records: Sequence[bytes]) -> Kept:
        head = msgspec.json.encode({"holder": holder, "ttl_ms": ttl_ms})
        body = head[:-1] + b',"records":[' + b",".join(records) + b"]}"
        try:
            answer = await self._ask("POST", _REPLICAS, body)
            kept = answer.record(KeptAnswer)
        except ClientError as error:
            raise _failure(error, many=True) from error
        if len(kept.results) != len(records):
            raise IndexUnavailableError("it answered for another number of records")
        results = [_result(each, kept.ttl_ms) for each in kept.results]
        return Kept(kept.ttl_ms, kept.records, results)

    async def withdraw_all(self, holder: str) -> None:
        try:
            await self._ask("DELETE", f"{_REPLICAS}?holder={quote(holder, safe='')}")
        except ClientError as error:
            raise _failure(error, many=True) from error

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        path = compat_path(descriptor.compat_id)
        try:
            await self._ask("PUT", path, descriptor.jcs, expected=(200, 201))
        except ClientError as error:
            raise _failure(error) from error

    async def withdraw(self, path: str) -> None:
        try:
            await self._ask("DELETE", path, expected=(204, 404))
        except ClientError as error:
            raise _failure(error) from error

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        try:
            answer = await self._ask("GET", compat_path(compat_id))
        except NotFoundError:
            return None
        except ClientError as error:
            raise _failure(error) from error
        try:
            descriptor = Descriptor.parse(answer.body)
        except DecodeError as error:
            raise IndexUnavailableError(f"its descriptor is malformed: {error}") from None
        if descriptor.compat_id != compat_id:
            raise IndexUnavailableError("it answered with the descriptor of another ID")
        return descriptor

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, expected: Collection[int] = (200,)
    ) -> Answer:
        return await self._caller.ask(
            method,
            self._base_uri,
            path,
            body=body,
            expected=expected,
            limit=_ANSWER_OCTETS,
            seconds=self._timeout_s,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._caller.close()


def _result(result: Mapping[str, Any], ttl_ms: int) -> Published | IndexRefusedError:
    """What became of one record of many."""
    created = result.get("created")
    if isinstance(created, bool):
        return Published(ttl_ms, created)
    text = f"{result.get('problem') or 'refused'}: {result.get('detail')}"
    if result.get("problem") is None and result.get("status") == _CONFLICT:
        return OvertakenError(text)
    unknown = result.get("problem") == ProblemName.COMPAT_UNKNOWN
    return (CompatUnknownError if unknown else IndexRefusedError)(text)


def _failure(
    error: ClientError, *, many: bool = False
) -> IndexUnavailableError | IndexRefusedError:
    """`many`: of a request that not every index service knows."""
    if many and isinstance(error, RequestRefusedError) and error.problem.status in (404, 405):
        return ManyUnsupportedError(str(error))
    if not isinstance(error, RequestRefusedError) or isinstance(error, UnavailableError):
        return IndexUnavailableError(str(error))
    problem = error.problem
    if many and problem.status == _TOO_LARGE:
        limit = problem.members.get("limit")
        return TooManyError(str(error), limit if type(limit) is int else None)
    if problem.name is None and problem.status == _CONFLICT:
        return OvertakenError(str(error))
    unknown = problem.name is ProblemName.COMPAT_UNKNOWN
    return (CompatUnknownError if unknown else IndexRefusedError)(str(error))
