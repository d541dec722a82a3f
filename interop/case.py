"""What a case is, and what it may use: sessions by role, a namespace of its own, one deadline."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic

import moqt
from interop.tap import Point, Scalar

logger = logging.getLogger("interop")

DRAFT = "moqt-22"
SECONDS = 10.0
"""The deadline of a case that names none."""


class Mismatch(Exception):
    """The relay did something else than the draft says."""

    def __init__(self, expected: str, received: str) -> None:
        super().__init__(f"expected {expected}, received {received}")
        self.expected = expected
        self.received = received


class NotOffered(Exception):
    """The relay does not offer what this case needs, and need not: the case is skipped."""


class Stage:
    """One case's sessions with the relay, closed when the case is over."""

    def __init__(self, url: str, *, verify: bool) -> None:
        self.url = url
        self.nonce = secrets.token_hex(4).encode()
        self.connection_ids: dict[str, str] = {}
        self._quic = moqt.QuicConfig(verify=verify)
        self._exit = AsyncExitStack()

    def namespace(self, *more: bytes) -> moqt.TrackNamespace:
        """A namespace nobody else uses."""
        return (b"moq-test", b"interop", self.nonce, *more)

    async def connect(
        self,
        role: str,
        handler: moqt.SessionHandler | None = None,
        config: moqt.SessionConfig | None = None,
    ) -> moqt.MoqtSession:
        """A session with the relay; `role` names it in the diagnostics."""
        session = await self._exit.enter_async_context(
            moqt.connect(
                self.url, quic=self._quic, session=config, handler=handler, timeout=SECONDS
            )
        )
        cid = getattr(session.session.transport, "local_cid", None)
        if isinstance(cid, bytes):
            self.connection_ids[role] = cid.hex()
        return session

    async def close(self) -> None:
        await self._exit.aclose()

    def diagnostics(self) -> dict[str, Scalar]:
        """Connection IDs under the names the contract gives them."""
        if len(self.connection_ids) == 1:
            return {"connection_id": next(iter(self.connection_ids.values()))}
        return {f"{role}_connection_id": cid for role, cid in self.connection_ids.items()}


@dataclass(frozen=True, slots=True)
class Case:
    """A named procedure against a relay; it returns when all was as the draft says."""

    name: str
    run: Callable[[Stage], Awaitable[None]]
    seconds: float
    public: bool
    """Whether the public suite has it."""

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().partition("\n")[0]


CASES: dict[str, Case] = {}
"""Every case, in the order in which they run."""


def case(
    name: str, *, seconds: float = SECONDS, public: bool = False
) -> Callable[[Callable[[Stage], Awaitable[None]]], Callable[[Stage], Awaitable[None]]]:
    """Put a procedure into the table."""

    def register(run: Callable[[Stage], Awaitable[None]]) -> Callable[[Stage], Awaitable[None]]:
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, run, seconds, public)
        return run

    return register


async def perform(case: Case, url: str, *, verify: bool) -> Point:
    """Run one case within its deadline and say how it went."""
    stage = Stage(url, verify=verify)
    began = monotonic()
    ok, skip = False, None
    why: dict[str, Scalar] = {}
    try:
        async with asyncio.timeout(case.seconds):
            try:
                await case.run(stage)
            finally:
                await stage.close()
        ok = True
    except Mismatch as error:
        why = {"expected": error.expected, "received": error.received}
    except NotOffered as error:
        skip = str(error)
    except TimeoutError:
        why = {"received": "timeout", "message": f"not over after {case.seconds:g} s"}
    except moqt.ConnectError as error:
        why = {"received": "ConnectError", "message": str(error)}
    except Exception as error:  # whatever it was, the case has failed and the next one runs
        logger.exception("%s failed", case.name)
        why = {"received": type(error).__name__, "message": str(error)}
    took = round((monotonic() - began) * 1000)
    return Point(case.name, ok, skip, {"duration_ms": took, **why, **stage.diagnostics()})
