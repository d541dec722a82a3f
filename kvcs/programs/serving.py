"""A publication served at a relay until it is asked to stop: sessions come and go, it stays."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from kvcs.names.refusals import retry_delay
from kvcs.programs.common import exit_code
from kvcs.publishing.announcing import Publishable, publish
from kvsp.cli.common import ExitCode, note, print_json, stopping_signals
from moqt.aio import MoqtSession, PublishedNamespace
from moqt.backoff import Backoff
from moqt.client import connect
from moqt.loop_hold import forget_holds, longest_hold, longest_work
from moqt.publisher import Publisher
from moqt.quic.config import QuicConfig
from moqt.requests import IncomingFetch, IncomingRequest, IncomingSubscribe, RequestState
from moqt.session import Session
from moqt.values.codes import SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import ConnectError, MoqtError, SessionClosed
from moqt.values.messages import Goaway

PROGRAM: Final = "kvcs-publish"
MOST_SECONDS: Final = 5.0
"""Between two tries to connect: a relay that is back has the publication again within that."""
LEAVE_AFTER: Final = 1.0
"""Seconds without a request after which a relay that goes away is left."""

_T = TypeVar("_T")


class CountingPublisher(Publisher):
    """A Publisher that knows which requests it is serving."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.sent_away = asyncio.Event()
        """The peer is going to end the session (GOAWAY)."""
        self._served: set[IncomingRequest] = set()

    @property
    def active(self) -> int:
        """Subscriptions and fetches that are not over."""
        self._served = {r for r in self._served if r.state is not RequestState.CLOSED}
        return len(self._served)

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._count(request)
        super().subscribe_received(request)

    def fetch_received(self, request: IncomingFetch) -> None:
        self._count(request)
        super().fetch_received(request)

    def goaway_received(self, session: Session, goaway: Goaway) -> None:
        self.sent_away.set()

    def _count(self, request: IncomingRequest) -> None:
        self.requests += 1
        if len(self._served) > 256:
            _ = self.active
        self._served.add(request)


@dataclass(frozen=True, slots=True)
class Settings:
    url: str
    quic: QuicConfig
    session: SessionConfig
    timeout: float
    live_delay: float
    exit_after_idle: float | None
    json: bool


class Produced(Publishable, Protocol):
    """A publication, of whichever profile, while it is produced."""

    @property
    def complete(self) -> bool: ...
    def abandon(self, reason: str) -> None: ...


class Serving(ABC):
    """Connect, announce, produce, serve; connect again when the session is lost."""

    def __init__(self, publication: Produced, settings: Settings) -> None:
        self._publication = publication
        self._settings = settings
        self._publisher = CountingPublisher()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._background: list[asyncio.Task[None]] = []
        self._announced = False

    async def run(self) -> None:
        """Raises what the first try to connect raises, and a refusal of the first announcement;
        what is cut off in between, and everything later, is tried again."""
        loop = asyncio.get_running_loop()
        for number in stopping_signals():
            loop.add_signal_handler(number, self._stop.set)
        forget_holds()  # those of reading the inputs
        backoff = Backoff(most=MOST_SECONDS)
        try:
            while not self._stop.is_set():
                began = loop.time()
                lost = await self._session()
                if self._stop.is_set():
                    break
                delay = backoff.next(loop.time() - began)
                note(PROGRAM, f"{lost}; trying again in {delay:.1f} s")
                await self._unless_stopped(asyncio.sleep(delay))
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._publication.abandon("the publisher is going away")
            if self._announced and self._settings.json:
                holds = {"loop_hold_seconds": longest_hold(), "loop_work_seconds": longest_work()}
                print_json({"event": "ended", **holds, **self._ended()})
        if self._failure is not None:
            raise self._failure

    async def _session(self) -> str:
        """One session, to its end; returns why it ended."""
        settings = self._settings
        session: MoqtSession | None = None
        self._publisher.sent_away.clear()
        try:
            session = await self._unless_stopped(self._connect())
            if session is None:
                return "stopped"
            async with asyncio.timeout(settings.timeout):
                announced = await self._unless_stopped(publish(session, self._publication))
            if announced is None:
                return "stopped"
            self._on_announced()
            return await self._unless_stopped(self._serve(announced)) or "stopped"
        except TimeoutError:
            error: MoqtError = ConnectError(
                f"{settings.url} did not accept the namespace within {settings.timeout:g} s"
            )
        except MoqtError as caught:
            error = caught
        finally:
            if session is not None:
                session.close()
                await session.wait_closed()
        again = self._announced or (session is not None and _is_passing(error))
        if not again or exit_code(error) is ExitCode.NOT_AUTHORIZED:
            raise error
        return str(error)

    async def _serve(self, announced: PublishedNamespace) -> str:
        """Serve until the relay ends it, or goes away and uses nothing any more; returns why."""
        ended = asyncio.ensure_future(_result(announced.ended))
        leaving = asyncio.ensure_future(self._leave())
        try:
            await asyncio.wait({ended, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"no longer announced: {ended.result()}"
            return "the relay is going away"
        finally:
            ended.cancel()
            leaving.cancel()

    async def _leave(self) -> None:
        await self._publisher.sent_away.wait()
        await self._until_unused(LEAVE_AFTER)

    async def _connect(self) -> MoqtSession:
        settings = self._settings
        return await connect(
            settings.url,
            quic=settings.quic,
            session=settings.session,
            handler=self._publisher,
            timeout=settings.timeout,
        )

    def _on_announced(self) -> None:
        if self._announced:
            note(PROGRAM, "announced again")
            return
        self._announced = True
        text, members = self._told()
        if self._settings.json:
            print_json({"event": "announced", **members, "url": self._settings.url})
        else:
            print(f"publishing {text}", flush=True)
        self._start(self._produce())
        if self._settings.exit_after_idle is not None:
            self._start(self._watch_idle(self._settings.exit_after_idle))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.append(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._stop.set()

    @abstractmethod
    def _told(self) -> tuple[str, dict[str, Any]]:
        """What is published: in words, and as members of a JSON object."""

    def _ended(self) -> dict[str, Any]:
        """What is to be said at the end, as members of a JSON object."""
        return {}

    @abstractmethod
    async def _produce(self) -> None:
        """Publish all of it, and let the sessions send in between."""

    async def _watch_idle(self, seconds: float) -> None:
        """Stop once nothing was asked for `seconds` after the publication is complete."""
        await self._until_unused(seconds, lambda: self._publication.complete)
        self._stop.set()

    async def _until_unused(self, seconds: float, ready: Callable[[], bool] = lambda: True) -> None:
        """Wait until nothing was served or asked for `seconds`, all that time being `ready`."""
        publisher, loop = self._publisher, asyncio.get_running_loop()
        since, requests = loop.time(), publisher.requests
        while True:
            busy = publisher.active > 0 or publisher.requests != requests
            if busy or not ready():
                since, requests = loop.time(), publisher.requests
            elif loop.time() - since >= seconds:
                return
            await asyncio.sleep(min(max(seconds / 10, 0.02), 0.5))

    async def _unless_stopped(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The result of `work`, or None when it was cut short by a signal."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, MoqtError):
                    await task


async def _result(future: asyncio.Future[_T]) -> _T:
    return await asyncio.shield(future)


def _is_passing(error: MoqtError) -> bool:
    """Whether a relay that was reached may take the announcement the next time: it went away, or
    says so itself."""
    if isinstance(error, SessionClosed):
        return error.transport or error.code == SessionErrorCode.NO_ERROR
    return retry_delay(error) is not None
