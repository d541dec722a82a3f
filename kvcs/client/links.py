"""A client's standing session to one relay, and what the relay says is published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvcs.client.stalls import Line
from kvcs.finding.listing import Directory, Found
from kvcs.finding.probing import DEFAULT_GRACE, DEFAULT_PROBES, Probing
from kvcs.names.errors import MisuseError, NotAuthorized, RetrievalError
from kvcs.names.namespace import compat_prefix
from kvcs.names.refusals import not_authorized
from kvcs.publishing.announcing import Publishable
from kvcs.publishing.standing import CountingPublisher, Standing
from kvsp.names.identity import Descriptor, Scope
from moqt.aio import MoqtSession
from moqt.values.errors import ConnectError, MoqtError, RequestError
from moqt.values.names import TrackNamespace

logger = logging.getLogger("kvcs.client")

RIGHTS_SECONDS: Final = 30.0
"""Seconds after which a relay that lists nothing to us for want of rights is asked again: they may
be given meanwhile."""

Opening = Callable[[str, CountingPublisher], Awaitable[MoqtSession]]
"""Opens a session to the relay with that URL, served by that publisher. Raises MoqtError."""

NO_MODEL: Final = bytes(32)
"""A Compatibility ID that no descriptor has: a relay has nothing to look for to answer for it."""


class RelayLink(Standing):
    """A relay: what is published there is announced on every session to it, and its listing is
    at hand as long as one stands."""

    def __init__(
        self,
        url: str,
        opening: Opening,
        scope: Scope,
        descriptor: Descriptor,
        *,
        asked: Callable[[TrackNamespace], None],
        offered: Callable[[RelayLink, Publishable], None],
        exchanged: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`asked` is told of requests for what is published here, `offered` of announcements;
        `exchanged` says whether a new session would show the relay another token."""
        super().__init__(CountingPublisher(asked))
        self.url = url
        self.ready = asyncio.Event()
        """It has answered: `known` is complete, or it `refuses` to list."""
        self.refuses = False
        """It lists nothing: it is to be asked prefix by prefix."""
        self.silent_until = 0.0
        """When it may be waited for again, on the loop's clock: it did not answer in time."""
        self.line = Line()
        """The loads on its session."""
        self._opening = opening
        self._scope = scope
        self._descriptor = descriptor
        self._offered = offered
        self._exchanged = exchanged
        self._directory: Directory | None = None
        self._listing: asyncio.Task[None] | None = None
        self._why = ""

    def known(self, keys: Sequence[bytes]) -> list[Found]:
        """The publications of every prefix, longest first, that the relay has told of; in
        whatever thread, without asking anybody."""
        directory = self._directory
        if directory is None:
            return []
        try:
            return directory.find_keys(keys)
        except (RetrievalError, MisuseError):
            return []  # it has just ended, or was closed on the loop: `_list` deals with it

    async def probe(self, keys: Sequence[bytes]) -> list[Found]:
        """The same of a relay that lists nothing, by asking for each prefix."""
        session = self.session
        if session is None:
            return []
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        probing = Probing(
            session.session,
            self._scope.scope_id,
            self._descriptor.compat_id,
            keys,
            min_blocks=1,
            grace=DEFAULT_GRACE,
            probes=DEFAULT_PROBES,
            changed=changed.set,
        )
        try:
            while True:
                changed.clear()
                due = probing.poll(loop.time())
                best = next(probing.find(), None)
                if probing.error is not None or probing.open <= (best[0] if best else 0):
                    return list(probing.find())
                try:
                    async with asyncio.timeout_at(due):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            probing.close()

    async def answers(self, within: float) -> bool:
        """Whether the relay itself answers anything, within so many seconds."""
        session = self.session
        if session is None:
            return False
        prefix = compat_prefix(self._scope.scope_id, NO_MODEL)
        try:
            async with asyncio.timeout(within):
                listing = await session.subscribe_namespace(prefix)
        except RequestError:
            return True
        except (MoqtError, TimeoutError):
            return False
        listing.request.cancel()
        return True

    # -- of the standing session ---------------------------------------------------------

    async def connect(self) -> MoqtSession:
        return await self._opening(self.url, self.publisher)

    def opened(self, session: MoqtSession) -> None:
        super().opened(session)
        logger.info("%s: connected", self.url)
        if self._listing is not None:
            self._listing.cancel()
        self._listing = asyncio.create_task(self._list(session))

    def is_renewed(self, error: MoqtError) -> bool:
        return not_authorized(error) and self._exchanged(self.url)

    def in_use(self) -> bool:
        return self.line.loads > 0

    def announced(self, publication: Publishable) -> None:
        self._offered(self, publication)

    def lost(self, why: str, delay: float) -> None:
        # the same of many publications, and again and again, is worth one warning
        level = logging.DEBUG if why == self._why else logging.WARNING
        self._why = why
        logger.log(level, "%s: %s; trying again in %.1f s", self.url, why, delay)

    # -- inside --------------------------------------------------------------------------

    async def _list(self, session: MoqtSession) -> None:
        """What the relay tells, as long as the session stands."""
        try:
            while isinstance(why := await self._listed(session), NotAuthorized):
                logger.warning("%s: nothing is found there: %s", self.url, why)
                self._answered(None)
                await asyncio.sleep(RIGHTS_SECONDS)
                if self._exchanged(self.url):
                    self.renew(ConnectError("there is another token for it now"))
            if session.closed is None:
                logger.info("%s: asked prefix by prefix from now on: %s", self.url, why)
                self.refuses = True
                self._answered(None)
                await session.wait_closed()
        finally:
            self.ready.clear()

    async def _listed(self, session: MoqtSession) -> RetrievalError:
        """The listing, until it ends; returns why."""
        self.ready.clear()
        self.refuses = False
        directory = Directory(session, self._scope, self._descriptor, remember=0)
        try:
            async with directory:
                self._answered(directory)
                return await directory.wait_ended()
        except RetrievalError as error:
            return error
        finally:
            self._directory = None
            self.ready.clear()

    def _answered(self, directory: Directory | None) -> None:
        self._directory = directory
        self.silent_until = 0.0
        self.ready.set()
