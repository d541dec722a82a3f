"""The numbers of an inference instance."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsp.instance.shell import InstanceShell
from kvsp.names.codes import InstanceState


class InstanceMetrics(Collector):
    """Reads an instance when it is asked to."""

    def __init__(self, shell: InstanceShell) -> None:
        self._shell = shell

    def collect(self) -> list[Metric]:
        agent = self._shell.agent
        metrics: list[Metric] = [
            GaugeMetricFamily(f"kvsp_instance_{name}", text, value=value)
            for name, text, value in (
                ("epoch", "The epoch it reports in.", agent.epoch),
                ("pool_blocks", "Blocks in the engine's memory.", len(agent.pool)),
                ("pool_octets", "Their octets.", agent.pool.used),
                ("pool_reserved_octets", "Room set aside for loads.", agent.pool.reserved),
                ("pool_budget_octets", "Octets there may be.", agent.pool.budget),
                ("sessions", "Sessions that are loaded or generate.", agent.sessions.live),
                ("sessions_known", "Sessions, ended ones included.", len(agent.sessions)),
                ("directives", "Directives under way.", agent.directives.under_way),
                ("directives_known", "Directives, ended ones included.", len(agent.directives)),
                ("maps", "Shard Maps it is a member of.", len(agent.shards)),
                ("prefill_tokens_per_second", "Measured.", agent.rates.prefill.per_s),
                ("decode_tokens_per_second", "Measured.", agent.rates.decode.per_s),
            )
        ]
        state = GaugeMetricFamily(
            "kvsp_instance_state", "1 for the state it is in.", labels=["state"]
        )
        for each in InstanceState:
            state.add_metric([each], float(each is agent.state))
        metrics.append(state)
        for name, text, counters in (
            ("sessions", "What happened to sessions.", agent.sessions.counters),
            ("directives", "What became of directives.", agent.directives.counters),
            ("blocks", "Loads and stores of blocks.", self._shell.loader.counters),
            ("pool", "Evictions from the engine's memory, and refusals.", agent.pool.counters),
            ("reshards", "What became of reshard plans.", agent.shards.counters),
        ):
            family = CounterMetricFamily(f"kvsp_instance_{name}_events", text, labels=["event"])
            for event, count in sorted(counters.items()):
                family.add_metric([str(event)], count)
            metrics.append(family)
        return metrics
