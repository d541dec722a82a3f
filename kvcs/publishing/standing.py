"""A session to a relay that stands: opened again whenever it is lost, with everything that is
published announced on it again (KVCS "Publisher Behavior").

    class Here(Standing):
        async def connect(self): return await moqt.connect(url, handler=self.publisher)

    here = Here(CountingPublisher())
    here.add(publication)
    await here.stand()

`kvcs-publish` serves its one publication so, and `kvcs.Client` all that it keeps.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from kvcs.names.refusals import retry_delay
from kvcs.publishing.announcing import Publishable, publish, unpublish
from moqt.aio import MoqtSession, PublishedNamespace
from moqt.backoff import Backoff
from moqt.publisher import Publisher
from moqt.requests import IncomingFetch, IncomingRequest, IncomingSubscribe, RequestState
from moqt.session import Session
from moqt.values.errors import ConnectError, MoqtError, SessionClosed
from moqt.values.messages import Goaway
from moqt.values.names import TrackNamespace

MOST_SECONDS: Final = 5.0
"""Between two tries to connect: a relay that is back has everything again within that."""
LEAVE_AFTER: Final = 1.0
"""Seconds without a request after which a relay that goes away is left."""
ANNOUNCE_SECONDS: Final = 10.0
"""Seconds that a relay may take to accept a namespace."""
_SWEEP: Final = 256
"""Requests served after which those that are over are forgotten, and again after twice as many as
were left."""


class CountingPublisher(Publisher):
    """A Publisher that knows which requests it is serving."""

    def __init__(self, asked: Callable[[TrackNamespace], None] | None = None) -> None:
        """`asked` is called with the namespace of every SUBSCRIBE and FETCH."""
        super().__init__()
        self.requests = 0
        self.sent_away = asyncio.Event()
        """The peer is going to end the session (GOAWAY)."""
        self._asked = asked
        self._served: dict[IncomingRequest, TrackNamespace] = {}
        self._sweep_at = _SWEEP

    @property
    def active(self) -> int:
        """Subscriptions and fetches that are not over."""
        self._served = {
            request: namespace
            for request, namespace in self._served.items()
            if request.state is not RequestState.CLOSED
        }
        return len(self._served)

    def serves(self, namespace: TrackNamespace) -> bool:
        """Whether a subscription or fetch of a track of that namespace is not over."""
        return self.active > 0 and namespace in self._served.values()

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        self._count(request)
        super().subscribe_received(request)

    def fetch_received(self, request: IncomingFetch) -> None:
        self._count(request)
        super().fetch_received(request)

    def goaway_received(self, session: Session, goaway: Goaway) -> None:
        self.sent_away.set()

    def _count(self, request: IncomingSubscribe | IncomingFetch) -> None:
        self.requests += 1
        if len(self._served) > self._sweep_at:
            self._sweep_at = max(_SWEEP, 2 * self.active)
        self._served[request] = request.name.namespace
        if self._asked is not None:
            self._asked(request.name.namespace)


class _Held:
    """A publication that is to be announced on every session."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.announced: PublishedNamespace | None = None

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None


