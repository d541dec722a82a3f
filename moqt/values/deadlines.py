"""Things that are to happen at a time, in a heap: nothing is scanned for what is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Deadline:
    """One entry of `Deadlines`; `action` is None once it happened or was cancelled."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action


class Deadlines:
    """Actions by time. Times are seconds of whatever clock the caller uses."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """The time of the last `run`."""
        self._heap: list[tuple[float, int, Deadline]] = []
        self._due: list[Deadline] = []
        """Those that the `run` which is under way has taken out of the heap."""
        self._number = 0
        self._pending = 0
        self.on_sooner: Callable[[], None] | None = None
        """Called when `next` has become earlier, for who waits until then."""

    def __len__(self) -> int:
        return self._pending

    def at(self, when: float, action: Callable[[], None]) -> Deadline:
        """Have `action` called by the first `run` at or after `when`."""
        deadline = Deadline(when, action)
        self._number += 1
        self._pending += 1
        heapq.heappush(self._heap, (when, self._number, deadline))
        if self.on_sooner is not None and self._heap[0][2] is deadline:
            self.on_sooner()
        return deadline

    def after(self, seconds: float, action: Callable[[], None]) -> Deadline:
        """Have `action` called by the first `run` that long from the last one, or later."""
        return self.at(self.now + seconds, action)

    def clear(self) -> None:
        """Nothing of it is to happen any more."""
        for deadline in (*self._due, *(entry[2] for entry in self._heap)):
            deadline.action = None
        self._heap.clear()
        self._pending = 0

    def cancel(self, deadline: Deadline | None) -> None:
        """`deadline` is not to happen any more; a no-op when it has, or is None."""
        if deadline is None or deadline.action is None:
            return
        deadline.action = None
        self._pending -= 1
        if len(self._heap) > 2 * self._pending + 64:
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float | None:
        """When `run` has something to do."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due at `now`, in order; what an action adds waits for the next call."""
        self.now = now
        due = self._due = []
        while (when := self.next) is not None and when <= now:
            due.append(heapq.heappop(self._heap)[2])
        for deadline in due:
            action, deadline.action = deadline.action, None
            if action is not None:  # else cancelled by one before it
                self._pending -= 1
                action()
        self._due = []
