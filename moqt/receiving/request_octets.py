"""What a peer's messages on request streams cost while their requests are open."""

from __future__ import annotations

from moqt.values.codes import SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import SessionError


class RequestOctets:
    """Octets billed to a session by request stream: those of its largest message, or of one whose
    end has not come. The names, filters and tokens kept of it are no more than that; its Track
    Properties are billed besides, for what they become.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._of: dict[int, int] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._of)

    @property
    def exceeded(self) -> bool:
        """Whether no more requests are to be taken."""
        return self.total > self._config.max_request_octets

    def bill(self, stream_id: int, octets: int) -> None:
        """`stream_id` costs so much from now on. Raises SessionError INTERNAL_ERROR when all
        together are `max_held_octets` beyond `max_request_octets`: requests are refused before
        that, so these are messages without an end, or updates."""
        self.total += octets - self._of.get(stream_id, 0)
        self._of[stream_id] = octets
        if self.total > self._config.max_request_octets + self._config.max_held_octets:
            raise SessionError(
                SessionErrorCode.INTERNAL_ERROR,
                f"request streams hold {self.total} octets of messages, "
                f"max_request_octets is {self._config.max_request_octets}",
            )

    def forget(self, stream_id: int) -> None:
        """The stream is over."""
        self.total -= self._of.pop(stream_id, 0)

    def clear(self) -> None:
        self._of.clear()
        self.total = 0
