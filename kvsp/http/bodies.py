"""JSON bodies of all requests together: how many octets they take, whose, and who reads them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from kvsp.http.limits import HttpLimits
from kvsp.locks import Locks
from kvsp.names import ijson
from kvsp.records.problems import Problem, ProblemName

logger = logging.getLogger("kvsp.http")

T = TypeVar("T")

_AT_ONCE: Final = 64 << 10
"""Octets of JSON that are read in a few milliseconds, for which no thread is worth it."""

_THREADS: Final = 2
_COUNTED: Final = 256 << 10
_CONTAINER_OCTETS: Final = 200
_ITEM_OCTETS: Final = 48
"""What an array or object, and an item or member, takes in memory beside its text."""


class Bodies:
    """Room for bodies that are in memory as a whole, and threads that read large ones.

    Each principal has a share of the room, and one large body read at a time.
    """

    def __init__(
        self, limits: HttpLimits, on_refused: Callable[[str], None] = lambda whose: None
    ) -> None:
        """`on_refused` is told of each body there was no room for: in the share of its
        `principal`, or in that of `all`."""
        self._limits = limits
        self._on_refused = on_refused
        self._pool = ThreadPoolExecutor(_THREADS, "kvsp-json")
        self._held: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._turns = Locks[str]()

    @property
    def octets(self) -> int:
        """What the bodies of requests under way take now, what is read of them included."""
        return self._held.total()

    def take(self, principal: str, octets: int, own: int) -> None:
        """Have room for `octets` more of a principal's body that has `own` already; the
        only one of a principal needs no share. Raises Problem 429 or 503."""
        held, share = self._held[principal], self._limits.bodies_octets_per_principal
        if held > own and held + octets > share:
            self._refuse(
                "principal",
                principal,
                429,
                f"your bodies take {held} of {share} octets already; send fewer at a time",
            )
        if self.octets + octets > self._limits.bodies_octets:
            self._refuse("all", principal, 503, "too many bodies are being read; wait")
        self._held[principal] += octets

    def _refuse(self, whose: str, principal: str, status: int, detail: str) -> None:
        self._on_refused(whose)
        if principal not in self._warned:
            self._warned.add(principal)
            logger.warning("bodies of %s are refused with status %d: %s", principal, status, detail)
        raise Problem.http(status, detail, retry_after=1)

    def give_back(self, principal: str, octets: int) -> None:
        """The request that took them is over."""
        self._held[principal] -= octets
        if not self._held[principal]:
            del self._held[principal]
            self._warned.discard(principal)

    async def parse(
        self, text: bytes, principal: str, take: Callable[[int], None], read: Callable[[Any], T]
    ) -> T:
        """What `read` makes of one I-JSON text; a large one does not hold up the event loop,
        nor those of other principals.

        `take` gets the octets that the tree will need. Raises what it raises, DecodeError,
        and Problem `kvsp-too-large` for more arrays, objects or items than any request of
        KVSP needs.
        """
        if len(text) <= _AT_ONCE:
            take(self._size(text))
            return read(ijson.loads(text))
        loop = asyncio.get_running_loop()
        async with self._turns.of(principal):
            take(await loop.run_in_executor(self._pool, self._size, text))
            return await loop.run_in_executor(self._pool, lambda: read(ijson.loads(text)))

    def _size(self, text: bytes) -> int:
        """What the tree of a text takes in memory, about. Raises Problem `kvsp-too-large`."""
        size = len(text)
        for what, octets, limit, each in (
            ("arrays and objects", b"[{", self._limits.json_containers, _CONTAINER_OCTETS),
            ("items", b",", self._limits.json_items, _ITEM_OCTETS),
        ):
            # those in strings count as well, which is no harm
            found = sum(
                text.count(octet, first, first + _COUNTED)
                for first in range(0, len(text), _COUNTED)
                for octet in octets
            )
            if found > limit:
                raise Problem(
                    ProblemName.TOO_LARGE, f"the body has more than {limit} {what}", limit=limit
                )
            size += found * each
        return size

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
