"""A small engine that calls a connector as vLLM 0.32 does, without torch: pages, prefix caching,
chunked prefill, preemption, and recomputing when pages could not be loaded.

Its "model" makes K and V of a position from all tokens up to it, and its next token from what lies
in the pages of the request: pages that are wrong in any layer give another token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from kvcs.vllm.pages import Pages


def kv_of(tokens, layer: int, heads: int, dim: int, dtype) -> tuple[np.ndarray, np.ndarray]:
    """K and V of all tokens in one layer, `[tokens, heads, dim]`: small whole numbers."""
    sums, total = [], 17
    for token in tokens:
        total = (total * 31 + token + 1) % 100_003
        sums.append(total)
    grid = np.arange(heads * dim).reshape(heads, dim)
    base = np.array(sums, np.int64)[:, None, None] * (layer + 3) + grid * 7
    return (base % 251).astype(dtype), ((base * 5 + 1) % 251).astype(dtype)


def next_token(caches: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """The token that follows a context with this K and V."""
    digest = hashlib.sha256()
    for k, v in caches:
        digest.update(np.ascontiguousarray(k).tobytes())
        digest.update(np.ascontiguousarray(v).tobytes())
    return int.from_bytes(digest.digest()[:4]) % 50_000


def own_token(tokens, *, layers=3, heads=2, dim=4, dtype="float32") -> int:
    """What an engine without any connector answers."""
    return next_token([kv_of(tokens, layer, heads, dim, dtype) for layer in range(layers)])


@dataclass
class Request:
    """A request as vLLM's scheduler has it."""

    request_id: str
    prompt_token_ids: list[int]
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: object = None
    pooling_params: object = None
    sampling_params: object = None
    skip_reading_prefix_cache: bool = False
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    external: int = 0
    state: str = "waiting"
    token: int | None = None
    resumed: bool = False
    asked: int = 0
    """How often the connector was asked about it."""


