"""What a holder asks of an index service, and what that may answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from kvsp.holder.records.table import Published
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord

RecordSource = Callable[[BlockId, int], ReplicaRecord | None]
"""The record of a block with a TTL in milliseconds; None when it is not to be published."""

DescriptorSource = Callable[[bytes], Awaitable[Descriptor | None]]
"""The descriptor of a Compatibility ID, None for one that is not known."""

DEFAULT_TTL_MS: Final = 600_000


class IndexUnavailableError(KvspError):
    """The index service does not answer, or not now."""


class IndexRefusedError(KvspError):
    """The index service refused a record; asking again the same way does not help."""


class CompatUnknownError(IndexRefusedError):
    """The index service has no descriptor for a record's Compatibility ID."""


class ManyUnsupportedError(IndexRefusedError):
    """The index service takes records one by one only, as KVSP has it."""


class TooManyError(IndexRefusedError):
    """The index service takes fewer records at once; `limit` when it says how many."""

    def __init__(self, detail: str, limit: int | None = None) -> None:
        super().__init__(detail)
        self.limit = limit


class OvertakenError(IndexRefusedError):
    """A withdrawal of the record was there before it: it may be published anew."""


class Kept(NamedTuple):
    """The index service's answer to many records, or to none."""

    ttl_ms: int
    records: int
    """How many of the holder's it keeps."""

    results: Sequence[Published | IndexRefusedError]
    """One for each record sent."""


class IndexClient(Protocol):
    """What a holder asks of an index service."""

    async def publish(self, record: ReplicaRecord) -> Published:
        """Raises IndexUnavailableError, IndexRefusedError, CompatUnknownError."""
        ...

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        """Store a descriptor; one that is there already is fine. Raises as `withdraw`."""
        ...

    async def withdraw(self, path: str) -> None:
        """Delete the record with that path; an unknown one is fine.
        Raises IndexUnavailableError, IndexRefusedError."""
        ...

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        """The descriptor of a Compatibility ID; None when the index has none."""
        ...


class ManyRecords(Protocol):
    """What a holder asks of an index service that takes many records at once."""

    async def keep(self, holder: str, ttl_ms: int, records: Sequence[bytes]) -> Kept:
        """Publish records, as JSON, of a holder that live as long as it is kept alive, and keep
        it alive. Raises IndexUnavailableError, IndexRefusedError, ManyUnsupportedError."""
        ...

    async def withdraw_all(self, holder: str) -> None:
        """Delete every record of a holder. Raises as `keep`."""
        ...


class NoIndex:
    """A holder that nobody looks up: nothing is published."""

    unavailable = False
    behind = ""

    def __init__(self, ttl_ms: int = DEFAULT_TTL_MS) -> None:
        self._ttl_s = ttl_ms / 1000

    def attach(self, source: RecordSource) -> None:
        """Nothing is asked of it."""

    def describe(self, descriptors: DescriptorSource) -> None:
        """Nothing is asked of it."""

    def changed(self, block: BlockId) -> None:
        """Nobody is told."""

    async def withdraw(self, block: BlockId) -> None:
        """Nobody is told."""

    def remaining_s(self, block: BlockId) -> float:
        return self._ttl_s

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        return None

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...
