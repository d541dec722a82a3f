"""JSON bodies of all requests together: how many octets they take, and who reads them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvsp.http.limits import HttpLimits
from kvsp.names import ijson
from kvsp.records.problems import Problem, ProblemName

_AT_ONCE: Final = 64 << 10
"""Octets of JSON that are read in a few milliseconds, for which no thread is worth it."""

_THREADS: Final = 2


class Bodies:
    """Room for bodies that are in memory as a whole, and threads that parse large ones."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._pool = ThreadPoolExecutor(_THREADS, "kvsp-json")
        self.octets = 0
        """What the bodies of requests under way take now."""

    def take(self, octets: int) -> None:
        """Have room for `octets` more. Raises Problem 503."""
        if self.octets + octets > self._limits.bodies_octets:
            raise Problem.http(503, "too many bodies are being read; wait", retry_after=1)
        self.octets += octets

    def give_back(self, octets: int) -> None:
        """The request that took them is over."""
        self.octets -= octets

    async def parse(self, text: bytes) -> Any:
        """One I-JSON text; a large one does not hold up the event loop.

        Raises DecodeError, and Problem `kvsp-too-large` for more arrays, objects or items
        than any request of KVSP needs.
        """
        for what, octets, limit in (
            ("arrays and objects", b"[{", self._limits.json_containers),
            ("items", b",", self._limits.json_items),
        ):
            # those in strings count as well, which is no harm
            if sum(text.count(octet) for octet in octets) > limit:
                raise Problem(
                    ProblemName.TOO_LARGE, f"the body has more than {limit} {what}", limit=limit
                )
        if len(text) <= _AT_ONCE:
            return ijson.loads(text)
        return await asyncio.get_running_loop().run_in_executor(self._pool, ijson.loads, text)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
