"""The same measurements under vLLM's metric names.

For tools that read those names: vLLM's Grafana dashboards and the endpoint picker of the Gateway API
inference extension. Every family has one series per server (`engine="0"`), summed over ranks: a picker
reads one value per endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

VLLM = "vllm:"
OURS = "epserver_"
# Theirs -> ours, both without prefix. What vLLM renamed stands under both names.
NAMES: Mapping[str, str] = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generated_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "request_seconds",
    "request_queue_time_seconds": "request_queue_seconds",
    "request_prefill_time_seconds": "request_prefill_seconds",
    "request_decode_time_seconds": "request_decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_output_tokens",
    "request_max_num_generation_tokens": "request_output_tokens",
}
CACHE_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # 1 is full, whatever the name says
FINISHED: Mapping[str, str] = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length"}


def with_vllm_names(registry: CollectorRegistry, model: str) -> CollectorRegistry:
    """A registry with all of `registry`, and again under vLLM's names. model: value of model_name."""
    both = CollectorRegistry()
    both.register(registry)
    both.register(VllmNames(registry, model))
    return both


@dataclass(frozen=True, eq=False, slots=True)
class VllmNames(Collector):
    """Reads `source` at every scrape. Families that `source` does not have yet are left out."""

    source: CollectorRegistry
    model: str

    def collect(self) -> Iterator[Metric]:
        """One pass over the source."""
        ours = {family.name.removeprefix(OURS): family for family in self.source.collect()}
        for theirs, name in NAMES.items():
            if name in ours:
                yield self._renamed(theirs, ours[name])
        yield self._success(ours["requests"])
        if "kv_blocks" in ours:
            yield from self._kv_cache(ours)

    def _labels(self, **more: str) -> dict[str, str]:
        return {"model_name": self.model, "engine": "0", **more}

    def _renamed(self, theirs: str, family: Metric) -> Metric:
        """Of the same type; series that differ in anything but `le` are added up."""
        sums: dict[tuple[str, str], float] = {}
        for sample in family.samples:
            key = sample.name.removeprefix(family.name), sample.labels.get("le", "")
            sums[key] = sums.get(key, 0.0) + sample.value
        renamed = Metric(VLLM + theirs, family.documentation, family.type)
        for (suffix, edge), value in sums.items():
            labels = self._labels(le=edge) if edge else self._labels()
            renamed.add_sample(VLLM + theirs + suffix, labels, value)
        return renamed

    def _success(self, requests: Metric) -> Metric:
        ended = dict.fromkeys((*FINISHED.values(), "abort"), 0.0)
        for sample in requests.samples:
            if sample.labels["status"] == "OK":
                ended[FINISHED[sample.labels["finish_reason"]]] += sample.value
            elif sample.labels["status"] == "CANCELLED":
                ended["abort"] += sample.value
        name = f"{VLLM}request_success"
        family = Metric(name, "Requests that finished, by vLLM's reasons.", "counter")
        for reason, number in ended.items():
            family.add_sample(f"{name}_total", self._labels(finished_reason=reason), number)
        return family

    def _kv_cache(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        blocks, used, size = (
            sum(sample.value for sample in ours[name].samples)
            for name in ("kv_blocks", "kv_blocks_used", "kv_block_size")
        )
        for theirs in CACHE_USAGE:
            usage = Metric(VLLM + theirs, "Share of all ranks' KV blocks in use, 0 to 1.", "gauge")
            usage.add_sample(usage.name, self._labels(), used / blocks if blocks else 0.0)
            yield usage
        info = Metric(f"{VLLM}cache_config_info", "Always 1; sizes of the KV cache.", "gauge")
        sizes = self._labels(block_size=str(int(size)), num_gpu_blocks=str(int(blocks)))
        info.add_sample(info.name, sizes, 1.0)
        yield info
