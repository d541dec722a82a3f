"""The options with which `kvcs-publish` and `kvcs-subscribe` reach an index service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvsp.cli.common import InputError, check_cafile, check_switch
from kvsp.names.errors import KvspError
from kvsp.principals import load_token
from kvsp.records.members import shown_uri

if TYPE_CHECKING:
    from kvsp.client import Client

_HTTP_LOOPBACK: Final = "--kvsp-http-loopback"

KvspIndex = Annotated[
    str | None,
    typer.Option("--kvsp", metavar="URI", help="Index service of KVSP; its base URI ends in /."),
]
KvspCafile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Authorities that sign index and holders, PEM."),
]
KvspTokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Bearer token for them, in a file only you may read."),
]
KvspHttpLoopback = Annotated[
    bool,
    typer.Option(_HTTP_LOOPBACK, help="Allow http:// to this machine (development)."),
]


@dataclass(frozen=True, slots=True)
class KvspAccess:
    """How the index service and holders are reached; `index` is None for not at all."""

    index: str | None
    cafile: Path | None
    token_file: Path | None
    http_loopback: bool

    def check(self) -> None:
        """Raises InputError for what cannot be right."""
        if self.index is None:
            given = (self.cafile, self.token_file, self.http_loopback or None)
            if any(each is not None for each in given):
                raise InputError("the --kvsp-… options say how to reach an index: give --kvsp URI")
            return
        check_cafile(self.cafile)
        check_switch(self.index, self.http_loopback, _HTTP_LOOPBACK)
        try:
            self._client()
        except (KvspError, ValueError, OSError) as error:
            raise InputError(f"--kvsp {shown_uri(self.index)}: {error}") from None

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client | None]:
        """The client, open; None without an index service."""
        if self.index is None:
            yield None
            return
        async with self._client() as client:
            yield client

    def _client(self) -> Client:
        from kvsp.client import Client  # it takes a while, and not everybody needs it

        return Client(
            self.index,
            token=None if self.token_file is None else load_token(self.token_file),
            cafile=self.cafile,
            http_loopback=self.http_loopback,
        )
