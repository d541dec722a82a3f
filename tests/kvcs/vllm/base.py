"""Stand-ins for the parts of vLLM 0.32 that a connector is made of: the same names, parameters and
order; `make test-vllm` holds them against the vLLM that is installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge

from tests.kvcs import stand_ins


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise NotImplementedError


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self):
        return self._role

    @property
    def requires_kv_delivery(self):
        return self._kv_transfer_config.is_kv_producer

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def register_kv_caches(self, kv_caches):
        return

    def start_load_kv(self, forward_context, **kwargs):
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise NotImplementedError

    def wait_for_save(self):
        raise NotImplementedError

    def get_finished(self, finished_req_ids):
        return None, None

    def get_block_ids_with_load_errors(self):
        return set()

    def shutdown(self):
        return None

    def get_kv_connector_stats(self):
        return None

    def build_connector_worker_meta(self):
        return None

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._kv_cache_manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        raise NotImplementedError

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        raise NotImplementedError

    def build_connector_meta(self, scheduler_output):
        raise NotImplementedError

    def update_connector_output(self, connector_output):
        return

    def request_finished(self, request, block_ids):
        return False, None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return False

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return None

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return None


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)

    def reset(self):
        raise NotImplementedError

    def aggregate(self, other):
        raise NotImplementedError

    def reduce(self):
        raise NotImplementedError

    def is_empty(self):
        raise NotImplementedError


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data, engine_idx=0):
        raise NotImplementedError


MODULES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": (
        KVConnectorPromMetrics,
        KVConnectorStats,
    ),
}
"""What is imported of vLLM, by module."""


def install(monkeypatch) -> type:
    """Put the stand-ins in vLLM's place for a test; the connector, made of them."""
    stand_ins.install(monkeypatch, MODULES, "kvcs.vllm.connector")
    import kvcs.vllm

    connector = kvcs.vllm.KvcsConnector
    monkeypatch.delattr(kvcs.vllm, "connector", raising=False)
    monkeypatch.setitem(sys.modules, "kvcs.vllm.connector", sys.modules["kvcs.vllm.connector"])
    return connector


_ENGINES = count()


def vllm_config(
    *,
    extra=None,
    page=16,
    layers=3,
    heads=2,
    dim=4,
    dtype="float32",
    role="kv_both",
    budget=10_000,
    **changes,
) -> SimpleNamespace:
    """vLLM's configuration of a small model with full attention; `changes` are named by the path
    to a member, with two underscores between its parts."""
    text = SimpleNamespace(model_type="toy", num_hidden_layers=layers, rope_theta=10000.0)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/nowhere",
            dtype=f"torch.{dtype}",
            hf_text_config=text,
            hf_config=text,
            hf_overrides={},
            use_mla=False,
            is_hybrid=False,
            is_attention_free=False,
            is_encoder_decoder=False,
            quantization=None,
            get_sliding_window=lambda: None,
            get_total_num_kv_heads=lambda: heads,
            get_head_size=lambda: dim,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_batched_tokens=budget),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=page),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=dict(extra or {}),
            kv_load_failure_policy="recompute",
            engine_id=f"engine-{next(_ENGINES)}",
            is_kv_producer=role in ("kv_both", "kv_producer"),
            is_kv_consumer=role in ("kv_both", "kv_consumer"),
        ),
        speculative_config=None,
    )
    for path, value in changes.items():
        *folders, name = path.split("__")
        held = config
        for each in folders:
            held = getattr(held, each)
        setattr(held, name, value)
    return config
