"""Tracks that are known not to exist, so that nobody is asked for them again and again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection

from moqt.session import Session
from moqt.values.names import FullTrackName


class AbsentTracks:
    """What publishers said does not exist, for as long as they said (Retry Interval).

    A publisher that was not asked may have the track all the same: with a new one nothing is
    known. When there are too many, the oldest is forgotten, which costs one more question.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tracks: OrderedDict[FullTrackName, tuple[float, weakref.WeakSet[Session]]]
        self._tracks = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracks)

    def add(self, name: FullTrackName, asked: Collection[Session], until: float) -> None:
        """All of `asked` say that it will not exist before `until`."""
        self._tracks[name] = (until, weakref.WeakSet(asked))
        self._tracks.move_to_end(name)
        if len(self._tracks) > self._most:
            self._tracks.popitem(last=False)

    def forget(self, name: FullTrackName) -> None:
        """Somebody has it."""
        self._tracks.pop(name, None)

    def left(
        self, name: FullTrackName, publishers: Collection[Session], now: float
    ) -> float | None:
        """Seconds for which none of `publishers` has the track; None when that is not known."""
        found = self._tracks.get(name)
        if found is None:
            return None
        until, asked = found
        if now >= until:
            del self._tracks[name]
            return None
        return until - now if all(session in asked for session in publishers) else None

    def tick(self, now: float) -> None:
        """Forget what was said for long enough ago, the oldest first."""
        while self._tracks and now >= next(iter(self._tracks.values()))[0]:
            self._tracks.popitem(last=False)
