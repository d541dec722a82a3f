"""Retrieving the KV cache of a prompt by the second profile.

    async with PromptConsumer(session, descriptor, prompt, Compression.FP16) as consumer:
        async for chunk in consumer.chunks(): ...

`chunks` decides what the Objects are; here they are asked for: one subscription with a fill of
what was published before, a FETCH where that brings not all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Self

from kvcs.names.errors import (
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalError,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.names.limits import MAX_TOKENS
from kvcs.names.refusals import not_authorized, retry_delay
from kvcs.simple.chunks import Chunk, Chunks
from kvcs.simple.names import CHUNK_TOKENS, Compression, PromptNamespace
from kvsp.names.identity import Descriptor
from moqt.aio import MoqtSession
from moqt.receiving.receiver import IncomingStream, ObjectReceiver, ReceivedObject, Via
from moqt.requests import OutgoingFetch, OutgoingSubscribe
from moqt.values.codes import EndOfRange, GroupOrder, ObjectStatus, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location, TrackNamespace
from moqt.wire.objects import ObjectHeader, RangeMarker

LISTING_GRACE: Final = 0.02
"""Seconds to wait, after a listing was accepted, for the first namespaces; as long as the answer
took if that is longer."""

PATIENCE: Final = 2.0
"""Seconds of silence after which what is missing before something later is fetched."""

FETCHES: Final = 3
"""FETCHes in a row that may bring nothing before the publication is given up."""

FETCH_PAUSE: Final = 0.1
"""Seconds between them, unless the peer asks for more."""

_THREAD_OCTETS: Final = 1 << 20
"""Octets of a chunk from which on it is decoded in a thread: 1 MiB takes about 2 ms."""


class PromptConsumer:
    """The cache of a prompt, or of the longest prompt published that it begins with.

    A prompt is text here: that its first half is published does not mean that its tokens are
    those of the first half. Nothing of the data is checked but lengths.
    """

    def __init__(
        self,
        session: MoqtSession,
        descriptor: Descriptor,
        prompt: bytes,
        compression: Compression,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        timeout: float = 60.0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """`descriptor` gives the model's name, geometry and the element type of the result;
        `chunk_tokens` has to be the publisher's. `timeout`, in seconds, bounds everything.
        A publication of more than `max_tokens` is refused: no more is ever held. Raises
        ValueError for a prompt that cannot be one, DecodeError `codec-unsupported` for an
        element type that is not known.
        """
        if chunk_tokens < 1 or max_tokens < 1:
            raise ValueError("chunk_tokens and max_tokens are at least 1")
        descriptor.section_octets()
        self.wanted = PromptNamespace(descriptor.model, prompt)
        self.found: TrackNamespace | None = None
        """The namespace that is retrieved."""
        self.tokens = 0
        """Tokens handed over."""
        self.octets = 0
        """Octets of payload that came and were needed."""
        self._session = session
        self._descriptor = descriptor
        self._compression = compression
        self._chunk_tokens = chunk_tokens
        self._max_tokens = max_tokens
        self._timeout = timeout
        self._attempt: _Attempt | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        if self._attempt is not None:
            self._attempt.close()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The chunks, in order, each as soon as it is whole.

        Raises NotFound, NotAuthorized, PublisherLost, RetrievalTimeout, and VerificationFailed
        for what cannot be a cache of this geometry. One of a shorter prompt is taken when a
        longer one brings nothing.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                candidates = await self._find()
            failure: RetrievalError = self._not_found()
            for namespace in candidates:
                self.found, self.octets = namespace, 0
                held = Chunks(
                    self._descriptor,
                    self._compression,
                    chunk_tokens=self._chunk_tokens,
                    max_tokens=self._max_tokens,
                )
                name = self._compression.track_name
                attempt = self._attempt = _Attempt(self._session, namespace, name, held)
                try:
                    await attempt.subscribe(deadline)
                    while await attempt.go_on(deadline):
                        self.octets = held.octets
                        while held.ready:
                            chunk = await self._decoded(held)
                            self.tokens += chunk.tokens
                            yield chunk
                    return
                except (RetrievalError, MoqtError) as error:
                    failure = self._explained(error)
                    if self.tokens or isinstance(error, SessionClosed):
                        raise failure from error  # what was handed over cannot be taken back
                finally:
                    attempt.close()
            raise failure
        except TimeoutError:
            raise RetrievalTimeout(
                f"{self.tokens} tokens came within {self._timeout:g} s"
            ) from None
        except MoqtError as error:
            raise self._explained(error) from error

    # -- inside --------------------------------------------------------------------------

    async def _find(self) -> list[TrackNamespace]:
        """The namespaces to try, the best first."""
        loop = asyncio.get_running_loop()
        asked, own = loop.time(), self.wanted.fields
        async with await self._session.subscribe_namespace(self.wanted.prefix) as listing:
            try:
                async with asyncio.timeout(max(LISTING_GRACE, loop.time() - asked)):
                    async for namespace, present in listing:
                        if present and namespace == own:
                            break
            except TimeoutError:
                pass  # nothing better is going to come
            return self.wanted.best_of(listing.namespaces)

    async def _decoded(self, held: Chunks) -> Chunk:
        chunk = held.ready.popleft()
        arguments = self._descriptor, self._compression
        if sum(map(len, chunk.payloads)) < _THREAD_OCTETS:
            return chunk.decode(*arguments)
        return await asyncio.to_thread(chunk.decode, *arguments)

    def _not_found(self) -> NotFound:
        return NotFound(
            f"nothing is published as {self._compression}, for {self.wanted.model}, of this "
            "prompt or of one that it begins with"
        )

    def _explained(self, error: RetrievalError | MoqtError) -> RetrievalError:
        if isinstance(error, RetrievalError):
            return error
        if not_authorized(error):
            return NotAuthorized(str(error))
        if isinstance(error, RequestError) and error.code == RequestErrorCode.DOES_NOT_EXIST:
            return self._not_found()
        return PublisherLost(str(error))


class _Attempt:
    """One publication, asked for. Callbacks of the session only take note."""

    def __init__(
        self,
        session: MoqtSession,
        namespace: TrackNamespace,
        name: bytes,
        chunks: Chunks,
    ) -> None:
        self.chunks = chunks
        self.changed = asyncio.Event()
        self.fault: RetrievalError | None = None
        self.live = False
        """Whether the subscription may bring more."""
        self.filling = False
        """Whether its fill may."""
        self._session = session
        self._namespace = namespace
        self._name = name
        self._requests: list[OutgoingSubscribe | OutgoingFetch] = []
        self._fruitless = 0

    def close(self) -> None:
        """Cancel every request; harmless when repeated."""
        while self._requests:
            self._requests.pop().cancel()

    async def subscribe(self, deadline: float) -> None:
        """Subscribe, with a fill of all that there is. One that is refused, as by a relay that
        has lost the publisher, leaves it to FETCH. Raises NotAuthorized and what ends all."""
        self.live = self.filling = True
        filled = Parameters(location_filter=LocationFilter.absolute_start(0))
        parameters = Parameters(
            location_filter=LocationFilter.next_object(),
            fill_parameters=filled,
            group_order=GroupOrder.ASCENDING,
        )
        try:
            async with asyncio.timeout_at(deadline):
                self._requests.append(
                    await self._session.subscribe_with(
                        self._namespace, self._name, _Live(self), parameters
                    )
                )
        except RequestError as error:
            if not_authorized(error):
                raise
            self.live = False

    async def go_on(self, deadline: float) -> bool:
        """Wait for what comes, and ask again for what will not; False when all was handed over.

        Raises TimeoutError at `deadline`, VerificationFailed, PublisherLost, RequestError.
        """
        chunks, seen = self.chunks, self.chunks.received
        while self.fault is not None or not chunks.ready:
            if self.fault is not None:
                raise self.fault
            if chunks.whole:
                if not chunks.total:
                    raise VerificationFailed("the track has ended without a token")
                return False
            if not self.live or (chunks.behind and not self.filling):
                await self._fetch(deadline)
                continue
            self.changed.clear()
            try:
                async with asyncio.timeout_at(
                    min(deadline, asyncio.get_running_loop().time() + PATIENCE)
                ):
                    await self.changed.wait()
            except TimeoutError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                # a fill that brings nothing for so long was lost
                self.filling = self.filling and chunks.received > seen
                seen = chunks.received
        return True

    async def _fetch(self, deadline: float) -> None:
        """Fetch from the Group on that is not whole; ask for its first token, too, as it may be
        that nothing but the end is missing."""
        before = self.chunks.received
        group, number = self.chunks.first_missing
        start = Location(group - 1 if group and not number else group, 0)
        receiver = _Fetched(self)
        pause = FETCH_PAUSE
        try:
            async with asyncio.timeout_at(deadline):
                request = await self._session.fetch_with(
                    self._namespace,
                    self._name,
                    receiver,
                    Parameters(
                        location_filter=LocationFilter.absolute_start(*start),
                        group_order=GroupOrder.ASCENDING,
                    ),
                )
                try:
                    await receiver.over.wait()
                finally:
                    request.cancel()
        except RequestError as error:
            delay = retry_delay(error)
            if delay is None:
                raise
            pause = max(pause, delay)
        else:
            if receiver.whole and request.end_of_track and self.fault is None:
                self.chunks.fetched_to_the_end()
                return
        if self.chunks.received > before:
            self._fruitless = 0
            return
        self._fruitless += 1
        if self._fruitless >= FETCHES:
            raise PublisherLost(
                f"no more than {before} tokens are to be had: the publisher is gone before its "
                "end, or what the relay had of it"
            )
        async with asyncio.timeout_at(deadline):
            await asyncio.sleep(pause)

    # -- what comes ----------------------------------------------------------------------

    def received(self, received: ReceivedObject) -> None:
        try:
            if received.status is ObjectStatus.NORMAL:
                self.chunks.object_received(received.location, received.payload)
            else:
                self.chunks.ended(received.status, received.location)
        except VerificationFailed as error:
            self.fault = error
        if self.fault is not None or self.chunks.ready or self.chunks.whole:
            self.changed.set()

    def too_large(self, octets: int) -> None:
        self.fault = VerificationFailed(
            f"a token has {octets} octets where {self.chunks.token_octets} are due"
        )
        self.changed.set()


class _Receiver(ObjectReceiver):
    """A request for tokens: Objects longer than one are not kept."""

    def __init__(self, attempt: _Attempt) -> None:
        self.attempt = attempt
        self.max_object_octets = attempt.chunks.token_octets

    def object_received(self, received: ReceivedObject) -> None:
        self.attempt.received(received)

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self.attempt.too_large(header.length)


class _Live(_Receiver):
    """What the subscription brings, and its fill."""

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        super().stream_ended(stream, error)
        if stream.via is Via.FILL:
            self.attempt.filling = False
            self.attempt.changed.set()

    def subscription_done(self, code: int, reason: str) -> None:
        self._over()

    def request_failed(self, error: MoqtError) -> None:
        self._over()

    def _over(self) -> None:
        self.attempt.live = self.attempt.filling = False
        self.attempt.changed.set()


class _Fetched(_Receiver):
    """What a FETCH brings."""

    def __init__(self, attempt: _Attempt) -> None:
        super().__init__(attempt)
        self.over = asyncio.Event()
        self.whole = False
        """Whether nothing within its range is unknown."""
        self._unknown = False

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None:
        self._unknown |= marker.kind is not EndOfRange.NON_EXISTENT

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        super().stream_ended(stream, error)
        self.whole = error is None and not self._unknown
        self.over.set()

    def request_failed(self, error: MoqtError) -> None:
        self.over.set()
