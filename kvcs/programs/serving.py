"""A publication served at a relay until it is asked to stop: sessions come and go, it stays."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvcs.names.refusals import retry_delay
from kvcs.programs.common import exit_code, loop_holds
from kvcs.publishing.announcing import Publishable
from kvcs.publishing.standing import CountingPublisher, Standing
from kvsp.cli.common import ExitCode, note, print_json, stopping_signals
from moqt.aio import MoqtSession
from moqt.client import connect
from moqt.loop_hold import forget_holds
from moqt.quic.config import QuicConfig
from moqt.values.codes import SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import MoqtError, SessionClosed

PROGRAM: Final = "kvcs-publish"


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


class Serving(Standing):
    """Connect, announce, produce, serve; connect again when the session is lost."""

    def __init__(self, publication: Produced, settings: Settings) -> None:
        super().__init__(CountingPublisher(), timeout=settings.timeout)
        self._publication = publication
        self._settings = settings
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
        self.add(self._publication)
        standing = asyncio.create_task(self.stand())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({standing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if standing.done():
                standing.result()
        finally:
            tasks = [*self._background, standing, stopped]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._publication.abandon("the publisher is going away")
            if self._announced and self._settings.json:
                print_json({"event": "ended", **loop_holds(), **self._ended()})
        if self._failure is not None:
            raise self._failure

    async def connect(self) -> MoqtSession:
        settings = self._settings
        return await connect(
            settings.url,
            quic=settings.quic,
            session=settings.session,
            handler=self.publisher,
            timeout=settings.timeout,
        )

    def lost(self, why: str, delay: float) -> None:
        note(PROGRAM, f"{why}; trying again in {delay:.1f} s")

    def gives_up(self, error: MoqtError, *, reached: bool) -> bool:
        again = self._announced or (reached and _is_passing(error))
        return not again or exit_code(error) is ExitCode.NOT_AUTHORIZED

    def announced(self, publication: Publishable) -> None:
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
        await self.until_unused(seconds, lambda: self._publication.complete)
        self._stop.set()


def _is_passing(error: MoqtError) -> bool:
    """Whether a relay that was reached may take the announcement the next time: it went away, or
    says so itself."""
    if isinstance(error, SessionClosed):
        return error.transport or error.code == SessionErrorCode.NO_ERROR
    return retry_delay(error) is not None