class Standing(ABC):
    """One session to a relay, opened again with growing delays when it is lost.

    `stand` runs it, until it is cancelled or `gives_up` says so. A relay that says GOAWAY is
    left as soon as it uses nothing any more. An announcement that is refused, or ended, while the
    session stands is made again on it.
    """

    def __init__(self, publisher: CountingPublisher, *, timeout: float = ANNOUNCE_SECONDS) -> None:
        """`timeout` is how many seconds the relay may take to accept a namespace."""
        self.publisher = publisher
        self.session: MoqtSession | None = None
        """The session that stands now."""
        self._timeout = timeout
        self._held: dict[Publishable, _Held] = {}
        self._reached = False
        self._over: asyncio.Future[None] | None = None

    # -- for those who use it ------------------------------------------------------------

    def add(self, publication: Publishable) -> None:
        """Announce a publication, on this session and on those that follow."""
        self._held.setdefault(publication, _Held())
        if self.session is not None:
            self._begin(self.session, publication)

    def remove(self, publication: Publishable) -> None:
        """Announce and serve it no longer; harmless when it is not."""
        held = self._held.pop(publication, None)
        if held is None:
            return
        held.stop()
        if self.session is None or self.session.closed is not None:
            publication.withdraw(self.publisher)
        else:
            unpublish(self.session, publication, held.announced)

    def renew(self, error: Exception) -> None:
        """End the session that stands, for this reason, so that another one is opened."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    async def stand(self) -> None:
        """Open sessions, one after another. Raises what `gives_up` does not bear with."""
        loop, backoff = asyncio.get_running_loop(), Backoff(most=MOST_SECONDS)
        while True:
            began = loop.time()
            try:
                await self._one()
                why = "the relay is going away"
            except MoqtError as error:
                if self.gives_up(error, reached=self._reached):
                    raise
                why = str(error)
            delay = backoff.next(loop.time() - began)
            self.lost(why, delay)
            await asyncio.sleep(delay)

    async def until_unused(self, seconds: float, ready: Callable[[], bool] = lambda: True) -> None:
        """Wait until nothing was served or asked for `seconds`, all that time being `ready`."""
        publisher, loop = self.publisher, asyncio.get_running_loop()
        since, requests = loop.time(), publisher.requests
        while True:
            busy = publisher.active > 0 or publisher.requests != requests or self.in_use()
            if busy or not ready():
                since, requests = loop.time(), publisher.requests
            elif loop.time() - since >= seconds:
                return
            await asyncio.sleep(min(max(seconds / 10, 0.02), 0.5))

    # -- what the owner says, and is told ------------------------------------------------

    @abstractmethod
    async def connect(self) -> MoqtSession:
        """Open a session whose handler is `publisher`. Raises MoqtError."""

    def opened(self, session: MoqtSession) -> None:
        """A session stands."""
        self.session, self._reached = session, True

    def in_use(self) -> bool:
        """Whether the session is needed for something else than what it serves."""
        return False

    @abstractmethod
    def announced(self, publication: Publishable) -> None:
        """The relay has accepted its namespace, on this session for the first time."""

    @abstractmethod
    def lost(self, why: str, delay: float) -> None:
        """A session, or an announcement, is lost, and tried again in `delay` seconds."""

    def is_renewed(self, error: MoqtError) -> bool:
        """Whether a new session may be given what this one is refused."""
        return False

    def gives_up(self, error: MoqtError, *, reached: bool) -> bool:
        """Whether `stand` ends with this error; `reached`: there was a session."""
        return False

    # -- inside --------------------------------------------------------------------------

    async def _one(self) -> None:
        """One session, until the relay that said GOAWAY uses it no more. Raises why it ended."""
        self._reached = False
        self.publisher.sent_away.clear()
        session = await self.connect()
        over = self._over = asyncio.get_running_loop().create_future()
        ends = [asyncio.ensure_future(each) for each in (session.wait_closed(), self._leave())]
        try:
            self.opened(session)
            for publication in self._held:
                self._begin(session, publication)
            await asyncio.wait({over, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
            if session.closed is not None:
                raise session.closed
        finally:
            self.session = None
            if not over.cancel() and not over.cancelled():
                over.exception()  # it was retrieved, or another end came before
            for task in ends:
                task.cancel()
            for held in self._held.values():
                held.stop()
            session.close()
            await session.wait_closed()

    async def _leave(self) -> None:
        await self.publisher.sent_away.wait()
        await self.until_unused(LEAVE_AFTER)

    def _begin(self, session: MoqtSession, publication: Publishable) -> None:
        held = self._held[publication]
        held.stop()
        held.task = asyncio.create_task(self._announce(session, publication, held))
        held.task.add_done_callback(self._announcing_ended)

    def _announcing_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.renew(error)

    async def _announce(self, session: MoqtSession, publication: Publishable, held: _Held) -> None:
        """Announce it, again and again, while the session stands. Raises what is not to be borne
        with."""
        loop, backoff = asyncio.get_running_loop(), Backoff()
        while session.closed is None:
            began, said, held.announced = loop.time(), "", None
            error: MoqtError
            try:
                async with asyncio.timeout(self._timeout):
                    held.announced = await publish(session, publication)
            except TimeoutError:
                error = ConnectError(
                    f"the relay did not accept the namespace within {self._timeout:g} s"
                )
            except SessionClosed:
                return  # whoever waits for the session knows why
            except MoqtError as refused:
                error = refused
            else:
                self.announced(publication)
                error = await asyncio.shield(held.announced.ended)
                if isinstance(error, SessionClosed):
                    return
                said = "no longer announced: "
            if self.gives_up(error, reached=True) or self.is_renewed(error):
                raise error
            delay = max(backoff.next(loop.time() - began), retry_delay(error) or 0.0)
            self.lost(f"{said}{error}", delay)
            await asyncio.sleep(delay)
