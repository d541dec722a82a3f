"""Ways to blocks that are not HTTP, and why a block cannot be had."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Final, Protocol

from kvsp.blocks.layout import Octets
from kvsp.client.errors import (
    ClientError,
    NotFoundError,
    RequestRefusedError,
    RequestTimeoutError,
    VerificationError,
)
from kvsp.client.policy import Fault
from kvsp.client.retrieving.flights import Fetch
from kvsp.client.retrieving.receiving import Layer
from kvsp.client.retrieving.ways import Received, WayError
from kvsp.instance.core.directives import CAPACITY, TIMEOUT
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName

DIGEST_MISMATCH: Final = "digest-mismatch"
UNREACHABLE: Final = "unreachable"

WriteLayer = Callable[[int, Octets, Octets], None]
"""Takes layer number, K and V of the next verified layer, ascending."""


class LoadError(KvspError):
    """A block cannot be had; `reason` is the word of a directive's status for it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Fetcher(Protocol):
    """A way to blocks that is not HTTP."""

    def takes(self, source: str) -> bool:
        """Whether it reaches this kind of source (a holder URI)."""
        ...

    async def fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        """Give every verified layer of a block to `write`, ascending. Raises LoadError."""
        ...


class FetcherWay:
    """A `Fetcher` in the retrievals of the client."""

    leases = False

    def __init__(self, fetcher: Fetcher, descriptor: Descriptor, lease_ms: int) -> None:
        self._fetcher = fetcher
        self._descriptor = descriptor
        self._lease_ms = lease_ms

    def takes(self, source: str) -> bool:
        return self._fetcher.takes(source)

    async def layers(self, fetch: Fetch, received: Received) -> AsyncGenerator[Layer, None]:
        source, layers = fetch.record.holder, list[Layer]()

        def write(layer: int, k: Octets, v: Octets) -> None:
            views = memoryview(k).cast("B"), memoryview(v).cast("B")
            layers.append(Layer(fetch.block, layer, *views, source))

        try:
            await self._fetcher.fetch(
                source, fetch.record.block, self._descriptor, self._lease_ms, write
            )
        except LoadError as error:
            fault = _FAULTS.get(error.reason, Fault.REFUSED)
            raise WayError(source, str(error), fault) from error
        for layer in layers:
            received(len(layer.k) + len(layer.v))
            yield layer


_FAULTS: Final = {
    CAPACITY: Fault.CAPACITY,
    DIGEST_MISMATCH: Fault.VERIFICATION,
    TIMEOUT: Fault.TIMEOUT,
    UNREACHABLE: Fault.UNREACHABLE,
    str(ProblemName.FORBIDDEN): Fault.NOT_AUTHORIZED,
    str(ProblemName.LAYERS_UNAVAILABLE): Fault.NOT_HELD,
    str(ProblemName.UNKNOWN_RESOURCE): Fault.NOT_HELD,
}
"""What the reasons of a fetcher mean to a retrieval."""

_REASONS: Final = {
    Fault.NO_REPLICA: str(ProblemName.UNKNOWN_RESOURCE),
    Fault.NOT_HELD: str(ProblemName.UNKNOWN_RESOURCE),
    Fault.CODEC: str(ProblemName.CODEC_UNSUPPORTED),
    Fault.CAPACITY: CAPACITY,
    Fault.TIMEOUT: TIMEOUT,
    Fault.NOT_AUTHORIZED: str(ProblemName.FORBIDDEN),
    Fault.VERIFICATION: DIGEST_MISMATCH,
}
"""What a directive's status says of layers that did not come; else that it was unreachable."""


def failure_of(fault: Fault, error: ClientError | None) -> LoadError:
    """Why a block did not come, by the last failure that it had."""
    if fault is Fault.TIMEOUT or error is None:
        return LoadError(_REASONS.get(fault, UNREACHABLE), "" if error is None else str(error))
    if isinstance(error.__cause__, LoadError):
        return error.__cause__
    return LoadError(_reason(error), str(error))


def _reason(error: ClientError) -> str:
    if isinstance(error, RequestRefusedError):
        if error.problem.name is not None:
            return str(error.problem.name)
        if isinstance(error, NotFoundError):
            return str(ProblemName.UNKNOWN_RESOURCE)
        return str(ProblemName.FORBIDDEN) if error.problem.status in (401, 403) else UNREACHABLE
    if isinstance(error, VerificationError):
        return DIGEST_MISMATCH
    return TIMEOUT if isinstance(error, RequestTimeoutError) else UNREACHABLE
