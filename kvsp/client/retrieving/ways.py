"""How the layers of one request come: over HTTP, or another way that its user brings along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final, Protocol

from kvsp.blocks.codecs import known_codec
from kvsp.blocks.container import LayerSections, layers_parameter
from kvsp.client.caller import Caller
from kvsp.client.errors import ClientError, VerificationError
from kvsp.client.policy import Fault
from kvsp.client.retrieving.flights import Fetch
from kvsp.client.retrieving.receiving import BlockReceiver, Layer
from kvsp.client.retrieving.sources import NamedReplica
from kvsp.names import uris
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import block_path

_CHUNK: Final = 1 << 20

Received = Callable[[int], None]
"""Told of octets as they come."""


class WayError(ClientError):
    """A way that is not HTTP failed; `fault` says how."""

    def __init__(self, source: str, detail: str, fault: Fault) -> None:
        super().__init__(source, detail)
        self.fault = fault


class Way(Protocol):
    """Brings layers from the sources that it takes."""

    leases: bool
    """Whether blocks are leased at its sources."""

    def takes(self, source: str) -> bool:
        """Whether it reaches this kind of source."""
        ...

    def layers(self, fetch: Fetch, received: Received) -> AsyncGenerator[Layer, None]:
        """The verified layers of a request. Raises ClientError, and DecodeError for a source
        that is no URI."""
        ...


class HttpWay:
    """Holders over HTTP."""

    leases = True

    def __init__(self, caller: Caller, descriptor: Descriptor) -> None:
        self._caller = caller
        self._descriptor = descriptor

    def takes(self, source: str) -> bool:
        return not uris.is_moqt(source)

    async def layers(self, fetch: Fetch, received: Received) -> AsyncGenerator[Layer, None]:
        async with self._open(fetch) as response:
            receiver = self._receiver(fetch, response.headers)
            async for chunk in response.content.iter_chunked(_CHUNK):
                received(len(chunk))
                for sections in receiver.feed(chunk):
                    yield await self._decoded(fetch, sections)
            for sections in receiver.close():
                yield await self._decoded(fetch, sections)

    def _open(self, fetch: Fetch) -> Any:
        query = f"layers={layers_parameter(fetch.layers)}&" if fetch.candidate.by_layer else ""
        path = f"{block_path(fetch.record.block)}?{query}codec={fetch.candidate.codec}"
        return self._caller.open("GET", fetch.record.holder, path)

    def _receiver(self, fetch: Fetch, fields: Mapping[str, str]) -> BlockReceiver:
        replica = fetch.record
        return BlockReceiver(
            replica.holder,
            self._descriptor,
            fields,
            layers=fetch.layers,
            codec=fetch.candidate.codec,
            record=None if isinstance(replica, NamedReplica) else replica,
        )

    async def _decoded(self, fetch: Fetch, sections: LayerSections) -> Layer:
        return await decoded(
            fetch.record.holder, self._descriptor, fetch.candidate.codec, fetch.block, sections
        )


async def decoded(
    source: str, descriptor: Descriptor, codec: int, block: int, sections: LayerSections
) -> Layer:
    """A layer as raw octets. Raises VerificationError when its sections do not decode."""
    known = known_codec(codec)
    try:
        if known is Codec.RAW:
            k, v = sections.k, sections.v
        else:
            k, v = await asyncio.to_thread(sections.decode, known, descriptor)
    except DecodeError as error:
        raise VerificationError(source, f"{error.name}: {error.detail}") from None
    return Layer(block, sections.layer, k, v, source)
