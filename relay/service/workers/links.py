"""The sessions of an edge to the home: two for each scope, made, watched and made again."""

from __future__ import annotations

import asyncio
import logging

import moqt
from moqt.backoff import Backoff
from moqt.quic.config import QuicConfig
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from moqt.values.errors import MoqtError
from relay.core import Relay
from relay.mesh.uplink_client import Connect, UplinkClient
from relay.scopes import Scopes
from relay.service.workers.edge import EdgeRelay

logger = logging.getLogger("relay")

FIRST_SECONDS, MOST_SECONDS = 0.1, 1.0
"""Between two tries: the home is on this machine, and is started again when it dies."""


class Links:
    """Those of all scopes of an edge."""

    def __init__(
        self,
        scopes: Scopes,
        port: int,
        quic: QuicConfig,
        serving: SessionConfig,
        bringing: SessionConfig,
    ) -> None:
        """The home is at `port` of this machine."""
        self._at = f"moqt://127.0.0.1:{port}"
        self._quic = quic
        self._serving, self._bringing = serving, bringing
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._relays: dict[str, EdgeRelay] = {}
        scopes.made.append(self._made)
        scopes.gone.append(self._gone)

    def _made(self, scope: str, relay: Relay) -> None:
        assert isinstance(relay, EdgeRelay)
        url = self._at + scope
        try:
            fits = parse_uri(url).path == scope
        except MoqtError:
            fits = False
        if not fits:
            logger.warning("with --workers nothing is served under the path %r", scope)
            return
        self._relays[scope] = relay
        clients = (
            UplinkClient(relay.uplink, url, self._dial(relay, self._serving), backoff=_backoff()),
            UplinkClient(
                relay.announced,
                url,
                self._dial(relay.taking, self._bringing),
                backoff=_backoff(),
            ),
        )
        self._tasks[scope] = [asyncio.ensure_future(client.run()) for client in clients]

    def _dial(self, relay: Relay, session: SessionConfig) -> Connect:
        async def dial(url: str) -> moqt.MoqtSession:
            return await moqt.connect(url, quic=self._quic, session=session, handler=relay)

        return dial

    def _gone(self, scope: str) -> None:
        self._relays.pop(scope, None)
        for task in self._tasks.pop(scope, ()):
            task.cancel()

    def home_gone(self) -> None:
        """The home has died: nothing more comes on the sessions to it."""
        for relay in self._relays.values():
            for session in (relay.uplink.session, relay.announced.session):
                if session is not None:
                    session.close()

    def close(self) -> None:
        for scope in tuple(self._tasks):
            self._gone(scope)


def _backoff() -> Backoff:
    return Backoff(first=FIRST_SECONDS, most=MOST_SECONDS, healthy=1.0)
