"""A publication handed to a relay that keeps it: who pushed it leaves when it is stored there.

Every track is PUBLISHed. MOQT has no message for "it is stored", so that is asked for: a FETCH of
all of a track whose filter lets no Object through makes the relay get, and cache, every Object of
it, and costs nothing on the way back; where something is missing the answer has a range that is
UNKNOWN (MOQT "FETCH", "End of Range"). When all have been taken the publisher's session ends, and
the same is asked in a new one: what is answered then is what the relay has by itself. It counts as
stored when no track lacks anything and the relay lists the namespace as its own. Whether that is on
its disk, or in its memory alone, is asked for by itself (`moqt.values.names.ON_DISK`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Any, Final

from kvcs.names.errors import KvcsError
from kvcs.names.refusals import not_authorized
from kvcs.publishing.announcing import publish, unpublish
from kvcs.publishing.publication import Publication
from moqt.aio import MoqtSession
from moqt.receiving.receiver import IncomingStream, Receiver
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.codes import EndOfRange, ParameterType, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, StreamReset
from moqt.values.messages import Parameters, RangeFilter
from moqt.values.names import ON_DISK
from moqt.wire.objects import ObjectHeader, Payload, RangeMarker

PATIENCE: Final = 30.0
"""Seconds in which a relay has to take something, or say that it is stored."""
SETTLED_SECONDS: Final = 10.0
"""How long it may take, once all was taken, until the relay has it by itself and says so."""
AGAIN_SECONDS: Final = 0.25
AT_ONCE: Final = 8
"""Tracks that are asked for together."""
NOTHING: Final = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1 << 61, 1 << 61),))
"""Lets no Object of a publication through: blocks are far fewer."""


class StoredIn(StrEnum):
    """Where a relay keeps what was pushed."""

    DISK = "disk"
    """It outlives the relay's process."""
    MEMORY = "memory"
    """It is gone with the relay's process, or when that needs the room."""


