"""Holders are told when octets of theirs fail verification, so that they look at their copy.

An extension of ours: `POST blocks/…/verification`. A holder that does not know it answers 404
or 405, and nothing comes of it.
"""

from __future__ import annotations

from typing import Final

from kvsp.client.behind import Behind
from kvsp.client.caller import Caller
from kvsp.names.uris import BlockId, verification_path

_AT_ONCE: Final = 8


class Doubts:
    """Tells holders in the background; a failure to do so is nobody's."""

    def __init__(self, caller: Caller, behind: Behind, seconds: float) -> None:
        """`seconds` bounds one request."""
        self._caller = caller
        self._behind = behind
        self._seconds = seconds
        self._telling: set[tuple[str, BlockId]] = set()

    def tell(self, holder: str, block: BlockId) -> None:
        """Tell a holder once at a time; more than a few at once are left out."""
        if (holder, block) not in self._telling and len(self._telling) < _AT_ONCE:
            self._telling.add((holder, block))
            self._behind.start(self._tell(holder, block))

    async def _tell(self, holder: str, block: BlockId) -> None:
        try:
            await self._caller.ask(
                "POST",
                holder,
                verification_path(block),
                expected=(204, 404, 405),
                seconds=self._seconds,
            )
        finally:
            self._telling.discard((holder, block))
