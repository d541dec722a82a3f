"""One retrieval for one request, and what the two sides of a process share.

The client receives into arrays of its own; the engine's thread asks what is there and writes it to
pages itself, so that no page is touched while a kernel of an earlier step may read it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvcs.client.counters import Ended
from kvcs.client.loading import CacheLost
from kvcs.vllm.gate import CostGate
from kvcs.vllm.outcomes import Outcome, Outcomes
from kvsp.blocks.layout import Tensor
from kvsp.names.identity import Descriptor

if TYPE_CHECKING:
    from kvcs.client.client import Client
    from kvcs.client.loading import Load

_OUTCOMES = {Ended.VERIFICATION: Outcome.VERIFICATION, Ended.REFUSED: Outcome.REFUSED}


class Transfer:
    """The blocks of a publication that a request needs, as they come."""

    def __init__(
        self, request: str, descriptor: Descriptor, load: Load, heads: range | None = None
    ) -> None:
        """`heads` are those that are taken, all by default."""
        self.request = request
        self._descriptor = descriptor
        self._load = load
        self._heads = heads or range(descriptor.kv_heads)

    def has(self, layer: int) -> bool:
        """Whether all of a layer is there."""
        return self._load.layers > layer and self._load.error is None

    def wait(self, layer: int, within: float) -> bool:
        """Wait for a layer, at most so many seconds and no longer than the load goes on."""
        return self._load.wait_layer(layer, within)

    def take(self, layer: int, tokens: range) -> tuple[Tensor, Tensor] | None:
        """K and V of a layer that is there, `[tokens, heads, head_dim]`, of these positions; None
        when the load has failed meanwhile, which lets go of them."""
        first = self._load.blocks.start * self._descriptor.block_tokens
        rows = slice(tokens.start - first, tokens.stop - first)
        heads = slice(self._heads.start, self._heads.stop)
        try:
            k, v = self._load.layer(layer)
        except CacheLost:
            return None
        return k[rows, heads], v[rows, heads]

    @property
    def whole(self) -> bool:
        """Whether every layer is there and the manifest has confirmed them."""
        return self._load.finished

    @property
    def failed(self) -> bool:
        """Whether it has ended without being whole."""
        return self._load.over and not self._load.finished

    @property
    def failure(self) -> tuple[Outcome, str] | None:
        """What it failed of, in one word and in a sentence; None while it has not."""
        if self._load.outcome is None or not self.failed:
            return None
        return _OUTCOMES.get(self._load.outcome, Outcome.STALLED), str(self._load.error)

    def finish(self, within: float) -> bool:
        """Wait for the last confirmation, at most so many seconds; whether it is whole."""
        return self._load.wait(within)

    @property
    def octets(self) -> int:
        """Octets of the layers that are there."""
        section = self._descriptor.section_octets()
        return 2 * self._load.layers * len(self._load.blocks) * section

    @property
    def rate(self) -> tuple[int, float] | None:
        """Octets and seconds of a load that is whole, and that waited for nobody who computes."""
        load = self._load
        return (self.octets, load.seconds) if load.finished and not load.producing else None

    @property
    def producing(self) -> bool:
        """Whether the publication was still computed when its manifest came."""
        return self._load.producing

    @property
    def published(self) -> int:
        """Leading blocks of the prompt that the publication has so far, once its manifest came."""
        return self._load.published

    def cancel(self) -> None:
        """End it; harmless when repeated."""
        self._load.cancel()


class Shared:
    """What the scheduler's side and the worker's share where both are in one process: the client,
    transfers that begin on the one and end on the other, what is measured and counted."""

    def __init__(self, client: Client, descriptor: Descriptor) -> None:
        self.client = client
        self.descriptor = descriptor
        self.outcomes = Outcomes()
        self.gate = CostGate(2 * descriptor.layers * descriptor.section_octets(1))
        self.worker_here = False
        """Whether a worker of this process takes up the transfers begun here."""
        self.under_way: dict[str, Transfer] = {}
        """Transfers by request."""
        self._lock = threading.Lock()
        self._users = 0

    def begin(
        self, request: str, found: Any, blocks: range, heads: range | None = None
    ) -> Transfer:
        """Begin a transfer for a request, in place of the one it had."""
        self.end(request)
        load = self.client.load(found, blocks=blocks)
        transfer = self.under_way[request] = Transfer(request, self.descriptor, load, heads)
        return transfer

    def end(self, request: str) -> None:
        """End the transfer of a request, if there is one."""
        transfer = self.under_way.pop(request, None)
        if transfer is not None:
            transfer.cancel()

    def opened(self) -> None:
        """One more side uses it."""
        with self._lock:
            self._users += 1

    def closed(self) -> bool:
        """One side less uses it; whether it was the last, which has closed the client."""
        with self._lock:
            self._users -= 1
            if self._users:
                return False
        for request in list(self.under_way):
            self.end(request)
        self.client.close()
        return True
