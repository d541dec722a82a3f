"""Full garbage collections that do not look at every cached Object.

One looks at all that was not found to be garbage before: two seconds for a million Objects, in
which nothing else runs. What is cached is no garbage, and is freed when it is evicted without any
collection. So what there is, is left out from time to time (`gc.freeze`); and since that may be
the remains of sessions, too, everything is looked at once in many sessions.
"""

from __future__ import annotations

import gc
from typing import Final

GROWTH: Final = 20_000
"""Objects by which the cache grows before they are left out, some milliseconds' worth."""

SESSIONS: Final = 256
"""Sessions that have ended before everything is looked at again."""


class Garbage:
    """What collections leave out, of one process. Call `tick` from time to time."""

    def __init__(self) -> None:
        self._objects = 0
        """Objects in the cache when they were left out."""
        self._sessions = 0
        """Sessions that had ended when everything was looked at."""

    def tick(self, objects: int, sessions_ended: int) -> None:
        """`objects` are in the cache now; so many sessions have ended since the start."""
        self._objects = min(self._objects, objects)
        if sessions_ended >= self._sessions + SESSIONS:
            self._sessions = sessions_ended
            gc.unfreeze()
        elif objects < self._objects + GROWTH:
            return
        self._objects = objects
        gc.collect()  # of what is new alone: requests that are over refer to themselves
        gc.freeze()
