"""Full garbage collections that do not look at every cached Object.

One looks at all that was not found to be garbage before: two seconds for a million Objects, in
which nothing else runs. What is cached is no garbage, and is freed when it is evicted without any
collection. So what there is, is left out from time to time (`gc.freeze`), as often as so much
has come, also to a full cache; and since that may be the remains of sessions and of requests
that were open then, too, everything is looked at once in many of these.
"""

from __future__ import annotations

import gc
from typing import Final

GROWTH: Final = 4_000
"""Objects that come before they are left out, some milliseconds' worth."""

SESSIONS: Final = 256
"""Sessions that have ended before everything is looked at again."""

REQUESTS: Final = 65_536
"""Requests that were made before everything is looked at again."""


class Garbage:
    """What collections leave out, of one process. Call `tick` from time to time."""

    def __init__(self) -> None:
        self._objects = 0
        """Objects that had come when they were left out."""
        self._sessions = self._requests = 0
        """Sessions that had ended, and requests that had been made, when everything was looked
        at."""

    def tick(self, objects: int, sessions_ended: int, requests: int) -> None:
        """So many Objects have come, sessions ended and requests been made since the start."""
        if sessions_ended >= self._sessions + SESSIONS or requests >= self._requests + REQUESTS:
            self._sessions, self._requests = sessions_ended, requests
            gc.unfreeze()
            self._leave_out(objects)
        else:
            self.grown(objects)

    def grown(self, objects: int) -> None:
        """So many Objects have come: in between, as a collection takes as long as many are new."""
        if objects >= self._objects + GROWTH:
            self._leave_out(objects)

    def _leave_out(self, objects: int) -> None:
        self._objects = objects
        gc.collect()  # of what is new alone: requests that are over refer to themselves
        gc.freeze()
