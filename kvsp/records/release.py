"""When an output token leaves an instance, and what a front end makes of it
(KVSP "Session Checkpoints and Migration").

Both sides are sans-IO: an instance asks its gate, a front end feeds what arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvsp.records.records import OutputToken, SessionProgress


class TokenGate:
    """Holds the output tokens of one session in one epoch back until they may go.

    Tokens of a sampler that is not deterministic go when a checkpoint that covers them
    was acknowledged; those of a deterministic one at once.
    """

    def __init__(
        self, session: str, epoch: int, output_offset: int, *, deterministic: bool, size: int = 64
    ) -> None:
        """The next token has the index `output_offset`; at most `size` tokens are held."""
        self.session = session
        self.epoch = epoch
        self.deterministic = deterministic
        self._next = output_offset
        self._size = size
        self._held: deque[OutputToken] = deque()

    @property
    def full(self) -> bool:
        """Whether a checkpoint has to be acknowledged before the next token is generated."""
        return len(self._held) >= self._size

    def produce(self, token: int) -> list[OutputToken]:
        """A token was generated; what may go to the front end now. Raises RuntimeError when
        the gate is full."""
        if self.full:
            raise RuntimeError("the gate is full; publish a checkpoint before the next token")
        made = OutputToken(self.session, self.epoch, self._next, token)
        self._next += 1
        if self.deterministic:
            return [made]
        self._held.append(made)
        return []

    def acknowledge(self, progress: SessionProgress) -> list[OutputToken]:
        """A checkpoint was acknowledged; what may go to the front end now.

        An answer that tells of another epoch releases nothing.
        """
        if (progress.session, progress.epoch) != (self.session, self.epoch):
            return []
        released = []
        while self._held and self._held[0].index < progress.output_offset:
            released.append(self._held.popleft())
        return released


class FrontEnd:
    """Delivers every index of a session's output once and in order.

    Tokens of a lower epoch than one already seen and of delivered indexes are dropped;
    what comes after a gap is held back, at most `size` tokens.
    """

    def __init__(self, session: str, *, size: int = 4096) -> None:
        self.session = session
        self.epoch = 0
        self.next_index = 0
        self.dropped = 0
        self._size = size
        self._held: dict[int, OutputToken] = {}

    def receive(self, token: OutputToken) -> list[OutputToken]:
        """A token arrived; what can be delivered now."""
        if token.session != self.session or token.epoch < self.epoch:
            self.dropped += 1
            return []
        self.epoch = token.epoch
        over = len(self._held) >= self._size and token.index != self.next_index
        if over or token.index < self.next_index or token.index in self._held:
            self.dropped += 1
            return []
        self._held[token.index] = token
        return self._deliver()

    def fill(self, generated: Sequence[int]) -> list[OutputToken]:
        """Close a gap with the tokens of a recorded checkpoint; what can be delivered now.

        For tokens that were acknowledged and released, and got lost on the way.
        """
        for index in range(self.next_index, len(generated)):
            known = OutputToken(self.session, self.epoch, index, generated[index])
            self._held.setdefault(index, known)
        return self._deliver()

    def _deliver(self) -> list[OutputToken]:
        delivered = []
        while (token := self._held.pop(self.next_index, None)) is not None:
            delivered.append(token)
            self.next_index += 1
        return delivered
