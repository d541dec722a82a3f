"""Following REQUEST_ERROR: redirects to other sessions and names, retries after the interval."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from moqt.aio import MoqtSession
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.names import FullTrackName

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How far `follow` goes for one request."""

    max_hops: int = 4
    """Redirects in a row."""
    max_retries: int = 3
    """Times the request is repeated after its Retry Interval."""
    max_retry_wait: float = 30.0
    """Seconds; a longer Retry Interval is the caller's to wait for."""


class Churn:
    """At most `count` redirects and retries in `seconds`, over all requests that share it.

    It keeps peers that redirect to each other, or refuse for ever, from making load.
    """

    def __init__(self, count: int = 32, seconds: float = 60.0) -> None:
        self._count = count
        self._seconds = seconds
        self._times: deque[float] = deque()

    def allow(self, now: float) -> bool:
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._count:
            return False
        self._times.append(now)
        return True


async def follow(
    session: MoqtSession,
    name: FullTrackName,
    ask: Callable[[MoqtSession, FullTrackName], Awaitable[_T]],
    connect: Callable[[str], Awaitable[MoqtSession]],
    *,
    limits: FollowLimits = FollowLimits(),
    churn: Churn | None = None,
) -> tuple[MoqtSession, _T]:
    """`ask(session, name)`; where it is redirected or told to retry, ask again there and then.

    Returns the session that answered with what `ask` returned. A session made by `connect`
    belongs to the caller when it is the one returned, and is closed here otherwise. Raises
    the last RequestError when the limits are reached, and what `connect` raises.
    (MOQT "REQUEST_ERROR")
    """
    churn = churn or Churn()
    own: MoqtSession | None = None
    here = ""
    seen = {(here, name)}
    hops = retries = 0
    try:
        while True:
            current = own or session
            try:
                answer = await ask(current, name)
            except RequestError as error:
                now = asyncio.get_running_loop().time()
                if error.redirect is not None:
                    uri, namespace, track = error.redirect
                    here, name = uri or here, FullTrackName(namespace, track)
                    hops += 1
                    if hops > limits.max_hops or (here, name) in seen or not churn.allow(now):
                        raise RequestError(
                            RequestErrorCode.REDIRECT, "redirected too often, or in a circle"
                        ) from error
                    seen.add((here, name))
                    if uri:
                        if own is not None:
                            own.close()
                            own = None
                        own = await connect(uri)
                    continue
                wait = (error.retry_after_ms or 0) / 1000
                if (
                    error.retry_after_ms is None
                    or retries >= limits.max_retries
                    or wait > limits.max_retry_wait
                    or not churn.allow(now)
                ):
                    raise
                retries += 1
                await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            else:
                returned, own = current, None
                return returned, answer
    finally:
        if own is not None:
            own.close()
