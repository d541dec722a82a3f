"""The connector, with a line in a file for every layer that it saves or has been waited for: what
`make demo-llm` draws. `"trace"` in `kv_connector_extra_config` names the file."""

from __future__ import annotations

import json
import time
from typing import Any

from kvcs.vllm.connector import KvcsConnector
from kvcs.vllm.pages import layer_number


class TracingConnector(KvcsConnector):
    """`KvcsConnector`, telling what it does."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._trace_file = extra["trace"]
        given = dict(extra)
        del given["trace"]
        vllm_config.kv_transfer_config.kv_connector_extra_config = given
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            vllm_config.kv_transfer_config.kv_connector_extra_config = extra

    def _tell(self, event: str, **facts: Any) -> None:
        with open(self._trace_file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        self._tell("computed", layer=layer_number(layer_name))

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        self._tell("used", layer=layer_number(layer_name))

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if report is not None:
            for outcome, why, tokens, octets in report.report.outcomes.values():
                self._tell(str(outcome), why=why, tokens=tokens, octets=octets)