class Engine:
    """One engine with both sides of a connector; `step` until `idle`."""

    def __init__(
        self,
        connector,
        config,
        *,
        roles,
        pages=64,
        form="packed",
        prefix_caching=True,
        layers=3,
        heads=2,
        dim=4,
        dtype="float32",
    ):
        self.page = config.cache_config.block_size
        self.geometry = layers, heads, dim, dtype
        shape = {
            "packed": (pages, heads, self.page, 2 * dim),
            "halves": (2, pages, self.page, heads, dim),
            "paired": (pages, 2, self.page, heads, dim),
        }[form]
        self.pages = Pages(form, self.page, heads, dim, pages)
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]
        self.caches = {name: np.full(shape, 77, dtype) for name in self.names}
        self.free = list(range(1, pages))
        self.budget = config.scheduler_config.max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.held: dict[tuple[int, ...], int] = {}
        """Pages by the tokens up to their end."""
        self.requests: dict[str, Request] = {}
        self.finished_ids: set[str] = set()
        self.calls: list[str] = []
        self.computed_tokens = 0
        self.counts: Counter[str] = Counter()
        """What the connector has counted."""
        self.worker = connector(config, roles.WORKER, None)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = connector(config, roles.SCHEDULER, None)
        self.scheduler.bind_kv_cache_manager(self)

    # -- for tests --------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], **members) -> Request:
        request = self.requests[name] = Request(name, list(prompt), **members)
        return request

    def run(self, steps=2000) -> None:
        """Until every request has its token."""
        for _ in range(steps):
            if all(each.state == "done" for each in self.requests.values()):
                self.step()  # finished ids are told
                return
            self.step()
        raise AssertionError([(each.request_id, each.state) for each in self.requests.values()])

    def abort(self, name: str) -> None:
        request = self.requests[name]
        remote = request.state == "remote"
        self._finish(request)
        if remote:  # its pages are freed when the load has ended
            request.state = "leaving"

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        assert request.state == "running"
        self._release(request)
        request.state, request.computed, request.resumed = "waiting", 0, True

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    # -- its cache manager --------------------------------------------------------------------

    def get_block_ids(self, name: str) -> tuple[list[int]]:
        return (self.requests[name].pages,)

    def evict_blocks(self, pages: set[int]) -> None:
        """They serve no further request."""
        self.held = {key: page for key, page in self.held.items() if page not in pages}

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> None:
        scheduled, new, cached = {}, [], []
        left = self.budget
        for request in list(self.requests.values()):
            if request.state == "running" and left:
                fresh = self._grow(request, left, scheduled)
                cached.append((request, fresh, False))
                left -= scheduled[request.request_id]
        has_sync = False
        for request in list(self.requests.values()):
            if request.state != "waiting" or not left:
                continue
            first = request.computed == 0
            local = self._local(request) if first else request.computed
            external, beside = 0, False
            if first:
                request.asked += 1
                external, beside = self.scheduler.get_num_new_matched_tokens(request, local)
                if external is None:
                    continue
            assert external >= 0 and (external or not beside)
            assert local + external < len(request.prompt_token_ids)
            total = local + external
            if not self._allocate(request, local, total):
                break
            blocks = SimpleNamespace(get_block_ids=lambda request=request: (request.pages,))
            self.scheduler.update_state_after_alloc(request, blocks, external)
            request.computed = total
            request.external = external if first else request.external
            if beside:
                request.state = "remote"
                continue
            has_sync |= external > 0
            fresh = self._grow(request, left, scheduled, fresh=list(request.pages))
            left -= scheduled[request.request_id]
            request.state = "running"
            if request.resumed:
                cached.append((request, fresh, True))
            else:
                new.append(request)
        self._execute(scheduled, new, cached, has_sync)

    def _execute(self, scheduled, new, cached, has_sync) -> None:
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.request_id,
                    prompt_token_ids=each.prompt_token_ids,
                    block_ids=(list(each.pages),),
                    num_computed_tokens=each.computed,
                    mm_features=each.mm_features,
                    lora_request=each.lora_request,
                )
                for each in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each.request_id for each, _, _ in cached],
                resumed_req_ids={each.request_id for each, _, resumed in cached if resumed},
                new_block_ids=[(fresh,) if fresh else None for _, fresh, _ in cached],
                num_computed_tokens=[each.computed for each, _, _ in cached],
            ),
            num_scheduled_tokens=dict(scheduled),
            finished_req_ids=set(self.finished_ids),
            has_sync_kv_loads=has_sync,
        )
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        self.finished_ids.clear()
        result = self._work(output)
        self._update(output, result)

    def _work(self, output) -> SimpleNamespace:
        worker, calls = self.worker, self.calls
        calls.append("bind")
        worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            calls.append("start")
            worker.start_load_kv(None)
        if output.num_scheduled_tokens:
            self._forward(output)
        if not output.has_sync_kv_loads:
            calls.append("start")
            worker.start_load_kv(None)
        worker.wait_for_save()
        _, received = worker.get_finished(output.finished_req_ids)
        result = SimpleNamespace(
            finished_recving=received or set(),
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return result

    def _forward(self, output) -> None:
        _, heads, dim, dtype = self.geometry
        for layer, name in enumerate(self.names):
            self.worker.wait_for_layer_load(name)
            for request_id, count in output.num_scheduled_tokens.items():
                request = self.requests[request_id]
                stop = request.computed + count
                k, v = kv_of(request.prompt_token_ids[:stop], layer, heads, dim, dtype)
                for position in range(request.computed, stop):
                    at = request.pages[position // self.page], position % self.page
                    for view, rows in zip(self.pages.views(self.caches[name]), (k, v), strict=True):
                        view[at] = rows[position]
            self.worker.save_kv_layer(name, self.caches[name], None)
        self.computed_tokens += sum(output.num_scheduled_tokens.values())

    def _update(self, output, result) -> None:
        bad = result.invalid_block_ids
        failed = set()
        for request in self.requests.values():
            where = [n for n, page in enumerate(request.pages) if page in bad]
            if where and request.state in ("running", "remote"):
                request.computed = min(request.computed, where[0] * self.page)
                failed.add(request.request_id)  # and vLLM leaves its pages in the prefix cache
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.state != "running" or request_id in failed:
                continue
            request.computed += count
            if request.computed == len(request.prompt_token_ids):
                request.token = self._sample(request)
                self._finish(request)
        for request_id in result.finished_recving:
            request = self.requests[request_id]
            if request.state == "leaving":
                self._release(request)
                request.state = "done"
                continue
            assert request.state == "remote"
            request.state = "waiting"
            if not request.computed:
                self._release(request)
            elif request_id not in failed:
                self._remember(request)
        self.scheduler.update_connector_output(result)
        for stats in (result.kv_connector_stats, self.scheduler.get_kv_connector_stats()):
            self.counts.update({} if stats is None else stats.data)

    # -- inside -----------------------------------------------------------------------------

    def _sample(self, request: Request) -> int:
        span = range(len(request.prompt_token_ids))
        return next_token(
            [self.pages.gather(self.caches[name], request.pages, span) for name in self.names]
        )

    def _finish(self, request: Request) -> None:
        self.scheduler.request_finished(request, list(request.pages))
        self.finished_ids.add(request.request_id)
        if request.state != "remote":
            self._release(request)
        request.state = "done"

    def _release(self, request: Request) -> None:
        kept = set(self.held.values())
        self.free += [page for page in request.pages if page not in kept]
        request.pages = []

    def _local(self, request: Request) -> int:
        """Tokens whose pages are here, all but one at most."""
        tokens = request.prompt_token_ids
        request.pages = []
        for stop in range(self.page, len(tokens), self.page):
            page = self.held.get(tuple(tokens[:stop]))
            if page is None or not self.prefix_caching:
                break
            request.pages.append(page)
        return len(request.pages) * self.page

    def _allocate(self, request: Request, local: int, total: int) -> bool:
        wanted = -(-total // self.page) - len(request.pages)
        if wanted > len(self.free):
            if request.computed == 0:
                request.pages = []
            return False
        request.pages += [self.free.pop(0) for _ in range(max(wanted, 0))]
        return True

    def _grow(self, request: Request, left: int, scheduled, fresh=None) -> list[int]:
        count = min(left, len(request.prompt_token_ids) - request.computed)
        wanted = -(-(request.computed + count) // self.page) - len(request.pages)
        assert wanted <= len(self.free), "the test's engine has too few pages"
        more = [self.free.pop(0) for _ in range(max(wanted, 0))]
        request.pages += more
        scheduled[request.request_id] = count
        self._remember(request, request.computed + count)
        return (fresh or []) + more

    def _remember(self, request: Request, stop: int | None = None) -> None:
        """Its whole pages may serve others from now on, as in vLLM, which knows of no failure."""
        tokens = request.prompt_token_ids
        if not self.prefix_caching:
            return
        for number in range((stop if stop is not None else request.computed) // self.page):
            self.held.setdefault(tuple(tokens[: (number + 1) * self.page]), request.pages[number])