class _Answer(Receiver):
    """What a relay says that it has of a track."""

    def __init__(self) -> None:
        self.lacks = 0
        """Ranges of which it knows nothing."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        return True  # of a relay that knows no filters

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None:
        self.lacks += marker.kind is not EndOfRange.NON_EXISTENT

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is not None:
            self.request_failed(StreamReset(error, "the answer of the relay"))
        elif not self.over.done():
            self.over.set_result(None)

    def request_failed(self, error: MoqtError) -> None:
        if not self.over.done():
            self.over.set_exception(error)
            self.over.exception()  # no warning: whoever asked may have been told already


class Push:
    """Hands `publication` over. `run` returns when it is stored, and raises when it is not."""

    why_memory = ""
    """Why it is not on the relay's disk, as that says; empty when it is."""

    def __init__(
        self,
        publication: Publication,
        connect: Callable[[], Awaitable[MoqtSession]],
        *,
        durable: bool = False,
    ) -> None:
        """`publication` is complete; `connect` makes a session with the relay. `durable`: what the
        relay has in memory alone does not count as stored."""
        self._publication = publication
        self._connect = connect
        self._durable = durable
        self._taken_at = 0.0
        """When the relay took something last."""

    async def run(self) -> StoredIn:
        """Where it is stored. Raises KvcsError when the relay does not keep it, and MoqtError."""
        await self._hand_over()
        return await self._make_sure()

    async def _hand_over(self) -> None:
        """Have the relay take every Object."""
        tracks = self._publication.tracks
        session = await self._connect()
        try:
            await self._in_time(publish(session, self._publication))
            for store in tracks:
                store.on_used = self._used
            await self._each(tracks, lambda store: self._offer(session, store))
            await self._each(tracks, lambda store: self._lacks(session, store))
        finally:
            for store in tracks:
                store.on_used = None
            unpublish(session, self._publication)
            session.close()
            await session.wait_closed()

    def _used(self, store: TrackStore, stored: StoredObject) -> None:
        self._taken_at = asyncio.get_running_loop().time()

    async def _offer(self, session: MoqtSession, store: TrackStore) -> None:
        try:
            await self._in_time(session.publish(store))
        except RequestError as error:
            if error.code == RequestErrorCode.UNINTERESTED:
                return  # it may take it for all that, when it is asked for
            raise KvcsError(f"the relay does not take {store.name.name!r}: {error}") from error

    async def _lacks(self, session: MoqtSession, store: TrackStore) -> int:
        """How many ranges of the track the relay lacks, once it has tried to get all of it."""
        answer = _Answer()
        name = store.name
        asked = Parameters(range_filters=(NOTHING,))
        await self._in_time(session.fetch_with(name.namespace, name.name, answer, asked))
        await self._in_time(answer.over)
        return answer.lacks

    async def _make_sure(self) -> StoredIn:
        """See that the relay has all of it, and lists it, without us, and where."""
        tracks, namespace = self._publication.tracks, self._publication.namespace.fields
        clock = asyncio.get_running_loop()
        session = await self._connect()
        try:
            listing = await self._in_time(session.subscribe_namespace(namespace))
            deadline = clock.time() + SETTLED_SECONDS
            lacking = list(tracks)
            while lacking or namespace not in listing.namespaces:
                lacking = [store for store in lacking if not await self._kept(session, store)]
                if clock.time() >= deadline:
                    break
                if lacking or namespace not in listing.namespaces:
                    await asyncio.sleep(AGAIN_SECONDS)
            if lacking:
                raise KvcsError(
                    f"not stored: the relay has no room for {len(lacking)} of {len(tracks)} tracks"
                )
            if namespace not in listing.namespaces:
                raise KvcsError("not stored: the relay has every track and does not list them")
            return await self._where(session, clock.time() + SETTLED_SECONDS)
        finally:
            session.close()
            await session.wait_closed()

    async def _kept(self, session: MoqtSession, store: TrackStore) -> bool:
        try:
            return not await self._lacks(session, store)
        except StreamReset:
            return False
        except RequestError as error:
            if not_authorized(error):
                raise
            return False

    async def _where(self, session: MoqtSession, deadline: float) -> StoredIn:
        """Whether every track outlives the relay. Raises KvcsError when that is demanded."""
        tracks = self._publication.tracks
        for number, store in enumerate(tracks):
            self.why_memory = await self._not_on_disk(session, store, deadline)
            if not self.why_memory:
                continue
            if self._durable:
                raise KvcsError(
                    f"not stored durably: the relay has all of it in memory, and {number} of "
                    f"{len(tracks)} tracks on its disk: {self.why_memory}"
                )
            return StoredIn.MEMORY
        return StoredIn.DISK

    async def _not_on_disk(self, session: MoqtSession, store: TrackStore, deadline: float) -> str:
        """Why the track is not on the disk of the relay, which may be writing it; empty when it
        is."""
        clock = asyncio.get_running_loop()
        namespace = (ON_DISK, *store.name.namespace)
        while True:
            try:
                await self._in_time(session.track_status(namespace, store.name.name))
            except RequestError as error:
                if error.retry_after_ms is None or clock.time() >= deadline:
                    return error.reason or str(error)
                await asyncio.sleep(max(AGAIN_SECONDS, error.retry_after_ms / 1000))
            else:
                return ""

    async def _each(
        self, tracks: Iterable[TrackStore], work: Callable[[TrackStore], Awaitable[object]]
    ) -> None:
        """Do `work` for each, some at once; the first that fails ends all."""
        free = asyncio.Semaphore(AT_ONCE)

        async def one(store: TrackStore) -> None:
            async with free:
                await work(store)

        try:
            async with asyncio.TaskGroup() as group:
                for store in tracks:
                    group.create_task(one(store))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _in_time(self, awaited: Awaitable[Any]) -> Any:
        """Its result, unless the relay takes nothing for too long."""
        task = asyncio.ensure_future(awaited)
        clock = asyncio.get_running_loop()
        self._taken_at = max(self._taken_at, clock.time())
        try:
            while True:
                left = self._taken_at + PATIENCE - clock.time()
                if left <= 0:
                    raise KvcsError(f"the relay took nothing for {PATIENCE:g} s")
                done, _ = await asyncio.wait({task}, timeout=left)
                if done:
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
