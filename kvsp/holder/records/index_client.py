"""The index service over HTTP, as a holder sees it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvsp.client.caller import Answer, Caller
from kvsp.client.errors import ClientError, NotFoundError, RequestRefusedError, UnavailableError
from kvsp.holder.records.publishing import (
    CompatUnknownError,
    IndexRefusedError,
    IndexUnavailableError,
    Published,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import compat_path
from kvsp.records.problems import ProblemName
from kvsp.records.records import ReplicaRecord, TtlAnswer

_ANSWER_OCTETS: Final = 1 << 20


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


def _failure(error: ClientError) -> IndexUnavailableError | IndexRefusedError:
    if not isinstance(error, RequestRefusedError) or isinstance(error, UnavailableError):
        return IndexUnavailableError(str(error))
    unknown = error.problem.name is ProblemName.COMPAT_UNKNOWN
    return (CompatUnknownError if unknown else IndexRefusedError)(str(error))
