"""The worker's side: pages are filled from what came, and read for what is published.

The order of vLLM's calls in a step (0.32): `bind`, then, when a load is layer by layer,
`start_load_kv`, the forward pass with `wait_for_layer` before and `save_layer` after the attention
of each layer, `start_load_kv` when no load was, `wait_for_save`, `finished`, `failed_pages`. What
must not wait for the forward pass is therefore begun in `bind`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcs.names.errors import KvcsError
from kvcs.vllm.describe import RefusedError, element_of
from kvcs.vllm.outcomes import Outcome
from kvcs.vllm.pages import Pages, blocks_to_load, layer_number
from kvcs.vllm.plan import LoadPlan, Plan, Report, SavePlan
from kvcs.vllm.ranks import assemble, check_heads, heads_of
from kvcs.vllm.settings import Settings
from kvcs.vllm.transfer import Shared, Transfer
from kvsp.blocks.tensors import as_array, to_torch
from kvsp.names.errors import KvspError

if TYPE_CHECKING:
    from kvcs.client.saving import Save

logger = logging.getLogger("vllm.kvcs")

Gather = Callable[[Any], "Sequence[Any] | None"]
"""Brings a tensor of every rank together: all in order on the first rank, None on others."""


@dataclass(slots=True)
class _Filling:
    """A load whose pages are being filled."""

    plan: LoadPlan
    transfer: Transfer
    next: int = 0
    """The layer that is due."""


class WorkerSide:
    """Moves K and V between pages and the client."""

    def __init__(
        self,
        shared: Shared,
        settings: Settings,
        *,
        page: int,
        rank: int = 0,
        ranks: int = 1,
        gather: Gather | None = None,
    ) -> None:
        """`gather` is needed with more than one rank. Raises ValueError when the KV heads of the
        model are not shared out evenly."""
        self._shared = shared
        self._settings = settings
        self._page = page
        self._rank, self._ranks = rank, ranks
        self._gather = gather
        self._heads = heads_of(rank, ranks, shared.descriptor.kv_heads)
        self._caches: dict[int, Any] = {}
        self._numbers: dict[str, int] = {}
        self._pages: Pages | None = None
        self._plan = Plan()
        self._now: list[_Filling] = []
        """Loads of this step's forward pass."""
        self._beside: dict[str, _Filling] = {}
        self._saves: dict[str, Save | None] = {}
        """By request; None for one that was given up, and on the ranks that publish nothing."""
        self._bad: set[int] = set()
        self._tainted: dict[int, int] = {}
        """Pages that were not filled, by the step in which that was seen: what later steps compute
        from them is not to be published until the scheduler's side knows."""
        self._to_publish: tuple[SavePlan, ...] = ()
        """Of this step's saves, those that stand on no load that it waits for on several ranks."""
        self._unsure: set[int] = set()
        """Pages that this step's forward pass is filling."""
        self._last: list[tuple[SavePlan, Any, Any]] = []
        """Last layers that stand on such pages: published when their loads are confirmed, so that
        nothing is whole before."""
        self._report = Report(0)
        shared.worker_here = True

    # -- the caches ---------------------------------------------------------------------------

    def register(self, caches: Mapping[str, Any]) -> None:
        """The cache of every layer. Raises RefusedError, or UnknownPagesError, when they are not
        those of the descriptor."""
        d = self._shared.descriptor
        self._numbers = {name: layer_number(name) for name in caches}
        self._caches = {self._numbers[name]: cache for name, cache in caches.items()}
        if sorted(self._numbers.values()) != list(range(d.layers)):
            raise RefusedError(
                f"kvcs: vLLM has caches of {len(caches)} layers, numbered "
                f"{sorted(self._numbers.values())}, and the model's descriptor has {d.layers}: "
                f"layers that share their cache, and draft models, cannot be shared out"
            )
        check_heads(self._rank, self._ranks, d.kv_heads, len(self._heads))
        for layer, cache in self._caches.items():
            pages = Pages.of(
                cache.shape, page=self._page, heads=len(self._heads), head_dim=d.head_dim
            )
            if self._pages is not None and pages.form != self._pages.form:
                raise RefusedError(f"kvcs: layer {layer} keeps its pages otherwise than layer 0")
            if element_of(cache) != d.kv_dtype:
                raise RefusedError(
                    f"kvcs: layer {layer} has a cache of {element_of(cache)}, and the descriptor "
                    f"says {d.kv_dtype}: run with --kv-cache-dtype auto and the dtype of the "
                    f"descriptor"
                )
            self._pages = pages

    # -- a step -------------------------------------------------------------------------------

    def bind(self, plan: Plan) -> None:
        """A step begins: publications are announced, and loads asked for."""
        self._plan = plan
        self._report = Report(plan.step)
        self._tainted = {page: step for page, step in self._tainted.items() if step > plan.heard}
        for request in plan.aborted:
            self._give_up(request)
        for load in plan.loads:
            filling = _Filling(load, self._transfer(load))
            if load.layerwise:
                self._now.append(filling)
            else:
                self._beside[load.request] = filling
        self._unsure = {
            page for load in plan.loads if load.layerwise for page in self._pages_of(load)
        }
        # whether a load of this pass fails, each rank learns for itself, and none of the others
        unsure = self._unsure if self._ranks > 1 else frozenset[int]()
        self._to_publish = tuple(s for s in plan.saves if unsure.isdisjoint(s.page_ids))
        for save in plan.saves:
            if unsure.isdisjoint(save.page_ids) and self._tainted.keys().isdisjoint(save.page_ids):
                self._announce(save)
            else:
                self._give_up(save.request)

    def _transfer(self, load: LoadPlan) -> Transfer:
        """The transfer that the scheduler's side began in this process, or a new one."""
        here = self._shared.under_way.get(load.request)
        if here is not None:
            return here
        blocks = blocks_to_load(load.tokens, self._shared.descriptor.block_tokens)
        return self._shared.begin(load.request, load.found, blocks, self._heads)

    def _announce(self, save: SavePlan) -> None:
        """The publication of a request, if it is not there yet."""
        if save.request not in self._saves:
            held: Save | None = None
            if self._rank == 0:
                first = len(save.blocks) * self._shared.descriptor.block_tokens
                try:
                    held = self._shared.client.publish(save.tokens, first_chunk=first)
                except (KvcsError, KvspError) as error:
                    logger.warning("kvcs: request %s is not published: %s", save.request, error)
            self._saves[save.request] = held

    def wait_for_layer(self, name: str) -> None:
        """The forward pass comes to the attention of a layer."""
        if not self._now:
            return
        layer = self._numbers[name]
        for filling in list(self._now):
            came = filling.transfer.wait(layer, self._settings.timeout)
            if not came or not self._fill(filling, layer):
                self._now.remove(filling)
                self._fail(filling)

    def save_layer(self, name: str, cache: Any) -> None:
        """The attention of a layer has written K and V of this step."""
        if not self._to_publish:
            return
        layer = self._numbers[name]
        for save in self._to_publish:
            held = self._saves.get(save.request)
            # ranks gather by the plan alone, whatever one has given up: they wait for each other
            if held is not None or self._ranks > 1:
                self._put(save, held, layer, cache)

    def _put(self, save: SavePlan, held: Save | None, layer: int, cache: Any) -> None:
        assert self._pages is not None
        rows = self._shared.descriptor.block_tokens
        tokens = range(save.blocks.start * rows, save.blocks.stop * rows)
        parts = self._pages.gather(cache, save.page_ids, tokens)
        if self._ranks > 1:
            k, v = (self._of_all_ranks(part) for part in parts)
        else:
            k, v = (to_host(part) for part in parts)
        if held is None:
            return
        last = layer + 1 == self._shared.descriptor.layers
        if last and not self._unsure.isdisjoint(save.page_ids):
            self._last.append((save, k, v))
        else:
            self._hand_over(save, held, layer, k, v)

    def _hand_over(self, save: SavePlan, held: Save, layer: int, k: Any, v: Any) -> None:
        try:
            held.put_chunk(save.blocks.start, layer, k, v)
        except KvcsError as error:  # the request itself is well
            logger.warning("kvcs: request %s is not published: %s", save.request, error)
            self._give_up(save.request)

    def _of_all_ranks(self, part: Any) -> NDArray[Any] | None:
        assert self._gather is not None, "ranks are gathered with what vLLM has for it"
        parts = self._gather(part)
        if parts is None:
            return None
        heads = self._shared.descriptor.kv_heads
        return np.ascontiguousarray(assemble([to_host(each) for each in parts], heads))

    def wait_for_save(self) -> None:
        """The forward pass is over: what it was given must be whole and confirmed by now."""
        for filling in self._now:
            if filling.transfer.finish(self._settings.stall):
                self._succeed(filling)
            else:
                self._fail(filling)
        self._now.clear()
        late, self._last = self._last, []
        for save, k, v in late:
            held = self._saves.get(save.request)
            if held is not None:
                self._hand_over(save, held, self._shared.descriptor.layers - 1, k, v)
        rows = self._shared.descriptor.block_tokens
        for save in self._to_publish:
            if save.blocks.stop * rows == len(save.tokens):
                self._saves[save.request] = None  # whole: the client keeps it

    def finished(self, ended: set[str]) -> set[str]:
        """The loads beside the batch that have ended, well or not; `ended` are requests that vLLM
        has finished."""
        for request in ended:
            self._give_up(request)
            self._saves.pop(request, None)
        done = set()
        for request, filling in list(self._beside.items()):
            if request in ended:
                self._shared.end(request)
            elif not self._advance(filling):
                continue
            del self._beside[request]
            done.add(request)
        return done

    def _advance(self, filling: _Filling) -> bool:
        """Fill what has come; whether the load has ended."""
        transfer = filling.transfer
        while filling.next < self._shared.descriptor.layers and transfer.has(filling.next):
            if not self._fill(filling, filling.next):
                break
        if transfer.failed:
            self._fail(filling)
            return True
        if filling.next == self._shared.descriptor.layers and transfer.whole:
            self._succeed(filling)
            return True
        return False

    def failed_pages(self) -> set[int]:
        """The pages that were to be filled and were not, since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def report(self) -> Report:
        """What is to be told to the scheduler's side of this step."""
        report, self._report = self._report, Report(self._plan.step)
        return report

    @property
    def remembered(self) -> int:
        """Requests of which something is kept here."""
        return len(self._saves) + len(self._now) + len(self._beside)

    @property
    def waits(self) -> bool:
        """Whether nothing is to be computed and something is to come."""
        return self._plan.idle and (self._plan.awaited or bool(self._beside))

    # -- loads ----------------------------------------------------------------------------------

    def _fill(self, filling: _Filling, layer: int) -> bool:
        """Write a layer that came to its pages; whether it was still there."""
        assert self._pages is not None
        cache, plan = self._caches[layer], filling.plan
        taken = filling.transfer.take(layer, plan.tokens)
        if taken is None:
            return False
        k, v = (from_host(array, cache) for array in taken)
        self._pages.scatter(cache, plan.page_ids, plan.tokens, k, v)
        filling.next = layer + 1
        return True

    def _succeed(self, filling: _Filling) -> None:
        transfer, plan = filling.transfer, filling.plan
        self._tell(filling, Outcome.HIT, f"{len(plan.tokens)} tokens were loaded")
        if transfer.rate is not None:
            self._report.rates.append(transfer.rate)
        self._shared.end(plan.request)

    def _fail(self, filling: _Filling) -> None:
        """All its pages are bad, and so is what this step computed from them."""
        plan = filling.plan
        outcome, why = filling.transfer.failure or (
            Outcome.STALLED,
            f"layer {filling.next} did not come in time",
        )
        self._tell(filling, outcome, f"{why}; its tokens are computed")
        bad = set(self._pages_of(plan))
        self._bad |= bad
        self._tainted.update(dict.fromkeys(bad, self._plan.step))
        self._shared.end(plan.request)
        for save in self._plan.saves:
            if not bad.isdisjoint(save.page_ids):
                self._give_up(save.request)

    def _pages_of(self, plan: LoadPlan) -> tuple[int, ...]:
        """Those that a load fills."""
        return plan.page_ids[plan.tokens.start // self._page :]

    def _tell(self, filling: _Filling, outcome: Outcome, why: str) -> None:
        tokens = len(filling.plan.tokens) if outcome is Outcome.HIT else 0
        self._report.outcomes[filling.plan.request] = (
            outcome,
            why,
            tokens,
            filling.transfer.octets,
        )

    def _give_up(self, request: str) -> None:
        """Withdraw a publication that will not become whole, or that is not to begin."""
        held = self._saves.get(request)
        self._saves[request] = None
        if held is not None:
            held.abort()

    def close(self) -> None:
        """Withdraw what is not whole, and let go of every load."""
        for request in list(self._saves):
            self._give_up(request)
        for filling in (*self._now, *self._beside.values()):
            self._shared.end(filling.plan.request)
        self._now.clear()
        self._beside.clear()


def to_host(tensor: Any) -> NDArray[Any]:
    """A tensor of the engine as a contiguous array in this machine's memory."""
    if hasattr(tensor, "cpu"):
        tensor = tensor.cpu()
    return np.ascontiguousarray(as_array(tensor))


def from_host(array: NDArray[Any], cache: Any) -> Any:
    """An array as a tensor of the kind of `cache`, where that is."""
    if isinstance(cache, np.ndarray):
        return array
    return to_torch(array).to(cache.device)
