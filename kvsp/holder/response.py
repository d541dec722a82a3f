"""The streamed answer to a GET of a block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from kvsp.blocks.layout import Octets
from kvsp.holder.holder import Holder
from kvsp.holder.reading import Body
from kvsp.holder.tiers.tiers import PartLostError
from kvsp.names.codes import BLOCK_MEDIA_TYPE
from kvsp.names.uris import BlockId


class BlockResponse(Response):
    """Streams a body; ends when the client goes away, closes the body in any case."""

    def __init__(
        self, holder: Holder, block: BlockId, body: Body, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type=BLOCK_MEDIA_TYPE)
        self._holder = holder
        self._block = block
        self._container = body

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._pieces()) as chunks:
                async for chunk in chunks:
                    if gone.done():
                        raise ClientDisconnect
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except PartLostError as error:
            # the client sees that octets are missing and takes the next replica
            await self._holder.part_lost(self._block, error)
            raise
        finally:
            gone.cancel()
            self._container.close()

    async def _pieces(self) -> AsyncGenerator[Octets, None]:
        async for chunk in self._container.chunks():
            yield chunk


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
