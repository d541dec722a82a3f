"""`KvcsConnector`: the shell that vLLM calls. It turns vLLM's calls into those of `scheduling` and
`working`, and holds nothing itself.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvcsConnector",
        "kv_connector_module_path": "kvcs.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"relay": "moqt://relay.example:4443",
            "cafile": "ca.pem", "scope_key_file": "scope.json"}}'

Called by vLLM 0.32; `make test-vllm` holds these signatures against the vLLM that is installed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcs.vllm.describe import RefusedError, check_config, check_groups, most_layerwise
from kvcs.vllm.outcomes import Outcome
from kvcs.vllm.plan import Plan, Report
from kvcs.vllm.scheduling import SchedulerSide
from kvcs.vllm.settings import Settings, Way
from kvcs.vllm.starting import client_of, model_descriptor
from kvcs.vllm.transfer import Shared
from kvcs.vllm.working import WorkerSide

IDLE = 0.001
"""Seconds for which a step that computes nothing leaves the interpreter to the network."""

_SHARED: dict[Any, Shared] = {}
_LOCK = threading.Lock()


@dataclass
class KvcsMetadata(KVConnectorMetadata):
    """The scheduler's plan of a step, on its way to the workers."""

    plan: Plan = field(default_factory=Plan)


@dataclass
class KvcsWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's report of a step, on its way back."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of two workers in one."""
        assert isinstance(other, KvcsWorkerMetadata)
        return KvcsWorkerMetadata(self.report.merged(other.report))


class KvcsStats(KVConnectorStats):
    """Requests by outcome, tokens and octets loaded, of an interval."""

    def reset(self) -> None:
        """Begin to count again."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of another interval or worker."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows."""
        return {f"kvcs {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvcsPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvcs_requests_total` by outcome, `vllm:kvcs_tokens_total`, `vllm:kvcs_octets_total`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        self._requests = self._counter_cls(
            name="vllm:kvcs_requests",
            documentation="Requests by what became of their prompt: loaded (hit), or why not.",
            labelnames=[*labelnames, "outcome"],
        )
        self._amounts = {
            name: self._counter_cls(
                name=f"vllm:kvcs_{name}", documentation=sentence, labelnames=list(labelnames)
            )
            for name, sentence in (
                ("tokens", "Tokens of prompts that were loaded instead of computed."),
                ("octets", "Octets of K and V that loads brought, whole or not."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted in an interval."""
        values = self._values[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._amounts:
                self._amounts[name].labels(*values).inc(count)
            elif name in list(Outcome):
                self._requests.labels(*values, name).inc(count)


class KvcsConnector(KVConnectorBase_V1):
    """Loads prompts from, and publishes them to, the relay of `kv_connector_extra_config`."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        """Raises RefusedError for a configuration that cannot share caches, SettingsError for one
        of ours that is wrong, FileError and DecodeError for files."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.parse(transfer.kv_connector_extra_config)
        check_config(vllm_config)
        page = check_groups(vllm_config, kv_cache_config)
        if settings.load is Way.LAYERWISE and not most_layerwise(vllm_config):
            raise RefusedError(
                "kvcs: with asynchronous scheduling a load within a forward pass could not be "
                'taken back. Run with --no-async-scheduling, or with "load": "auto"'
            )
        self.shared = _shared(settings, vllm_config)
        self._manager: Any = None
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(
                self.shared,
                settings,
                page=page,
                block_tokens=self.shared.descriptor.block_tokens,
                most_layerwise=most_layerwise(vllm_config),
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )
        else:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            self.worker = WorkerSide(
                self.shared,
                settings,
                page=page,
                rank=_rank() if ranks > 1 else 0,
                ranks=ranks,
                gather=_gather if ranks > 1 else None,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A publication that is lost is a later miss, no more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for and saved between the pieces of a graph."""
        return True

    # -- the worker's side ------------------------------------------------------------------

    @property
    def _work(self) -> WorkerSide:
        assert self.worker is not None, "called on the scheduler's connector"
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Raises RefusedError for caches that are not those of the descriptor."""
        self._work.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. What must not wait for the forward pass is done here: vLLM calls
        `start_load_kv` after it unless a load is synchronous."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KvcsMetadata)
        self._work.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Everything was asked for in `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Fill the pages of one layer."""
        self._work.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Publish what this step computed of one layer."""
        self._work.save_layer(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """The forward pass is over; publishing waits for nobody."""
        self._work.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request is held back for sending; those whose pages are filled or given up."""
        done = self._work.finished(finished_req_ids)
        if not done and self._work.waits:
            time.sleep(IDLE)
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All pages of every load that failed."""
        return self._work.failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's side is to know of the step."""
        return KvcsWorkerMetadata(self._work.report())

    # -- the scheduler's side ---------------------------------------------------------------

    @property
    def _schedule(self) -> SchedulerSide:
        assert self.scheduler is not None, "called on a worker's connector"
        return self.scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond those computed, and whether beside the batch."""
        return self._schedule.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its pages."""
        self._schedule.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of a step."""
        return KvcsMetadata(self._schedule.build(scheduler_output))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """What knows vLLM's prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def _forget(self, bad: set[int]) -> None:
        """Take pages that were not filled, and all that was computed from them, out of the prefix
        cache: vLLM leaves them there, and whoever is to compute them again may be aborted."""
        if not bad or self._manager is None:
            return
        for request in self._schedule.requests:
            pages = self._manager.get_block_ids(request)[0]
            first = next((n for n, page in enumerate(pages) if page in bad), len(pages))
            bad = bad | set(pages[first:])
        self._manager.evict_blocks(bad)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report of a step."""
        self._forget(set(getattr(connector_output, "invalid_block_ids", None) or ()))
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(meta, KvcsWorkerMetadata):
            self._schedule.heard(meta.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its pages may be used again at once: what is published was copied."""
        self._schedule.finished(request)
        return False, None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call, on either side."""
        counts = self.shared.outcomes.take()
        return KvcsStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """The statistics that vLLM has sent as plain values."""
        return KvcsStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The metrics that vLLM's server shows."""
        return KvcsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Withdraw what is not whole, and close the client with the last side that uses it."""
        side: SchedulerSide | WorkerSide | None = self.scheduler or self.worker
        if side is None:
            return
        side.close()
        self.scheduler = self.worker = None
        with _LOCK:
            if self.shared.closed():
                for key in [key for key, held in _SHARED.items() if held is self.shared]:
                    del _SHARED[key]


def _shared(settings: Settings, vllm_config: Any) -> Shared:
    """What both sides share where they are in one process."""
    with _LOCK:
        descriptor = model_descriptor(settings, vllm_config)
        # two engines of one process have requests of the same names
        engine = getattr(vllm_config.kv_transfer_config, "engine_id", None)
        key = settings, descriptor.compat_id, engine
        if key not in _SHARED:
            _SHARED[key] = Shared(client_of(settings, descriptor), descriptor)
        _SHARED[key].opened()
        return _SHARED[key]


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def _gather(tensor: Any) -> list[Any] | None:
    """A tensor of every rank, on the first one."""
    from vllm.distributed.parallel_state import get_tp_group

    parts = get_tp_group().gather(tensor.unsqueeze(0).contiguous(), dst=0, dim=0)
    return None if parts is None else list(parts.unbind(0))
