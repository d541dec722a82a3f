"""What a server shows the services it asks, and whom it trusts: its table [peers]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsp.client.caller import Caller, Token
from kvsp.client.tls import tls_context
from kvsp.client.tokens import TokenFile
from kvsp.http.auth import developer_token
from kvsp.names.errors import FileError
from kvsp.service.settings import Settings, SettingsError

_CONNECTIONS: Final = 100


class Peers(Collector):
    """The credentials of one process, the same towards every service. A collector of what
    is counted of them."""

    def __init__(self, settings: Settings, base_uri: str) -> None:
        """Raises SettingsError when the token file cannot be used now."""
        self._settings = settings
        self._base_uri = base_uri
        self.token_file: TokenFile | None = None
        if settings.peers.token_file is not None:
            try:
                self.token_file = TokenFile(settings.peers.token_file)
            except FileError as error:
                raise SettingsError(str(error)) from None

    @property
    def token(self) -> Token | None:
        """What is shown as bearer token; None when a certificate is all there is."""
        if self.token_file is not None:
            return self.token_file
        return developer_token(self._base_uri) if self._settings.dev else None

    @property
    def certificate(self) -> tuple[Path, Path] | None:
        """The certificate shown, and its key."""
        table = self._settings.peers
        if table.certificate is None or table.key is None:
            return None
        return table.certificate, table.key

    def caller(self) -> Caller:
        """A way to the other services, for one role. Raises FileError."""
        dev = self._settings.dev
        return Caller(
            token=self.token,
            tls=None if dev else tls_context(self._settings.peers.cafile, self.certificate),
            http_loopback=dev,
            # roles come again by themselves, and one request does not wait for the others
            limits=replace(self._settings.client, attempts=1, connections_per_source=_CONNECTIONS),
        )

    def collect(self) -> Iterable[Metric]:
        if self.token_file is not None:
            yield CounterMetricFamily(
                "kvsp_token_file_failures",
                "Requests to other services that were not sent for want of a token.",
                value=self.token_file.failures,
            )
